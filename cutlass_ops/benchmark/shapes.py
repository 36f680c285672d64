"""The shapes that scripts/sweep.py measures: what selection must know of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import Operator, conv2d, conv2d_min_add_mul, conv2d_relu_hardswish, conv2d_sub_tanh_sub_avgpool
from ..problem import DTYPES, Problem
from . import adapter

OPERATORS: dict[str, Operator] = {
    op.spec.name: op for op in (conv2d, conv2d_sub_tanh_sub_avgpool, conv2d_relu_hardswish, conv2d_min_add_mul)
}
POOLED, PLAIN, HARDSWISH, MIN_ADD_MUL = "conv2d_sub_tanh_sub_avgpool", "conv2d", "conv2d_relu_hardswish", "conv2d_min_add_mul"


@dataclass(frozen=True)
class Shape:
    """A call: an operator, x (n, c, side, side), weight (k, c, size, size)."""

    operator: str
    n: int
    c: int
    side: int
    k: int
    size: int = 3
    stride: int = 1
    padding: int = 0
    dtype: str = "f32"
    channels_last: bool = False

    def __str__(self) -> str:
        name = self.operator.removeprefix("conv2d_")
        how = f"{self.size}x{self.size} s{self.stride} p{self.padding} {self.dtype} {'nhwc' if self.channels_last else 'nchw'}"
        return f"{name} ({self.n}, {self.c}, {self.side}, {self.side}) -> {self.k} {how}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, `Shape(**data)` is its inverse."""
        return asdict(self)

    def tensors(self, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """x, weight and the further arguments; x uniform in [0, 1), results about 1."""
        dtype = next(t for t, name in DTYPES.items() if name == self.dtype)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        x = torch.rand(self.n, self.c, self.side, self.side, device=device).to(dtype).contiguous(memory_format=layout)
        weight = torch.randn(self.k, self.c, self.size, self.size, device=device) / (self.c * self.size**2) ** 0.5
        vectors = {a.name: torch.rand(self.k, device=device).to(dtype) for a in OPERATORS[self.operator].spec.vectors}
        rest = {"stride": self.stride, "padding": self.padding} | ({"precision": "tf32"} if self.dtype == "f32" else {})
        return x, weight.to(dtype).contiguous(memory_format=layout), vectors | rest

    def problem(self) -> Problem:
        """The call's problem; needs no GPU."""
        x, weight, arguments = self.tensors("meta")
        return adapter.problem_of(OPERATORS[self.operator], x, weight, arguments)


def shape_of(row: Mapping[str, Any]) -> Shape:
    """The shape of a row of plan_costs.json."""
    return Shape(**{k: v for k, v in row.items() if k in Shape.__dataclass_fields__})


#: Operator, n, c, side, k, size, stride, padding. Wide and narrow images, few and many, with and without pool; where the fused
#: family ends (128 channels, 5 x 5, stride 2) what remains is measured too, for the fit.
_CALLS: tuple[tuple[str, int, int, int, int, int, int, int], ...] = (
    *((POOLED, n, 64, 128, 128, 3, 1, 0) for n in (1, 8, 32, 128)),
    (POOLED, 512, 64, 28, 128, 3, 1, 1),
    (POOLED, 512, 32, 16, 64, 3, 1, 1),
    (POOLED, 128, 64, 16, 256, 3, 1, 1),
    (POOLED, 32, 64, 56, 64, 3, 1, 1),
    (POOLED, 64, 16, 112, 64, 3, 1, 1),
    (POOLED, 16, 8, 256, 16, 3, 1, 1),
    (POOLED, 64, 64, 56, 256, 1, 1, 0),
    (POOLED, 64, 128, 28, 128, 3, 1, 1),
    (POOLED, 64, 64, 56, 128, 3, 2, 1),
    (MIN_ADD_MUL, 128, 64, 128, 128, 3, 1, 0),
    (MIN_ADD_MUL, 4, 64, 256, 256, 3, 1, 1),
    (HARDSWISH, 128, 8, 128, 64, 3, 1, 0),
    (HARDSWISH, 1, 8, 128, 64, 3, 1, 0),
    (HARDSWISH, 512, 16, 32, 64, 3, 1, 1),
    (HARDSWISH, 32, 32, 64, 64, 5, 1, 2),
    (PLAIN, 1, 64, 56, 64, 3, 1, 1),
    (PLAIN, 512, 64, 16, 128, 3, 1, 1),
    (PLAIN, 16, 64, 16, 64, 3, 1, 1),
    (PLAIN, 128, 32, 28, 64, 3, 1, 1),
    (PLAIN, 16, 8, 224, 64, 3, 2, 1),
    (PLAIN, 128, 64, 56, 64, 1, 1, 0),
    (PLAIN, 512, 64, 16, 256, 1, 1, 0),
    (PLAIN, 256, 128, 7, 256, 3, 1, 1),
)
_NARROW = ((POOLED, 512, 64, 14, 128, 3, 1, 1), (PLAIN, 128, 64, 14, 64, 3, 1, 1), (PLAIN, 512, 64, 7, 128, 1, 1, 0))
#: Rows of no whole 16 bytes, which fused kernels of NCHW gather.
_GATHERED = (
    (POOLED, 128, 64, 126, 128, 3, 1, 0),
    (POOLED, 512, 64, 14, 128, 3, 1, 1),
    (POOLED, 64, 16, 110, 64, 3, 1, 1),
    (POOLED, 8, 64, 62, 64, 1, 1, 0),
    (HARDSWISH, 128, 8, 126, 64, 3, 1, 0),
    (HARDSWISH, 64, 3, 30, 16, 3, 1, 1),
    (MIN_ADD_MUL, 64, 64, 126, 128, 3, 1, 1),
    (PLAIN, 64, 32, 62, 64, 3, 1, 1),
)
#: Odd widths, which are gathered one by one in float32 and stored one by one without a pool.
_ODD = (
    (POOLED, 128, 64, 127, 128, 3, 1, 0),
    (POOLED, 512, 64, 15, 128, 3, 1, 1),
    (POOLED, 64, 16, 111, 64, 3, 1, 1),
    (POOLED, 32, 32, 57, 128, 3, 1, 1),
    (POOLED, 16, 3, 225, 64, 3, 1, 1),
    (POOLED, 32, 64, 63, 64, 1, 1, 0),
    (HARDSWISH, 128, 8, 127, 64, 3, 1, 0),
    (MIN_ADD_MUL, 64, 64, 127, 128, 3, 1, 1),
    (PLAIN, 64, 32, 63, 64, 3, 1, 1),
    (PLAIN, 64, 64, 33, 128, 3, 1, 1),
    (PLAIN, 64, 64, 71, 64, 3, 1, 1),
    (MIN_ADD_MUL, 128, 64, 29, 128, 3, 1, 0),
    (HARDSWISH, 128, 16, 77, 64, 3, 1, 1),
)
#: Float32 tiles that begin where TMA cannot read, though rows are of whole 16 bytes.
_PADDED = ((POOLED, 32, 64, 56, 128, 1, 1, 1), (PLAIN, 128, 64, 28, 128, 1, 1, 1))
_IMAGES = ((POOLED, 16, 3, 224, 64, 3, 1, 1), (HARDSWISH, 64, 3, 64, 16, 3, 1, 1))


def sweep_shapes() -> list[Shape]:
    """All of them. Of every second call half precision takes NCHW too, and float32 channels_last."""
    found = [Shape(*call, dtype="f32") for call in (*_CALLS, *_IMAGES, *_GATHERED, *_ODD, *_PADDED)]
    found += [Shape(*call, dtype="f32", channels_last=True) for call in (*_CALLS[1::2], *_NARROW)]
    for dtype in ("f16", "bf16"):
        found += [Shape(*call, dtype=dtype, channels_last=True) for call in (*_CALLS, *_NARROW)]
        found += [Shape(*call, dtype=dtype) for call in (*_CALLS[::2], *_IMAGES, *_GATHERED, *_ODD)]
    return found
