"""Arguments of an operator's call: what users write -> vectors, scalars and `Parameters`, checked."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Sequence
from typing import Any

import torch

from .problem import Parameters, PoolArguments, check_parameters, pair
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
        self._names = frozenset(self._positional) | frozenset(self._defaults)
        self._parameter_names = tuple(n for n in self._defaults if n not in self._positional)
        #: Raw values of a call -> its parameters, checked; and equal parameters -> one object (see Parameters).
        self._checked_values: dict[Any, Parameters] = {}
        self._interned: dict[Any, Parameters] = {}
        self.signature = self._signature()

    def _signature(self) -> inspect.Signature:
        empty = inspect.Parameter.empty
        first, then = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        kinds = [(n, first) for n in ("x", "weight", *self._positional)] + [(n, then) for n in self._parameter_names]
        return inspect.Signature([inspect.Parameter(n, kind, default=self._defaults.get(n, empty)) for n, kind in kinds])

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], list[float], Parameters]:
        """Vectors, scalars and parameters of a call. Raises TypeError or ValueError for what no tensor could make right."""
        values = self._defaults.copy()
        values.update(zip(self._positional, args))
        values.update(kwargs)
        fits = len(args) <= len(self._positional) and len(values) == len(self._names) and kwargs.keys() <= self._names
        if not fits or any(n in kwargs for n in self._positional[: len(args)]):
            self._complain(args, kwargs)
        scalars = []
        for name in self.scalars:
            value = values[name]
            if type(value) is not float:
                if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, numbers.Real)):
                    raise TypeError(f"expected {name} to be a number, got {type(value).__name__}")
                try:
                    value = float(value)
                except OverflowError:
                    raise ValueError(f"expected {name} within the range of a float, got an int beyond it") from None
            scalars.append(value)
        return [values[n] for n in self.vectors], scalars, self._parameters(values)

    def _parameters(self, values: dict[str, Any]) -> Parameters:
        """Stride, padding, dilation, pool and precision, checked once for equal values."""
        if torch.compiler.is_compiling():
            return self._check_parameters(values)
        raw = tuple(map(values.__getitem__, self._parameter_names))
        try:
            key = raw, tuple(map(type, raw))  # types, since 1 == True == 1.0
            known = self._checked_values.get(key)
        except TypeError:  # an unhashable value, such as a list
            return self._check_parameters(values)
        if known is None:
            known = self._check_parameters(values)
            if len(self._checked_values) < _CACHED_VALUES:
                self._checked_values[key] = known
        return known

    def _complain(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise TypeError as Python does for a call that does not fit a signature."""
        try:
            self.signature.bind(None, None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}: {error}; expected {self.signature}") from None

    def _check_parameters(self, values: dict[str, Any]) -> Parameters:
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

    def intern(self, parameters: Parameters) -> Parameters:
        """The one object for these parameters; nothing is kept for symbolic sizes (tracing)."""
        if torch.compiler.is_compiling():
            return parameters
        if len(self._interned) >= _CACHED_VALUES:
            self._interned.clear()
        return self._interned.setdefault(parameters.key, parameters)
