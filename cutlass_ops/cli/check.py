"""`cutlass-ops check`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from .. import verification
from . import Failure
from .own import own_source

NO_GPU = 2  # exit code, that of the scripts which need a GPU


@click.command(short_help="Check kernels on a Hopper GPU.")
@own_source
@click.option("--kernels", type=click.Path(path_type=Path), metavar="DIR", help="The folder that SOURCE was built into.")
@click.option("--skip-tests", is_flag=True, help="Print the accuracy table only; write nothing.")
@click.option("--commit", metavar="ID", help="Commit to record where there is no git checkout (ID-dirty: with changes).")
def command(source: Optional[Path], kernels: Optional[Path], skip_tests: bool, commit: Optional[str]) -> None:
    """Check kernels on a Hopper GPU: those of your own SOURCE, or in a checkout the shipped ones.

    SOURCE is a project folder (cutlass-ops new) or a Python file with your own specs. For the shipped ones it runs the GPU tests. It
    compares every operator and plan with float64, and writes which cubins passed into gpu_checks.json beside
    their manifest. Kernels without such a record are not used.

    Exit code 0: all passed. 1: something failed. 2: no Hopper GPU here, or wrong usage; nothing was written.

    \b
    Examples:
      cutlass-ops check
      cutlass-ops check my_ops
      cutlass-ops check my_ops.py --skip-tests
    """
    if kernels is not None and source is None:
        raise click.UsageError("expected SOURCE beside --kernels: which operators the folder holds")
    missing = verification.missing_gpu()
    if missing:
        click.echo(f"not checked: {missing}", err=True)
        click.get_current_context().exit(NO_GPU)
    try:
        passed = verification.check_kernels(source, kernels, tests=not skip_tests, commit=commit)
    except ValueError as error:  # of a spec
        raise Failure(str(error)) from error
    click.echo("all passed" if passed else "not passed")
    click.get_current_context().exit(0 if passed else 1)
