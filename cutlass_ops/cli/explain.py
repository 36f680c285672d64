"""`cutlass-ops explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import click
import torch

from ..catalogue import HOPPER, find_operator, hopper, plan_call, present_gpu
from ..codegen.cli import kernels_folder, load_specs
from ..ops import Operator
from ..selection import describe
from . import Failure
from .output import show_json


def _numbers(*counts: int) -> Callable[[str], tuple[int, ...]]:
    """Reads whole numbers with commas between them, so many of them."""

    def read(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(map(int, text.split(",")))
        except ValueError:
            numbers = ()
        if len(numbers) not in counts:
            raise click.BadParameter(f"expected {' or '.join(map(str, counts))} whole numbers with commas between them, got {text!r}")
        return numbers

    return read


_SHAPE, _PAIR = _numbers(4), _numbers(1, 2)


@click.command(short_help="Show which plan a call takes, and why.")
@click.argument("operator")
@click.option("--shape", type=_SHAPE, metavar="N,C,H,W", required=True, help="Shape of x.")
@click.option("--weight", type=_SHAPE, metavar="K,C,R,S", required=True, help="Shape of the filters.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--layout", type=click.Choice(["nchw", "channels_last"]), default="nchw", show_default=True, help="Of x and weight.")
@click.option("--stride", type=_PAIR, metavar="S[,S]", help="Of the convolution; so --padding and --dilation.")
@click.option("--padding", type=_PAIR, metavar="P[,P]")
@click.option("--dilation", type=_PAIR, metavar="D[,D]")
@click.option("--pool", type=_PAIR, metavar="K[,K]", help="Size of the pool, for operators that have one; so the options below.")
@click.option("--pool-stride", type=_PAIR, metavar="S[,S]")
@click.option("--pool-padding", type=_PAIR, metavar="P[,P]")
@click.option("--pool-dilation", type=_PAIR, metavar="D[,D]", help="Max pools only.")
@click.option("--ceil-mode/--floor-mode", default=None, help="How the pool rounds its size.")
@click.option("--count-include-pad/--no-count-include-pad", default=None, help="Average pools only.")
@click.option("--divisor-override", type=int, metavar="N", help="Average pools only.")
@click.option("--precision", type=click.Choice(["tf32", "ieee"]), help="Of float32 tensors (default: as PyTorch's settings say).")
@click.option("--device", metavar="GPU", help=f"Plan for this GPU ({', '.join(HOPPER)}; default: the one that is here, else an H200).")
@click.option("--spec", type=click.Path(path_type=Path), metavar="FILE", help="A Python file with your own specs.")
@click.option("--kernels", type=click.Path(path_type=Path), metavar="DIR", help="Beside --spec: the folder they were built into.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    operator: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    dtype: str,
    layout: str,
    device: Optional[str],
    spec: Optional[Path],
    kernels: Optional[Path],
    as_json: bool,
    **arguments: Any,
) -> None:
    """Show which plan a call of OPERATOR takes, its kernels and its expected time, and the reason against each other plan.

    Needs no GPU: it plans for any Hopper GPU. Exit code 1: no plan serves the call, or it cannot be computed at all.

    \b
    Examples:
      cutlass-ops explain conv2d --shape 128,64,128,128 --weight 128,64,3,3
      cutlass-ops explain conv2d_sub_tanh_sub_avgpool --shape 8,64,56,56 --weight 128,64,3,3 --padding 1 --pool 2
      cutlass-ops explain conv2d --shape 8,64,56,56 --weight 128,64,1,1 --dtype float16 --layout channels_last --device "NVIDIA H100"
      cutlass-ops explain my_op --spec my_ops.py --shape 8,64,56,56 --weight 128,64,3,3 --json
    """
    if kernels is not None and spec is None:
        raise click.UsageError("expected --spec beside --kernels: which operators the folder holds")
    op = find_operator(operator, _own(spec, kernels) if spec else None)
    here = present_gpu()
    gpu = hopper(device) if device is not None else here or hopper("NVIDIA H200")
    given = {name: _unwrapped(value) for name, value in arguments.items() if value is not None}
    try:
        problem, selection = plan_call(op, gpu, shape, weight, getattr(torch, dtype), channels_last=layout == "channels_last", **given)
    except (TypeError, ValueError) as error:
        raise Failure(str(error)) from error
    if here is None and device is None:
        click.echo(f"no GPU here: this is the plan on an {gpu.name}; --device names another", err=True)
    if as_json:
        plan = dataclasses.asdict(selection.plan) if selection.plan else None
        others = [dataclasses.asdict(plan) for plan in selection.others]
        rejected = [dataclasses.asdict(r) for r in selection.rejected]
        facts = dataclasses.asdict(problem) | {"output_shape": problem.output_shape}
        show_json({"device": dataclasses.asdict(gpu), "problem": facts, "plan": plan, "others": others, "rejected": rejected})
    else:
        click.echo(describe(problem, selection, gpu))
    click.get_current_context().exit(0 if selection.plan else 1)


def _own(spec: Path, kernels: Optional[Path]) -> dict[str, Operator]:
    return {s.name: Operator(s, kernels or kernels_folder(spec)) for s in load_specs(spec)}


def _unwrapped(value: Any) -> Any:
    """One number for a pair that was given as one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
