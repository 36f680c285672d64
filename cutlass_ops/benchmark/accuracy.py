"""The check before timing: results against float64 on some images of the batch."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import LIMIT, ROUNDING, round_to_tf32

FEW_ROUNDINGS = 2.0**-22  # relative, of a result in fp32


@dataclass(frozen=True)
class Error:
    """Absolute error against float64."""

    max: float
    mean: float


def checked_images(batch: int) -> list[int]:
    """The first four and the last two images: the first and the last tiles of any kernel, at little memory."""
    return sorted({*range(min(4, batch)), *range(max(0, batch - 2), batch)})


def float64_result(model: nn.Module, x: Tensor) -> Tensor:
    """The model in float64 on the checked images of x."""
    return _in_float64(copy.deepcopy(model), x[checked_images(x.shape[0])])


def _in_float64(model: nn.Module, x: Tensor) -> Tensor:
    """In NCHW: convolutions in float64 have no other layout."""
    wide: Any = model.double().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    y: Tensor = wide(x.double().contiguous())
    return y


def error_of(y: Tensor, expected: Tensor) -> Error:
    """Error of a whole batch's result; `expected` holds the checked images only. NaN where the result has one."""
    difference = (y[checked_images(y.shape[0])].double() - expected).abs()
    return Error(float(difference.max()), float(difference.mean()))


def tf32_error(model: nn.Module, x: Tensor, expected: Tensor) -> Error:
    """Error that rounding the operands to TF32 makes, all else in float64: what TF32 means, whatever PyTorch runs."""
    rounded: Any = copy.deepcopy(model)
    rounded.conv.weight.data = round_to_tf32(rounded.conv.weight.data).float()
    images = x[checked_images(x.shape[0])]
    difference = (_in_float64(rounded, round_to_tf32(images)) - expected).abs()
    return Error(float(difference.max()), float(difference.mean()))


def allowed_error(eager: Error, tf32: Error | None, expected: Tensor, dtype: torch.dtype) -> Error:
    """The largest error that ours may have: 1.05 times that of PyTorch's eager result, and what rounding makes unavoidable.

    PyTorch may choose an algorithm without TF32 where TF32 is allowed (small batches): its error is then far below TF32's,
    which is what it promised; the error of TF32 itself (`tf32`, where TF32 is allowed) takes its place. A result in half
    precision may always be one rounding from the float64 result; one in fp32 a few roundings farther than PyTorch's, which
    counts where TF32 is forbidden.
    """
    base = tf32 if tf32 is not None and eager.mean < tf32.mean / 2 else eager
    relative = ROUNDING[dtype][0] if dtype in ROUNDING else FEW_ROUNDINGS
    magnitude = expected.abs()
    rounding = Error(relative * float(magnitude.max()), relative * float(magnitude.mean()))
    if dtype in ROUNDING:
        return Error(max(LIMIT * base.max, rounding.max), max(LIMIT * base.mean, rounding.mean))
    return Error(LIMIT * base.max + rounding.max, LIMIT * base.mean + rounding.mean)


def within(error: Error, allowed: Error) -> bool:
    """Whether an error is a number and no larger than allowed."""
    finite = math.isfinite(error.max) and math.isfinite(error.mean)
    return finite and error.max <= allowed.max and error.mean <= allowed.mean
