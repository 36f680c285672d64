"""Precisions that no kernel has are PyTorch's own, forward and backward, and `explain` says so."""

from __future__ import annotations

import pytest
import torch

import cutlass_ops
from cutlass_ops.reference import convolutions

from .helpers import errors, gradients, in_pytorch, name_of, reference64, tensors

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
OPERATORS = [cutlass_ops.conv2d, POOLED, cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=name_of)


@each_operator
def test_ieee_precision_is_pytorchs_own_and_is_explained(op, capsys):
    given = tensors(op, "ieee")
    with convolutions("ieee"):
        expected = in_pytorch(op)(*given)
    assert torch.equal(op(*given, precision="ieee"), expected)
    largest = reference64(op, *given).abs().max().item()
    assert errors(expected, reference64(op, *given))[0] <= 2.0**-17 * largest  # TF32: 2^-12
    assert "plan: pytorch" in cutlass_ops.explain(op, *given, precision="ieee")
    assert "precision ieee" in capsys.readouterr().out


def test_without_tf32_allowed_the_default_precision_is_ieee(capsys):
    given = tensors(POOLED, "setting")
    assert "precision tf32" in cutlass_ops.explain(POOLED, *given)
    fast = POOLED(*given)
    torch.backends.cudnn.allow_tf32 = False
    try:
        y = POOLED(*given)
        expected = in_pytorch(POOLED)(*given)
        cutlass_ops.explain(POOLED, *given)
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert torch.equal(y, expected)
    assert not torch.equal(y, fast)
    assert "precision ieee" in capsys.readouterr().out
    assert torch.equal(POOLED(*given), fast)


def test_double_tensors_are_served_by_pytorch():
    given = [t.double() for t in tensors(POOLED, "double")]
    assert torch.equal(POOLED(*given), reference64(POOLED, *given))


@pytest.mark.parametrize("op", [cutlass_ops.conv2d, POOLED], ids=name_of)  # no kink that a rounding could move a value across
def test_gradients_at_ieee_precision_are_ieee(op):
    """A precision is never lowered silently, backward neither. TF32 gives errors of about 2^-12 of the largest gradient."""
    given = tensors(op, "ieee gradient")
    exact = gradients(in_pytorch(op), [t.double() for t in given])
    with convolutions("tf32"):  # PyTorch's default, which precision="ieee" must overrule
        found = gradients(lambda *t: op(*t, precision="ieee"), given)
    for mine, theirs in zip(found, exact):
        assert errors(mine, theirs)[0] <= 2.0**-16 * theirs.abs().max().item()
