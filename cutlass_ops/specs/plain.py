"""Convolution alone: the identity chain, which the exact tests also use."""

from __future__ import annotations

from ..spec import Vector, operator


@operator()
def conv2d(accum, bias: Vector = None):  # type: ignore[no-untyped-def, assignment]
    """Convolution with bias, as torch.nn.functional.conv2d."""
    return accum + bias
