"""`cutlass-ops build`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from ..codegen.cli import build_kernels
from .output import progress
from .own import own_source


@click.command(short_help="Build kernels from specs.")
@own_source
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the results (default: the project's kernels/).")
@click.option("--nvcc", metavar="PATH", help="Another nvcc 13.0 than the one from PyPI.")
@click.option("--jobs", type=click.IntRange(min=0), default=0, metavar="N", help="Compilations at a time (default: one a core).")
@click.option("--check", is_flag=True, help="Change nothing; build all elsewhere and fail where anything differs.")
def command(source: Optional[Path], out: Optional[Path], nvcc: Optional[str], jobs: int, check: bool) -> None:
    """Build kernels ahead of time: specs to CUDA sources, cubins and a manifest. Needs the extra `build`, but no GPU.

    SOURCE is a project folder (cutlass-ops new) or a Python file with your own specs; without one, the shipped operators are
    built, in a checkout.

    Only what changed is built; a build that is interrupted goes on where it was. Exit code 1: an error, or with --check a
    difference.

    \b
    Examples:
      cutlass-ops build my_ops
      cutlass-ops build my_ops.py --out kernels --jobs 4
      cutlass-ops build --check
    """
    with progress("nvcc") as step:
        fine = build_kernels(source, out, nvcc=nvcc, jobs=jobs, check=check, progress=step)
    click.get_current_context().exit(0 if fine else 1)
