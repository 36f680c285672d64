"""How DTensor shards an operator: by the batch, or by output channels, without communication.

Registered at the first use of an operator after torch.distributed.tensor has been imported, which this module does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

from torch import Tensor

if TYPE_CHECKING:
    from .ops import Operator

__all__ = ["gradients", "is_distributed", "offer"]

_offered: set[str] = set()


def _dtensor() -> Any:
    """The class DTensor, or None where torch.distributed.tensor has not been imported (so that nothing can be one)."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    kind = _dtensor()
    return kind is not None and isinstance(tensor, kind)


def offer(operator: Operator) -> None:
    """Let DTensor know the operator, if there is DTensor in this process and it does not know it yet."""
    if operator.spec.name in _offered or _dtensor() is None:
        return
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    _offered.add(operator.spec.name)
    register_sharding(operator._op)(lambda *inputs: _placements(operator, inputs))
    # DTensor keeps what it finds by the tensors alone, register_sharding adds single ints: let it add stride, padding and the pool.
    first = 2 + len(operator.spec.vectors) + len(operator.spec.scalars)
    _dtensor()._op_dispatcher.sharding_propagator.op_to_schema_info[operator._op] = RuntimeSchemaInfo(first)


def _placements(operator: Operator, inputs: tuple[Any, ...]) -> list[tuple[list[Any], list[Any]]]:
    """For one dimension of a device mesh: placement of the result, and those of the inputs that it needs."""
    from torch.distributed.tensor import Replicate, Shard

    _, weight, *rest = inputs
    vectors = rest[: len(operator.spec.vectors)]
    others = [None] * (len(inputs) - 2 - len(vectors))
    replicated = [None if v is None else Replicate() for v in vectors]
    by_channel = [None if v is None else Shard(_channels(v, weight)) for v in vectors]
    return [
        ([Replicate()], [Replicate(), Replicate(), *replicated, *others]),
        ([Shard(0)], [Shard(0), Replicate(), *replicated, *others]),
        ([Shard(1)], [Replicate(), Shard(0), *by_channel, *others]),
    ]


def _channels(vector: Any, weight: Any) -> int:
    """The dimension of a vector that has the output channels."""
    return list(vector.shape).index(weight.shape[0])


def gradients(
    compute: Callable[[Sequence[Optional[Tensor]], Tensor], list[Optional[Tensor]]], tensors: Sequence[Any], gradient: Any
) -> list[Optional[Tensor]]:
    """`compute` of local tensors, where the result was computed; sums over the mesh stay to be made (Partial), as DTensor's own."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x, weight, *vectors = tensors
    mesh = gradient.device_mesh
    needed: list[list[Any]] = [[] for _ in tensors]  # of each tensor, by dimension of the mesh
    found: list[list[Any]] = [[] for _ in tensors]  # of its gradient
    of_result: list[Any] = []
    for px, pw in zip(x.placements, weight.placements):
        by_batch, by_channel = px == Shard(0), px != Shard(0) and pw == Shard(0)
        split = [by_batch, by_channel, *[by_channel] * len(vectors)]
        of_result.append(Shard(0) if by_batch else Shard(1) if by_channel else Replicate())
        for i, (t, shard) in enumerate(zip(tensors, split)):
            placement = Shard(_channels(t, weight) if i > 1 else 0) if shard and t is not None else Replicate()
            needed[i].append(placement)
            found[i].append(placement if shard or not (by_batch or by_channel) else Partial())
    local = [None if t is None else t.detach().redistribute(mesh, p).to_local() for t, p in zip(tensors, needed)]
    results = compute(local, gradient.redistribute(mesh, of_result).to_local())
    return [
        None if g is None else DTensor.from_local(g, mesh, p, run_check=False, shape=t.shape, stride=t.stride())
        for g, t, p in zip(results, tensors, found)
    ]
