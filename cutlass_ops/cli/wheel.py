"""`cutlass-ops wheel`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Optional

import click

from ..project import locate, wheel


@click.command(short_help="Pack an operator of your own and its verified kernels into a wheel.")
@click.argument("project", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the wheel (default: dist/ in the project).")
@click.option("--allow-unverified", is_flag=True, help="Also pack kernels without a record of a passed GPU check.")
def command(project: Path, out: Optional[Path], allow_unverified: bool) -> None:
    """Pack a PROJECT folder that `cutlass-ops new` made, with its kernels, into a wheel. Needs the extra `build`, but no GPU.

    Kernels that are missing, damaged, older than the specs, or without a record of a passed GPU check (`cutlass-ops check`) are
    refused. Those that --allow-unverified lets through are used only where CUTLASS_OPS_ALLOW_UNVERIFIED=1 is set. The same project
    gives the same bytes each time. One wheel serves x86-64 and Arm hosts.

    \b
    Examples:
      cutlass-ops wheel my_ops
      cutlass-ops wheel my_ops --out dist --allow-unverified
    """
    built = wheel.build(locate(project), out or project / "dist", allow_unverified=allow_unverified)
    if built.unverified:
        names = wheel.some(built.unverified)
        click.echo(f"warning: {names} have no record of a passed GPU check: used only where CUTLASS_OPS_ALLOW_UNVERIFIED=1", err=True)
    data = built.path.read_bytes()
    click.echo(f"{built.path}\n{len(data)} bytes, operators: {', '.join(built.operators)}\nsha256 {hashlib.sha256(data).hexdigest()}")
