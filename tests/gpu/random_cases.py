"""Random problems by number: operator, sizes, parameters, layouts, dtype, and values up to the dtype's extremes.

What a correct kernel cannot promise is left out, each for a reason:
  - sums of products stay within [1e-28, 1e34] (fp16: 2e4), where fp32 accumulation neither overflows nor loses bits;
  - infinities and NaN in weights come without padding: whether 0 * infinity counts in the padding is the algorithm's choice;
  - x of other than uniform values is not scaled to between 1e-5 and 0.03: there fp16's smallest numbers cost a few per cent
    of accuracy against TF32 (README.md, Precision).
"""

from __future__ import annotations

import math
import random as python_random
from typing import Any

import torch

import cutlass_ops
from cutlass_ops.accuracy import uniform, without_ties

from .cases import Case
from .helpers import DEVICE, DTYPES, LAYOUTS, expandable, lay_out, vectors

OPERATORS = (
    cutlass_ops.conv2d,
    cutlass_ops.conv2d_sub_tanh_sub_avgpool,
    cutlass_ops.conv2d_relu_hardswish,
    cutlass_ops.conv2d_min_add_mul,
)
SPECIALS = (math.nan, math.inf, -math.inf)
MAX_PRODUCTS = 3e8  # multiplications of a case: its float64 reference takes milliseconds


class RandomCase(Case):
    """The problem of a number: the same whatever ran before."""

    def __init__(self, number: int) -> None:
        self.number = number
        choose = self._choose = python_random.Random(number)  # noqa: S311
        self.op = choose.choice(OPERATORS)
        self.dtype = choose.choice((torch.float32, *DTYPES))
        values = self._draw()
        super().__init__(values)
        while not self.is_possible or self.products > MAX_PRODUCTS:
            self.values = self._draw()
        self.scalars = {a.name: round((a.default or 0.0) * choose.uniform(0.5, 1.5), 3) for a in self.op.spec.scalars}
        self.x_values = choose.choice(("uniform", "uniform", "symmetric", "normal", "half zeros", "constant"))
        self.x_scale, self.weight_scale = self._scales()
        self.specials = {name: choose.choice(SPECIALS) for name in ("x", "weight", "vector") if choose.random() < 0.06}
        if any((p if isinstance(p, int) else max(p)) for p in [self["padding"]]):
            self.specials.pop("weight", None)

    @property
    def products(self) -> float:
        """An upper bound of the multiplications."""
        return self["n"] * (self["h"] + 8) * (self["w"] + 8) * math.prod(self.weight_shape)

    def __repr__(self) -> str:
        own = {"x_values": self.x_values, "x_scale": self.x_scale, "weight_scale": self.weight_scale, "specials": self.specials}
        return f"{self.op.spec.name} {self.dtype} {self.values | self.scalars | own}"

    def _draw(self) -> dict[str, Any]:
        choose = self._choose
        one, two = choose.randint, lambda low, high: (choose.randint(low, high), choose.randint(low, high))
        layouts = tuple(LAYOUTS)
        values: dict[str, Any] = {"bias": choose.random() < 0.8}
        pooled = self.op.spec.pool is not None
        if choose.random() < 0.4:  # near what a fused kernel serves
            values |= {"n": one(1, 6), "c": choose.choice((1, 3, 8, 16, 24, 32, 64, 65)), "h": one(3, 40)}
            values |= {"w": choose.choice((1, 2, 4)) * one(1, 40)}
            if choose.random() < 0.25:  # several whole rows for every CTA
                values |= {"n": one(20, 60), "h": one(3, 16), "w": choose.choice((2, 4)) * one(15, 33)}
            values |= {"k": one(1, 140), "filter": choose.choice(((3, 3), (3, 3), (1, 1))), "stride": 1}
            values |= {"padding": choose.choice((0, 0, 1, 2, (1, 0), (0, 1), (3, 4))), "dilation": 1}
            values |= {"x_layout": choose.choice(("contiguous", "contiguous", "channels_last", "channels_last", *layouts))}
            values |= {"weight_layout": choose.choice(layouts)}
            return values | ({"pool": choose.choice((2, 2, 2, 3)), "ceil_mode": choose.random() < 0.3} if pooled else {})
        values |= {"n": one(1, 8), "c": one(1, choose.choice((4, 20, 140))), "h": one(1, 40), "w": one(1, 40)}
        values |= {"k": one(1, choose.choice((8, 40, 260))), "filter": two(1, 6), "stride": choose.choice((1, one(1, 8), two(1, 4)))}
        values |= {"padding": choose.choice((0, one(0, 5), two(0, 4))), "dilation": choose.choice((1, one(1, 4), two(1, 3)))}
        values |= {"x_layout": choose.choice(layouts), "weight_layout": choose.choice(layouts)}
        if pooled:
            values |= {"pool": choose.choice((1, 2, one(1, 5), two(1, 4))), "pool_stride": choose.choice((None, one(1, 4), two(1, 3)))}
            values |= {"pool_padding": choose.choice((0, 0, 1, (0, 1))), "ceil_mode": choose.random() < 0.5}
            values |= {"count_include_pad": choose.random() < 0.5, "divisor_override": choose.choice((None, None, 1, 7, -3))}
        return values

    def _scales(self) -> tuple[float, float]:
        """Largest magnitudes of x, and of the weight relative to 1 / sqrt(filter size)."""
        choose, fan = self._choose, math.prod(self.weight_shape[1:])
        if choose.random() < 0.5:
            return 1.0, 1.0
        if self.dtype is torch.float16:
            x = 10.0 ** choose.uniform(-4, 4.8)
            return x, min(10.0 ** choose.uniform(-2, 2), 2e4 / (x * math.sqrt(fan)))
        x = choose.uniform(-36, 38.4)
        while self.x_values != "uniform" and -5 < x < -1.5:
            x = choose.uniform(-36, 38.4)
        product = choose.uniform(max(-27.0, x - 34), min(32.0, x + 34))
        return 10.0**x, 10.0 ** (product - x)

    def tensors(self) -> tuple[list[Any], dict[str, Any]]:
        """x and weight, and the other arguments of the call."""
        random = torch.Generator(DEVICE).manual_seed(self.number)
        # Scaling makes ties anew, which kernels and criterion round to different sides: of few different results one could stand out.
        x = without_ties(self._x(random) * self.x_scale)
        reach = self.weight_scale / math.sqrt(math.prod(self.weight_shape[1:]))
        weight = without_ties(uniform(self.weight_shape, -1, 1, torch.float32, random) * reach)
        own = vectors(self.op, self["k"], torch.float32, random)
        if self.op.spec.pool is None:  # elsewhere tanh would be saturated
            own = [v * min(self.x_scale * self.weight_scale, 1e4) for v in own]
        x, weight, *own = (self._with_special(name, t).to(self.dtype) for name, t in zip(("x", "weight", "vector", ""), (x, weight, *own)))
        arguments = dict(zip((a.name for a in self.op.spec.vectors), own)) | self.scalars | self.arguments
        if not self["bias"] and "bias" in arguments:
            arguments["bias"] = None
        if self.dtype is torch.float32:
            arguments["precision"] = "tf32"
        pairs = ((x, self["x_layout"]), (weight, self["weight_layout"]))
        return [self._laid_out(t, layout) for t, layout in pairs], arguments

    def _x(self, random: torch.Generator) -> torch.Tensor:
        if self.x_values == "normal":
            return without_ties(torch.randn(self.x_shape, generator=random, device=random.device).clamp(-4, 4) / 4)
        if self.x_values == "constant":
            return uniform((1, 1, 1, 1), 0.5, 1, torch.float32, random).repeat(self.x_shape)
        x = uniform(self.x_shape, 0 if self.x_values == "uniform" else -1, 1, torch.float32, random)
        if self.x_values == "half zeros":
            x = x * (torch.rand(self.x_shape, generator=random, device=random.device) < 0.5)
        return x

    def _with_special(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with an infinity or NaN in one to three places, if the case has it."""
        if name in self.specials:
            tensor = tensor.clone()
            for _ in range(self._choose.randint(1, 3)):
                tensor.view(-1)[self._choose.randrange(tensor.numel())] = self.specials[name]
        return tensor

    @staticmethod
    def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
        values = expandable(values, layout)
        laid = LAYOUTS[layout](values)
        return laid if values.isnan().any() else lay_out(values, layout)
