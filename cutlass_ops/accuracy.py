"""How accurate a result must be: `Criterion`, the one criterion of tests/gpu and of the GPU check (verification.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional

from .chain import evaluate
from .loader import device_facts
from .ops import Operator
from .reference import apply_pool, convolutions
from .selection import PLAN_NAMES, PYTORCH, DeviceFacts, Plan

__all__ = ["Accuracy", "Criterion", "difference", "round_to_tf32", "serving", "uniform", "without_ties"]

LIMIT = 1.05  # times the error of PyTorch's TF32 convolution, or of operands rounded to TF32
#: Chain functions that the kernels approximate: tanh.approx and its kin, 7.8e-6 measured for tanh.
APPROXIMATED = frozenset({"tanh", "sigmoid", "silu", "gelu", "exp"})
APPROXIMATION = 1e-5
#: Half of the last place relative to the value, and half of the smallest subnormal: one rounding to the dtype.
ROUNDING = {torch.float16: (2.0**-11, 2.0**-25), torch.bfloat16: (2.0**-8, 2.0**-134)}


def uniform(shape: Sequence[int], low: float, high: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers without ties."""
    return without_ties(torch.rand(tuple(shape), generator=generator, device=generator.device) * (high - low) + low).to(dtype)


def without_ties(values: Tensor) -> Tensor:
    """fp32 values with the last mantissa bit set, but for zero and infinity: none is a tie between two TF32 or fp16 neighbours."""
    untied = (values.contiguous().view(torch.int32) | 1).view(torch.float32)
    return torch.where(values.isfinite() & (values != 0), untied, values)


def round_to_tf32(values: Tensor) -> Tensor:
    """fp32 rounded to TF32's 10 mantissa bits, to nearest, ties away from zero (cvt.rna.tf32); the result is float64."""
    rounded = ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).double()


def difference(y: Tensor, reference: Tensor) -> Tensor:
    """|y - reference| in float64; 0 where both are NaN or the same infinity, infinite where only one is NaN or infinite."""
    y, reference = y.double(), reference.double()
    same = (y == reference) | (y.isnan() & reference.isnan())
    apart = (y - reference).abs()
    return torch.where(same, 0.0, torch.where(apart.isnan(), math.inf, apart))


@dataclass(frozen=True)
class Accuracy:
    """Absolute errors against float64: a result's, PyTorch's own, and what is allowed."""

    max: float
    mean: float
    eager_max: float
    eager_mean: float
    allowed_max: float
    allowed_mean: float
    #: Elements of a half-precision result beyond their own limit.
    outside: int = 0

    @property
    def passed(self) -> bool:
        """Whether the result is accurate enough (NaN is not)."""
        return self.max <= self.allowed_max and self.mean <= self.allowed_mean and self.outside == 0

    def to_json(self) -> dict[str, float]:
        """What the record of a check keeps."""
        found = {"max": self.max, "mean": self.mean, "eager_max": self.eager_max, "eager_mean": self.eager_mean}
        return {name: float(f"{error:.3g}") for name, error in found.items()}


class Criterion:
    """How accurate a call ``op(x, weight, *args, **kwargs)`` must be; `judge` measures a result.

    fp32 tensors (precision tf32): at most 1.05 times the error of PyTorch's TF32 convolution. For some shapes cuDNN computes
    in true fp32; then at most 1.05 times the error of exact arithmetic on operands rounded to TF32, plus `slack`.
    fp16 and bf16: every element within one rounding of the float64 result, plus `slack`.

    `slack` is what fp32 arithmetic on the GPU adds, through the chain and the pool:
      - a tensor core adds 8 (TF32) or 16 products at a time and truncates: an error below 2^-23 of the partial sum in each
        step; partial sums of random products seldom exceed twice the RMS of the results, so 2^-22 of it;
      - a few roundings of the result: 2^-22 of it;
      - 1e-5, absolute and relative, where the chain has a function that the kernels approximate.
    """

    def __init__(self, op: Operator, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
        vectors, scalars, p = op.arguments.bind(args, kwargs)
        doubles = [None if v is None else v.double() for v in vectors]
        inputs = dict(zip((a.name for a in op.spec.vectors), doubles)) | dict(zip((a.name for a in op.spec.scalars), scalars))

        def conv(a: Tensor, b: Tensor) -> Tensor:
            return functional.conv2d(a, b, None, p.stride, p.padding, p.dilation)

        def finish(accum: Tensor) -> Tensor:
            y = evaluate(op.spec.chain, accum.clone(), inputs)
            return y if p.pool is None else apply_pool(y, p.pool)

        exact = conv(x.double(), weight.double())
        rounded = conv(round_to_tf32(x), round_to_tf32(weight)) if x.dtype is torch.float32 else exact
        emulated = finish(rounded)
        self.dtype, self.reference = x.dtype, finish(exact)

        steps = weight.shape[2] * weight.shape[3] * -(-x.shape[1] // 8)
        finite = torch.where(exact.isfinite(), exact, 0.0)
        shift = (steps + 4) * 2.0**-22 * finite.square().mean().sqrt()
        slack = torch.maximum(*(difference(finish(rounded + s), emulated) for s in (shift, -shift))) + 2.0**-22 * emulated.abs()
        if APPROXIMATED & set(op.spec.chain.__code__.co_names):
            gain = 1.0 if p.pool is None else apply_pool(torch.ones_like(exact), p.pool).abs()
            slack = slack + APPROXIMATION * (gain + emulated.abs())
        self._slack = torch.where(slack.isfinite(), slack, 0.0)

        with convolutions("tf32"):
            eager = difference(op._reference(x, weight, vectors, scalars, p), self.reference)
        self._eager = eager.max().item(), eager.mean().item()
        emulation = difference(emulated, self.reference)
        self._emulation = emulation.max().item(), emulation.mean().item()

    def judge(self, y: Tensor) -> Accuracy:
        """Errors of a result and what is allowed. Raises ValueError for another shape or dtype."""
        if y.shape != self.reference.shape or y.dtype is not self.dtype:
            raise ValueError(f"expected a result {tuple(self.reference.shape)} {self.dtype}, got {tuple(y.shape)} {y.dtype}")
        error = difference(y, self.reference)
        found = error.max().item(), error.mean().item()
        if self.dtype is torch.float32:
            slack = self._slack.max().item(), self._slack.mean().item()
            eager = [e if math.isfinite(e) else 0.0 for e in self._eager]  # PyTorch's own misplaced NaN or infinity allows nothing
            most, average = (max(LIMIT * e, LIMIT * own + s) for e, own, s in zip(eager, self._emulation, slack))
            return Accuracy(*found, *self._eager, most, average)
        relative, smallest = ROUNDING[self.dtype]
        magnitude = torch.where(self.reference.isfinite(), self.reference.abs(), 0.0)
        limit = relative * (magnitude + self._slack) + smallest + self._slack
        return Accuracy(*found, *self._eager, limit.max().item(), limit.mean().item(), int((error > limit).sum()))


def serving(op: Operator, x: Tensor, weight: Tensor, *args: Any, device: Optional[DeviceFacts] = None, **kwargs: Any) -> list[Plan]:
    """The plans with kernels of ours that can serve a call."""
    problem = op.problem(x, weight, op.arguments.bind(args, kwargs)[2])
    facts = device or device_facts(x.device.index)
    plans = [op._select(problem, facts, name).plan for name in PLAN_NAMES if name != PYTORCH]
    return [plan for plan in plans if plan]
