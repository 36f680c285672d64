"""PyTorch's state around a call: autocast, transforms, modes, the precision of its convolutions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import reference

_AUTOCAST_DEVICES = ("cuda", "cpu")
_AUTOCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # not float64, as PyTorch has it


def autocast(
    x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], precision: Optional[str]
) -> tuple[Tensor, Tensor, Sequence[Optional[Tensor]]]:
    """The tensors in autocast's dtype, where it is on and the call names no precision."""
    if precision is not None:
        return x, weight, vectors
    kind = "cuda" if x.is_cuda else x.device.type  # the name alone takes 0.4 us
    if kind not in _AUTOCAST_DEVICES or not torch.is_autocast_enabled(kind):
        return x, weight, vectors
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Any) -> Any:
        return t.to(dtype) if isinstance(t, Tensor) and t.dtype in _AUTOCAST_DTYPES and t.device.type == kind else t

    return cast(x), cast(weight), [cast(v) for v in vectors]


def without_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """A block in which tensors on this kind of device keep their dtype."""
    on = kind in _AUTOCAST_DEVICES and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()


def is_transformed() -> bool:
    """Whether forward-mode AD or a torch.func transform (vmap, grad, jvp) is on."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_plain(x: Any, weight: Any, vectors: Sequence[Any]) -> bool:
    """Whether a call is plain eager CUDA work: nothing that the dispatcher serves (autograd, modes, transforms) is on."""
    gradients = torch.is_grad_enabled()
    for t in (x, weight, *vectors):
        if t is None:
            continue
        kind = type(t)
        if (kind is not Tensor and kind is not Parameter) or t.is_neg() or (gradients and t.requires_grad):
            return False
    if not x.is_cuda or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    return torch._C._get_tracing_state() is None and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def in_precision(precision: Optional[str]) -> contextlib.AbstractContextManager[None]:
    """PyTorch's convolutions in a precision that a call gave or that holds anyway."""
    return reference.convolutions("ieee") if precision == "ieee" else contextlib.nullcontext()
