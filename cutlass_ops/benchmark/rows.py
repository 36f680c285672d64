"""Figures derived from measured ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

Row = dict[str, Any]


def input_name(row: Mapping[str, Any]) -> str:
    """The input of a row in words."""
    layout = "NCHW" if row["layout"] == "contiguous" else "channels_last"
    precision = ", TF32 forbidden" if row["precision"] == "ieee" else ""
    weight = f", weight {tuple(row['weight'])}," if "weight" in row else ""
    arguments = "".join(f", {name} {value}" for name, value in row.get("arguments", {}).items())
    return f"{row['case']}, x ({', '.join(map(str, row['shape']))}){weight} {row['dtype']} {layout}{arguments}{precision}"


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


def pick(rows: Iterable[Row], **facts: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in facts.items())]


def limit_ms(flops: float, moved: float, limits: Mapping[str, float]) -> float:
    """Least time that the GPU could take: bytes at copy bandwidth or FLOPs at the fp16 matmul rate, whichever is longer."""
    return max(moved / limits["copy_gbps"] / 1e6, flops / limits["fp16_tflops"] / 1e9)


def baseline(rows: Sequence[Row]) -> Optional[Row]:
    """The fastest torch.compile among a group's rows."""
    compiled = [r for r in rows if r["what"].startswith("torch.compile")]
    return min(compiled, key=lambda r: float(r["ms_mean"]), default=None)


def complete(rows: Sequence[Row], flops: int, moved: int, limits: Mapping[str, float]) -> list[Row]:
    """A group's rows with rates, ratios (how many times as fast as the other) and the fraction of the limit.

    Products of fp32 operands (precision ieee) have no measured limit.
    """
    compiled = baseline(rows)
    eager = next((r for r in rows if r["what"] == "eager"), None)

    def ratio(other: Optional[Row], row: Row) -> Optional[float]:
        return None if other is None else other["ms_mean"] / row["ms_mean"]

    return [
        row
        | {
            "tflops": flops / row["ms_mean"] / 1e9,
            "gbps": moved / row["ms_mean"] / 1e6,
            "ratio_compile": ratio(compiled, row),
            "ratio_compile_to": compiled and compiled["what"],
            "ratio_eager": ratio(eager, row),
            "fraction_of_limit": None if row["precision"] == "ieee" else limit_ms(flops, moved, limits) / row["ms_mean"],
        }
        for row in rows
    ]


def stage_figures(family: str, operand: str, ms: float, flops: int, moved: int, limits: Mapping[str, float]) -> Row:
    """Rate of a stage and its fraction of the limit that bounds it: the matmul rate of its operands or copy bandwidth."""
    bandwidth = moved / ms / 1e6
    if family in ("implicit_gemm", "fused"):
        rate = flops / ms / 1e9
        fraction = max(rate / limits[f"{'tf32' if operand == 'tf32' else 'fp16'}_tflops"], bandwidth / limits["copy_gbps"])
        return {"tflops": rate, "gbps": bandwidth, "fraction_of_limit": fraction}
    if not moved:  # packing of the filters: too small to have a rate
        return {"tflops": None, "gbps": None, "fraction_of_limit": None}
    return {"tflops": None, "gbps": bandwidth, "fraction_of_limit": bandwidth / limits["copy_gbps"]}


def rounded(value: Any) -> Any:
    """Numbers at 6 significant digits, through lists and dicts: more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value
