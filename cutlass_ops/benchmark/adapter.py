"""The one module of the benchmark that reaches into the run time: which plans serve a call, and a plan's launches one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from .. import driver
from ..costs import Costs, shipped_costs
from ..launch import PreparedCall
from ..loader import allow_unverified, device_facts
from ..manifest import KernelRecord
from ..ops import Operator, kernel_set
from ..problem import Problem
from ..selection import PLAN_NAMES, Plan, Rejection, Selection, headline, select
from ..work import round_up
from .cases import BenchmarkError

Arguments = Mapping[str, Any]


def problem_of(operator: Operator, x: Tensor, weight: Tensor, arguments: Arguments) -> Problem:
    """The problem of the call ``operator(x, weight, **arguments)``."""
    _, _, parameters = operator.arguments.bind((), dict(arguments))
    return operator.problem(x, weight, parameters)


def selection(operator: Operator, problem: Problem, device: int, force: Optional[str] = None) -> Selection:
    """What the operator's call selects on a device."""
    kernels, facts, allowed = kernel_set(operator.kernels), device_facts(device), allow_unverified()
    costs = shipped_costs() if force is None else Costs()
    return select(problem, facts, kernels.records.values(), kernels.verified, allow_unverified=allowed, force=force, costs=costs)


def default_plan(operator: Operator, problem: Problem, device: int) -> Plan:
    """The plan that a call takes. Raises BenchmarkError where there is none."""
    chosen = selection(operator, problem, device)
    if chosen.plan is None:
        reasons = "; ".join(f"{r.name}: {r.reason}" for r in chosen.rejected)
        raise BenchmarkError(f"expected a plan for {headline(problem)}, found none: {reasons}")
    return chosen.plan


def candidates(operator: Operator, problem: Problem, device: int) -> tuple[list[Plan], list[Rejection]]:
    """Every plan that serves a problem, in the order of `PLAN_NAMES`, and why the others do not."""
    found = [selection(operator, problem, device, force=name) for name in PLAN_NAMES]
    return [s.plan for s in found if s.plan is not None], [r for s in found for r in s.rejected]


@dataclass(frozen=True)
class Stage:
    """One launch of a plan. Its operands lie ready, but it may need those before it to run again."""

    record: KernelRecord
    #: Whether the range guard leaves it without work.
    idle: bool
    launch: Callable[[], None]


def stages(operator: Operator, plan: Plan, x: Tensor, weight: Tensor, arguments: Arguments) -> tuple[list[Stage], Tensor]:
    """The launches of a plan on inputs within fp16's range, and the result that they gave when run in order.

    The stages keep the workspace, in which each found and left its operands.
    """
    vectors, scalars, parameters = operator.arguments.bind((), dict(arguments))
    kernels, device = kernel_set(operator.kernels), x.device.index
    names = [[a.name for a in arguments] for arguments in (operator.spec.vectors, operator.spec.scalars)]
    call = PreparedCall(operator.problem(x, weight, parameters), plan, kernels, device, *names)
    workspace = torch.empty(call.workspace_bytes, dtype=torch.uint8, device=x.device)
    y = torch.empty_like(operator(x, weight, **arguments))
    call.launch(workspace.data_ptr(), y, x, weight, vectors, scalars)
    launches = [launch for _, launch in call.stages()]
    if len(launches) != len(plan.kernels):
        raise BenchmarkError(f"expected one launch for each of {', '.join(plan.kernels)}, got {len(launches)}")
    records = [kernels.records[name] for name in plan.kernels]
    keep, stream = (call, workspace, y, x, weight, vectors), driver.current_stream(device)

    def make(record: KernelRecord, idle: bool, launch: driver.Launch) -> Stage:
        def run(_: object = keep) -> None:
            launch(stream)

        return Stage(record, idle, run)

    return [make(*each) for each in zip(records, idle_launches(records), launches)], y


def idle_launches(records: Sequence[KernelRecord]) -> list[bool]:
    """Which launches of a plan the range guard leaves without work while values fit fp16: the TF32 fallback, if it has one."""
    guarded = any("f16" in r.variant for r in records)
    return [guarded and "tf32" in r.variant for r in records]


def flops(problem: Problem) -> int:
    """Of the convolution alone, a multiply-add counted as two."""
    return 2 * problem.x_shape[0] * math.prod(problem.conv_size) * math.prod(problem.weight_shape)


def minimum_bytes(problem: Problem) -> int:
    """Bytes that any implementation moves: x read once, y written once (the filters are left out)."""
    return (math.prod(problem.x_shape) + math.prod(problem.output_shape)) * (4 if problem.dtype == "f32" else 2)


def stage_bytes(record: KernelRecord, problem: Problem) -> int:
    """Bytes that a launch must move, filters left out."""
    n, c, h, w = problem.x_shape
    k, out_h, out_w = problem.output_shape[1:]
    p, q = problem.conv_size
    size = 4 if problem.dtype == "f32" else 2
    source, result = n * c * h * w * size, n * k * out_h * out_w * size
    operand = n * h * w * round_up(c, 8) * (4 if "tf32" in record.variant else 2)
    between = n * p * q * round_up(k, 4) * 4
    by_family = {"convert": source + operand, "implicit_gemm": operand + between, "pool": between + result, "fused": source + result}
    return by_family.get(record.family, 0)
