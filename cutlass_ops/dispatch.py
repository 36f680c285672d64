"""An operator's kernels for what PyTorch does before a device is asked: fake tensors, transforms, autocast, autograd.

With them torch.ops.cutlass_ops.<name> behaves as the functional API does, in eager mode and inside torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.autograd import forward_ad

from . import ieee, sharding
from .torch_state import autocast, in_precision

if TYPE_CHECKING:
    from .ops import Operator

__all__ = ["register"]


def register(library: Any, operator: Operator) -> None:
    """Register the kernels of an operator that the library has defined."""
    name = operator.spec.name
    torch.library.register_fake(f"cutlass_ops::{name}", lambda *inputs: _fake(operator, inputs), lib=library)
    library.impl(name, lambda *inputs: _transformed(operator, inputs), "FuncTorchDynamicLayerFrontMode")
    for key in (DispatchKey.AutocastCUDA, DispatchKey.AutocastCPU):
        library.impl(name, lambda *inputs, key=key: _autocast(operator, key, inputs), key.name)
    library.impl(name, lambda keyset, *inputs: _autograd(operator, keyset, inputs), "Autograd", with_keyset=True)


def _fake(operator: Operator, inputs: tuple[Any, ...]) -> Tensor:
    """Shape, strides and dtype of a result. DTensor asks for them before it asks how the operator may be sharded."""
    sharding.offer(operator)
    return operator._fake(*inputs)


def _transformed(operator: Operator, inputs: tuple[Any, ...]) -> Tensor:
    """Under a torch.func transform, or forward-mode AD: PyTorch's own operators, which know how to be transformed."""
    x, weight, *rest = inputs
    vectors, scalars, parameters = operator.arguments.split(rest)
    x, weight, vectors = autocast(x, weight, list(vectors), parameters.precision)
    return operator._transformed(x, weight, vectors, scalars, parameters)


def _autocast(operator: Operator, key: DispatchKey, inputs: tuple[Any, ...]) -> Tensor:
    """Under autocast: the tensors in its dtype, as conv2d has them."""
    x, weight, *rest = inputs
    count = len(operator.spec.vectors)
    x, weight, vectors = autocast(x, weight, rest[:count], rest[-1])
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(key)):
        result: Tensor = operator._op(x, weight, *vectors, *rest[count:])
    return result


# ---- autograd ----------------------------------------------------------------------------------------------------


def _autograd(operator: Operator, keyset: DispatchKeySet, inputs: tuple[Any, ...]) -> Tensor:
    if forward_ad._current_level >= 0:
        return _transformed(operator, inputs)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        result: Tensor = _Differentiable.apply(operator, keyset, *inputs)  # type: ignore[no-untyped-call]
        return result
    return _below_autograd(operator, keyset, inputs)


def _below_autograd(operator: Operator, keyset: DispatchKeySet, inputs: tuple[Any, ...]) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = operator._op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
    return result


class _Differentiable(torch.autograd.Function):
    """An operator with gradients by PyTorch's own operators: the reference is computed again and differentiated."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, keyset: DispatchKeySet, *inputs: Any) -> Tensor:
        count = 2 + len(operator.spec.vectors)
        ctx.operator, ctx.rest = operator, inputs[count:]
        ctx.save_for_backward(*inputs[:count])
        return _below_autograd(operator, keyset, inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        operator, saved, wanted = ctx.operator, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if not sharding.is_distributed(gradient):
            gradients = _gradients(operator, saved, ctx.rest, wanted, gradient)
        elif torch.is_grad_enabled():
            raise NotImplementedError("expected one derivative of DTensors, got a second one; take it of local tensors (to_local)")
        else:
            gradients = sharding.gradients(lambda t, g: _gradients(operator, t, ctx.rest, wanted, g), saved, gradient)
        return (None, None, *gradients, *(None for _ in ctx.rest))


def _gradients(
    operator: Operator, saved: Sequence[Optional[Tensor]], rest: Sequence[Any], wanted: Sequence[bool], gradient: Tensor
) -> list[Optional[Tensor]]:
    """Gradients of the wanted ones among x, weight and vectors."""
    create_graph = torch.is_grad_enabled()  # the gradients are to be differentiated again

    def own(t: Optional[Tensor], need: bool) -> Optional[Tensor]:
        if t is None:
            return None
        return t.view_as(t) if create_graph and need else t.detach().requires_grad_(need)

    with torch.enable_grad(), in_precision(rest[-1]):
        x, weight, *vectors = tensors = [own(t, need) for t, need in zip(saved, wanted)]
        y = operator._reference(x, weight, *operator.arguments.split([*vectors, *rest]), ieee.convolution(rest[-1]))  # type: ignore[arg-type]
        needed = [t for t in tensors if t is not None and t.requires_grad]
        # A chain need not use all its vectors; those have no gradient, as in PyTorch.
        found = iter(torch.autograd.grad(y, needed, gradient, create_graph=create_graph, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in tensors]
