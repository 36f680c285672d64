"""A toolchain that is missing or another one, and builds that fail: one clear sentence, and nothing half-written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_ops.__main__ import main
from cutlass_ops.codegen import build
from cutlass_ops.codegen.toolchain import find
from cutlass_ops.errors import BuildError

REMEDY = r"pip install 'cutlass_ops\[build\]' brings one; --nvcc names another"

SPEC = """
from cutlass_ops import Vector, operator

@operator()
def some_operator(accum, bias: Vector = None):
    return accum + bias
"""


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "some_specs.py"
    path.write_text(SPEC)
    return path


@pytest.fixture
def nvcc(tmp_path):
    """Write an nvcc that is a shell script."""

    def write(script, mode=0o755):
        path = tmp_path / "toolkit" / "bin" / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(mode)
        for tool in ("cuobjdump", "nvdisasm"):
            (path.parent / tool).touch()
        return str(path)

    return write


VERSION = 'echo "Cuda compilation tools, release 13.0, V13.0.88"'


def test_the_toolchain_from_pypi_is_found(toolchain):
    assert toolchain.version.startswith("13.0.")
    assert os.access(toolchain.nvcc, os.X_OK)


def test_a_given_nvcc_names_its_toolkit(nvcc):
    found = find(nvcc(VERSION))
    assert found.version == "13.0.88"
    assert str(found.nvcc) == nvcc(VERSION)


def test_a_missing_nvcc_is_named_with_the_remedy(tmp_path):
    with pytest.raises(BuildError, match=rf"expected an executable nvcc at .*nowhere/nvcc, found none; {REMEDY}"):
        find(str(tmp_path / "nowhere" / "nvcc"))


def test_an_nvcc_that_is_not_executable_is_refused(nvcc):
    with pytest.raises(BuildError, match=rf"expected an executable nvcc at .*/nvcc, found none; {REMEDY}"):
        find(nvcc(VERSION, mode=0o644))


@pytest.mark.parametrize("release", ["12.9", "13.1", "14.0"])
def test_another_release_is_refused(nvcc, release):
    script = f'echo "Cuda compilation tools, release {release}, V{release}.1"'
    with pytest.raises(BuildError, match=rf"expected nvcc release 13.0 .*, got {release} at .*/nvcc; {REMEDY}"):
        find(nvcc(script))


@pytest.mark.parametrize("script", ["echo hello", "exit 1", ""])
def test_a_program_that_is_no_nvcc_is_refused(nvcc, script):
    with pytest.raises(BuildError, match=rf"expected nvcc at .*/nvcc to tell its version, got .*; {REMEDY}"):
        find(nvcc(script))


def test_a_file_that_cannot_run_is_refused(nvcc, tmp_path):
    path = nvcc(VERSION)
    (tmp_path / "toolkit" / "bin" / "nvcc").write_bytes(b"\x7fELF not a program")
    with pytest.raises(BuildError, match=rf"expected a working nvcc at .*/nvcc, could not run it .*; {REMEDY}"):
        find(path)


def test_a_missing_host_compiler_is_named_with_the_remedy(nvcc, tmp_path, monkeypatch):
    path = nvcc(VERSION)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"expected the host compiler g\+\+, .*, found none; install it \(Debian: apt-get install g\+\+\)"):
        find(path)


@pytest.mark.parametrize("tool", ["cuobjdump", "nvdisasm"])
def test_a_missing_disassembler_is_named_with_the_remedy(nvcc, tool):
    path = nvcc(VERSION)
    Path(path).with_name(tool).unlink()
    with pytest.raises(BuildError, match=rf"expected {tool} beside nvcc in .*/bin, found none; {REMEDY}"):
        find(path)


def test_a_cubin_that_cannot_be_disassembled_is_named(toolchain, tmp_path):
    (tmp_path / "some.cubin").write_bytes(b"nonsense")
    with pytest.raises(BuildError, match=r"cuobjdump could not disassemble .*some.cubin: "):
        toolchain.sass(tmp_path / "some.cubin")


# ---- the command line --------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    """Exit code and the lines on stderr of the command line."""
    code = main(["build", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.err.splitlines()


def test_the_script_ends_with_code_1_and_one_sentence(repository, tmp_path):
    command = [sys.executable, repository / "scripts" / "build_kernels.py", "--nvcc", "/nowhere/nvcc", "--out", tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: expected an executable nvcc at /nowhere/nvcc, found none; ")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "expected a Python file with specs at {path}, found none; cutlass-ops new writes a project with one"),
        ("x = 1\n", "expected at least one function under @cutlass_ops.operator(...) in {path}, found none; declare one there"),
        ("import nowhere_at_all\n", "expected {path} to import, it raised ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("def f(:\n", "expected {path} to import, it raised SyntaxError: invalid syntax"),
        (SPEC.replace("bias: Vector = None", "bias"), "expected {path} to import, it raised TypeError: some_operator: argument 'bias'"),
        (SPEC.replace("accum + bias", "accum ** bias"), "{path}:6: chain 'some_operator' cannot be traced: the operator Pow"),
        (
            SPEC.replace("some_operator", "convert"),
            "expected operator names without the prefixes of the shared kernels (convert_, pack_, pool_), got 'convert'; rename it",
        ),
    ],
)
def test_a_spec_file_that_cannot_be_built_is_named(toolchain, capsys, tmp_path, text, message):
    path = tmp_path / "specs.py"
    if text is not None:
        path.write_text(text)
    code, lines = run(capsys, "--spec", path, "--out", tmp_path / "out")
    assert code == 1
    assert lines[0].startswith("error: " + message.format(path=path))
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_named_with_the_remedy(toolchain, capsys, spec, tmp_path):
    (tmp_path / "file").touch()
    code, lines = run(capsys, "--spec", spec, "--out", tmp_path / "file" / "out")
    assert code == 1
    assert len(lines) == 1
    assert lines[0].startswith(f"error: expected to write to {tmp_path}/file/out, could not (")
    assert lines[0].endswith("name a writable folder with --out")


def test_a_failing_compilation_is_named_with_command_errors_and_log(toolchain, capsys, spec, tmp_path, nvcc, monkeypatch):
    errors = "\n".join(f'echo "kernel.cu({i}): error: number {i}" >&2' for i in range(9))
    fake = nvcc(f'if [ "$1" = --version ]; then {VERSION}; exit 0; fi\necho note >&2\n{errors}\nexit 2')
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    code, lines = run(capsys, "--spec", spec, "--out", tmp_path / "out", "--nvcc", fake, "--jobs", 1)
    assert code == 1
    assert lines[0] == f"error: nvcc could not compile some_operator_f16 for {tmp_path / 'out'}:"
    assert lines[1:6] == [f"  kernel.cu({i}): error: number {i}" for i in range(5)]
    assert lines[6].startswith(f"Command: {fake} -cubin ")
    assert lines[6].endswith("some_operator_f16.cu -o some_operator_f16.cubin")
    log = lines[7].removeprefix("Log: ")
    assert lines[8:] == []
    assert log in map(str, temporary.iterdir())
    assert {p.suffix for p in temporary.iterdir()} == {".log"}  # the working folders are gone
    text = (temporary / log).read_text()
    assert text.startswith(f"$ {fake} -cubin ")
    assert "error: number 8" in text
    assert [p for p in (tmp_path / "out").rglob("*") if not p.is_dir()] == []


def test_a_command_line_without_rich_says_what_to_install(capsys, spec, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich", None)
    code, lines = run(capsys, "--spec", spec, "--out", tmp_path / "out")
    assert code == 1
    assert lines == ["error: expected the package rich, found none; pip install 'cutlass_ops[cli]'"]
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "file"
    build._write(target, b"old")

    def write_half(path, data):
        with path.open("wb") as file:
            file.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(BuildError, match=r"expected to write .*/file, could not .*No space left.*; free space or name another folder"):
        build._write(target, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"old"}
