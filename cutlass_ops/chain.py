"""The functions a chain may call, on torch tensors.

A chain is an ordinary Python function of ``accum`` (the convolution without bias), per-channel vectors and scalars. The
builder traces its source into an epilogue visitor tree; the reference path simply calls it, with the functions below.
`FUNCTIONS` is the one list of what both sides understand, beside ``+ - * /`` and unary minus.
"""

from __future__ import annotations

from typing import Any, Union

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "clamp", "exp", "gelu", "hardswish", "maximum", "minimum", "relu", "sigmoid", "silu", "tanh"]

Value = Union[Tensor, float]


def _pair(a: Value, b: Value) -> tuple[Tensor, Tensor]:
    """Make two operands tensors of one dtype and device; at least one is a tensor already."""
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        raise TypeError(f"expected a tensor among the operands, got {type(a).__name__} and {type(b).__name__}")

    def tensor(value: Value) -> Tensor:  # filled on the device: a copy from the host cannot be captured in a CUDA graph
        if isinstance(value, Tensor):
            return value.to(like)
        return torch.full((), value, dtype=like.dtype, device=like.device)

    return tensor(a), tensor(b)


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent. The kernels approximate it to about 1e-5 (tanh.approx)."""
    return torch.tanh(x)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return torch.sigmoid(x)


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``; NaN stays NaN."""
    return torch.relu(x)


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return torch.nn.functional.silu(x)


def hardswish(x: Tensor) -> Tensor:
    """``x * clamp(x + 3, 0, 6) / 6``."""
    return torch.nn.functional.hardswish(x)


def gelu(x: Tensor) -> Tensor:
    """``x * Phi(x)``, Phi the standard normal distribution function (PyTorch's ``approximate="none"``)."""
    return torch.nn.functional.gelu(x)


def exp(x: Tensor) -> Tensor:
    """``e**x``."""
    return torch.exp(x)


def minimum(a: Value, b: Value) -> Tensor:
    """Smaller of two values; NaN wins."""
    return torch.minimum(*_pair(a, b))


def maximum(a: Value, b: Value) -> Tensor:
    """Larger of two values; NaN wins."""
    return torch.maximum(*_pair(a, b))


def clamp(x: Tensor, min: Value, max: Value) -> Tensor:  # noqa: A002 (PyTorch's argument names)
    """``minimum(maximum(x, min), max)``."""
    return minimum(maximum(x, min), max)


#: Name -> number of positional arguments.
FUNCTIONS: dict[str, int] = {
    "tanh": 1,
    "sigmoid": 1,
    "relu": 1,
    "silu": 1,
    "hardswish": 1,
    "gelu": 1,
    "exp": 1,
    "minimum": 2,
    "maximum": 2,
    "clamp": 3,
}


def evaluate(chain: Any, accum: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Call a chain on tensors: `inputs` maps its argument names to per-channel vectors (K,) or None and to scalars."""
    values = {
        # A vector that was not given is zero, as the kernel's null pointer is. Copies: a chain may work in place (+=).
        name: accum.new_zeros(1, 1, 1, 1) if value is None else value.reshape(1, -1, 1, 1).clone() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    result: Tensor = chain(accum, **values)
    return result
