"""Tables of the figures, for the terminal and for the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from .rows import Row, competitor_name, input_name


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
    """A table for a terminal, a file or a pipe."""
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


# ---- tables ----------------------------------------------------------------------------------------------------------


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

    return Table(f"{input_name(rows[0])}, {rows[0]['trials']} trials", headers, tuple(map(cells, rows)))


def short_table(rows: Sequence[Row]) -> Table:
    """All competitors on one input, in the columns that fit a terminal."""
    keys = ("ms_mean", "ms_min", "tflops", "ratio_eager", "ratio_compile", "fraction_of_limit", "error_max", "peak_extra_mb")
    columns = [c for c in _COLUMNS if c[1] in keys]
    cells = [(competitor_name(row), *(number(row.get(key), form) for _, key, form in columns)) for row in rows]
    return Table(f"{input_name(rows[0])}, {rows[0]['trials']} trials", ("", *(header for header, _, _ in columns)), tuple(cells))


def stage_table(stages: Sequence[Row]) -> Table:
    """The launches of one plan on one input, and their sum."""
    columns = [c for c in _COLUMNS if c[1] in ("ms_mean", "ms_median", "ms_min", "ms_std", "tflops", "gbps", "fraction_of_limit")]
    rows = [(f"{s['stage']}{' (idle)' if s['idle'] else ''}", *(number(s.get(key), form) for _, key, form in columns)) for s in stages]
    total = sum(s["ms_mean"] for s in stages)
    rows.append(("sum", number(total, ".4f"), *("" for _ in columns[1:])))
    title = f"Launches of {stages[0]['plan']}: {input_name(stages[0])}, {stages[0]['trials']} trials"
    return Table(title, ("launch", *(header for header, _, _ in columns)), tuple(rows))


def host_table(host: Sequence[Row]) -> Table:
    """Host time of a call."""
    rows = [(h["what"], *(number(h[f"us_{k}"], ".1f") for k in ("mean", "median", "min"))) for h in host]
    title = f"Host microseconds per call, x (1, 8, 8, 8), 8 output channels, {host[0]['calls']} calls"
    return Table(title, ("", "mean", "median", "min"), tuple(rows))


def start_name(start: Row) -> str:
    """What was started, in words."""
    return f"{start['what']}, {start['cache']} cache" if start["cache"] else str(start["what"])


def start_table(starts: Sequence[Row]) -> Table:
    """Cold start of problem 46."""
    keys = ("import_torch_ms", "import_ms", "first_call_ms", "second_call_ms")
    rows = [(start_name(s), *(number(s[key], ".2f") for key in keys), str(s["processes"])) for s in starts]
    headers = ("ms", "import torch", "import on top", "first call", "second call", "processes")
    return Table("Cold start in fresh processes, problem 46, medians (CUDA initialised before the second import)", headers, tuple(rows))


def graph_table(graphs: Sequence[Row]) -> Table:
    """CUDA-graph replays beside their launches."""

    def cells(row: Row) -> tuple[str, ...]:
        figures = row["replay_us"], row["launches_us"], row["replay_us"] - row["launches_us"]
        return (f"{input_name(row)}, {row['plan']}", str(row["launches"]), *(number(us, ".2f") for us in figures))

    headers = ("us, medians", "launches", "graph of a call", "launches alone, sum", "difference")
    return Table("A call as a CUDA graph, less the time between two events with nothing between", headers, tuple(map(cells, graphs)))


def other_tables(result: Mapping[str, Any]) -> list[Table]:
    """Launches, graphs, host time and cold start: those that were measured."""
    plans: dict[tuple[str, str], list[Row]] = {}
    for stage in result["stages"]:
        plans.setdefault((input_name(stage), stage["plan"]), []).append(stage)
    tables = [stage_table(s) for s in plans.values()]
    parts = (("graphs", graph_table), ("host", host_table), ("cold_start", start_table))
    return tables + [table(result[name]) for name, table in parts if result[name]]


def limits_line(limits: Mapping[str, float]) -> str:
    """The limits in words."""
    return (
        f"Limits in the same process: device-to-device copy {limits['copy_gbps']:.0f} GB/s (bytes read + written), "
        f"8192 x 8192 x 8192 matmul fp16 {limits['fp16_tflops']:.0f} TFLOP/s, TF32 {limits['tf32_tflops']:.0f} TFLOP/s."
    )


def environment_line(environment: Mapping[str, Any]) -> str:
    """Where and how it was measured, in words."""
    e = environment
    return (
        f"{machine_line(e)}, {e['date']}, {commit_name(e)}, `{e['command']}`, {e['trials']} trials, {e['idle_ms']:g} ms idle before each."
    )


def machine_line(environment: Mapping[str, Any]) -> str:
    """GPU, driver and versions, in words."""
    e = environment
    return f"{e['gpu']}, driver {e['driver'] or 'unknown'}, PyTorch {e['torch']} (CUDA {e['cuda']}), Python {e['python']}"


def commit_name(environment: Mapping[str, Any]) -> str:
    """The commit, in words."""
    e = environment
    if not e["commit"]:
        return f"cutlass_ops {e['version']}" if "version" in e else "commit unknown"
    return f"commit {e['commit'][:12]}{' with changes' if e['dirty'] else ''}"
