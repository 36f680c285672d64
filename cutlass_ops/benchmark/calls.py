"""Any call of any operator as a subject of comparison: random tensors, and the operator in PyTorch's own operators as a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import Operator, reference
from ..problem import Parameters, precision_of
from . import adapter
from .cases import SEED
from .compare import Comparison, Subject, compare, competitors


class ReferenceModel(nn.Module):
    """An operator in PyTorch's own operators, as a model of x with `conv.weight`."""

    def __init__(
        self, operator: Operator, weight: Tensor, vectors: Mapping[str, Tensor], scalars: Mapping[str, float], p: Parameters
    ) -> None:
        super().__init__()
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(weight, requires_grad=False)
        self.vectors = nn.ParameterDict({name: nn.Parameter(v, requires_grad=False) for name, v in vectors.items()})
        self._spec, self._scalars, self._p = operator.spec, dict(scalars), p

    def forward(self, x: Tensor) -> Tensor:
        """The operator of x."""
        conv: Any = self.conv
        inputs: dict[str, Any] = {**self.vectors, **self._scalars}
        p = self._p
        return reference.compute(self._spec, x, conv.weight, inputs, stride=p.stride, padding=p.padding, dilation=p.dilation, pool=p.pool)


def call_subject(
    operator: Operator,
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    dtype: torch.dtype,
    *,
    channels_last: bool,
    device: str,
    arguments: Mapping[str, Any],
) -> Subject:
    """A call with x uniform in [0, 1), filters as torch.nn.Conv2d initialises them, vectors uniform in [-1, 1), all of them given.

    `arguments`: those after the tensors. Their precision becomes a setting of PyTorch's, for all competitors. Raises TypeError
    or ValueError for arguments that do not fit.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    generator = torch.Generator(device if device != "meta" else "cpu").manual_seed(SEED)

    def uniform(shape: Sequence[int], low: float, high: float) -> Tensor:
        random = torch.rand(tuple(shape), device=device, generator=generator if device != "meta" else None)
        return (random * (high - low) + low).to(dtype)

    reach = 1 / math.sqrt(math.prod(weight_shape[1:]))
    x = uniform(x_shape, 0, 1).contiguous(memory_format=layout)
    weight = uniform(weight_shape, -reach, reach).contiguous(memory_format=layout)
    vectors = {a.name: uniform(weight_shape[:1], -1, 1) for a in operator.spec.vectors}
    _, scalars, parameters = operator.arguments.bind((), vectors | dict(arguments))
    model = ReferenceModel(operator, weight, vectors, dict(zip(operator.arguments.scalars, scalars)), parameters)
    others = {name: value for name, value in arguments.items() if name != "precision"}
    facts = {
        "case": operator.spec.name,
        "shape": list(x_shape),
        "weight": list(weight_shape),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": "channels_last" if channels_last else "contiguous",
        "precision": precision_of(x, parameters.precision) if dtype is torch.float32 else str(dtype).removeprefix("torch."),
        "arguments": others,
    }
    return Subject(operator, model, x, {**vectors, **others}, facts)


@torch.no_grad()
def compare_call(subject: Subject, modes: Sequence[str], limits: Mapping[str, float], trials: int, idle_ms: float) -> Comparison:
    """Check and time eager, torch.compile and every plan of ours on a subject's call. Raises BenchmarkError without a plan."""
    torch.compiler.reset()
    with subject.settings():
        device = subject.x.device.index
        default = adapter.default_plan(subject.operator, subject.problem, device)
        plans, _ = adapter.candidates(subject.operator, subject.problem, device)
        return compare(subject, competitors(subject, modes, plans), default.name, limits, trials, idle_ms)
