"""The reference path: every operator in PyTorch's own operators, on any device and dtype that they support."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Optional, cast

import torch
from torch import Tensor
from torch.nn import functional

from .chain import evaluate
from .problem import Pair, PoolArguments
from .spec import Spec

__all__ = ["apply_pool", "compute", "convolutions"]


def compute(
    spec: Spec,
    x: Tensor,
    weight: Tensor,
    inputs: dict[str, Any],
    *,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    pool: Optional[PoolArguments] = None,
    convolution: Callable[..., Tensor] = functional.conv2d,
) -> Tensor:
    """``pool(chain(conv2d(x, weight), **inputs))`` in PyTorch's own operators.

    Args:
        spec: What to compute.
        x: Tensor (N, C, H, W) of any dtype and device that PyTorch's conv2d takes.
        weight: Tensor (K, C, R, S).
        inputs: The chain's arguments by name: tensors of K elements or None (zero), and numbers.
        stride: Height and width, in pixels.
        padding: Height and width, in pixels.
        dilation: Height and width, in pixels.
        pool: Arguments of the pool, or None for none.
        convolution: What computes the convolution.

    Returns:
        A tensor (N, K, P, Q) of x's dtype.
    """
    accum = convolution(x, weight, None, stride, padding, dilation)
    y = evaluate(spec.chain, accum, inputs)
    return y if pool is None else apply_pool(y, pool)


def apply_pool(y: Tensor, pool: PoolArguments) -> Tensor:
    """PyTorch's avg_pool2d or max_pool2d of a tensor (N, K, H, W) with these arguments."""
    if pool.kind == "max":
        return functional.max_pool2d(y, pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    return functional.avg_pool2d(
        y, pool.kernel_size, pool.stride, pool.padding, pool.ceil_mode, pool.count_include_pad, pool.divisor_override
    )


@contextlib.contextmanager
def convolutions(precision: str) -> Iterator[None]:
    """Within the block, PyTorch's float32 convolutions on CUDA have this precision.

    PyTorch's setting is process-wide; it is put back on exit.

    Args:
        precision: "tf32" or "ieee".
    """
    conv: Any = getattr(torch.backends.cudnn, "conv", None)
    owner, name, value = torch.backends.cudnn, "allow_tf32", cast(Any, precision == "tf32")
    if conv is not None and hasattr(conv, "fp32_precision"):
        owner, name, value = conv, "fp32_precision", precision
    before = getattr(owner, name)
    if before == value:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
