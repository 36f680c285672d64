# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test: strict mode, the checkout as the current folder, steps that tell their time, and
# the virtual environment .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# step NAME COMMAND...: one line, with the seconds it took; what the command prints is shown only where it fails.
step() {
  local name=$1 start=$SECONDS status=0
  shift
  printf '%s ... ' "$name"
  "$@" >"$logs/step" 2>&1 </dev/null || status=$?
  printf '%s s\n' $((SECONDS - start))
  if [ "$status" -ne 0 ]; then
    tail -n 60 "$logs/step" >&2
    fail "'$name' failed (exit code $status)"
  fi
}

apt_install() {
  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
}

# need WHAT PACKAGE...: install Debian packages, or say which are missing.
need() {
  local what=$1
  shift
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    fail "expected $what, found none; install it (Debian, Ubuntu: sudo apt-get install $*)"
  fi
  step "Install $* (apt-get)" apt_install "$@"
}

# find_python: sets $python to $PYTHON, or to the first Python 3.10 to 3.13 on PATH (empty where there is none).
find_python() {
  local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  python=
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      python=$candidate
      return
    fi
  done
}

# choose_python: find_python, with all that a virtual environment needs of it.
choose_python() {
  find_python
  if [ -z "$python" ]; then
    [ -z "${PYTHON:-}" ] || fail "expected Python 3.10 to 3.13 at PYTHON=$PYTHON, found none; name another or unset it"
    need "Python 3.10 to 3.13" python3 python3-venv
    find_python
    [ -n "$python" ] || fail "expected Python 3.10 to 3.13, got $(python3 --version); install one and name it with PYTHON="
  fi
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    need "the modules venv and ensurepip of Python $version" "python$version-venv"
  fi
}

version_of() {
  "$1" -c 'import sys; print(sys.version)' 2>/dev/null
}

# set_up EXTRAS: make .venv hold the checkout (editable) with these extras; a .venv that is current is left as it is.
set_up() {
  local extras=$1 stamp=.venv/.cutlass_ops-$1 wanted
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    choose_python
    step "Make .venv ($python)" "$python" -m venv --clear .venv
  elif [ -n "${PYTHON:-}" ] && [ "$(version_of .venv/bin/python)" != "$(version_of "$PYTHON")" ]; then
    choose_python
    step "Make .venv again, for $python" "$python" -m venv --clear .venv
  fi
  wanted=$({ pwd && version_of .venv/bin/python && cat pyproject.toml scripts/constraints.txt; } | sha256sum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    step "Install the checkout with [$extras] into .venv" .venv/bin/python -m pip install -c scripts/constraints.txt -e ".[$extras]"
    printf '%s\n' "$wanted" >"$stamp"
  fi
  command -v g++ >/dev/null || need "the host compiler g++, which nvcc calls" g++
}
