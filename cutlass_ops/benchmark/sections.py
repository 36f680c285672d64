"""The generated parts of the documents, as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .cases import CASES
from .plots import MAIN_BATCH, PLOTS
from .rows import Row, baseline, competitor_name, grouped, input_name, pick
from .tables import Table, environment_line, graph_table, group_table, limits_line, markdown, number, other_tables

Result = Mapping[str, Any]


def performance(result: Result, costs: Result, drawn: Collection[str]) -> dict[str, str]:
    """Region -> text of docs/performance.md. `drawn`: the plots that there are."""
    found = {plot.name: _plot(plot.name, drawn) for plot in PLOTS}
    texts = {"environment": _environment, "clock": _clock, "overhead": _overhead, "measured": _measured}
    return found | {name: text(result) for name, text in texts.items()} | {"selection": _selection(costs)}


def figures(result: Result) -> str:
    """The generated part of README.md: the first plot; milliseconds at KernelBench's sizes in fp32 NCHW."""
    rows = pick(result["rows"], dtype="float32", layout="contiguous", precision="tf32")
    shown = [group for group in grouped(rows) if group[0]["shape"][0] == CASES[group[0]["case"]].batch]
    plans = list(dict.fromkeys(r["plan"] for group in shown for r in group if r["plan"]))
    lines = []
    for group in shown:
        by_name = {r["plan"] or r["what"]: r for r in group}
        default: Row = next((r for r in group if r.get("default_plan")), {})
        columns = [by_name.get("eager"), baseline(group), *(by_name.get(plan) for plan in plans)]
        ms = ["-" if r is None else number(r["ms_mean"], ".3f") for r in columns]
        ms = [f"**{text}**" if r is not None and r is default else text for r, text in zip(columns, ms)]
        ratio, fraction = number(default.get("ratio_compile"), ".2f"), number(default.get("fraction_of_limit"), ".0%")
        lines.append((f"`{group[0]['case']}`", *ms, ratio, fraction))
    headers = ("ms", "PyTorch eager", "torch.compile", *(f"cutlass_ops {plan}" for plan in plans))
    table = Table("", (*headers, "times as fast as torch.compile", "of the GPU's limit"), tuple(lines))
    picture = f"{_picture('time', 'docs/plots')}\n\n" if pick(rows, **MAIN_BATCH) else ""
    note = "Bold: the plan that a call takes. torch.compile: the faster of its default and max-autotune."
    return f"{picture}{markdown(table)}\n\n{note} Measured on {environment_line(result['environment'])}"


def _picture(name: str, folder: str) -> str:
    alt = next(plot.alt for plot in PLOTS if plot.name == name)
    return f"![{alt}]({folder}/{name}.svg)"


def _plot(name: str, drawn: Collection[str]) -> str:
    needs = next(plot.needs for plot in PLOTS if plot.name == name)
    return _picture(name, "plots") if name in drawn else f"No plot: {needs} was not measured in these figures."


def _environment(result: Result) -> str:
    failed = [f"Failed: {note}" for note in result["failed"]]
    return "\n\n".join([environment_line(result["environment"]), limits_line(result["limits"]), *failed])


def _clock(result: Result) -> str:
    """The same call between other competitors, and its launches repeated alone."""
    lines = []
    for row in (r for r in result["rows"] if r.get("default_plan")):
        alone = [s for s in result["stages"] if (s["plan"], input_name(s)) == (row["plan"], input_name(row))]
        if alone:
            values = row["ms_mean"], row["ms_min"], sum(s["ms_mean"] for s in alone), sum(s["ms_min"] for s in alone)
            lines.append((f"{input_name(row)}, {competitor_name(row)}", *(number(ms, ".4f") for ms in values)))
    if not lines:
        return "Not measured in these figures."
    headers = ("ms", "between the others, mean", "least", "its launches repeated alone, sum of means", "of least")
    return markdown(Table("", headers, tuple(lines)))


def _overhead(result: Result) -> str:
    """What was asked of graphs and imports, beside what was measured."""
    parts = [markdown(graph_table(result["graphs"]))] if result["graphs"] else ["CUDA graphs were not measured in these figures."]
    ours = pick(result["cold_start"], what="cutlass_ops")
    parts += [f"`import cutlass_ops` on top of torch: {ours[0]['import_ms']:.0f} ms (goal: under 100 ms)."] if ours else []
    host = {h["what"]: h["us_median"] for h in result["host"]}
    parts += ["Host time of a call, median: " + ", ".join(f"{what} {us:.1f} us" for what, us in host.items()) + "."] if host else []
    return "\n\n".join(parts)


def _selection(costs: Result) -> str:
    lines = [
        (name.replace("_", " "), *(str(c[key]) for key in ("shapes", "fastest", "within_5_percent")), number(c["worst"], ".2f"))
        for name, c in costs["choices"].items()
    ]
    headers = ("costs", "shapes", "the fastest plan taken", "one within 5 % of it", "worst, times as long")
    p = costs["provenance"]
    kept = "".join(f" Some times are kept of {e['date']}, `{e['command']}`." for e in p.get("earlier", []))
    return f"{markdown(Table('', headers, tuple(lines)))}\n\n{p['gpu']}, driver {p['driver']}, {p['date']}, `{p['command']}`.{kept}"


def _measured(result: Result) -> str:
    tables = [*map(group_table, grouped(result["rows"])), *other_tables(result)]
    notes = [f"Not timed: {note}" for note in (*result["refused"], *result["not_run"])]
    return "\n\n".join([*map(markdown, tables), *notes])
