"""`cutlass-ops new`: a starter project for operators of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from ..errors import CutlassOpsError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--operator", metavar="NAME", help="Name of its operator (default: conv2d_ and the folder's name).")
def command(folder: Path, operator: Optional[str]) -> None:
    """Write a starter project for operators of your own into a new FOLDER, whose name becomes the package's.

    It needs no GPU and no compiler. The project holds one operator (specs.py), a test, and a pyproject.toml that makes it a wheel.

    \b
    Example:
      cutlass-ops new my_ops --operator conv2d_scale_relu_maxpool
      cutlass-ops build my_ops
      cutlass-ops check my_ops
      cutlass-ops wheel my_ops
    """
    from ..project import starter

    try:
        made = starter.create(folder, operator)
    except CutlassOpsError as error:
        raise click.ClickException(str(error)) from error
    for path in sorted(p for p in made.rglob("*") if p.is_file()):
        click.echo(folder / path.relative_to(made))
    click.echo(f"Declare what it computes in {folder / made.name / 'specs.py'}, then: cutlass-ops build {folder}")
