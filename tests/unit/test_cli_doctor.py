"""`cutlass-ops doctor`: what it finds, its exit code, and that nothing which is missing or damaged stops it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
import torch
from click.testing import CliRunner

import cutlass_ops
from cutlass_ops import OPERATORS, CudaError, DeviceFacts, Operator, catalogue, cli, costs, doctor, driver
from cutlass_ops.errors import BuildError, InstallationError
from cutlass_ops.loader import ALLOW_UNVERIFIED

from .fake_driver import FakeDriver
from .records import write_folder
from .test_cli import start

pytestmark = pytest.mark.usefixtures("only_shipped_operators")
H200, A100 = DeviceFacts("NVIDIA H200", (9, 0), 132), DeviceFacts("NVIDIA A100", (8, 0), 108)


@pytest.fixture
def gpus(monkeypatch):
    """Lets PyTorch and the driver have these GPUs; without any, PyTorch is one for CUDA all the same."""
    fake = FakeDriver({})

    def have(*facts):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(facts))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(facts))
        monkeypatch.setattr(doctor, "device_facts", lambda i: facts[i])
        return fake

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(driver, "api", lambda: fake)
    monkeypatch.delenv(ALLOW_UNVERIFIED, raising=False)
    return have


@pytest.fixture
def whole(gpus):
    """A machine where all is well."""
    return gpus(H200)


def found(*subjects, kernels=None):
    """Findings of these subjects, and whether all is usable."""
    report = doctor.examine(kernels)
    return [next(f for f in report.findings if f.subject == s) for s in subjects], report.usable


def test_a_hopper_gpu_and_whole_kernels_are_usable(whole, capsys):
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "usable: calls with tensors on this GPU use the kernels"
    assert all(line.startswith(("ok    ", "note  ")) for line in lines[:-1])
    shown = "\n".join(lines)
    assert "GPU 0" in shown
    assert "NVIDIA H200, compute capability 9.0, 132 SMs" in shown
    assert re.search(r"\b[1-9]\d* cubins are those of the manifest \(sha256\)", shown)
    for name in OPERATORS:
        assert f"{name} " in shown
    assert "on NVIDIA H200: fused-f16, " in shown


def test_the_report_looks_at_everything_and_says_the_same_as_json(whole):
    result = CliRunner().invoke(cli.group, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["usable"]) == (0, True)
    subjects = ["cutlass_ops", "Python", "PyTorch", "cuda-bindings", "driver", "GPU 0", "kernels", "cubins", "verified", "costs of plans"]
    subjects += ["extra cli", "extra bench", "extra build", *OPERATORS]
    assert [f["subject"] for f in report["findings"]] == subjects
    assert all(f.keys() == {"status", "subject", "found", "remedy"} for f in report["findings"])
    assert report["findings"][0]["found"].startswith(f"{cutlass_ops.__version__} in ")


def test_nothing_is_loaded_or_launched(whole):
    doctor.examine()
    assert whole.loaded == []
    assert whole.work == []


# ---- GPU, driver, PyTorch ----------------------------------------------------------------------------------------


def test_without_a_gpu_it_is_not_usable_and_says_what_operators_do_and_would_do(gpus, capsys):
    gpus()
    assert doctor.main() == 1
    shown = capsys.readouterr().out
    assert "FAIL  GPU " in shown
    assert "here PyTorch's own operators (CPU tensors); x (128, 64, 128, 128), weight (128, 64, 3, 3) on NVIDIA H200: fused-f16" in shown
    tail = shown.partition("not usable: ")[2]
    assert "on CPU tensors, operators compute with PyTorch's own. To change:\n  GPU: run on a machine with a Hopper GPU" in tail


def test_another_gpu_is_not_enough_but_does_no_harm_beside_a_hopper_one(gpus):
    gpus(A100)
    (gpu,), usable = found("GPU 0")
    assert (gpu.status, gpu.found, usable) == ("FAIL", "NVIDIA A100, compute capability 8.0, 108 SMs", False)
    assert gpu.remedy.startswith("use a Hopper GPU (compute capability 9.0: H100, ")
    gpus(A100, H200)
    (first, second), usable = found("GPU 0", "GPU 1")
    assert (first.status, second.status, usable) == ("note", "ok", True)


def test_a_pytorch_that_fails_to_look_is_a_finding(whole, monkeypatch):
    def fails():
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    (gpu,), usable = found("GPU")
    assert (gpu.status, gpu.found, usable) == ("FAIL", "PyTorch failed: CUDA driver initialization failed", False)


def test_a_pytorch_without_cuda_is_named(whole, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    (pytorch,), usable = found("PyTorch")
    assert (pytorch.found, usable) == (f"{torch.__version__}, built without CUDA", False)
    assert pytorch.remedy.startswith("install a build of PyTorch for CUDA")


@pytest.mark.parametrize(
    ("error", "text", "remedy"),
    [
        (
            CudaError("expected the NVIDIA driver library libcuda,\n could not load it (no file); install the driver"),
            "libcuda, could",
            "install the",
        ),
        (CudaError("expected a driver for CUDA 13.0, got one for CUDA 12.8; install a newer driver"), "12.8", "install a newer driver"),
        (InstallationError("expected the package cuda-bindings, could not import it (x); pip install 'cuda-bindings'"), "bindings", "pip"),
    ],
)
def test_a_driver_that_cannot_be_used_is_named(whole, monkeypatch, error, text, remedy):
    def fails():
        raise error

    monkeypatch.setattr(driver, "api", fails)
    (finding,), usable = found("driver")
    assert (finding.status, usable) == ("FAIL", False)
    assert text in finding.found
    assert finding.remedy.startswith(remedy)


def test_the_version_that_the_driver_tells_is_shown(whole):
    whole.version = 13020
    (finding,), _ = found("driver")
    assert finding.found == "for CUDA 13.2"


def test_missing_bindings_are_named(whole, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    (finding,), usable = found("cuda-bindings")
    assert (finding.found, finding.remedy, usable) == ("not installed", "pip install 'cuda-bindings>=13.0,<14'", False)


# ---- kernels -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(whole, tmp_path):
    """A whole folder of kernels."""
    write_folder(tmp_path, "some_operator")
    return tmp_path


def flip(path):
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "kernels", "found none", "build the kernels or reinstall the wheel"),
    "manifest no JSON": (lambda f: (f / "manifest.json").write_text("{"), "kernels", "could not read it", "reinstall the wheel"),
    "manifest newer": (
        lambda f: (f / "manifest.json").write_text('{"schema": 99}'),
        "kernels",
        "got 99",
        "build the kernels again with this version",
    ),
    "records no JSON": (lambda f: (f / "gpu_checks.json").write_text("["), "kernels", "GPU check records", "reinstall the wheel"),
    "no folder": (lambda f: f.rename(f.with_name("moved")), "kernels", "found none", "build the kernels or reinstall the wheel"),
    "cubin missing": (
        lambda f: (f / "cubins" / "pool.cubin").unlink(),
        "cubins",
        "1 of 25 cubins missing or damaged; expected the cubin",
        "build the kernels or reinstall the wheel",
    ),
    "cubins changed": (
        lambda f: [flip(p) for p in (f / "cubins").glob("p*.cubin")],
        "cubins",
        "2 of 25 cubins missing or damaged; expected ",
        "rebuild it or reinstall the wheel",
    ),
    "no records": (
        lambda f: (f / "gpu_checks.json").unlink(),
        "verified",
        "25 of 25 cubins have no record of a passed GPU check: convert.cubin, pack.cubin, pool.cubin, ...",
        "run `cutlass-ops check` on a Hopper GPU",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_with_its_remedy(folder, name):
    damage, subject, text, remedy = DAMAGES[name]
    assert found("kernels", "cubins", "verified", kernels=folder)[1]
    damage(folder)
    (finding,), usable = found(subject, kernels=folder)
    assert (finding.status, usable) == ("FAIL", False)
    assert text in finding.found
    assert finding.remedy.startswith(remedy)


def test_a_damaged_folder_of_the_shipped_operators_is_reported_and_the_exit_code_1(whole, monkeypatch, tmp_path, capsys):
    for name in OPERATORS:
        monkeypatch.setattr(getattr(cutlass_ops, name), "kernels", tmp_path / "nowhere")
    assert doctor.main() == 1
    shown = capsys.readouterr().out
    assert shown.count("FAIL  kernels ") == 1
    assert "  kernels: build the kernels or reinstall the wheel\n" in shown


def test_kernels_of_a_process_own_operators_are_looked_at_too(whole, folder):
    own = Operator(dataclasses.replace(OPERATORS["conv2d"], name="some_operator"), folder)
    assert catalogue.operators()["some_operator"] is own
    (folder / "cubins" / "pack.cubin").unlink()
    report = doctor.examine()
    assert [f.status for f in report.findings if f.subject == "cubins"] == ["ok", "FAIL"]
    assert [f.status for f in report.findings if f.subject == "some_operator"] == ["ok"]


def test_unverified_kernels_are_a_note_where_they_are_allowed(folder, monkeypatch):
    (folder / "gpu_checks.json").unlink()
    monkeypatch.setenv(ALLOW_UNVERIFIED, "1")
    (kernels, variable), usable = found("verified", ALLOW_UNVERIFIED, kernels=folder)
    assert (kernels.status, variable.status, usable) == ("note", "note", True)
    assert kernels.found.endswith(f"; {ALLOW_UNVERIFIED}=1 uses them")


def test_a_wrong_environment_variable_is_a_finding(whole, monkeypatch):
    monkeypatch.setenv(ALLOW_UNVERIFIED, "yes")
    (variable, operator), usable = found(ALLOW_UNVERIFIED, "conv2d")
    assert (variable.status, variable.remedy, operator.status, usable) == ("FAIL", "set it to 0 or 1, or unset it", "FAIL", False)


def test_missing_costs_are_named(whole, monkeypatch, tmp_path):
    monkeypatch.setattr(costs, "PATH", tmp_path / "nowhere.json")
    costs.shipped_costs.cache_clear()
    try:
        (finding, operator), usable = found("costs of plans", "conv2d")
    finally:
        costs.shipped_costs.cache_clear()
    assert (finding.status, operator.status, usable) == ("FAIL", "FAIL", False)
    assert "expected the plans' costs at" in finding.found


# ---- extras ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "subject", "text"),
    [("click", "extra cli", "no click"), ("matplotlib", "extra bench", "no matplotlib"), ("elftools", "extra build", "no elftools")],
)
def test_an_extra_that_is_missing_is_a_note_with_its_command(whole, monkeypatch, module, subject, text):
    monkeypatch.setitem(sys.modules, module, None)
    (finding,), usable = found(subject)
    assert (finding.status, finding.remedy, usable) == ("note", f"pip install 'cutlass_ops[{subject.split()[1]}]'", True)
    assert text in finding.found


def test_a_compiler_that_does_not_fit_is_a_note(whole, monkeypatch):
    def fails():
        raise BuildError("expected nvcc release 13.0, got 12.9; pip install 'cutlass_ops[build]' brings one")

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("cutlass_ops.codegen.toolchain.find", fails)
    (finding,), usable = found("extra build")
    assert (finding.status, finding.found, usable) == ("note", "expected nvcc release 13.0, got 12.9", True)
    assert finding.remedy == "pip install 'cutlass_ops[build]' brings one"


# ---- a real process ----------------------------------------------------------------------------------------------


def test_a_process_that_sees_no_gpu_ends_with_1_and_no_traceback():
    result = start("doctor", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 1
    assert "FAIL  GPU " in result.stdout
    assert "\nnot usable: " in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
