"""A convolution of PyTorch's in ieee precision as an operator of its own, forward and backward.

PyTorch takes the precision of its convolutions from a setting at run time. In a graph that torch.compile traces there is no
place to set it, so that a traced gradient of `precision="ieee"` would be computed in TF32; a call of this operator is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional

from .reference import convolutions

__all__ = ["convolution", "is_traced"]

_LIBRARY: Any = torch.library.Library("cutlass_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
_PARAMETERS = "int[2] stride, int[2] padding, int[2] dilation"


def is_traced() -> bool:
    """Whether torch.compile or torch.export is tracing what runs now."""
    return torch._guards.TracingContext.try_get() is not None


def convolution(precision: Optional[str]) -> Callable[..., Tensor]:
    """conv2d(x, weight, None, stride, padding, dilation) that keeps the precision of a call also where it is traced."""
    return _conv2d if precision == "ieee" and is_traced() else functional.conv2d


def _conv2d(x: Tensor, weight: Tensor, bias: None, *parameters: Sequence[int]) -> Tensor:
    result: Tensor = torch.ops.cutlass_ops._conv2d_ieee(x, weight, *parameters)
    return result


def _forward(x: Tensor, weight: Tensor, *parameters: Any) -> Tensor:
    with convolutions("ieee"):
        return functional.conv2d(x, weight, None, *parameters)


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, wanted: list[bool]) -> tuple[Any, ...]:
    with convolutions("ieee"):
        parameters = stride, padding, dilation, False, [0, 0], 1
        found = torch.ops.aten.convolution_backward(gradient, x, weight, None, *parameters, [*wanted, False])
    return tuple(g if want else x.new_empty(0) for g, want in zip(found, wanted))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *ctx.parameters = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
    wanted = list(ctx.needs_input_grad[:2])
    found = torch.ops.cutlass_ops._conv2d_ieee_backward(gradient, *ctx.saved_tensors, *ctx.parameters, wanted)
    return (*(g if want else None for g, want in zip(found, wanted)), None, None, None)


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
    _LIBRARY.define(f"_conv2d_ieee(Tensor x, Tensor weight, {_PARAMETERS}) -> Tensor", tags=tags)
    backward = f"_conv2d_ieee_backward(Tensor gradient, Tensor x, Tensor weight, {_PARAMETERS}, bool[2] wanted) -> (Tensor, Tensor)"
    _LIBRARY.define(backward, tags=tags)
    for name, function in (("_conv2d_ieee", _forward), ("_conv2d_ieee_backward", _backward)):
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cutlass_ops::{name}", function, lib=_LIBRARY)
    torch.library.register_autograd("cutlass_ops::_conv2d_ieee", _differentiate, setup_context=_save, lib=_LIBRARY)


_register()
