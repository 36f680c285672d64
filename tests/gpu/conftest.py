"""What all GPU tests share: the reasons to skip them, unverified kernels allowed, the seed in the report."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.loader import ALLOW_UNVERIFIED
from cutlass_ops.verification import missing_gpu

from .helpers import SEED, SEED_VARIABLE

MISSING = missing_gpu()
LARGE_BYTES = 100e9


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture: the only place where a test of this folder is skipped."""
    if MISSING:
        pytest.skip(MISSING)
    if item.get_closest_marker("large"):
        found = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if found < LARGE_BYTES:
            pytest.skip(f"needs a GPU with {LARGE_BYTES / 1e9:.0f} GB of memory, found {found / 1e9:.0f} GB")


def pytest_report_collectionfinish(config):
    """The report's header comes before this file is read where pytest is started for all of tests/."""
    return f"tests/gpu: random data of {SEED_VARIABLE}={SEED}"


@pytest.fixture(autouse=True, scope="package")
def _allow_unverified():
    """The checks that verify a kernel run before there is a record of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_UNVERIFIED, "1")
        yield
