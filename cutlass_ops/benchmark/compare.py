"""One input: check the result of every competitor against float64, then time those that passed, interleaved."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import Operator, use_plan
from ..problem import Problem
from ..reference import convolutions
from ..selection import Plan
from . import adapter, measure, rows
from .accuracy import Error, allowed_error, error_of, float64_result, tf32_error, within
from .cases import CUDA_GRAPHS
from .measure import Competitor
from .rows import Row

OURS = "cutlass_ops"
TOLERANCE = 1e-4  # KernelBench's for fp32, absolute and relative


@dataclass(frozen=True)
class Subject:
    """One call: an operator with its arguments, and the same computation as a PyTorch model of x that has `conv.weight`.

    `facts` say what the input is (`Group.facts`); their precision holds within `settings()`, for all competitors.
    """

    operator: Operator
    model: nn.Module
    x: Tensor
    arguments: adapter.Arguments
    facts: Row

    @property
    def weight(self) -> Tensor:
        """The filters."""
        conv: Any = self.model.conv
        weight: Tensor = conv.weight
        return weight

    @property
    def problem(self) -> Problem:
        """The problem of the operator's call."""
        return adapter.problem_of(self.operator, self.x, self.weight, self.arguments)

    def settings(self) -> AbstractContextManager[None]:
        """PyTorch's precision of convolutions as the facts have it."""
        is_fp32 = self.x.dtype is torch.float32
        return convolutions(self.facts["precision"]) if is_fp32 else contextlib.nullcontext()

    def __str__(self) -> str:
        return rows.input_name(self.facts)


@dataclass
class Comparison:
    """Rows of what was timed; what could not run, and which results of ours were refused, in words."""

    rows: list[Row] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


# ---- competitors ---------------------------------------------------------------------------------------------------------


def competitors(subject: Subject, modes: Sequence[str], plans: Sequence[Plan]) -> list[Competitor]:
    """PyTorch's eager mode, torch.compile in some modes, and plans of ours."""
    found = [Competitor("eager", functools.partial(subject.model, subject.x))]
    found += [compiled(subject.model, subject.x, mode) for mode in modes]
    return found + [ours(subject, plan.name) for plan in plans]


@contextlib.contextmanager
def _graph_step() -> Iterator[None]:
    """A CUDA graph may write over the result of the step before."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    yield


def compiled(model: nn.Module, x: Tensor, mode: str) -> Competitor:
    """The model under torch.compile; it compiles at the first call."""
    module = torch.compile(model, mode=mode)
    graphs = mode == CUDA_GRAPHS
    scope = _graph_step if graphs else contextlib.nullcontext
    return Competitor(f"torch.compile {mode}", functools.partial(module, x), scope=scope, owns_memory=graphs)


def ours(subject: Subject, plan: str) -> Competitor:
    """The operator by one of its plans."""
    call = functools.partial(subject.operator, subject.x, subject.weight, **subject.arguments)
    return Competitor(OURS, call, plan, scope=functools.partial(use_plan, plan))


def result_of(competitor: Competitor, moved: int) -> Tensor:
    """A competitor's result, computed in memory that held NaN before, after the calls that compile or capture it."""
    for _ in range(3):
        with competitor.scope():
            competitor.call()
    measure.poison(6 * moved)  # more than result and workspace of any plan
    with competitor.scope():
        y: Tensor = competitor.call()
        return y.clone() if competitor.owns_memory else y


# ---- comparison ----------------------------------------------------------------------------------------------------------


def compare(
    subject: Subject, who: Sequence[Competitor], default: str, limits: Mapping[str, float], trials: int, idle_ms: float
) -> Comparison:
    """Check and time all competitors of a subject, within its settings. `default` is the plan that a call takes."""
    comparison = Comparison()
    problem = subject.problem
    flops, moved = adapter.flops(problem), adapter.minimum_bytes(problem)
    passed = _check(subject, who, moved, comparison)
    times = measure.interleaved([competitor for competitor, _ in passed], trials, idle_ms)
    found = []
    for (competitor, accuracy), ms in zip(passed, times):
        extra = measure.peak_extra_bytes(competitor)
        found.append(
            subject.facts
            | {"what": competitor.what, "plan": competitor.plan, "trials": trials}
            | ({"default_plan": competitor.plan == default} if competitor.plan else {})
            | measure.summary(ms)
            | accuracy
            | {"peak_extra_mb": None if extra is None else extra / 1e6}
        )
    comparison.rows = rows.complete(found, flops, moved, limits)
    return comparison


def _check(subject: Subject, who: Sequence[Competitor], moved: int, comparison: Comparison) -> list[tuple[Competitor, Row]]:
    """The competitors whose results may be timed, each with its accuracy; the others are noted."""
    expected = float64_result(subject.model, subject.x)
    is_fp32 = subject.x.dtype is torch.float32
    by_eager = subject.model(subject.x)
    eager = error_of(by_eager, expected)
    tf32 = tf32_error(subject.model, subject.x, expected) if subject.facts["precision"] == "tf32" else None
    allowed = allowed_error(eager, tf32, expected, subject.x.dtype)
    passed = []
    for competitor in who:
        name = " ".join(filter(None, (competitor.what, competitor.plan)))
        try:
            y = result_of(competitor, moved)
        except Exception as failure:
            if not competitor.what.startswith("torch.compile"):
                raise
            reason = (str(failure).strip().splitlines() or ["no message"])[0]
            comparison.not_run.append(f"{name} on {subject}: {type(failure).__name__}: {reason[:200]}")
            continue
        error = error_of(y, expected)
        problem = why_refused(competitor, error, allowed)
        if problem is not None:
            (comparison.refused if competitor.plan else comparison.not_run).append(f"{name} on {subject}: {problem}")
            continue
        close = bool(torch.allclose(y, by_eager, rtol=TOLERANCE, atol=TOLERANCE)) if is_fp32 else None
        passed.append((competitor, accuracy_row(error, eager, tf32, close)))
        del y
    return passed


def why_refused(competitor: Competitor, error: Error, allowed: Error) -> Optional[str]:
    """Why a result must not be timed, or None: ours errs more than PyTorch's, or any holds NaN."""
    got = f"error against float64 max {error.max:.3e}, mean {error.mean:.3e}"
    if competitor.plan is None:
        return None if within(error, Error(float("inf"), float("inf"))) else f"expected a finite result, got {got}"
    return None if within(error, allowed) else f"expected at most max {allowed.max:.3e}, mean {allowed.mean:.3e}, got {got}"


def accuracy_row(error: Error, eager: Error, tf32: Optional[Error], close: Optional[bool]) -> Row:
    """A row's fields on accuracy."""
    return {
        "error_max": error.max,
        "error_mean": error.mean,
        "eager_error_max": eager.max,
        "eager_error_mean": eager.mean,
        "tf32_error_max": None if tf32 is None else tf32.max,
        "tf32_error_mean": None if tf32 is None else tf32.mean,
        "allclose_eager": close,
    }
