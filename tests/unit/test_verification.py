"""The GPU check: its samples reach every kernel; no test may fail or be skipped, but for what the GPU has no memory for."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

import cutlass_ops
from cutlass_ops import InstallationError, MaxPool2d, Operator, accuracy, verification
from cutlass_ops.accuracy import Accuracy
from cutlass_ops.loader import ALLOW_UNVERIFIED
from cutlass_ops.manifest import Manifest, verified_hashes
from cutlass_ops.work import gathered

from .fake_driver import H200
from .records import write_folder

PASSES = "def test_passes(): pass\n"
TOO_LARGE = "@pytest.mark.large\ndef test_large(): pytest.skip('needs a GPU with 100 GB of memory, found 85 GB')\n"
SKIPS = "def test_skips(): pytest.skip('why not')\n"
FAILS = "def test_fails(): assert False\n"


@pytest.mark.parametrize(
    ("tests", "counts", "passed"),
    [
        (PASSES, {"passed": 1, "failed": 0, "skipped": 0}, True),
        (PASSES + TOO_LARGE, {"passed": 1, "failed": 0, "skipped": 0, "too large": 1}, True),
        (PASSES + SKIPS, {"passed": 1, "failed": 0, "skipped": 1}, False),
        (PASSES + FAILS, {"passed": 1, "failed": 1, "skipped": 0}, False),
        (TOO_LARGE, {"passed": 0, "failed": 0, "skipped": 0, "too large": 1}, False),
    ],
)
def test_only_tests_too_large_for_the_gpu_may_be_skipped(tmp_path, tests, counts, passed):
    file = tmp_path / f"test_{tmp_path.name}.py"  # a name that no other test has imported
    file.write_text("import pytest\n" + tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = large\n")
    assert verification.run_tests([file]) == (counts, passed)


def assert_samples_reach_every_kernel_of(op):
    generator = torch.Generator().manual_seed(0)
    reached, plans = set(), set()
    records = {k.name: k for k in Manifest.load(op.kernels / "manifest.json").kernels if k.operator == op.spec.name}
    nchw = {name for name, k in records.items() if k.family == "fused" and k.variant[1] == "nchw"}
    read = {0: set(), 1: set(), 2: set()}  # NCHW kernels by how they read x: by TMA, or gathering single elements or pairs
    for sample in verification.SAMPLES:
        for dtype in verification.DTYPES_WITH_KERNELS:
            tensors, arguments = sample.inputs(op, dtype, generator)
            for plan in accuracy.serving(op, *tensors, device=H200, **arguments):
                reached |= set(plan.kernels)
                problem = op.problem(*tensors[:2], op.arguments.bind(tensors[2:], arguments)[2])
                for kernel in nchw & set(plan.kernels):
                    read[gathered(problem, records[kernel])].add(kernel)
                plans.add((sample.name, plan.name.split("-")[0]))
    assert reached >= set(records)
    fused = {sample for sample, plan in plans if plan == "fused"}
    assert fused == {sample.name for sample in verification.SAMPLES[:-2]}
    for kernels in read.values():
        assert kernels >= nchw


@pytest.mark.parametrize("name", cutlass_ops.OPERATORS)
def test_the_samples_reach_every_fused_kernel_and_implicit_gemm_of_an_operator(name, monkeypatch):
    monkeypatch.setenv(ALLOW_UNVERIFIED, "1")
    assert_samples_reach_every_kernel_of(getattr(cutlass_ops, name))


def test_the_samples_reach_every_kernel_of_a_users_operator_whose_pool_no_fused_kernel_has(tmp_path, import_source):
    source = (
        f"@operator(pool=MaxPool2d(3))\ndef {OWN}(accum, v: Vector, bias: Vector = None, scale=2.0):\n    return (accum + bias) * v * scale"
    )
    spec = getattr(import_source(source), OWN)
    assert spec.pool == MaxPool2d(3)
    write_folder(tmp_path / "kernels", OWN, "max")
    assert_samples_reach_every_kernel_of(Operator(spec, tmp_path / "kernels"))


# ---- a user's kernels --------------------------------------------------------------------------------------------


OWN = "conv2d_own"
#: Kernels that an operator with a max pool never launches.
IDLE = {"pool_avg_f32", "pool_avg_f16", "pool_avg_bf16"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's folder and the shipped one, of one build; a GPU that launches what it should and computes exactly."""
    own = SimpleNamespace(kernels=tmp_path / "own", shipped=tmp_path / "shipped", accuracy=Accuracy(0, 0, 0, 0, 1, 1))
    records = write_folder(own.kernels, OWN, "max")
    write_folder(own.shipped, "conv2d_shipped")
    (own.kernels / "gpu_checks.json").unlink()
    own.launched = {r.name for r in records} - IDLE
    own.cubins = {r.cubin: r.sha256 for r in records}
    own.shared = {r.cubin: r.sha256 for r in records if not r.operator}
    rows = lambda op, manifest: [verification.Row("a case", own.accuracy, frozenset({own.cubins[f"{OWN}_f16.cubin"]}))]  # noqa: E731
    monkeypatch.setattr(verification, "measure", rows)
    monkeypatch.setattr(verification, "launches", lambda: contextlib.nullcontext(own.launched))
    monkeypatch.setattr(verification, "environment", lambda root, commit: {"gpu": "a GPU", "commit": commit})
    monkeypatch.setattr(verification, "shipped_kernels", lambda: own.shipped)
    own.check = lambda **options: verification.check_own([SimpleNamespace(spec=SimpleNamespace(name=OWN))], own.kernels, "abc", **options)
    return own


def test_a_users_cubins_get_records_and_shared_ones_keep_theirs(own):
    checks = json.loads((own.shipped / "gpu_checks.json").read_text())
    checks["cubins"][own.shared["pool.cubin"]]["tests"] = {"passed": 7}
    (own.shipped / "gpu_checks.json").write_text(json.dumps(checks))
    assert own.check()
    records = json.loads((own.kernels / "gpu_checks.json").read_text())["cubins"]
    assert verified_hashes(own.kernels / "gpu_checks.json") == set(own.cubins.values())
    gemm = records[own.cubins[f"{OWN}_f16.cubin"]]
    assert (gemm["gpu"], gemm["commit"], gemm["cutlass_ops"]) == ("a GPU", "abc", cutlass_ops.__version__)
    assert set(gemm["errors"]) == {"a case"}
    assert records[own.shared["pool.cubin"]] == {"passed": True, "tests": {"passed": 7}}


def test_an_inaccurate_or_idle_cubin_of_a_user_does_not_pass(own, capsys):
    own.accuracy = Accuracy(2, 0, 0, 0, 1, 1)
    own.launched.remove(f"{OWN}_bf16")
    assert not own.check()
    refused = {f"{OWN}_f16.cubin", f"{OWN}_bf16.cubin"}
    assert verified_hashes(own.kernels / "gpu_checks.json") == {sha for name, sha in own.cubins.items() if name not in refused}
    printed = capsys.readouterr().out
    assert f"{OWN}_f16.cubin: not accurate: a case\n" in printed
    assert f"{OWN}_bf16.cubin: never launched: {OWN}_bf16\n" in printed


def test_without_tests_nothing_is_written_for_a_user(own):
    assert own.check(write=False)
    assert not (own.kernels / "gpu_checks.json").exists()
    own.accuracy = Accuracy(2, 0, 0, 0, 1, 1)
    assert not own.check(write=False)


def test_shared_cubins_of_another_build_are_refused_before_anything_runs(own, monkeypatch):
    monkeypatch.setattr(verification, "measure", lambda op, manifest: pytest.fail("it ran"))
    (own.shipped / "gpu_checks.json").write_text(json.dumps({"cubins": {own.shared["pool.cubin"]: {"passed": True}}}))
    with pytest.raises(InstallationError, match=r"expected .*own/cubins/convert\.cubin to be as cutlass_ops ships it.*; build again"):
        own.check()


def test_a_folder_of_other_operators_is_refused(own):
    write_folder(own.kernels / "other", "conv2d_other")
    with pytest.raises(InstallationError, match=r"expected the operators \['conv2d_own'\] in .*, got \['conv2d_other'\]; build again"):
        verification.check_own([SimpleNamespace(spec=SimpleNamespace(name=OWN))], own.kernels / "other")


def test_the_shipped_kernels_are_checked_in_a_checkout_only(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "TESTS", tmp_path)
    with pytest.raises(InstallationError, match=r"expected the GPU tests in .*, found none; run the check in a checkout"):
        verification.check_kernels(None, None)
