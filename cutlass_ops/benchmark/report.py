"""The documents: their regions filled from the record, and the plots beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..costs import PATH as COSTS
from .cases import BenchmarkError
from .rows import rounded

SCHEMA = 2


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
    """Write performance.md and plots/ into `out`, README.md's figures where `out` is the checkout's docs/; returns the documents.

    Raises BenchmarkError where a document lacks a region, before anything is written, and without matplotlib.
    """
    try:
        from . import plot_style, plots
    except ModuleNotFoundError as error:
        remedy = "pip install 'cutlass_ops[bench]', then scripts/bench.py --render"
        raise BenchmarkError(f"expected the package {error.name} for the plots, found none; {remedy}") from error
    from . import sections

    costs = json.loads(COSTS.read_text(encoding="utf-8"))
    drawn = plots.figures(result, costs)
    frame = out / "performance.md"
    source = frame if frame.exists() else root / "docs" / "performance.md"
    jobs = [(source, frame, sections.performance(result, costs, set(drawn)))]
    readme = root / "README.md"
    if out.resolve() == (root / "docs").resolve():
        jobs.append((readme, readme, {"figures": sections.figures(result)}))
    texts = {target: _filled(origin, regions) for origin, target, regions in jobs}
    folder = out / "plots"
    folder.mkdir(exist_ok=True)
    for plot in plots.PLOTS:
        for path in (folder / f"{plot.name}{suffix}" for suffix in plot_style.SUFFIXES):
            if plot.name in drawn:
                plot_style.save(drawn[plot.name], path)
            else:
                path.unlink(missing_ok=True)
    for target, text in texts.items():
        write_aside(target, text)
    return list(texts)


def _filled(document: Path, regions: Mapping[str, str]) -> str:
    """A document with its regions filled. Raises BenchmarkError where it cannot be read or lacks one."""
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchmarkError(f"expected {document} with the regions {', '.join(regions)}, could not read it ({error})") from error
    try:
        for name, body in regions.items():
            text = replace_region(text, name, body)
    except BenchmarkError as error:
        raise BenchmarkError(f"{document}: {error}") from None
    return text
