"""`cutlass-ops bench`."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any, Optional

import click
import torch

from .. import __version__
from ..benchmark import measure, tables
from ..benchmark.calls import call_subject, compare_call
from ..benchmark.cases import COMPILE_DEFAULT, MAX_AUTOTUNE
from ..benchmark.cli import IDLE_MS, MAX_IDLE_MS
from ..benchmark.report import SCHEMA, dumps, write_aside
from ..benchmark.run import require_gpu
from ..catalogue import plan_call
from ..environment import environment
from ..loader import device_facts
from . import Failure
from .call import Call, call_options
from .output import progress

_FORMATS = (".svg", ".png", ".pdf")
_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def _out(_: click.Context, option: click.Parameter, path: Optional[Path]) -> Optional[Path]:
    """A file that can be written later: nobody waits for a measurement that has nowhere to go."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"expected a file in a folder that exists, got {path}", param=option)
    if path is not None and option.name == "plot" and path.suffix not in _FORMATS:
        raise click.BadParameter(f"expected a name that ends in {', '.join(_FORMATS)}, got {path}", param=option)
    return path


def _idle(_: click.Context, option: click.Parameter, value: float) -> float:
    """A time: the range lets NaN through."""
    if math.isnan(value):
        raise click.BadParameter(f"expected milliseconds from 0 to {MAX_IDLE_MS:g}, got {value}", param=option)
    return value


@click.command(short_help="Time an operator against eager PyTorch and torch.compile.")
@call_options
@click.option("--max-autotune", is_flag=True, help="Also torch.compile with mode max-autotune-no-cudagraphs (takes a minute).")
@click.option("--trials", type=click.IntRange(1), default=100, show_default=True, help="Timed calls of each.")
@click.option(
    "--idle-ms",
    type=click.FloatRange(0, MAX_IDLE_MS),
    callback=_idle,
    default=IDLE_MS,
    show_default=True,
    help="Without work before each call.",
)
@click.option("--json", "json_file", type=_FILE, callback=_out, metavar="FILE", help="Write all figures as JSON.")
@click.option("--plot", type=_FILE, callback=_out, metavar="FILE", help=f"Draw the times ({', '.join(_FORMATS)}).")
def command(call: Call, max_autotune: bool, trials: int, idle_ms: float, json_file: Optional[Path], plot: Optional[Path]) -> None:
    """Time a call of OPERATOR by every plan that serves it, beside PyTorch's eager mode and torch.compile. Needs a Hopper GPU.

    Each result is first checked against float64; a wrong one is not timed. Competitors take turns in one process, L2 flushed
    before each call, as docs/performance.md describes. PyTorch computes the operator's chain as it is written, all vectors
    given. Exit code 1: no Hopper GPU, no plan, or a result of ours that is wrong.

    \b
    Examples:
      cutlass-ops bench conv2d_sub_tanh_sub_avgpool --shape 128,64,128,128 --weight 128,64,3,3
      cutlass-ops bench conv2d --shape 32,64,56,56 --weight 64,64,3,3 --padding 1 --dtype float16 --layout channels_last
      cutlass-ops bench conv2d --shape 1,64,56,56 --weight 64,64,1,1 --json times.json --plot times.svg
      cutlass-ops bench my_op --spec my_ops.py --shape 8,64,56,56 --weight 128,64,3,3
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise Failure("expected the package matplotlib for --plot, found none; pip install 'cutlass_ops[bench]'")
    if call.dtype is torch.float64:
        raise click.BadParameter("expected float32, float16 or bfloat16: no kernel computes float64", param_hint="--dtype")
    require_gpu("cutlass-ops explain says, without a GPU, which plan a call takes")
    result = _measured(call, [COMPILE_DEFAULT] + [MAX_AUTOTUNE] * max_autotune, trials, idle_ms)
    if result["rows"]:
        click.echo(tables.plain(tables.short_table(result["rows"])))
    click.echo(tables.environment_line(result["environment"]))
    for text in result["not_run"]:
        click.echo(f"not timed: {text}", err=True)
    if json_file is not None:
        write_aside(json_file, dumps(result))
    if plot is not None and result["rows"]:
        _draw(result, plot)
    if result["refused"]:
        raise Failure("refused to time " + "; ".join(result["refused"]))


def _measured(call: Call, modes: list[str], trials: int, idle_ms: float) -> dict[str, Any]:
    """The record of a comparison, as docs/performance.json has it."""
    gpu = device_facts(torch.cuda.current_device())
    form: dict[str, Any] = {"dtype": call.dtype, "channels_last": call.channels_last}
    with progress("checking the call") as step:
        try:
            plan_call(call.operator, gpu, call.shape, call.weight, **form, **call.arguments)
            if 0 in (*call.shape, *call.weight):
                raise ValueError(f"expected sizes of at least 1, got x {call.shape} and weight {call.weight}")
            subject = call_subject(call.operator, call.shape, call.weight, **form, device="cuda", arguments=call.arguments)
        except (TypeError, ValueError) as error:
            raise Failure(str(error)) from error
        step("measuring the GPU's limits", 1, 3)
        limits = measure.limits(idle_ms)
        step("compiling, checking and timing", 2, 3)
        found = compare_call(subject, modes, limits, trials, idle_ms)
        step("done", 3, 3)
    how = {"command": _command_line(subject.facts, call, len(modes) > 1), "trials": trials, "idle_ms": idle_ms}
    where = environment(Path.cwd()) | {"commit": None, "dirty": None, "version": __version__} | how
    lists = {"rows": found.rows, "not_run": found.not_run, "refused": found.refused}
    return {"schema": SCHEMA, "environment": where, "limits": limits} | lists


def _command_line(facts: dict[str, Any], call: Call, max_autotune: bool) -> str:
    """The command as the record has it: what decides the figures, not where they go."""
    words = ["cutlass-ops", "bench", facts["case"]]
    options = {"shape": call.shape, "weight": call.weight, "dtype": facts["dtype"], "layout": facts["layout"].replace("contiguous", "nchw")}
    for name, value in {**options, **call.arguments}.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append({"ceil_mode": "--ceil-mode" if value else "--floor-mode"}.get(name, option if value else f"--no-{option[2:]}"))
        else:
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return " ".join([*words, *["--max-autotune"] * max_autotune])


def _draw(result: dict[str, Any], path: Path) -> None:
    from ..benchmark import plot_style, plots  # here: matplotlib is for --plot alone

    with plot_style.style():
        figure = plots.time_figure(result["rows"], result["environment"])
    plot_style.save(figure, path)
