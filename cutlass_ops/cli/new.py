"""`cutlass-ops new`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from ..project import starter


@click.command(short_help="Start a package with an operator of your own.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--operator", metavar="NAME", help="Name of its operator (default: conv2d_ and the folder's name).")
def command(folder: Path, operator: Optional[str]) -> None:
    """Write a project for operators of your own into a new FOLDER, whose name becomes the package's. Needs no GPU and no compiler.

    The project holds one operator (specs.py), a test of it, and a pyproject.toml that makes it a wheel.

    \b
    Examples:
      cutlass-ops new my_ops
      cutlass-ops new my_ops --operator conv2d_scale_relu_maxpool
    """
    made = starter.create(folder, operator)
    for path in sorted(p for p in made.rglob("*") if p.is_file()):
        click.echo(folder / path.relative_to(made))
    click.echo(f"Say what it computes in {folder / made.name / 'specs.py'}, then: cutlass-ops build {folder}")
