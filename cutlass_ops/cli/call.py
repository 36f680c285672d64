"""How commands take a call: operator, shapes, dtype, layout, and what follows the tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import click
import torch

from ..catalogue import find_operator
from ..codegen.cli import kernels_folder, load_specs
from ..ops import Operator
from . import Failure


@dataclass(frozen=True)
class Call:
    """A call without its tensors. `arguments` are those after them that were given."""

    operator: Operator
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    arguments: dict[str, Any]


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
_DTYPES = ["float32", "float16", "bfloat16", "float64"]
_OPTIONS = (
    click.argument("operator"),
    click.option("--shape", type=_SHAPE, metavar="N,C,H,W", required=True, help="Shape of x."),
    click.option("--weight", type=_SHAPE, metavar="K,C,R,S", required=True, help="Shape of the filters."),
    click.option("--dtype", type=click.Choice(_DTYPES), default="float32", show_default=True),
    click.option("--layout", type=click.Choice(["nchw", "channels_last"]), default="nchw", show_default=True, help="Of x and weight."),
    click.option("--spec", type=click.Path(path_type=Path), metavar="FILE", help="A Python file with your own specs."),
    click.option("--kernels", type=click.Path(path_type=Path), metavar="DIR", help="Beside --spec: the folder they were built into."),
)
_ARGUMENTS = {
    "stride": click.option("--stride", type=_PAIR, metavar="S[,S]", help="Of the convolution; so --padding and --dilation."),
    "padding": click.option("--padding", type=_PAIR, metavar="P[,P]"),
    "dilation": click.option("--dilation", type=_PAIR, metavar="D[,D]"),
    "pool": click.option(
        "--pool", type=_PAIR, metavar="K[,K]", help="Size of the pool, for operators that have one; so the options below."
    ),
    "pool_stride": click.option("--pool-stride", type=_PAIR, metavar="S[,S]"),
    "pool_padding": click.option("--pool-padding", type=_PAIR, metavar="P[,P]"),
    "pool_dilation": click.option("--pool-dilation", type=_PAIR, metavar="D[,D]", help="Max pools only."),
    "ceil_mode": click.option("--ceil-mode/--floor-mode", default=None, help="How the pool rounds its size."),
    "count_include_pad": click.option("--count-include-pad/--no-count-include-pad", default=None, help="Average pools only."),
    "divisor_override": click.option("--divisor-override", type=int, metavar="N", help="Average pools only."),
    "precision": click.option(
        "--precision", type=click.Choice(["tf32", "ieee"]), help="Of float32 tensors (default: as PyTorch's settings say)."
    ),
}


def call_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a call, which it gets as its parameter `call`."""

    @functools.wraps(command)
    def wrapped(
        operator: str,
        shape: tuple[int, ...],
        weight: tuple[int, ...],
        dtype: str,
        layout: str,
        spec: Optional[Path],
        kernels: Optional[Path],
        **others: Any,
    ) -> None:
        if kernels is not None and spec is None:
            raise click.UsageError("expected --spec beside --kernels: which operators the folder holds")
        arguments = {name: _unwrapped(value) for name in _ARGUMENTS if (value := others.pop(name)) is not None}
        op = find_operator(operator, _own(spec, kernels) if spec else None)
        command(call=Call(op, shape, weight, getattr(torch, dtype), layout == "channels_last", arguments), **others)

    decorated: Callable[..., None] = wrapped
    for option in reversed([*_OPTIONS[:-2], *_ARGUMENTS.values(), *_OPTIONS[-2:]]):
        decorated = option(decorated)
    return decorated


def _own(spec: Path, kernels: Optional[Path]) -> dict[str, Operator]:
    try:
        return {s.name: Operator(s, kernels or kernels_folder(spec)) for s in load_specs(spec)}
    except ValueError as error:  # a name that is registered already
        raise Failure(str(error)) from error


def _unwrapped(value: Any) -> Any:
    """One number for a pair that was given as one."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
