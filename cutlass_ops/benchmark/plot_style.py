"""How plots look, and how they become files: legible on white and on black, the same bytes from the same figures."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .rows import Row
from .tables import commit_name, machine_line

#: Contrast of at least 3 : 1 with white and with #0d1117, of text at least 4 : 1.
INK, OURS, OTHERS, COMPILED, EAGER = "#7a7d85", "#2f81f7", "#8a63d2", "#cf6a1c", "#868a91"
SUFFIXES = (".svg", ".png")
DPI = 144
_METADATA: dict[str, Any] = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}

_STYLE: Any = {
    "svg.hashsalt": "cutlass_ops",  # else the ids in an SVG are random
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that any machine draws the same
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "savefig.transparent": True,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK),
}


def colour(row: Row) -> str:
    """Of a competitor: ours (the plan that a call takes, the others), torch.compile, eager."""
    if row.get("plan"):
        return OURS if row.get("default_plan") else OTHERS
    what = str(row["what"])
    return COMPILED if what.startswith("torch.compile") else OURS if what == "cutlass_ops" else EAGER


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Within the block figures are made and saved by matplotlib's own defaults and ours, whatever the user's settings are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(title: str, environments: Sequence[Mapping[str, Any]], height: float) -> tuple[Figure, Axes]:
    """A figure of 8 inches with one pair of axes, its title, and below where each of its measurements is from."""
    footer = "\n".join(map(provenance, environments))
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(footer, fontsize=6.5, x=0.01, ha="left", color=INK)
    return figure, axes


def provenance(environment: Mapping[str, Any]) -> str:
    """GPU, driver, versions, date and command, in lines that fit a figure."""
    e = environment
    idle = f", {e['idle_ms']:g} ms idle before each" if "idle_ms" in e else ""
    when = f"{e['date']}, {commit_name(e)}, {e['command']}, {e['trials']} trials{idle}"
    return "\n".join([machine_line(e), *textwrap.wrap(when, 130, break_on_hyphens=False)])


def bars(axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], texts: Sequence[str]) -> None:
    """Horizontal bars, the first at the top, each with its text at the end."""
    drawn = axes.barh(range(len(names)), values, color=colours, height=0.68)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.bar_label(drawn, texts, padding=4, color=INK)
    axes.margins(x=0.16, y=0.02)
    axes.grid(axis="x")


def encoded(figure: Figure, suffix: str) -> bytes:
    """A figure as a file's bytes, without date and without matplotlib's version."""
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix[1:], dpi=DPI, metadata=_METADATA.get(suffix, {}))
    return stream.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix (.svg, .png, .pdf)."""
    with style():
        path.write_bytes(encoded(figure, path.suffix))
