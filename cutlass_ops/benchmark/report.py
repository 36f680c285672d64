"""Tables of the figures, for the terminal and for the documents, and the regions of the documents that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from .cases import CASES, BenchmarkError
from .rows import Row, baseline, rounded

SCHEMA = 1


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column is set flush left, the others flush right."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: Optional[float], form: str) -> str:
    """A number in a format, a dash for none."""
    return "-" if value is None else format(value, form)


def plain(table: Table) -> str:
    """A table for a terminal."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headers))]
    text = [table.title]
    for line in lines:
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def markdown(table: Table) -> str:
    """A table for a document."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    rule = f"| --- |{' ---: |' * (len(table.headers) - 1)}"
    title = [f"**{table.title}**", ""] if table.title else []
    return "\n".join([*title, line(table.headers), rule, *map(line, table.rows)])


def show(table: Table) -> None:
    """Print a table, with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(plain(table), flush=True)
        return
    console = Console()
    if not console.is_terminal:  # rich would fold a wide table into 80 columns
        print(plain(table), flush=True)
        return
    shown = RichTable(title=table.title, title_justify="left")
    for i, header in enumerate(table.headers):
        shown.add_column(header, justify="right" if i else "left")
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


# ---- tables ----------------------------------------------------------------------------------------------------------


def input_name(row: Row) -> str:
    """The input of a row in words."""
    layout = "NCHW" if row["layout"] == "contiguous" else "channels_last"
    return f"{row['case']}, x ({', '.join(map(str, row['shape']))}) {row['dtype']} {layout}"


def competitor_name(row: Row) -> str:
    """What was timed, in words."""
    if not row["plan"]:
        return str(row["what"])
    return f"{row['what']} {row['plan']}{' (default)' if row.get('default_plan') else ''}"


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one input together, in the order of their first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(input_name(row), []).append(row)
    return list(found.values())


_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ms mean", "ms_mean", ".4f"),
    ("median", "ms_median", ".4f"),
    ("min", "ms_min", ".4f"),
    ("std", "ms_std", ".4f"),
    ("TFLOP/s", "tflops", ".1f"),
    ("GB/s", "gbps", ".0f"),
    ("x compile", "ratio_compile", ".2f"),
    ("x eager", "ratio_eager", ".2f"),
    ("of limit", "fraction_of_limit", ".1%"),
    ("error max", "error_max", ".2e"),
    ("error mean", "error_mean", ".2e"),
    ("extra MB", "peak_extra_mb", ".0f"),
)


def group_table(rows: Sequence[Row]) -> Table:
    """All competitors on one input."""
    headers = ("", *(header for header, _, _ in _COLUMNS), "allclose")

    def cells(row: Row) -> tuple[str, ...]:
        close = "-" if row.get("allclose_eager") is None else "yes" if row["allclose_eager"] else "no"
        return (competitor_name(row), *(number(row.get(key), form) for _, key, form in _COLUMNS), close)

    return Table(input_name(rows[0]), headers, tuple(map(cells, rows)))


def stage_table(stages: Sequence[Row]) -> Table:
    """The launches of one plan on one input, and their sum."""
    columns = [c for c in _COLUMNS if c[1] in ("ms_mean", "ms_median", "ms_min", "ms_std", "tflops", "gbps", "fraction_of_limit")]
    rows = [(f"{s['stage']}{' (idle)' if s['idle'] else ''}", *(number(s.get(key), form) for _, key, form in columns)) for s in stages]
    total = sum(s["ms_mean"] for s in stages)
    rows.append(("sum", number(total, ".4f"), *("" for _ in columns[1:])))
    title = f"Stages of {stages[0]['plan']}: {input_name(stages[0])}"
    return Table(title, ("launch", *(header for header, _, _ in columns)), tuple(rows))


def other_tables(result: Mapping[str, Any]) -> list[Table]:
    """Stages, host time and first call."""
    plans: dict[tuple[str, str], list[Row]] = {}
    for stage in result["stages"]:
        plans.setdefault((input_name(stage), stage["plan"]), []).append(stage)
    tables = [stage_table(s) for s in plans.values()]
    if result["host"]:
        rows = [(h["what"], *(number(h[f"us_{k}"], ".1f") for k in ("mean", "median", "min"))) for h in result["host"]]
        title = f"Host microseconds per call, x (1, 8, 8, 8), 8 output channels, {result['host'][0]['calls']} calls"
        tables.append(Table(title, ("", "mean", "median", "min"), tuple(rows)))
    if result["first_call"]:
        f = result["first_call"]
        names = (("import cutlass_ops", "import_ms"), ("first call", "first_call_ms"), ("second call", "second_call_ms"))
        title = f"First call in a fresh process, problem 46, median of {f['processes']} (torch imported, CUDA initialised before)"
        tables.append(Table(title, ("", "ms"), tuple((name, number(f[key], ".2f")) for name, key in names)))
    return tables


def limits_line(limits: Mapping[str, float]) -> str:
    """The limits in words."""
    return (
        f"Limits in the same process: device-to-device copy {limits['copy_gbps']:.0f} GB/s (bytes read + written), "
        f"8192 x 8192 x 8192 matmul fp16 {limits['fp16_tflops']:.0f} TFLOP/s, TF32 {limits['tf32_tflops']:.0f} TFLOP/s."
    )


def environment_line(environment: Mapping[str, Any]) -> str:
    """Where and how it was measured, in words."""
    e = environment
    commit = f"commit {e['commit'][:12]}{' with changes' if e['dirty'] else ''}" if e["commit"] else "commit unknown"
    return (
        f"{e['gpu']}, driver {e['driver'] or 'unknown'}, PyTorch {e['torch']} (CUDA {e['cuda']}), Python {e['python']}, "
        f"{e['date']}, {commit}, `{e['command']}`, {e['trials']} trials, {e.get('idle_ms', 0):g} ms idle before each."
    )


def measured(result: Mapping[str, Any]) -> str:
    """The generated part of docs/performance.md."""
    tables = [*map(group_table, grouped(result["rows"])), *other_tables(result)]
    notes = [f"Not timed: {note}" for note in (*result["refused"], *result["not_run"])]
    return "\n\n".join([environment_line(result["environment"]), limits_line(result["limits"]), *map(markdown, tables), *notes])


def figures(result: Mapping[str, Any]) -> str:
    """The generated part of README.md: milliseconds at KernelBench's sizes in fp32 NCHW."""
    shown = [
        group
        for group in grouped(result["rows"])
        if (group[0]["dtype"], group[0]["layout"]) == ("float32", "contiguous") and group[0]["shape"][0] == CASES[group[0]["case"]].batch
    ]
    plans = list(dict.fromkeys(r["plan"] for group in shown for r in group if r["plan"]))
    rows = []
    for group in shown:
        by_name = {r["plan"] or r["what"]: r for r in group}
        default = next((r for r in group if r.get("default_plan")), {})
        columns = [by_name.get("eager"), baseline(group), *(by_name.get(plan) for plan in plans)]
        ms = ["-" if r is None else number(r["ms_mean"], ".3f") for r in columns]
        ms = [f"**{text}**" if r is not None and r is default else text for r, text in zip(columns, ms)]
        ratio, fraction = number(default.get("ratio_compile"), ".2f"), number(default.get("fraction_of_limit"), ".0%")
        rows.append((f"`{group[0]['case']}`", *ms, ratio, fraction))
    headers = ("ms", "PyTorch eager", "torch.compile", *(f"cutlass_ops {plan}" for plan in plans))
    table = Table("", (*headers, "times as fast as torch.compile", "of the GPU's limit"), tuple(rows))
    note = "Bold: the plan that a call takes. torch.compile: the faster of its default and max-autotune."
    return f"{markdown(table)}\n\n{note} Measured on {environment_line(result['environment'])}"


# ---- files -----------------------------------------------------------------------------------------------------------


def replace_region(text: str, name: str, body: str) -> str:
    """The text with what stands between ``<!-- name -->`` and ``<!-- /name -->`` replaced. Raises BenchmarkError without them."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise BenchmarkError(f"expected one region {begin} .. {end}, found {text.count(begin)} and {text.count(end)} of its marks; add it")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{body.strip()}\n{end}{rest.split(end)[1]}"


def write_aside(path: Path, text: str) -> None:
    """Write a file under another name and rename it."""
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def dumps(result: Mapping[str, Any]) -> str:
    """The result as JSON text."""
    return json.dumps(rounded(dict(result)), indent=1) + "\n"


def load(path: Path) -> dict[str, Any]:
    """Read performance.json. Raises BenchmarkError where it is missing or of another schema."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"expected figures in {path}, could not read them ({error}); measure them on a Hopper GPU first") from error
    schema = result.get("schema") if isinstance(result, dict) else None
    if schema != SCHEMA:
        raise BenchmarkError(f"expected schema {SCHEMA} in {path}, got {schema!r}; measure again with this version")
    return dict(result)


def render(result: Mapping[str, Any], out: Path, root: Path) -> list[Path]:
    """Write performance.md into `out`, and README.md's figures where `out` is the checkout's docs/. Returns what was written."""
    frame = out / "performance.md"
    source = frame if frame.exists() else root / "docs" / "performance.md"
    jobs = [(source, frame, "measured", measured(result))]
    readme = root / "README.md"
    if out.resolve() == (root / "docs").resolve():
        jobs.append((readme, readme, "figures", figures(result)))
    texts = {}
    for origin, target, name, body in jobs:
        try:
            text = origin.read_text(encoding="utf-8")
        except OSError as error:
            raise BenchmarkError(f"expected {origin} with a region {name}, could not read it ({error})") from error
        try:
            texts[target] = replace_region(text, name, body)
        except BenchmarkError as error:
            raise BenchmarkError(f"{origin}: {error}") from None
    for target, text in texts.items():
        write_aside(target, text)
    return list(texts)
