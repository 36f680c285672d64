"""Arguments of an operator's call: what users write -> vectors, scalars and `Parameters`, checked."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from .problem import Parameters, PoolArguments, check_parameters, listed_pair, pair
from .spec import Spec

_CACHED_VALUES = 256  # parameters that an operator keeps


class Arguments:
    """What may follow x and weight in a call of an operator."""

    def __init__(self, spec: Spec) -> None:
        self._name, self._pool = spec.name, spec.pool
        self.vectors = tuple(a.name for a in spec.vectors)
        self.scalars = tuple(a.name for a in spec.scalars)
        self._positional = tuple(a.name for a in spec.arguments)
        self._defaults: dict[str, Any] = {a.name: a.default for a in spec.arguments if a.kind == "scalar" or a.optional}
        self._defaults |= {"stride": 1, "padding": 0, "dilation": 1, "precision": None}
        if spec.pool:
            self._defaults |= {"pool": spec.pool.kernel_size, "pool_stride": None, "pool_padding": 0, "ceil_mode": False}
            self._defaults |= {"count_include_pad": True, "divisor_override": None} if spec.pool.kind == "avg" else {"pool_dilation": 1}
        parameters = tuple(n for n in self._defaults if n not in self._positional)
        #: Every argument after x and weight, in the order of bind()'s results.
        self._names = (*self.vectors, *self.scalars, *parameters)
        self._first_scalar, self._first_parameter = len(self.vectors), len(self.vectors) + len(self.scalars)
        self._default_values = tuple(self._defaults.values())
        #: Form of a call (number of positional arguments, names of the others) -> picks the values of _names from its values.
        self._forms: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {}
        #: Raw values of a call -> its parameters, checked; and equal parameters -> one object (see Parameters).
        self._checked_values: dict[Any, Parameters] = {}
        self._interned: dict[Any, Parameters] = {}
        self.signature = self._signature()

    def _signature(self) -> inspect.Signature:
        empty = inspect.Parameter.empty
        first, then = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        kinds = [(n, first) for n in ("x", "weight", *self._positional)] + [(n, then) for n in self._names[self._first_parameter :]]
        return inspect.Signature([inspect.Parameter(n, kind, default=self._defaults.get(n, empty)) for n, kind in kinds])

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Sequence[float], Parameters]:
        """Vectors, scalars and parameters of a call. Raises TypeError or ValueError for what no tensor could make right."""
        # The checks of a form of call, and of parameters, are kept: 1.8 us a call instead of 2.9. Not while torch.compile traces,
        # which would guard on what is kept.
        traced = torch.compiler.is_compiling()
        given = (*args, *kwargs.values(), *self._default_values)
        form = len(args), tuple(kwargs)
        if traced:
            positions = self._positions(*form)
            values = tuple([given[i] for i in positions])
        else:
            values = (self._forms.get(form) or self._new_form(form))(given)
        scalars: Sequence[float] = values[self._first_scalar : self._first_parameter]
        for value in scalars:
            if type(value) is not float:
                scalars = tuple(map(_number, self.scalars, scalars))
                break
        raw = values[self._first_parameter :]
        return values[: self._first_scalar], scalars, self._check_parameters(raw) if traced else self._parameters(raw)

    def _new_form(self, form: tuple[int, tuple[str, ...]]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        pick = itemgetter(*self._positions(*form))
        if len(self._forms) < _CACHED_VALUES:
            self._forms[form] = pick
        return pick

    def _positions(self, positional: int, keywords: tuple[str, ...]) -> list[int]:
        """Where the value of each of _names lies among those of a call, which the defaults follow.

        Raises TypeError as Python does for a call that does not fit the signature.
        """
        given = (*self._positional[:positional], *keywords)
        where = {name: i for i, name in enumerate(self._defaults, len(given))}
        where.update({name: i for i, name in enumerate(given)})
        # A name that is given twice, unknown or missing makes these counts differ.
        if len(set(given)) != positional + len(keywords) or len(where) != len(self._names) or any(n not in where for n in self._names):
            try:
                self.signature.bind(None, None, *[None] * positional, **dict.fromkeys(keywords))
            except TypeError as error:
                raise TypeError(f"{self._name}: {error}; expected {self.signature}") from None
        return [where[n] for n in self._names]

    def _parameters(self, raw: tuple[Any, ...]) -> Parameters:
        """Stride, padding, dilation, pool and precision, checked once for equal values."""
        try:
            key = raw, tuple(map(type, raw))  # types, since 1 == True == 1.0
            known = self._checked_values.get(key)
        except TypeError:  # an unhashable value, such as a list
            return self._check_parameters(raw)
        if known is None:
            known = self._check_parameters(raw)
            if len(self._checked_values) < _CACHED_VALUES:
                self._checked_values[key] = known
        return known

    def _check_parameters(self, raw: tuple[Any, ...]) -> Parameters:
        values = dict(zip(self._names[self._first_parameter :], raw))
        stride, padding, dilation = (pair(n, values[n]) for n in ("stride", "padding", "dilation"))
        pool = None
        if self._pool:
            kernel = pair("pool", values["pool"])
            pool_stride = kernel if values["pool_stride"] is None else pair("pool_stride", values["pool_stride"])
            pool_padding = pair("pool_padding", values["pool_padding"])
            pool_dilation = pair("pool_dilation", values.get("pool_dilation", 1))
            override = values.get("divisor_override")
            if override is not None and (isinstance(override, bool) or not isinstance(override, int)):
                raise TypeError(f"expected divisor_override to be an int or None, got {override!r}")
            flags = values["ceil_mode"], values.get("count_include_pad", True)
            for name, flag in zip(("ceil_mode", "count_include_pad"), flags):
                if not isinstance(flag, (bool, torch.SymBool)):
                    raise TypeError(f"expected {name} to be True or False, got {flag!r}")
            pool = PoolArguments(self._pool.kind, kernel, pool_stride, pool_padding, pool_dilation, *flags, override)
        precision = values["precision"]
        if precision is not None and not isinstance(precision, str):
            raise TypeError(f"expected precision to be a string or None, got {precision!r}")
        check_parameters(stride, padding, dilation, pool)
        return self.intern(Parameters(stride, padding, dilation, pool, precision))

    def split(self, rest: Sequence[Any]) -> tuple[Sequence[Any], Sequence[float], Parameters]:
        """Vectors, scalars and parameters from the schema's arguments after x and weight. Raises ValueError for a list's length."""
        flat = rest[self._first_parameter :]
        stride, padding, dilation = map(listed_pair, ("stride", "padding", "dilation"), flat)
        pool = None
        if self._pool:
            names = "pool", "pool_stride", "pool_padding", "pool_dilation"
            kernel, pool_stride, pool_padding, pool_dilation = map(listed_pair, names, flat[3:])
            pool = PoolArguments(self._pool.kind, kernel, pool_stride, pool_padding, pool_dilation, *flat[7:10])
        scalars = rest[self._first_scalar : self._first_parameter]
        return rest[: self._first_scalar], scalars, Parameters(stride, padding, dilation, pool, flat[-1])

    def intern(self, parameters: Parameters) -> Parameters:
        """The one object for these parameters; nothing is kept for symbolic sizes (tracing)."""
        if torch.compiler.is_compiling():
            return parameters
        if len(self._interned) >= _CACHED_VALUES:
            self._interned.clear()
        return self._interned.setdefault(parameters.key, parameters)


def _number(name: str, value: Any) -> float:
    """A scalar as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)):
        raise TypeError(f"expected {name} to be a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"expected {name} within the range of a float, got an int beyond it") from None
