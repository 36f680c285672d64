"""`cutlass-ops list`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional, Union

import click

from ..catalogue import Folder, available, find_operator, summary
from ..errors import InstallationError
from ..manifest import KernelRecord
from .output import show, show_json

#: Operand type of the tensor cores -> tensors that it serves.
_TENSORS = {"f32": "f32", "tf32": "f32", "f16": "f16", "bf16": "bf16"}


@click.command(short_help="Show operators and kernels.")
@click.argument("names", metavar="[OPERATOR]...", nargs=-1)
@click.option("--kernels", type=click.Path(path_type=Path), metavar="DIR", help="Those of this folder of kernels alone.")
@click.option("--all", "every", is_flag=True, help="Show the kernels of all operators, and those that operators share.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: every operator and kernel, with all fields.")
def command(names: tuple[str, ...], kernels: Optional[Path], every: bool, as_json: bool) -> None:
    """Show the operators; of each OPERATOR named, its kernels.

    Types are those of the tensors' elements; of a kernel: of the tensor cores' operands (implicit_gemm); of x, with layout, filter,
    alignment and pool (fused); from and to (convert, pack); kind and type (pool). A tile is pixels x output channels x input
    channels. Shared memory is dynamic, in bytes. "verified" says on which GPU and when a kernel's exact bytes passed the GPU
    check; kernels that did not are not used.

    Exit code 1: operators or kernels of a package cannot be read; the others are shown.

    \b
    Examples:
      cutlass-ops list
      cutlass-ops list conv2d
      cutlass-ops list --all | grep nhwc
      cutlass-ops list --kernels my_ops_kernels --json
    """
    folders, errors = _folders(kernels, names)
    known = {record.operator for folder in folders for record in folder.records}
    for name in names:
        if name not in known:
            find_operator(name)  # raises, with what the name may have meant
            raise click.UsageError(f"expected kernels of {name} in {', '.join(str(f.path) for f in folders)}, found none")
    _show(folders, names, every=every, as_json=as_json)
    if not (names or every or as_json or errors):
        click.echo("cutlass-ops list OPERATOR shows an operator's kernels", err=True)
    for error in errors:
        click.echo(f"error: {error}", err=True)
    click.get_current_context().exit(1 if errors else 0)


def _show(folders: Sequence[Folder], names: Sequence[str], *, every: bool, as_json: bool) -> None:
    if as_json:
        show_json({"folders": [_json(folder, names) for folder in folders]})
        return
    for folder in folders:
        if names or every:
            _show_kernels(folder, names)
        else:
            _show_operators(folder)


def _folders(kernels: Optional[Path], names: Sequence[str]) -> tuple[list[Folder], list[InstallationError]]:
    """The folder given, else those of the operators named, else those of all operators: what can be read of them, and why not more."""
    if kernels is not None or names:
        paths = [kernels] if kernels is not None else [find_operator(name).kernels for name in names]
        return [Folder.read(path) for path in dict.fromkeys(paths)], []
    known, errors = available()
    read = [_read(path) for path in dict.fromkeys(op.kernels for op in known.values())]
    return [f for f in read if isinstance(f, Folder)], errors + [e for e in read if isinstance(e, InstallationError)]


def _read(path: Path) -> Union[Folder, InstallationError]:
    try:
        return Folder.read(path)
    except InstallationError as error:
        return error


def _wanted(folder: Folder, names: Sequence[str]) -> list[KernelRecord]:
    return [r for r in folder.records if not names or r.operator in names]


def _operators(folder: Folder, names: Sequence[str] = ()) -> Iterable[tuple[str, list[KernelRecord]]]:
    """Operators of a folder with the records of their kernels."""
    found = sorted({r.operator for r in _wanted(folder, names)} - {""})
    return [(name, [r for r in folder.records if r.operator == name]) for name in found]


def _tensors(records: Sequence[KernelRecord]) -> list[str]:
    served = {_TENSORS.get(r.variant[0]) for r in records if r.variant}  # a later family may have others
    return [name for name in dict.fromkeys(_TENSORS.values()) if name in served]


def _doc(name: str) -> str:
    op = available()[0].get(name)
    return op.spec.doc.partition("\n")[0] if op else ""


def _show_operators(folder: Folder) -> None:
    rows = [(name, " ".join(_tensors(records)), len(records), folder.verified(records), _doc(name)) for name, records in _operators(folder)]
    show(f"Operators of {folder.path}", ("operator", "types", "kernels", "verified", "computes"), rows)


def _show_kernels(folder: Folder, names: Sequence[str]) -> None:
    headers = ("kernel", "family", "types", "tile", "threads", "registers", "shared memory", "verified")
    rows = [
        (r.name, r.family, " ".join(r.variant), "x".join(map(str, r.tile)), r.threads, r.registers, r.shared_memory, folder.verified([r]))
        for r in _wanted(folder, names)
    ]
    show(f"Kernels of {folder.path}", headers, rows)


def _json(folder: Folder, names: Sequence[str]) -> dict[str, Any]:
    return {
        "path": str(folder.path),
        "provenance": folder.kernels.manifest.provenance,
        "operators": [
            {"name": name, "types": _tensors(records), "kernels": [r.name for r in records], "doc": _doc(name)}
            for name, records in _operators(folder, names)
        ],
        "kernels": [dataclasses.asdict(r) | {"verified": summary(folder.check(r))} for r in _wanted(folder, names)],
    }
