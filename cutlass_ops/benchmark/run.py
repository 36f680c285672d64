"""The run: check, then time, group by group; every figure goes into one record."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import FusedConv2d, Operator, conv2d_min_add_mul, conv2d_relu_hardswish, conv2d_sub_tanh_sub_avgpool, use_plan
from ..loader import device_facts
from ..problem import conv_allows_tf32
from ..selection import Plan
from . import adapter, measure, probes, report, rows
from .accuracy import Error, allowed_error, error_of, float64_result, tf32_error, within
from .cases import CUDA_GRAPHS, MAIN, BenchmarkError, Group, make_input, make_model, operator_arguments
from .measure import Competitor

OPERATORS: dict[str, Operator] = {op.spec.name: op for op in (conv2d_sub_tanh_sub_avgpool, conv2d_relu_hardswish, conv2d_min_add_mul)}
OURS = "cutlass_ops"
TOLERANCE = 1e-4  # KernelBench's for fp32, absolute and relative


def require_gpu() -> None:
    """Raise BenchmarkError unless the kernels can run here and PyTorch's convolutions use TF32, as by default."""
    remedy = "run it on an H100, H200, H800, H20 or GH200; --render makes the documents from figures measured before, without a GPU"
    if not torch.cuda.is_available():
        raise BenchmarkError(f"expected a Hopper GPU (compute capability 9.0), PyTorch finds no CUDA device; {remedy}")
    facts = device_facts(torch.cuda.current_device())
    if facts.capability != (9, 0):
        raise BenchmarkError(f"expected compute capability 9.0, got {'.'.join(map(str, facts.capability))} ({facts.name}); {remedy}")
    if not conv_allows_tf32():
        raise BenchmarkError("expected PyTorch's default, TF32 allowed in convolutions, it is off; unset what switches it off")


class Run:
    """One run. `result` is what performance.json holds; with `path` it is kept in a file beside it as it grows."""

    def __init__(self, environment: dict[str, Any], trials: int, idle_ms: float, path: Optional[Path]) -> None:
        self.trials, self.idle_ms, self._path, self._start = trials, idle_ms, path, time.monotonic()
        self.result: dict[str, Any] = {"schema": report.SCHEMA, "environment": environment, "limits": {}}
        self.result |= {"rows": [], "stages": [], "host": [], "first_call": {}, "not_run": [], "refused": []}

    # ---- whole run ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, groups: Sequence[Group], processes: int) -> dict[str, Any]:
        """Measure everything; returns the record."""
        for group in groups:
            self._require_plan(group)
        self.result["limits"] = measure.limits(self.idle_ms)
        self._say(report.limits_line(self.result["limits"]))
        for group in groups:
            self._measure_group(group)
            self._keep()
        self._say("host time per call")
        self.result["host"] = host()
        self._keep()
        self._say("first call")
        self.result["first_call"] = probes.first_call(processes)
        self._keep()
        for table in report.other_tables(self.result):
            report.show(table)
        self._say("done")
        return self.result

    def _say(self, text: str) -> None:
        print(f"\n[{time.monotonic() - self._start:5.1f} s] {text}", flush=True)

    def _keep(self) -> None:
        """Save what there is: a run that is killed leaves its figures in performance.json.partial."""
        if self._path is not None:
            self._path.with_name(f"{self._path.name}.partial").write_text(report.dumps(self.result), encoding="utf-8")

    def _require_plan(self, group: Group) -> None:
        """Raise BenchmarkError, before anything slow, where no plan of ours serves a group."""
        operator = OPERATORS[group.case.operator]
        with torch.device("meta"):
            model, x = make_model(group, "meta"), make_input(group, "meta")
        problem = adapter.problem_of(operator, x, _weight(model), operator_arguments(group.case, model))
        chosen = adapter.selection(operator, problem, torch.cuda.current_device())
        if chosen.plan is None:
            reasons = "; ".join(f"{r.name}: {r.reason}" for r in chosen.rejected)
            raise BenchmarkError(f"expected a plan for {group}, found none: {reasons}")

    # ---- one group ---------------------------------------------------------------------------------------------------

    def _measure_group(self, group: Group) -> None:
        """Check every competitor of a group, time those that passed, interleaved, and list the stages of the default input."""
        self._say(str(group))
        torch.compiler.reset()
        gc.collect()  # the group before
        model, x = make_model(group, "cuda"), make_input(group, "cuda")
        operator = OPERATORS[group.case.operator]
        arguments = operator_arguments(group.case, model)
        problem = adapter.problem_of(operator, x, _weight(model), arguments)
        plans, rejected = adapter.candidates(operator, problem, x.device.index)
        print("\n".join(f"  no {r.name}: {r.reason}" for r in rejected), flush=True)
        default = adapter.selection(operator, problem, x.device.index).plan
        competitors = [Competitor("eager", functools.partial(model, x))]
        competitors += [compiled(model, x, mode) for mode in group.modes]
        competitors += [ours(operator, x, _weight(model), arguments, plan.name) for plan in plans]

        checked = self._checked(group, model, x, competitors)
        times = measure.interleaved([c for c, _ in checked], self.trials, self.idle_ms)
        found = []
        for (competitor, accuracy), ms in zip(checked, times):
            extra = measure.peak_extra_bytes(competitor)
            found.append(
                group.facts
                | {"what": competitor.what, "plan": competitor.plan}
                | ({"default_plan": default is not None and competitor.plan == default.name} if competitor.plan else {})
                | measure.summary(ms)
                | accuracy
                | {"peak_extra_mb": None if extra is None else extra / 1e6}
            )
        found = rows.complete(found, group.flops, group.minimum_bytes, self.result["limits"])
        self.result["rows"] += found
        report.show(report.group_table(found))
        if group.batch == group.case.batch and group.dtype is torch.float32 and not group.channels_last:
            timed = {competitor.plan for competitor, _ in checked}
            for plan in plans:
                if plan.name in timed:
                    self._measure_stages(group, operator, plan, x, _weight(model), arguments)

    def _checked(
        self, group: Group, model: nn.Module, x: Tensor, competitors: Sequence[Competitor]
    ) -> list[tuple[Competitor, dict[str, Any]]]:
        """The competitors whose results may be timed, each with its accuracy."""
        expected = float64_result(model, x)
        is_fp32 = group.dtype is torch.float32
        by_eager = model(x)
        eager = error_of(by_eager, expected)
        tf32 = tf32_error(model, x, expected) if is_fp32 else None
        allowed = allowed_error(eager, tf32)
        passed = []
        for competitor in competitors:
            try:
                y = result_of(competitor, group)
            except Exception as failure:
                if not competitor.what.startswith("torch.compile"):
                    raise
                reason = (str(failure).strip().splitlines() or ["no message"])[0]
                self._note("not_run", f"{competitor.what} on {group}: {type(failure).__name__}: {reason[:200]}")
                continue
            error = error_of(y, expected)
            problem = why_refused(competitor, error, allowed)
            if problem is not None:
                self._note("refused" if competitor.plan else "not_run", f"{competitor.what} {competitor.plan or ''} on {group}: {problem}")
                continue
            close = bool(torch.allclose(y, by_eager, rtol=TOLERANCE, atol=TOLERANCE)) if is_fp32 else None
            passed.append((competitor, accuracy_row(error, eager, tf32, close)))
            del y
        return passed

    def _note(self, kind: str, text: str) -> None:
        self.result[kind].append(text)
        self._say(f"{kind.replace('_', ' ')}: {text}")

    def _measure_stages(
        self, group: Group, operator: Operator, plan: Plan, x: Tensor, weight: Tensor, arguments: adapter.Arguments
    ) -> None:
        try:
            stages, y = adapter.stages(operator, plan, x, weight, arguments)
        except (AttributeError, TypeError, BenchmarkError) as error:  # other launches than the adapter knows
            self._note("not_run", f"stages of {plan.name} on {group}: {error}")
            return
        with use_plan(plan.name):
            if not torch.equal(y, operator(x, weight, **arguments)):
                raise BenchmarkError(f"expected the stages of {plan.name} to give the operator's result, got another")
        problem = adapter.problem_of(operator, x, weight, arguments)
        times = measure.interleaved([Competitor(s.record.name, s.launch) for s in stages], self.trials, self.idle_ms)
        for stage, ms in zip(stages, times):
            figures: dict[str, Any] = {"tflops": None, "gbps": None, "fraction_of_limit": None}
            if not stage.idle:
                family, operand = stage.record.family, stage.record.variant[0]
                mean = measure.summary(ms)["ms_mean"]
                moved = adapter.stage_bytes(stage.record, problem)
                figures = rows.stage_figures(family, operand, mean, group.flops, moved, self.result["limits"])
            names = {"plan": plan.name, "stage": stage.record.name, "idle": stage.idle}
            self.result["stages"].append(group.facts | names | measure.summary(ms) | figures)


# ---- competitors ---------------------------------------------------------------------------------------------------------


def _weight(model: nn.Module) -> Tensor:
    conv: Any = model.conv
    weight: Tensor = conv.weight
    return weight


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


def ours(operator: Operator, x: Tensor, weight: Tensor, arguments: adapter.Arguments, plan: str) -> Competitor:
    """The operator by one of its plans."""
    call = functools.partial(operator, x, weight, **arguments)
    return Competitor(OURS, call, plan, scope=functools.partial(use_plan, plan))


def result_of(competitor: Competitor, group: Group) -> Tensor:
    """A competitor's result, computed in memory that held NaN before, after the calls that compile or capture it."""
    for _ in range(3):
        with competitor.scope():
            competitor.call()
    measure.poison(6 * group.minimum_bytes)  # more than result and workspace of any plan
    with competitor.scope():
        y: Tensor = competitor.call()
        return y.clone() if competitor.owns_memory else y


def why_refused(competitor: Competitor, error: Error, allowed: Error) -> Optional[str]:
    """Why a result must not be timed, or None: ours errs more than PyTorch's, or any holds NaN."""
    got = f"error against float64 max {error.max:.3e}, mean {error.mean:.3e}"
    if competitor.plan is None:
        return None if within(error, Error(float("inf"), float("inf"))) else f"expected a finite result, got {got}"
    return None if within(error, allowed) else f"expected at most max {allowed.max:.3e}, mean {allowed.mean:.3e}, got {got}"


def accuracy_row(error: Error, eager: Error, tf32: Optional[Error], close: Optional[bool]) -> dict[str, Any]:
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


def host() -> list[dict[str, Any]]:
    """Host time per call of problem 46's operator on a tiny input."""
    operator = OPERATORS[MAIN.operator]
    torch.compiler.reset()
    x = torch.rand(1, 8, 8, 8, device="cuda")
    eager = MAIN.model(8, 8).cuda().requires_grad_(False)
    module = FusedConv2d(operator, 8, 8, 3, device="cuda").requires_grad_(False)
    module.load_state_dict(eager.state_dict())
    conv: Any = eager.conv
    calls = {
        "cutlass_ops, functional": functools.partial(operator, x, conv.weight, conv.bias),
        "cutlass_ops, module": functools.partial(module, x),
        "eager module": functools.partial(eager, x),
        "torch.compile default module": functools.partial(torch.compile(eager), x),
    }
    return measure.host_times([Competitor(what, call) for what, call in calls.items()])
