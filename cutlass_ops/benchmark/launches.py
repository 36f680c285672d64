"""The launches of a plan one by one, and a CUDA graph of a whole call beside them."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from .. import use_plan
from ..selection import Plan
from . import adapter, measure, rows
from .cases import BenchmarkError
from .compare import Subject, ours
from .measure import Competitor
from .rows import Row


def _stages(subject: Subject, plan: Plan) -> list[adapter.Stage]:
    """The launches of a plan. Raises BenchmarkError unless they give the operator's result."""
    stages, y = adapter.stages(subject.operator, plan, subject.x, subject.weight, subject.arguments)
    with use_plan(plan.name):
        if not torch.equal(y, subject.operator(subject.x, subject.weight, **subject.arguments)):
            raise BenchmarkError(f"expected the launches of {plan.name} to give the operator's result, got another")
    return stages


@contextlib.contextmanager
def _after(stages: Sequence[adapter.Stage]) -> Iterator[None]:
    for stage in stages:
        stage.launch()
    yield


def alone(stages: Sequence[adapter.Stage]) -> list[Competitor]:
    """Each launch by itself. Those before it run first, untimed: a fused kernel may count from what the packing kernel resets."""
    return [Competitor(s.record.name, s.launch, scope=functools.partial(_after, stages[:i])) for i, s in enumerate(stages)]


def stage_rows(subject: Subject, plan: Plan, limits: Mapping[str, float], trials: int, idle_ms: float) -> list[Row]:
    """A row for each launch of a plan, repeated alone."""
    stages, problem = _stages(subject, plan), subject.problem
    times = measure.interleaved(alone(stages), trials, idle_ms)
    found = []
    for stage, ms in zip(stages, times):
        figures: Row = {"tflops": None, "gbps": None, "fraction_of_limit": None}
        if not stage.idle:
            family, operand = stage.record.family, stage.record.variant[0]
            mean, moved = statistics.fmean(ms), adapter.stage_bytes(stage.record, problem)
            figures = rows.stage_figures(family, operand, mean, adapter.flops(problem), moved, limits)
        names = {"plan": plan.name, "stage": stage.record.name, "idle": stage.idle, "trials": trials}
        found.append(subject.facts | names | measure.summary(ms) | figures)
    return found


def graph_row(subject: Subject, plan: Plan, trials: int, idle_ms: float) -> Row:
    """A call as a CUDA graph beside its launches, interleaved: medians in microseconds, less what two events alone take."""
    stages = _stages(subject, plan)
    with use_plan(plan.name):
        graph = measure.captured(ours(subject, plan.name).call)
    nothing = Competitor("nothing", lambda: None)
    timed = [nothing, Competitor("graph", graph.replay), *alone(stages)]
    empty, replay, *launches = (statistics.median(ms) * 1e3 for ms in measure.interleaved(timed, trials, idle_ms))
    figures = {"replay_us": replay - empty, "launches_us": sum(us - empty for us in launches), "empty_us": empty}
    return subject.facts | {"plan": plan.name, "launches": len(stages), "trials": trials} | figures
