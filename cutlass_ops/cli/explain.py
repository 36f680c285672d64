"""`cutlass-ops explain`."""

from __future__ import annotations

import dataclasses
from typing import Optional

import click

from ..catalogue import HOPPER, hopper, plan_call, present_gpu
from ..selection import describe
from . import Failure
from .call import Call, call_options
from .output import show_json


@click.command(short_help="Show which plan a call takes, and why.")
@call_options
@click.option("--device", metavar="GPU", help=f"Plan for this GPU ({', '.join(HOPPER)}; default: the one that is here, else an H200).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(call: Call, device: Optional[str], as_json: bool) -> None:
    """Show which plan a call of OPERATOR takes, its kernels and its expected time, and the reason against each other plan.

    Needs no GPU: it plans for any Hopper GPU. Exit code 1: no plan serves the call, or it cannot be computed at all.

    \b
    Examples:
      cutlass-ops explain conv2d --shape 128,64,128,128 --weight 128,64,3,3
      cutlass-ops explain conv2d_sub_tanh_sub_avgpool --shape 8,64,56,56 --weight 128,64,3,3 --padding 1 --pool 2
      cutlass-ops explain conv2d --shape 8,64,56,56 --weight 128,64,1,1 --dtype float16 --layout channels_last --device "NVIDIA H100"
      cutlass-ops explain my_op --spec my_ops.py --shape 8,64,56,56 --weight 128,64,3,3 --json
    """
    here = present_gpu()
    gpu = hopper(device) if device is not None else here or hopper("NVIDIA H200")
    try:
        problem, selection = plan_call(
            call.operator, gpu, call.shape, call.weight, call.dtype, channels_last=call.channels_last, **call.arguments
        )
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
