"""The run of scripts/bench.py: part by part; every figure goes into one record, which is saved as it grows."""

from __future__ import annotations

import functools
import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch

from .. import FusedConv2d, Operator, conv2d_min_add_mul, conv2d_relu_hardswish, conv2d_sub_tanh_sub_avgpool
from ..problem import conv_allows_tf32
from ..verification import missing_gpu
from . import adapter, cold_start, compare, launches, measure, tables
from .cases import FEW_TRIALS, MAIN, BenchmarkError, Group, make_input, make_model, operator_arguments
from .compare import Subject
from .measure import Competitor
from .report import SCHEMA, dumps

OPERATORS: dict[str, Operator] = {op.spec.name: op for op in (conv2d_sub_tanh_sub_avgpool, conv2d_relu_hardswish, conv2d_min_add_mul)}


def require_gpu(otherwise: str = "--render makes the documents from figures measured before, without a GPU") -> None:
    """Raise BenchmarkError unless the kernels can run here and PyTorch's convolutions use TF32, as by default."""
    missing = missing_gpu()
    if missing:
        raise BenchmarkError(f"{missing}; run it on an H100, H200, H800, H20 or GH200; {otherwise}")
    if not conv_allows_tf32():
        raise BenchmarkError("expected PyTorch's default, TF32 allowed in convolutions, it is off; unset what switches it off")


def subject_of(group: Group, device: str) -> Subject:
    """A group's model and input on a device."""
    model, x = make_model(group, device), make_input(group, device)
    return Subject(OPERATORS[group.case.operator], model, x, operator_arguments(group.case, model), group.facts)


class Run:
    """One run. `result` is what performance.json holds; with `path` it is kept in a file beside it as it grows."""

    def __init__(self, environment: dict[str, Any], trials: int, idle_ms: float, path: Optional[Path]) -> None:
        self.trials, self.idle_ms, self._path, self._start = trials, idle_ms, path, time.monotonic()
        self.result: dict[str, Any] = {"schema": SCHEMA, "environment": environment, "limits": {}}
        self.result |= {"rows": [], "stages": [], "graphs": [], "host": [], "cold_start": []}
        self.result |= {"not_run": [], "refused": [], "failed": []}

    @torch.no_grad()
    def measure(self, groups: Sequence[Group], *, quick: bool) -> dict[str, Any]:
        """Measure everything; returns the record. A part that fails is noted in it, and the others are measured."""
        for group in groups:
            self._require_plan(group)
        self.result["limits"] = measure.limits(self.idle_ms)
        self._say(tables.limits_line(self.result["limits"]))
        # torch.compile starts without what earlier runs left, here as in the fresh processes.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, cold_start.caches(Path(name) / "this process"):
            self._part("host time per call", self._measure_host)
            for group in groups:
                self._part(str(group), functools.partial(self._measure_group, group))
            self._part("cold start, in fresh processes", functools.partial(self._measure_cold_start, Path(name), quick))
        for table in tables.other_tables(self.result):
            print(tables.plain(table), flush=True)
        self._say("done")
        return self.result

    def _part(self, name: str, measure_it: Callable[[], None]) -> None:
        self._say(name)
        try:
            measure_it()
        except Exception as failure:
            traceback.print_exc()
            self._note("failed", f"{name}: {type(failure).__name__}: {(str(failure).splitlines() or ['no message'])[0][:300]}")
        self._keep()

    def _say(self, text: str) -> None:
        print(f"\n[{time.monotonic() - self._start:5.1f} s] {text}", flush=True)

    def _note(self, kind: str, text: str) -> None:
        self.result[kind].append(text)
        self._say(f"{kind.replace('_', ' ')}: {text}")

    def _keep(self) -> None:
        """Save what there is: a run that is killed leaves its figures in performance.json.partial."""
        if self._path is not None:
            self._path.with_name(f"{self._path.name}.partial").write_text(dumps(self.result), encoding="utf-8")

    def _require_plan(self, group: Group) -> None:
        """Raise BenchmarkError, before anything slow, where no plan serves a group."""
        with torch.device("meta"):
            subject = subject_of(group, "meta")
        with subject.settings():
            adapter.default_plan(subject.operator, subject.problem, torch.cuda.current_device())

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _measure_cold_start(self, folder: Path, quick: bool) -> None:
        for start in cold_start.STARTS[:2] if quick else cold_start.STARTS:
            self.result["cold_start"].append(cold_start.measure(start, folder, once=quick))
            self._keep()

    def _measure_host(self) -> None:
        self.result["host"] = host()

    def _measure_group(self, group: Group) -> None:
        """Check every competitor of a group, time those that passed, interleaved, and list the launches of its plans."""
        torch.compiler.reset()
        gc.collect()  # the group before
        subject = subject_of(group, "cuda")
        with subject.settings():
            self._measure_subject(group, subject)

    def _measure_subject(self, group: Group, subject: Subject) -> None:
        device = subject.x.device.index
        default = adapter.default_plan(subject.operator, subject.problem, device)
        plans, rejected = adapter.candidates(subject.operator, subject.problem, device) if group.every_plan else ([default], [])
        print("\n".join(f"  no {r.name}: {r.reason}" for r in rejected), flush=True)
        trials = min(self.trials, group.most_trials or self.trials)
        who = compare.competitors(subject, group.modes, plans)
        found = compare.compare(subject, who, default.name, self.result["limits"], trials, self.idle_ms)
        self.result["rows"] += found.rows
        for kind in ("not_run", "refused"):
            for text in getattr(found, kind):
                self._note(kind, text)
        if found.rows:
            print(tables.plain(tables.group_table(found.rows)), flush=True)
        few = min(trials, FEW_TRIALS)
        passed = {row["plan"] for row in found.rows}
        timed = [plan for plan in plans if plan.kernels and plan.name in passed]
        for plan in timed if group.launches else []:
            self.result["stages"] += launches.stage_rows(subject, plan, self.result["limits"], few, self.idle_ms)
        if group.graph and default.name in passed:
            self.result["graphs"].append(launches.graph_row(subject, default, few, self.idle_ms))


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
