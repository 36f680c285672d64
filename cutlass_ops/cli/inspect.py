"""`cutlass-ops inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Optional

import click

from ..codegen.artifact import Artifact
from ..codegen.inspection import MIX, Comparison, Kernel, compare, disassembler, kernels, to_json
from .output import progress, show, show_json

_RESOURCES = ("registers", "local memory", "static shared", "dynamic shared", "threads", "barriers", "instructions")


@click.command(short_help="Show what compiled kernels consist of.")
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the count of every opcode.")
def command(path: Path, other: Optional[Path], as_json: bool) -> None:
    """Show the instructions, resources and origin of each kernel in PATH: a cubin, a wheel or a folder. With OTHER: what differs there.

    \b
    registers, local memory (bytes): of a thread. Local memory other than 0 means spills.
    static, dynamic shared memory (bytes), barriers: of a block. What cubins do not say (dynamic, threads) is the manifest's.
    wgmma ... BAR: instructions in the SASS, not how often they run. "local" loads and stores local memory; SYNCS is an mbarrier.
    verified: on which GPU and when exactly these bytes passed the GPU check.

    Needs cuobjdump and nvdisasm, which the extra `build` brings, and no GPU. Exit code 0 also where builds differ.

    \b
    Examples:
      cutlass-ops inspect generated/cubins/conv2d_f16.cubin
      cutlass-ops inspect dist/cutlass_ops-0.1.0-py3-none-any.whl --json
      cutlass-ops inspect old.whl new.whl
    """
    tool, artifact = disassembler(), Artifact.read(path)
    if other is None:
        with progress("cuobjdump") as step:
            found = kernels(artifact, tool, step=step)
        if as_json:
            show_json(_origin(artifact) | {"kernels": [to_json(kernel) for kernel in found]})
        else:
            _show(artifact, found)
        return
    after = Artifact.read(other)
    with progress("cuobjdump") as step:
        comparison = compare(artifact, after, tool, step=step)
    if as_json:
        show_json({"before": _origin(artifact), "after": _origin(after)} | comparison.to_json())
    else:
        click.echo(f"before: {_headline(artifact)}\nafter:  {_headline(after)}")
        _show_comparison(comparison)


def _origin(artifact: Artifact) -> dict[str, Any]:
    counts = {"cubins": len(artifact.images), "verified_cubins": artifact.verified}
    return {"path": str(artifact.path), **counts, "provenance": artifact.provenance}


def _headline(artifact: Artifact) -> str:
    built = ", ".join(f"{name} {artifact.provenance[name]}" for name in ("nvcc", "cutlass", "architecture") if name in artifact.provenance)
    count = f"{len(artifact.images)} cubin{'' if len(artifact.images) == 1 else 's'}"
    return f"{artifact.path}: {count}, {artifact.verified} verified; {built or 'no manifest beside them'}"


def _row(kernel: Kernel, columns: Sequence[str]) -> list[object]:
    figures = kernel.figures
    return [kernel.name, *(figures.get(column, "-") for column in columns)]


def _verified(kernel: Kernel) -> str:
    if kernel.check is None:
        return "no"
    return f"{kernel.check.get('gpu', 'yes')} {str(kernel.check.get('date', ''))[:10]}".strip()


def _show(artifact: Artifact, found: Sequence[Kernel]) -> None:
    click.echo(_headline(artifact))
    show("Resources", ("kernel", *_RESOURCES), [_row(k, _RESOURCES) for k in found])
    show("Instructions", ("kernel", *MIX), [_row(k, [*MIX]) for k in found])
    origins = [(k.name, PurePosixPath(k.cubin).name, k.sha256, "yes" if k.record else "no", _verified(k)) for k in found]
    show("Origin", ("kernel", "cubin", "sha256", "in manifest", "verified"), origins)


def _show_comparison(found: Comparison) -> None:
    click.echo(
        f"{found.equal_cubins} cubins equal; of the kernels in others: {len(found.added)} added, {len(found.removed)} removed, "
        f"{len(found.changed)} changed, {len(found.same)} the same"
    )
    columns = (*_RESOURCES, *MIX)
    for title, listed in (("Added", found.added), ("Removed", found.removed)):
        if listed:
            show(title, ("kernel", *columns, "verified"), [[*_row(k, columns), _verified(k)] for k in listed])
    if found.changed:
        rows = [row for before, after in found.changed for row in _changes(before, after)]
        show("Changed", ("kernel", "figure", "before", "after", "difference"), rows)


def _changes(before: Kernel, after: Kernel) -> list[tuple[object, ...]]:
    """A row for each figure that differs, and one for GPU checks that do; where none does, instructions differ in order or operands."""
    differences = before.differences(after).items()
    rows: list[tuple[object, ...]] = [(before.name, column, old, new, f"{new - old:+d}") for column, (old, new) in differences]
    rows = rows or [(before.name, "order or operands", "-", "-", "-")]
    if _verified(before) != _verified(after):
        rows.append((before.name, "verified", _verified(before), _verified(after), "-"))
    return rows
