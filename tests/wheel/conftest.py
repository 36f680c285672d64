"""A checkout to build from, what is built from it, and an environment with nothing but that."""

from __future__ import annotations

import json
import shutil
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers import ROOT, Records, cubin_hashes, git, successful, write_records

LEFT_OUT = ("__pycache__", "build", "dist")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean git checkout of the files of this one, with its built cubins and GPU check records for them.

    Where the real records do not cover the cubins (scripts/check_verified.py fails then), stand-ins take their place in
    the copy, so that packaging is tested all the same.
    """
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    shutil.copytree(ROOT, copy, ignore=lambda _, names: [n for n in names if n in LEFT_OUT or (n.startswith(".") and n != ".gitignore")])
    generated = copy / "generated"
    cubins = cubin_hashes(generated)
    missing = [name for name in cubins if not (generated / "cubins" / name).exists()]
    if missing:
        pytest.fail(f"expected the built cubin generated/cubins/{missing[0]}, found none; run scripts/build_kernels.py first")
    checks = generated / "gpu_checks.json"
    known: Records = json.loads(checks.read_text())["cubins"] if checks.exists() else {}
    if not all(known.get(sha256, {}).get("passed") is True for sha256 in cubins.values()):
        write_records(generated, {sha256: {"passed": True} for sha256 in cubins.values()})
    git(copy, "init", "-q")
    git(copy, "add", "-A")
    git(copy, "commit", "-q", "-m", "all")
    return copy


@pytest.fixture(scope="session")
def dist(checkout: Path) -> Path:
    """The folder that scripts/build_wheel.py fills: checkout -> sdist -> wheel."""
    out = checkout.parent / "dist"
    (out.parent / "printed").write_text(successful(sys.executable, checkout / "scripts" / "build_wheel.py", "--out", out))
    return out


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    (path,) = dist.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Callable[[str], str]:
    """Runs Python code in a clean environment that holds the wheel and what it asks for; returns what it prints."""
    folder = wheel.parent.parent / "clean"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    successful(python, "-m", "pip", "install", "-q", "-c", ROOT / "scripts" / "constraints.txt", wheel)
    return lambda code: successful(python, "-I", "-c", code)
