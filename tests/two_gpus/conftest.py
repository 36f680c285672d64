"""The one reason to skip these tests. They are apart from tests/gpu, none of which the GPU check lets be skipped."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.loader import ALLOW_UNVERIFIED
from cutlass_ops.verification import missing_gpu


def missing_gpus():
    """Why this machine cannot run the tests, or None."""
    if reason := missing_gpu():
        return reason
    found = sum(torch.cuda.get_device_capability(i) == (9, 0) for i in range(min(2, torch.cuda.device_count())))
    return None if found == 2 else f"needs two Hopper GPUs as cuda:0 and cuda:1; found {found}"


MISSING = missing_gpus()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture: the only place where a test of this folder is skipped."""
    if MISSING:
        pytest.skip(MISSING)


@pytest.fixture(autouse=True, scope="package")
def _allow_unverified():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOW_UNVERIFIED, "1")
        yield
