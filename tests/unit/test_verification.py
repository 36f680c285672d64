"""The GPU check: its samples reach every kernel; no test may fail or be skipped, but for what the GPU has no memory for."""

from __future__ import annotations

import pytest
import torch

import cutlass_ops
from cutlass_ops import accuracy, verification
from cutlass_ops.loader import ALLOW_UNVERIFIED, shipped_kernels
from cutlass_ops.manifest import Manifest

from .fake_driver import H200

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


@pytest.mark.parametrize("name", cutlass_ops.OPERATORS)
def test_the_samples_reach_every_fused_kernel_and_implicit_gemm_of_an_operator(name, monkeypatch):
    monkeypatch.setenv(ALLOW_UNVERIFIED, "1")
    op, generator = getattr(cutlass_ops, name), torch.Generator().manual_seed(0)
    reached, plans = set(), set()
    for sample in verification.SAMPLES:
        for dtype in verification.DTYPES_WITH_KERNELS:
            tensors, arguments = sample.inputs(op, dtype, generator)
            for plan in accuracy.serving(op, *tensors, device=H200, **arguments):
                reached |= set(plan.kernels)
                plans.add((sample.name, plan.name.split("-")[0]))
    assert reached >= {k.name for k in Manifest.load(shipped_kernels() / "manifest.json").kernels if k.operator == name}
    assert {sample for sample, plan in plans if plan == "fused"} == {sample.name for sample in verification.SAMPLES[:-3]}
