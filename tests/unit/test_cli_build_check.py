"""`cutlass-ops build` and `cutlass-ops check`: what they hand to the build and to the GPU check, and what is wrong usage.

The build itself, through this command line, is tested in tests/codegen.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cutlass_ops import OPERATORS, BuildError, InstallationError, cli, verification
from cutlass_ops.loader import shipped_kernels

REPOSITORY = Path(__file__).parents[2]
SPEC = "from cutlass_ops import Vector, operator\n\n@operator()\ndef {name}(accum, bias: Vector = None):\n    return accum + bias\n"


def run(*arguments):
    return CliRunner().invoke(cli.group, [str(a) for a in arguments])


@pytest.fixture
def build(monkeypatch):
    """Takes the place of the build; what it was asked for, and what it gives."""
    asked, gives = [], {"result": True}

    def build_kernels(spec, out, **options):
        options.pop("progress")("kernel", 1, 2)
        asked.append((spec, out, options))
        if isinstance(gives["result"], Exception):
            raise gives["result"]
        return gives["result"]

    monkeypatch.setattr(importlib.import_module("cutlass_ops.cli.build"), "build_kernels", build_kernels)
    return asked, gives


NOTHING = {"nvcc": None, "jobs": 0, "check": False}


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], (None, None, NOTHING)),
        (["own.py"], (Path("own.py"), None, NOTHING)),
        (["--spec", "own.py", "--out", "there"], (Path("own.py"), Path("there"), NOTHING)),
        (["--check", "--jobs", "3", "--nvcc", "/n"], (None, None, {"nvcc": "/n", "jobs": 3, "check": True})),
    ],
)
def test_build_hands_on_what_it_is_given(build, arguments, asked):
    assert run("build", *arguments).exit_code == 0
    assert build[0] == [asked]


def test_the_result_of_a_build_is_the_exit_code(build):
    build[1]["result"] = False
    assert run("build", "--check").exit_code == 1
    build[1]["result"] = BuildError("expected a, got b; do c")
    result = run("build")
    assert (result.exit_code, result.stderr) == (1, "error: expected a, got b; do c\n")


@pytest.mark.parametrize("command", ["build", "check"])
def test_a_source_is_given_once(build, command):
    result = run(command, "a.py", "--spec", "b.py")
    assert result.exit_code == 2
    assert "expected SOURCE once, got a.py and --spec b.py" in result.stderr
    assert build[0] == []


@pytest.mark.parametrize("arguments", [["--jobs", "-1"], ["--jobs", "many"], ["a.py", "b.py"], ["--no-such"]])
def test_wrong_usage_of_build_is_2(build, arguments):
    assert run("build", *arguments).exit_code == 2
    assert build[0] == []


def test_a_build_without_its_packages_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "elftools", None)
    gone = ("elftools.", "cutlass_ops.codegen.cubin", "cutlass_ops.codegen.build")  # as other tests have imported them
    for name in [name for name in sys.modules if name.startswith(gone)]:
        monkeypatch.delitem(sys.modules, name)
    import cutlass_ops.codegen as package

    for name in ("cubin", "build"):
        monkeypatch.delattr(package, name, raising=False)
    result = run("build", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: expected the package elftools")
    assert result.stderr.endswith("found none; pip install 'cutlass_ops[build]'\n")


def test_outside_a_checkout_the_shipped_operators_are_not_built(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cutlass_ops.codegen.cli.__file__", str(tmp_path / "cutlass_ops" / "codegen" / "cli.py"))
    for arguments in ([], ["--check"]):
        result = run("build", *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: expected your own specs, or a checkout of cutlass_ops")
    assert list(tmp_path.iterdir()) == []


# ---- check -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Lets the machine have a Hopper GPU, and the check itself only record what it was asked for."""
    asked, gives = [], {"passed": True}

    def check(operators, kernels, tests, commit):
        asked.append(([op.spec.name for op in operators], kernels, [t.name for t in tests], commit))
        return gives["passed"]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(verification, "check", check)
    return asked, gives


@pytest.mark.parametrize("script", [["-m", "cutlass_ops", "check"], ["scripts/check_gpu.py"]])
def test_without_a_gpu_it_says_so_and_ends_with_2(script):
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, *script], env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    message = "not checked: needs a Hopper GPU (compute capability 9.0); found none that PyTorch can use\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)


@pytest.mark.usefixtures("only_shipped_operators")
def test_the_shipped_operators_are_checked_with_all_tests(gpu):
    result = run("check", "--commit", "abc")
    assert (result.exit_code, result.stdout) == (0, "all passed\n")
    ((operators, kernels, tests, commit),) = gpu[0]
    assert operators == list(OPERATORS)
    assert (kernels, commit) == (shipped_kernels(), "abc")
    assert set(tests) == {p.name for p in (REPOSITORY / "tests" / "gpu").glob("test_*.py")}


def test_a_check_that_fails_ends_with_1(gpu):
    gpu[1]["passed"] = False
    result = run("check", "--skip-tests")
    assert (result.exit_code, result.stdout) == (1, "not passed\n")
    assert gpu[0][0][2] == []


def test_a_checkout_without_tests_is_named(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(verification, "TESTS", tmp_path)
    result = run("check")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: expected the GPU tests in {tmp_path}, found none; run the check in a checkout")
    assert len(result.stderr.splitlines()) == 1


def test_errors_of_a_check_are_one_line(gpu, monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(SPEC.format(name="conv2d"))  # a shipped operator's name
    result = run("check", tmp_path / "own.py")
    assert result.exit_code == 1
    assert result.stderr.endswith("own.py to name its operators otherwise than the shipped ones, got 'conv2d'; rename it\n")
    result = run("check", tmp_path / "nowhere.py")
    assert (result.exit_code, result.stderr) == (
        1,
        f"error: expected a Python file with specs at {tmp_path / 'nowhere.py'}, found none; cutlass-ops new writes a project with one\n",
    )

    def fails(*_, **__):
        raise InstallationError("expected a, got b; do c")

    monkeypatch.setattr(verification, "check", fails)
    assert run("check").stderr == "error: expected a, got b; do c\n"


def test_kernels_without_their_source_are_wrong_usage(gpu):
    result = run("check", "--kernels", "somewhere")
    assert result.exit_code == 2
    assert "expected SOURCE beside --kernels" in result.stderr
    assert gpu[0] == []


# ---- files that cannot be used -----------------------------------------------------------------------------------

TWICE = SPEC.format(name="unit_twice") + "\nagain = unit_twice\n"
UNUSABLE = {
    "expected {path} to name its operators otherwise than the shipped ones, got 'conv2d'; rename it": SPEC.format(name="conv2d"),
    "expected every operator of {path} to have a name of its own, got 'unit_twice' twice; rename one": TWICE,
    "expected {path} to import, it raised SystemExit: 3": "import sys\nsys.exit(3)\n",
}


@pytest.mark.parametrize("message", UNUSABLE)
@pytest.mark.parametrize(
    "command", [["build", "--spec"], ["explain", "foo", "--shape", "8,64,56,56", "--weight", "128,64,3,3", "--spec"]], ids=lambda c: c[0]
)
def test_a_file_that_cannot_be_used_is_one_line_and_nothing_is_compiled(message, command, tmp_path, monkeypatch):
    path = tmp_path / "specs.py"
    path.write_text(UNUSABLE[message])
    compiled = []
    monkeypatch.setattr("cutlass_ops.codegen.build.build", lambda *_, **__: compiled.append(1))
    result = run(*command, path)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {message.format(path=path)}\n")
    assert compiled == []


def test_an_operator_that_this_process_has_already_is_one_line(tmp_path):
    (tmp_path / "specs.py").write_text(SPEC.format(name="unit_registered_already"))
    arguments = ["explain", "foo", "--shape", "8,64,56,56", "--weight", "128,64,3,3", "--spec", tmp_path / "specs.py"]
    assert "expected an operator, got 'foo'" in run(*arguments).stderr
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: expected a new operator name, got 'unit_registered_already' of ")
