"""Problems for the tests: every value of the issue's lists, in combinations that cover as many pairs of values as they can."""

from __future__ import annotations

import itertools
import math
import random

from cutlass_ops.problem import PoolArguments, conv_size, pair, pool_size

from .helpers import LAYOUTS

SIZES = (3, 4, 5, 17, 63, 127, 130)
CONVOLUTION = {
    "n": (1, 2, 3, 37),
    "h": SIZES,
    "w": SIZES,
    "c": (1, 3, 8, 12, 64, 130),
    "k": (1, 7, 64, 130),
    "filter": ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (1, 3), (5, 2)),
    "stride": (1, 2, 3, (2, 1)),
    "padding": (0, 1, 2, (0, 2)),
    "dilation": (1, 2, (2, 1)),
    "x_layout": tuple(LAYOUTS),
    "weight_layout": tuple(LAYOUTS),
    "bias": (True, False),
}
POOL = {
    "pool": (1, 2, 3, 4, (2, 3)),
    "pool_stride": (None, 1, 2, 3, (3, 2)),
    "pool_padding": (0, 1, 2, (0, 1)),
    "ceil_mode": (False, True),
    "count_include_pad": (True, False),
    "divisor_override": (None, 1, 5, -3),
}
#: What the fused kernels serve, float32 and half precision, NCHW and channels_last; 3 x 3 filters and 1 x 1. NCHW rows of whole 16 bytes
#: are read by TMA, others are gathered.
#: Up to 16 input channels 3 x 3 filters have a kernel of their own; a CTA has 64 or 128 columns and 128 or 64 output channels.
_FUSED = {
    "n": (1, 2, 3, 37),
    "h": (3, 4, 5, 17, 63),
    "k": (1, 7, 64, 130),
    "stride": (1,),
    "dilation": (1,),
    "bias": (True, False),
}
_PLANES = {"x_layout": ("contiguous",), "weight_layout": ("contiguous", "transposed", "batch_inside")}
_PIXELS = {"x_layout": ("channels_last",), "weight_layout": ("channels_last", "contiguous", "transposed")}
_3X3 = {"filter": ((3, 3),), "padding": (0, 1, 2, (0, 2), (3, 4), (1, 8))}
_1X1 = {"filter": ((1, 1),), "padding": (0, (1, 0), (2, 4), (0, 8), (0, 1), (1, 3), (0, 2))}
FUSED = {
    ("f32", "3x3"): _FUSED | _PLANES | _3X3 | {"w": (2, 4, 8, 63, 64, 66, 68, 125, 132, 260), "c": (1, 3, 16, 17, 24, 64)},
    ("f32", "1x1"): _FUSED | _PLANES | _1X1 | {"w": (2, 4, 15, 64, 68, 129, 132), "c": (1, 8, 17, 64)},
    ("half", "3x3"): _FUSED | _PLANES | _3X3 | {"w": (2, 8, 28, 63, 64, 72, 125, 136, 264), "c": (1, 3, 16, 17, 24, 64)},
    ("half", "1x1"): _FUSED | _PLANES | _1X1 | {"w": (4, 8, 15, 64, 72, 129, 136), "c": (1, 8, 17, 64)},
    ("f32 channels_last", "3x3"): _FUSED | _PIXELS | _3X3 | {"w": (3, 5, 64, 67, 131, 258), "c": (4, 12, 16, 20, 64)},
    ("f32 channels_last", "1x1"): _FUSED | _PIXELS | _1X1 | {"w": (3, 5, 64, 67, 131), "c": (4, 12, 20, 64)},
    ("half channels_last", "3x3"): _FUSED | _PIXELS | _3X3 | {"w": (3, 5, 64, 67, 131, 258), "c": (8, 16, 24, 64)},
    ("half channels_last", "1x1"): _FUSED | _PIXELS | _1X1 | {"w": (3, 5, 64, 67, 131), "c": (8, 16, 24, 64)},
}
FUSED_POOL = {"pool": (2,), "count_include_pad": (True, False), "divisor_override": (None, 4)}
MAX_FLOPS = 4e9  # keeps the float64 reference of a problem below some milliseconds
_POOL_KEYS = tuple(POOL)


class Case:
    """One problem: `values` by factor name."""

    def __init__(self, values):
        self.values = values
        self.__name__ = "n{n}-c{c}-{h}x{w}-k{k}-".format(**values) + "f{}x{}".format(*values["filter"])

    def __repr__(self):
        return f"Case({self.values})"

    def __getitem__(self, factor):
        return self.values[factor]

    @property
    def x_shape(self):
        return tuple(self.values[f] for f in ("n", "c", "h", "w"))

    @property
    def weight_shape(self):
        return (self["k"], self["c"], *self["filter"])

    @property
    def arguments(self):
        """Keyword arguments of the operator."""
        return {name: self.values[name] for name in ("stride", "padding", "dilation", *_POOL_KEYS) if name in self.values}

    @property
    def is_possible(self):
        """Whether filter and pool fit, and the problem is not too large for a quick test."""
        stride, padding, dilation = (pair(f, self[f]) for f in ("stride", "padding", "dilation"))
        size = conv_size(self.x_shape, self.weight_shape, stride, padding, dilation)
        if min(size) < 1 or 2 * self["n"] * math.prod(size) * math.prod(self.weight_shape) > MAX_FLOPS:
            return False
        if "pool" not in self.values:
            return True
        kernel = pair("pool", self["pool"])
        around = pair("pool_padding", self.values.get("pool_padding", 0))
        if any(2 * p > k for p, k in zip(around, kernel)):
            return False
        step = kernel if self.values.get("pool_stride") is None else pair("pool_stride", self["pool_stride"])
        return min(pool_size(size, PoolArguments("avg", kernel, step, around, ceil_mode=self.values.get("ceil_mode", False)))) >= 1


def pairwise(factors, count, seed):
    """`count` possible cases, each the one of 40 random ones that adds most pairs of values not seen before."""
    choose = random.Random(seed)  # noqa: S311
    seen, cases = set(), []
    for _ in range(count):
        best, gain = None, set()
        tried = 0
        while tried < 40:
            case = Case({name: choose.choice(values) for name, values in factors.items()})
            if not case.is_possible:
                continue
            tried += 1
            new = set(itertools.combinations(case.values.items(), 2)) - seen
            if best is None or len(new) > len(gain):
                best, gain = case, new
        seen |= gain
        cases.append(best)
    return cases


def fused_problems(pool, count, seed):
    """`count` problems of each 3 x 3 kind of `FUSED` and two thirds as many of each 1 x 1 kind; `pool`: further factors."""
    counts = {"3x3": count, "1x1": count * 2 // 3}
    return {kind: pairwise(factors | pool, counts[kind[1]], seed) for kind, factors in FUSED.items()}


def missing_values(factors, cases):
    """The listed values that no case has."""
    return [(name, value) for name, values in factors.items() for value in values if all(case[name] != value for case in cases)]
