"""scripts/sweep.py: measures plans over many shapes, fits their costs to the times, and writes plan_costs.json."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from .. import use_plan
from ..costs import PATH, SCHEMA, Coefficients, Costs, features
from ..errors import CutlassOpsError
from ..loader import device_facts
from ..ops import kernel_set
from ..selection import DeviceFacts, select
from ..verification import missing_gpu
from . import adapter, measure
from .cases import BenchmarkError
from .fit import Sample, fit
from .measure import Competitor
from .report import write_aside
from .shapes import OPERATORS, Shape, shape_of, sweep_shapes

#: Largest difference between two plans' results, relative to the largest result: a few roundings of operands or results.
AGREEMENT = {"f32": 2e-3, "f16": 4e-3, "bf16": 3e-2}
FOLDS = 4  # in the check of choices by a fit to other shapes
CLOSE = 1.05

#: A measured shape: Shape.to_json() and "ms", the median milliseconds of each plan.
Row = dict[str, Any]
#: Plan and dtype -> features and microseconds of every row that has them.
Samples = dict[tuple[str, str], list[Sample]]


# ---- measuring ---------------------------------------------------------------------------------------------------


def require_agreement(shape: Shape, results: Iterable[tuple[str, Tensor]]) -> None:
    """Raise BenchmarkError unless all plans' results are finite and agree with the first's."""
    (name, first), *others = results
    largest = float(first.abs().max())
    if not largest < float("inf"):  # also NaN
        raise BenchmarkError(f"expected finite results of {name} on {shape}, got a largest magnitude of {largest}")
    for other, y in others:
        apart = float((y - first).abs().max())
        if not apart <= AGREEMENT[shape.dtype] * largest:
            raise BenchmarkError(f"expected {other} within {AGREEMENT[shape.dtype] * largest:.2e} of {name} on {shape}, got {apart:.2e}")


@torch.no_grad()
def measure_shape(shape: Shape, trials: int) -> Row:
    """Check that the plans that serve a shape agree, then time them, interleaved, L2 flushed before each."""
    operator = OPERATORS[shape.operator]
    x, weight, arguments = shape.tensors("cuda")
    plans, rejected = adapter.candidates(operator, adapter.problem_of(operator, x, weight, arguments), x.device.index)
    if not plans:
        raise BenchmarkError(f"expected a plan for {shape}, found none: {'; '.join(f'{r.name}: {r.reason}' for r in rejected)}")

    def call() -> Tensor:
        return operator(x, weight, **arguments)

    results, competitors = [], []
    for plan in plans:
        with use_plan(plan.name):
            results.append((plan.name, call()))
    require_agreement(shape, results)
    del results
    for plan in plans:
        with use_plan(plan.name):
            competitors.append(Competitor("cutlass_ops", measure.captured(call).replay, plan.name))
    times = measure.interleaved(competitors, trials)
    return shape.to_json() | {"ms": {plan.name: float(f"{statistics.median(ms):.5g}") for plan, ms in zip(plans, times)}}


def measured(shapes: Sequence[Shape], trials: int, known: Sequence[Row] = ()) -> list[Row]:
    """Rows of all shapes: the known ones, where they have times of every plan that serves the shape, and new ones."""
    torch.manual_seed(0)
    rows = []
    for shape in shapes:
        row = next((row for row in known if shape_of(row) == shape and set(row["ms"]) == serving(shape)), None)
        if row is not None:
            rows.append(row)
            continue
        rows.append(measure_shape(shape, trials))
        print(f"{shape}: " + ", ".join(f"{plan} {ms:.4f}" for plan, ms in rows[-1]["ms"].items()), flush=True)
        gc.collect()
        torch.cuda.empty_cache()  # the graphs' memory
    return rows


def serving(shape: Shape) -> set[str]:
    """The plans that serve a shape."""
    operator = OPERATORS[shape.operator]
    return {plan.name for plan in adapter.candidates(operator, shape.problem(), torch.cuda.current_device())[0]}


# ---- fitting -----------------------------------------------------------------------------------------------------


def work_of(row: Row, sm_count: int) -> dict[str, dict[str, float]]:
    """Features of each plan of a row, by today's kernels."""
    shape = shape_of(row)
    problem, records = shape.problem(), kernel_set(OPERATORS[shape.operator].kernels).records
    found = {}
    for name in row["ms"]:
        device = DeviceFacts("", (9, 0), sm_count)
        plan = select(problem, device, records.values(), frozenset(), allow_unverified=True, force=name).plan
        if plan is None:
            raise BenchmarkError(f"expected {name} to serve {shape}, as when it was measured; measure again with scripts/sweep.py")
        found[name] = features(problem, [records[kernel] for kernel in plan.kernels], sm_count)
    return found


def samples_of(rows: Sequence[Row], works: Sequence[dict[str, dict[str, float]]]) -> Samples:
    """The rows by plan and dtype."""
    found: Samples = defaultdict(list)
    for row, work in zip(rows, works):
        for plan, ms in row["ms"].items():
            found[plan, row["dtype"]].append((work[plan], ms * 1e3))
    return dict(found)


def expected(costs: dict[tuple[str, str], Coefficients], row: Row, work: dict[str, dict[str, float]]) -> dict[str, float]:
    """Expected microseconds of each plan of a row that has coefficients."""
    known = {plan: Costs(costs).of(plan, row["dtype"]) for plan in work}
    return {plan: c.expected(work[plan]) for plan, c in known.items() if c}


def losses(rows: Sequence[Row], times: Sequence[dict[str, float]]) -> list[float]:
    """Of each row with a choice: how many times as long as the fastest plan the chosen one took."""
    found = []
    for row, us in zip(rows, times):
        if len(us) > 1:
            found.append(row["ms"][min(us, key=lambda plan: us[plan])] / min(row["ms"].values()))
    return found


def held_out(rows: Sequence[Row], works: Sequence[dict[str, dict[str, float]]]) -> list[float]:
    """`losses` where each row's costs are fitted without a quarter of the rows, its own among them."""
    found = []
    for fold in range(FOLDS):
        inside = [i for i in range(len(rows)) if i % FOLDS != fold]
        costs = {k: fit(s).coefficients for k, s in samples_of([rows[i] for i in inside], [works[i] for i in inside]).items()}
        outside = range(fold, len(rows), FOLDS)
        found += losses([rows[i] for i in outside], [expected(costs, rows[i], works[i]) for i in outside])
    return found


def choice_summary(found: Sequence[float]) -> dict[str, Any]:
    """How often the chosen plan is the fastest measured, or within 5 % of it, and the worst choice."""
    close = sum(loss <= CLOSE for loss in found)
    return {"shapes": len(found), "fastest": sum(loss <= 1 for loss in found), "within_5_percent": close, "worst": max(found, default=1.0)}


def record(rows: Sequence[Row], provenance: dict[str, Any]) -> dict[str, Any]:
    """What plan_costs.json holds; prints the tables."""
    works = [work_of(row, provenance["sm_count"]) for row in rows]
    fits = {key: fit(samples) for key, samples in samples_of(rows, works).items()}
    costs = {key: found.coefficients for key, found in fits.items()}
    times = [expected(costs, row, work) for row, work in zip(rows, works)]
    choices = {"fitted": choice_summary(losses(rows, times)), "held_out": choice_summary(held_out(rows, works))}
    show(rows, times)
    entries = {
        f"{plan} {dtype}": {"us": dict(found.coefficients.us)} | {k: round(v, 4) for k, v in found.summary().items()}
        for (plan, dtype), found in sorted(fits.items())
    }
    for name, entry in entries.items():
        print(f"{name}: {entry['samples']} times, error median {entry['error_median']:.1%}, largest {entry['error_max']:.1%}")
    for name, c in choices.items():
        print(
            f"choices ({name.replace('_', ' ')}): the fastest measured plan for {c['fastest']} of {c['shapes']} shapes, "
            f"within 5 % of it for {c['within_5_percent']}, at worst {c['worst']:.2f} times its time"
        )
    return {"schema": SCHEMA, "provenance": provenance, "coefficients": entries, "choices": choices, "rows": list(rows)}


def show(rows: Sequence[Row], times: Sequence[dict[str, float]]) -> None:
    """Measured and expected times of every shape and plan; * marks the plan that selection takes."""
    print(f"\n{'shape':<70}{'plan':<26}{'measured us':>12}{'expected':>10}{'error':>8}")
    for row, us in zip(rows, times):
        chosen = min(us, key=lambda plan: us[plan], default=None)
        for plan, ms in row["ms"].items():
            error = us[plan] / ms / 1e3 - 1
            print(f"{shape_of(row)!s:<70}{('* ' if plan == chosen else '  ') + plan:<26}{ms * 1e3:>12.1f}{us[plan]:>10.1f}{error:>+8.1%}")
    print()


def dumps(data: dict[str, Any]) -> str:
    """JSON text with a line for each entry of a section."""

    def section(value: Any) -> str:
        if isinstance(value, dict):
            return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"  {json.dumps(v)}" for v in value) + "\n ]"
        return json.dumps(value)

    return "{\n" + ",\n".join(f" {json.dumps(k)}: {section(v)}" for k, v in data.items()) + "\n}\n"


# ---- command line ------------------------------------------------------------------------------------------------


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(prog="sweep.py", description="Measure the plans over many shapes and fit the costs that order them.")
    parser.add_argument("--out", type=Path, default=PATH, metavar="FILE", help="where rows and costs go (default: the package's own)")
    parser.add_argument("--trials", type=int, default=15, metavar="N", help="timed calls of each plan on each shape (default: 15)")
    parser.add_argument("--commit", metavar="ID", help="commit to record where there is no git checkout (ID-dirty: with changes)")
    parser.add_argument("--fit", action="store_true", help="fit again to the rows in FILE; needs no GPU")
    parser.add_argument(
        "--missing",
        action="store_true",
        help="measure only shapes of which FILE has not the times of all plans, whichever build they are of",
    )
    options = parser.parse_args(arguments)
    if options.trials < 1:
        parser.error(f"expected --trials of at least 1, got {options.trials}")
    if options.fit and options.missing:
        parser.error("expected --fit or --missing, got both")
    return options


def run(options: argparse.Namespace, root: Path) -> None:
    """Measure or read rows, fit, write."""
    rows: list[Row] = []
    provenance: dict[str, Any] = {}
    if options.fit or options.missing:
        try:
            old = json.loads(options.out.read_text(encoding="utf-8"))
            rows, provenance = old["rows"], old["provenance"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchmarkError(f"expected rows of an earlier sweep in {options.out}, could not read them ({error!r})") from error
    if not options.fit:
        from ..environment import environment

        sm_count = device_facts(torch.cuda.current_device()).sm_count
        command = f"python scripts/sweep.py --trials {options.trials}" + (" --missing" if options.missing else "")
        known, earlier = rows, provenance
        provenance = environment(root, options.commit) | {"sm_count": sm_count, "command": command, "trials": options.trials}
        if options.missing:
            if (earlier.get("gpu"), earlier.get("sm_count")) != (provenance["gpu"], sm_count):
                raise BenchmarkError(
                    f"expected {options.out} to be of a GPU like this, {provenance['gpu']}, got {earlier.get('gpu')}; sweep all anew"
                )
            # Of the rows that are kept, the latest last.
            provenance["earlier"] = [*earlier.get("earlier", []), {k: v for k, v in earlier.items() if k != "earlier"}]
        rows = measured(sweep_shapes(), options.trials, known)
        if options.missing and all(row in known for row in rows):
            provenance = earlier  # nothing was measured
    write_aside(options.out, dumps(record(rows, provenance)))
    print(f"wrote {options.out}")


def main(root: Path, arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit code: 1 where plans disagree or cannot be launched, 2 without a Hopper GPU."""
    options = parse(arguments)
    missing = None if options.fit else missing_gpu()
    if missing:
        print(f"not measured: {missing}; --fit fits again to the rows measured before, without a GPU", file=sys.stderr)
        return 2
    try:
        run(options, root)
    except CutlassOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
