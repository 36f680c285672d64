"""The plots of docs/performance.md: one function each, from the records to a figure, None where what it shows was not measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from . import adapter
from .cases import MAIN, MAX_AUTOTUNE
from .plot_style import COMPILED, EAGER, INK, OTHERS, OURS, bars, colour, new_figure, style
from .rows import Row, competitor_name, input_name, pick
from .shapes import shape_of
from .tables import start_name

Result = Mapping[str, Any]
Draw = Callable[[Result, Result], Optional[Figure]]

#: KernelBench's input of problem 46.
MAIN_INPUT = {"case": MAIN.operator, "dtype": "float32", "layout": "contiguous"}
MAIN_BATCH = {**MAIN_INPUT, "shape": [MAIN.batch, MAIN.channels, MAIN.size, MAIN.size]}


@dataclass(frozen=True)
class Plot:
    """A plot of the document. `needs` says what has to be measured for it."""

    name: str
    alt: str
    needs: str
    draw: Draw


def time_figure(rows: Sequence[Row], environment: Mapping[str, Any]) -> Figure:
    """Milliseconds of every competitor on one input, and the GPU's limit. Within `plot_style.style()`."""
    figure, axes = new_figure(f"Time: {input_name(rows[0])}", [environment], 1.7 + 0.36 * len(rows))
    means = [row["ms_mean"] for row in rows]
    bars(axes, [competitor_name(row) for row in rows], means, [colour(row) for row in rows], list(map(_ms, means)))
    axes.set_xlabel("ms, mean")
    fraction = rows[0].get("fraction_of_limit")
    if fraction:
        limit = means[0] * fraction
        axes.axvline(limit, color=INK, linestyle="--", linewidth=1)
        axes.set_xlabel(f"ms, mean; dashed: the GPU's limit, {_ms(limit)}")
    return figure


def _ms(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"


def time(result: Result, _: Result) -> Optional[Figure]:
    """Time of every competitor for KernelBench's input of problem 46."""
    rows = pick(result["rows"], **MAIN_BATCH, precision="tf32")
    return time_figure(rows, result["environment"]) if rows else None


def other_inputs(result: Result, _: Result) -> Optional[Figure]:
    """The same for problem 46 in other dtypes and layouts, and with TF32 forbidden."""
    found = pick(result["rows"], case=MAIN.operator, shape=MAIN_BATCH["shape"])
    rows = [row for row in found if row not in pick(found, **MAIN_BATCH, precision="tf32")]
    if not rows:
        return None
    figure, axes = new_figure("Time: problem 46, other dtypes, layouts and precisions", [result["environment"]], 1.7 + 0.31 * len(rows))
    names = [f"{_short_input(row)}: {competitor_name(row)}" for row in rows]
    means = [row["ms_mean"] for row in rows]
    bars(axes, names, means, [colour(row) for row in rows], list(map(_ms, means)))
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel("ms, mean")
    return figure


def _short_input(row: Row) -> str:
    layout = "NCHW" if row["layout"] == "contiguous" else "channels_last"
    return f"{row['dtype']}{' ieee' if row['precision'] == 'ieee' else ''} {layout}"


# ---- roofline ------------------------------------------------------------------------------------------------------------

_FAMILIES = (("fused", OURS, "fused plans"), ("two-kernel", OTHERS, "two-kernel plans"), ("", EAGER, "PyTorch eager, torch.compile"))


def roofline(result: Result, costs: Result) -> Optional[Figure]:
    """Every plan under the limits: small, the shapes of plan_costs.json; large, KernelBench's three problems in fp32 NCHW."""
    large = [row for row in pick(result["rows"], precision="tf32", layout="contiguous") if row["shape"][0] == MAIN.batch]
    if not large:
        return None
    environments = [result["environment"], costs["provenance"]]
    figure, axes = new_figure("Roofline: FLOPs of the convolution over bytes of x and y", environments, 5.4)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    for row in costs["rows"]:
        problem = shape_of(row).problem()
        flops, moved = adapter.flops(problem), adapter.minimum_bytes(problem)
        for plan, ms in row["ms"].items():
            axes.plot(flops / moved, flops / ms / 1e9, ".", color=_family(plan)[1], alpha=0.45, markersize=4)
    for row in large:
        marker = "D" if row["plan"] else "x"
        axes.plot(_intensity(row), row["tflops"], marker, color=_family(row["plan"] or "")[1], markersize=6)
    for row in large:
        if row.get("default_plan"):
            where = _intensity(row), row["tflops"]
            axes.annotate(f"problem {row['problem']}", where, xytext=(7, -12), textcoords="offset points")
    marks = [Line2D([], [], color=c, marker="D", linestyle="", label=label) for prefix, c, label in _FAMILIES if prefix]
    marks.append(Line2D([], [], color=EAGER, marker="x", linestyle="", label=_FAMILIES[-1][2]))
    marks.append(Line2D([], [], color=INK, marker=".", linestyle="", label="small: shapes of plan_costs.json"))
    axes.legend(handles=[*marks, *_limits(axes, result["limits"])], loc="lower right", fontsize=9)
    _plain_ticks(axes)
    axes.grid(which="major")
    return figure


def _family(plan: str) -> tuple[str, str, str]:
    return next(family for family in _FAMILIES if plan.startswith(family[0]))


def _intensity(row: Row) -> float:
    """FLOPs per byte of the input that a row is of."""
    return float(row["tflops"] / row["gbps"] * 1e3)


def _limits(axes: Axes, limits: Mapping[str, float]) -> list[Line2D]:
    """The lines that nothing passes: DRAM's, and those of the tensor cores."""
    low, high = axes.get_xlim()
    slope, fp16, tf32 = limits["copy_gbps"] / 1e3, limits["fp16_tflops"], limits["tf32_tflops"]
    roof = f"DRAM copy {slope * 1e3:.0f} GB/s, fp16 matmul {fp16:.0f} TFLOP/s"
    lines = axes.plot([low, fp16 / slope, high], [low * slope, fp16, fp16], color=INK, linewidth=1.2, label=roof)
    lines += axes.plot(
        [tf32 / slope, high], [tf32, tf32], color=INK, linewidth=1.2, linestyle="--", label=f"TF32 matmul {tf32:.0f} TFLOP/s"
    )
    axes.set_xlim(low, high)
    return lines


def _plain_ticks(axes: Axes) -> None:
    """1000 in place of 10^3."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


# ---- curves and bars ------------------------------------------------------------------------------------------------------


def batch(result: Result, _: Result) -> Optional[Figure]:
    """Time over batch size: eager, torch.compile's default, and the plan that a call takes."""
    rows = pick(result["rows"], **MAIN_INPUT, precision="tf32")
    lines = (
        ("PyTorch eager", EAGER, pick(rows, what="eager")),
        ("torch.compile default", COMPILED, pick(rows, what="torch.compile default")),
        ("cutlass_ops, the plan that a call takes", OURS, [row for row in rows if row.get("default_plan")]),
    )
    if len({row["shape"][0] for row in rows}) < 2:
        return None
    figure, axes = new_figure("Time over batch size: problem 46, float32 NCHW", [result["environment"]], 4.6)
    for label, line_colour, found in lines:
        points = sorted((row["shape"][0], row["ms_median"]) for row in found)
        axes.plot(*zip(*points), marker="o", markersize=4, color=line_colour, label=label)
    sizes = sorted({row["shape"][0] for row in rows})
    trials = " or ".join(map(str, sorted({row["trials"] for row in rows})))
    axes.set(xscale="log", yscale="log", xlabel=f"batch size ({trials} trials)", ylabel="ms, median")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid()
    axes.legend()
    return figure


def error(result: Result, _: Result) -> Optional[Figure]:
    """Mean (bar) and largest error (tick) against float64, of each precision and competitor."""
    rows = pick(result["rows"], case=MAIN.operator, shape=MAIN_BATCH["shape"])
    shown = [
        row
        for row in rows
        if (row["layout"] == "contiguous" or row["dtype"] == "bfloat16") and row["what"] != f"torch.compile {MAX_AUTOTUNE}"
    ]
    if not shown:
        return None
    figure, axes = new_figure(
        "Error against float64: problem 46, mean (bar) and largest (mark)", [result["environment"]], 1.7 + 0.31 * len(shown)
    )
    names = [f"{row['precision']}: {competitor_name(row)}" for row in shown]
    means, largest = [row["error_mean"] for row in shown], [row["error_max"] for row in shown]
    bars(axes, names, means, [colour(row) for row in shown], [""] * len(shown))
    axes.plot(largest, range(len(shown)), "|", color=INK, markersize=11, markeredgewidth=2)
    axes.set(xscale="log", xlabel="absolute error", xlim=(min(means) / 3, max(largest) * 2))
    axes.tick_params(axis="y", labelsize=8)
    return figure


def start(result: Result, _: Result) -> Optional[Figure]:
    """Import and first call in a fresh process."""
    starts = result["cold_start"]
    if not any(s["what"].startswith("torch.compile") for s in starts):
        return None
    figure, axes = new_figure(
        "Cold start: problem 46, import on top of torch and first call", [result["environment"]], 1.7 + 0.36 * len(starts)
    )
    totals = [s["import_ms"] + s["first_call_ms"] for s in starts]
    texts = [
        f"{s['import_ms']:.0f} + {s['first_call_ms']:.0f} ms" if s["import_ms"] >= 1 else f"{t:.0f} ms" for s, t in zip(starts, totals)
    ]
    bars(axes, [start_name(s) for s in starts], totals, [colour(s) for s in starts], texts)
    axes.set(xscale="log", xlabel="ms")
    axes.margins(x=0.3)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    return figure


def memory(result: Result, _: Result) -> Optional[Figure]:
    """Peak memory of a call beyond inputs and result."""
    rows = [r for r in pick(result["rows"], **MAIN_BATCH, precision="tf32") if r["peak_extra_mb"] is not None]
    if not rows:
        return None
    figure, axes = new_figure(
        "Memory of a call beyond inputs and result: problem 46, float32 NCHW", [result["environment"]], 1.7 + 0.36 * len(rows)
    )
    megabytes = [row["peak_extra_mb"] for row in rows]
    bars(axes, [competitor_name(row) for row in rows], megabytes, [colour(row) for row in rows], [_megabytes(mb) for mb in megabytes])
    axes.set_xlabel("MB (10^6 bytes)")
    return figure


def _megabytes(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


PLOTS = (
    Plot("time", "Milliseconds of every competitor for problem 46, float32 NCHW", "problem 46 in float32 NCHW", time),
    Plot("inputs", "Milliseconds for problem 46 in other dtypes, layouts and precisions", "problem 46 on other inputs", other_inputs),
    Plot("roofline", "Every plan under the limits of DRAM and tensor cores", "KernelBench's problems in float32 NCHW", roofline),
    Plot("batch", "Milliseconds over batch size for problem 46", "problem 46 at two batch sizes", batch),
    Plot("error", "Error against float64 by precision and competitor", "problem 46 at KernelBench's size", error),
    Plot("start", "Milliseconds from import to the first result in a fresh process", "the cold start of torch.compile", start),
    Plot("memory", "Megabytes that a call takes beyond inputs and result", "problem 46 in float32 NCHW", memory),
)


def figures(result: Result, costs: Result) -> dict[str, Figure]:
    """The plots that can be drawn, by name."""
    with style():
        drawn = {plot.name: plot.draw(result, costs) for plot in PLOTS}
    return {name: figure for name, figure in drawn.items() if figure is not None}
