"""scripts/bench.py without a GPU: a record with made-up figures, and a run on the CPU whose times are made up."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import torch

from cutlass_ops.benchmark import accuracy, adapter, cold_start, compare, launches, measure, report, rows, run
from cutlass_ops.benchmark.cases import CASES, MAIN, Group, make_input
from cutlass_ops.benchmark.compare import accuracy_row

from .fake_driver import H200
from .records import all_records

LIMITS = {"copy_gbps": 4000.0, "fp16_tflops": 800.0, "tf32_tflops": 400.0}
FLOPS, BYTES = 400_000_000_000, 1_000_000_000
ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": None,
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.3",
    "date": "2026-01-02",
    "commit": "0123456789abcdef",
    "dirty": True,
    "command": "python scripts/bench.py",
    "trials": 100,
    "idle_ms": 2.5,
}


def row(what, ms, plan=None, **extra):
    """A row of problem 46's input."""
    error = accuracy.Error(3e-4, 4e-5)
    facts = Group(MAIN, 128).facts | {"what": what, "plan": plan, "trials": 100, "peak_extra_mb": 1500.0}
    return facts | measure.summary([ms]) | accuracy_row(error, error, None, True) | extra


def record():
    """A small record: problem 46 at two batch sizes, no torch.compile in the cold start, no CUDA graphs."""
    found = rows.complete(
        [
            row("eager", 5.0),
            row("torch.compile default", 2.0),
            row("torch.compile max-autotune", 2.2),
            row("cutlass_ops", 1.0, "two-kernel-f16-guarded", default_plan=True),
            row("cutlass_ops", 1.6, "two-kernel-tf32", default_plan=False),
        ],
        FLOPS,
        BYTES,
        LIMITS,
    )
    small = {"shape": [1, 64, 128, 128], "plan": "two-kernel-tf32", "default_plan": True}
    stage = {**Group(MAIN, 128).facts, "plan": "two-kernel-tf32", **measure.summary([0.5]), "idle": False, "trials": 20}
    stages = [
        stage | {"stage": "convert_f32_tf32"} | rows.stage_figures("convert", "f32", 0.5, FLOPS, BYTES, LIMITS),
        stage | {"stage": "pool_avg_f32", "idle": True, "tflops": None, "gbps": None, "fraction_of_limit": None},
    ]
    start = {"what": "cutlass_ops", "cache": None, "processes": 3, "import_torch_ms": None}
    return {
        "schema": report.SCHEMA,
        "environment": dict(ENVIRONMENT),
        "limits": LIMITS,
        "rows": [*found, found[3] | small],
        "stages": stages,
        "graphs": [],
        "host": [{"what": "eager module", "us_mean": 50.04, "us_median": 49.0, "us_min": 48.0, "calls": 1000}],
        "cold_start": [start | {"import_ms": 10.0, "first_call_ms": 60.0, "second_call_ms": 1.5}],
        "not_run": [],
        "refused": [],
        "failed": [],
    }


class Kernels:
    """Every kernel of conv2d and of KernelBench's operators, built and verified."""

    records = {  # noqa: RUF012
        r.name: r
        for operator, pool in [("conv2d", 1), *((case.operator, case.pool) for case in CASES.values())]
        for r in all_records(operator, "none" if pool == 1 else "avg")
    }
    verified = frozenset(r.sha256 for r in records.values())


def select_as_on_h200(monkeypatch):
    """Selection as on an H200 with every kernel built and verified."""
    monkeypatch.setattr(adapter, "device_facts", lambda device: H200)
    monkeypatch.setattr(adapter, "kernel_set", lambda folder: Kernels)


def run_without_gpu(monkeypatch):
    """Inputs are small and on the CPU, where every competitor is PyTorch's eager mode; clocks are replaced."""
    select_as_on_h200(monkeypatch)
    ms = itertools.count(1)

    def small_input(group, device):
        x = make_input(group, "meta")[:2, ..., :16, :16]
        layout = torch.channels_last if group.channels_last else torch.contiguous_format
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype).contiguous(memory_format=layout)

    def ours(subject, plan):
        """As the kernels do: rounded to half precision once, at the end."""
        x, weight = subject.x.float(), subject.weight.float()
        arguments = {k: v.float() if torch.is_tensor(v) else v for k, v in subject.arguments.items()}
        return measure.Competitor(compare.OURS, lambda: subject.operator(x, weight, **arguments).to(subject.x.dtype), plan)

    def stages(operator, plan, x, weight, arguments):
        y = operator(x, weight, **arguments)
        return [adapter.Stage(Kernels.records[name], False, lambda: None) for name in plan.kernels], y

    monkeypatch.setattr(
        run, "make_input", lambda group, device: make_input(group, device) if device == "meta" else small_input(group, device)
    )
    monkeypatch.setattr(run, "make_model", lambda group, device, make=run.make_model: make(group, device if device == "meta" else "cpu"))
    monkeypatch.setattr(
        compare, "compiled", lambda model, x, mode: measure.Competitor(f"torch.compile {mode}", functools.partial(model, x))
    )
    monkeypatch.setattr(compare, "ours", ours)
    monkeypatch.setattr(launches, "ours", ours)
    monkeypatch.setattr(adapter, "stages", stages)
    monkeypatch.setattr(measure, "interleaved", lambda who, trials, idle_ms: [[next(ms) / 64.0] * trials for _ in who])
    monkeypatch.setattr(measure, "peak_extra_bytes", lambda competitor: 10**6 * len(competitor.what))
    monkeypatch.setattr(measure, "poison", lambda size: None)
    monkeypatch.setattr(measure, "limits", lambda idle_ms: LIMITS)
    monkeypatch.setattr(measure, "captured", lambda call: SimpleNamespace(replay=call))
    monkeypatch.setattr(run, "host", lambda: record()["host"])
    monkeypatch.setattr(run, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    started = {"import_torch_ms": 2000.0, "import_ms": 50.0, "first_call_ms": 25.0, "second_call_ms": 1.0}
    monkeypatch.setattr(cold_start, "_process", lambda start: dict(started))
