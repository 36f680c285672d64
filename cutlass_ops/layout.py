"""How tensors lie in memory: as kernels can read them, and as PyTorch would lay out the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from .problem import is_channels_last

__all__ = ["as_vector", "flat_strides", "in_format", "presentable"]


def flat_strides(shape: Sequence[int], strides: Sequence[int]) -> Optional[tuple[int, int, int]]:
    """(batch, channel, pixel) strides of a 4-D tensor whose rows follow each other evenly, or None.

    The conversion kernel walks an image's pixels as one dimension: stride_h must be W * stride_w. Strides of dimensions
    of one element mean nothing.
    """
    _, _, h, w = shape
    batch, channel, row, column = strides
    if w == 1:
        pixel = row if h > 1 else 1
    elif h == 1 or row == w * column:
        pixel = column
    else:
        return None
    return batch, channel, pixel


def presentable(tensor: Tensor) -> Tensor:
    """The tensor itself where the conversion kernel can walk it, else a dense copy in its memory format."""
    if not tensor.numel() or flat_strides(tensor.shape, tensor.stride()) is not None:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last if is_channels_last(tensor) else torch.contiguous_format)


def as_vector(vector: Optional[Tensor]) -> Optional[Tensor]:
    """A per-channel vector as the kernel reads it: fp32, dense."""
    if vector is None or (vector.dtype is torch.float32 and vector.is_contiguous()):
        return vector
    return vector.reshape(-1).to(torch.float32).contiguous()


def in_format(y: Tensor, channels_last: bool) -> Tensor:
    """A result in a memory format, with exactly its strides, also where a size of 1 leaves the choice."""
    y = y.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    _, k, p, q = y.shape
    strides = (k * p * q, 1, q * k, k) if channels_last else (k * p * q, p * q, q, 1)
    if y.stride() == strides:
        return y
    return torch.empty_strided(y.shape, strides, dtype=y.dtype, device=y.device).copy_(y)
