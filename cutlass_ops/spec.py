"""Specs: what an operator computes, declared as data.

    y = pool(chain(conv2d(x, weight), *vectors, *scalars))

A spec is written as the chain itself, an ordinary Python function, under the `operator` decorator:

    @operator(pool=AvgPool2d(2))
    def conv2d_sub_tanh_sub_avgpool(accum, bias: Vector = None, subtract1: float = 0.5, subtract2: float = 0.2):
        return tanh(accum + bias - subtract1) - subtract2

The function's name names the operator and its arguments are those that users see.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional

__all__ = ["AvgPool2d", "MaxPool2d", "Pool", "Spec", "Tile", "Vector", "operator"]

#: Characters of an operator's name: its kernels' files add some forty, and a file's name has at most 255.
LONGEST_NAME = 200


class Vector:
    """Annotation of a chain's argument that is a vector: in a call a tensor of K elements, one an output channel."""


@dataclass(frozen=True)
class Pool:
    """A pool after the chain, made by `AvgPool2d` or `MaxPool2d`.

    Attributes:
        kind: "avg" or "max".
        kernel_size: Height and width of the window in pixels, which calls use unless they give another.
    """

    kind: Literal["avg", "max"]
    kernel_size: int


def AvgPool2d(kernel_size: int) -> Pool:  # noqa: N802 (PyTorch's name)
    """Average pooling after a chain, as torch.nn.functional.avg_pool2d does it.

    Args:
        kernel_size: Height and width of the window in pixels, which calls use unless they give another.

    Returns:
        What `operator` takes as `pool`.
    """
    return Pool("avg", kernel_size)


def MaxPool2d(kernel_size: int) -> Pool:  # noqa: N802 (PyTorch's name)
    """Max pooling after a chain, as torch.nn.functional.max_pool2d does it.

    Args:
        kernel_size: Height and width of the window in pixels, which calls use unless they give another.

    Returns:
        What `operator` takes as `pool`.
    """
    return Pool("max", kernel_size)


@dataclass(frozen=True)
class Tile:
    """Shape of the implicit GEMM's tile in the two-kernel plans. A hint: any tile computes any problem.

    192 x 128 is the fastest measured at 128 output channels (docs/performance.md).

    Attributes:
        m: Output pixels, a multiple of 64 up to 256.
        n: Output channels, a multiple of 8 up to 256.
    """

    m: int = 192
    n: int = 128


@dataclass(frozen=True)
class Argument:
    """One argument of a chain.

    Attributes:
        name: As the chain and users have it.
        kind: "vector" or "scalar".
        default: A scalar's; None for a vector.
        optional: Whether a vector may be left out, and then is zero.
    """

    name: str
    kind: Literal["vector", "scalar"]
    default: Optional[float] = None
    optional: bool = False


@dataclass(frozen=True)
class Spec:
    """What an operator computes, declared by the `operator` decorator.

    Attributes:
        name: Of the operator: the chain function's.
        chain: The function itself, called as ``chain(accum, **arguments)``.
        arguments: Those of the chain after `accum`, in its order.
        pool: The pool after the chain, or None.
        tile: Of the two-kernel plans.
        doc: The chain function's docstring.
    """

    name: str
    chain: Callable[..., Any]
    arguments: tuple[Argument, ...]
    pool: Optional[Pool]
    tile: Tile
    doc: str

    @property
    def vectors(self) -> tuple[Argument, ...]:
        """Per-channel vectors, in the chain's order."""
        return tuple(a for a in self.arguments if a.kind == "vector")

    @property
    def scalars(self) -> tuple[Argument, ...]:
        """Scalars, in the chain's order."""
        return tuple(a for a in self.arguments if a.kind == "scalar")


#: Arguments that every operator has; a chain cannot use these names for its own.
RESERVED = frozenset(
    {"x", "weight", "stride", "padding", "dilation", "precision", "pool", "pool_stride", "pool_padding", "pool_dilation"}
    | {"ceil_mode", "count_include_pad", "divisor_override"}
)


def operator(*, pool: Optional[Pool] = None, tile: Tile = Tile()) -> Callable[[Callable[..., Any]], Spec]:
    """Decorator that turns a chain into a `Spec`.

    The chain is a Python function whose first argument is `accum`, the convolution's result. Its other arguments are annotated
    `Vector` (one value an output channel; default None: callers may leave it out), or have a number as default (a scalar). What
    it may compute with is in `cutlass_ops.chain`; that is checked when the kernels are built (`ChainError`).

    Args:
        pool: `AvgPool2d` or `MaxPool2d` of a kernel size, or None.
        tile: Of the two-kernel plans.

    Returns:
        A decorator: function -> `Spec`.

    Raises:
        TypeError: What is decorated is no Python function, an argument is neither a vector nor a scalar, or pool or tile is
            something else.
        ValueError: The first argument is not `accum`, an argument has a name that every operator uses, pool or tile is out of
            range, or the name is longer than a file's may be with what a kernel's adds to it.
    """

    def declare(chain: Callable[..., Any]) -> Spec:
        if not hasattr(chain, "__code__"):
            raise TypeError(f"expected a Python function as the chain, got {type(chain).__name__}; declare it with def")
        name = chain.__name__
        if len(name) > LONGEST_NAME:
            raise ValueError(f"expected a name of at most {LONGEST_NAME} characters for the chain, got {len(name)}")
        if not name.isidentifier() or keyword.iskeyword(name) or name == "<lambda>":
            raise ValueError(f"expected a chain declared with def (its name names the operator), got {name!r}")
        parameters = list(inspect.signature(chain).parameters.values())
        if not parameters or parameters[0].name != "accum":
            got = parameters[0].name if parameters else "no argument"
            raise ValueError(f"{name}: expected `accum` (the convolution's result) as the chain's first argument, got {got}")
        if not isinstance(tile, Tile):
            raise TypeError(f"{name}: expected tile to be a Tile, got {tile!r}")
        if pool is not None and (not isinstance(pool, Pool) or type(pool.kernel_size) is not int):
            raise TypeError(f"{name}: expected pool to be AvgPool2d or MaxPool2d of an int, or None, got {pool!r}")
        if tile.m % 64 or not 64 <= tile.m <= 256 or tile.n % 8 or not 8 <= tile.n <= 256:
            raise ValueError(f"{name}: expected a tile of 64 to 256 (a multiple of 64) x 8 to 256 (of 8), got {tile.m} x {tile.n}")
        if pool is not None and pool.kernel_size < 1:
            raise ValueError(f"{name}: expected a pool kernel_size of at least 1, got {pool.kernel_size}")
        arguments = tuple(_argument(name, p) for p in parameters[1:])
        return Spec(name, chain, arguments, pool, tile, inspect.cleandoc(chain.__doc__ or ""))

    return declare


def _argument(operator_name: str, parameter: inspect.Parameter) -> Argument:
    where = f"{operator_name}: argument {parameter.name!r}"
    if parameter.name in RESERVED:
        raise ValueError(f"{where} has a name that every operator already uses ({', '.join(sorted(RESERVED))}); rename it")
    if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise TypeError(f"{where}: expected an ordinary argument, got a {parameter.kind.description} one")
    annotation, default = parameter.annotation, parameter.default
    # A string where the file has `from __future__ import annotations`.
    if annotation is Vector or (isinstance(annotation, str) and annotation.rpartition(".")[2] == "Vector"):
        if default is not None and default is not parameter.empty:
            raise TypeError(f"{where}: expected default None (may be left out) or none at all for a Vector, got {default!r}")
        return Argument(parameter.name, "vector", optional=default is None)
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        raise TypeError(f"{where}: expected the annotation Vector or a number as default (a scalar), got neither")
    return Argument(parameter.name, "scalar", default=float(default))
