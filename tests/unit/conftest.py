"""PyTorch on one thread: the tensors of these tests are tiny, and other tests may run beside them."""

import pytest
import torch

import cutlass_ops
from cutlass_ops import ops

torch.set_num_threads(1)


@pytest.fixture
def only_shipped_operators(monkeypatch):
    """Without the operators that other tests have made in this process; what the test makes is forgotten."""
    monkeypatch.setattr(ops, "_OPERATORS", {name: getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS})
