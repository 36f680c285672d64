"""`cutlass-ops doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import click

from .. import doctor


@click.command(short_help="Check the installation.")
@click.option("--kernels", type=click.Path(path_type=Path), metavar="DIR", help="Look at this folder of kernels, not the operators'.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(kernels: Optional[Path], as_json: bool) -> None:
    """Check Python, PyTorch, driver, GPUs, the integrity of every cubin and the records of its GPU check; say what a call takes.

    Works on any machine, also without GPU, driver or intact installation. Lines begin with ok, note (nothing that calls need) or
    FAIL; what would have to change follows.

    Exit code 0: usable, calls with tensors on this machine's GPU use the kernels. 1: not usable; a machine without a Hopper GPU,
    where operators compute with PyTorch's own on CPU tensors, counts as that.

    \b
    Examples:
      cutlass-ops doctor
      cutlass-ops doctor --json
      cutlass-ops doctor --kernels my_ops_kernels
    """
    click.get_current_context().exit(doctor.main(as_json=as_json, kernels=kernels))
