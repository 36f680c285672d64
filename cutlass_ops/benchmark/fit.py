"""Times of plans -> coefficients of their expected time (costs.py): non-negative least squares on relative errors. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..costs import OVERLAPPED, SERIAL, Coefficients

#: What an H200 may be expected to take, in microseconds a unit (docs/performance.md): 3.7 TB/s, 6.7 TFLOP/s an SM, 4 us a launch;
#: in the implicit GEMM, bound by the traffic from L2 to the SMs, a k-step counts more than its FLOPs. A pull of `RIDGE` towards
#: it decides what the times leave open, and nothing where they do not.
PRIOR = {"launches": 4.0, "convert": 0.27, "pool": 0.2, "result": 0.55}
PRIOR |= {"flops": 0.15, "outputs": 0.03, "iterations": 0.5, "staged": 0.15, "gathered": 0.5, "moved": 0.27}
PRIOR |= {"single_loads": 0.1, "single_stores": 0.1}
PRIOR_GEMM = PRIOR | {"flops": 0.05, "outputs": 0.01}
RIDGE = 1e-4
_ROUNDS = 40
_PULLS = (1.0, 0.25, 4.0)  # starts: each overlapped group as it is, unlikely and likely to be the longest

#: Features and measured microseconds of one call.
Sample = tuple[Mapping[str, float], float]


@dataclass(frozen=True)
class Fit:
    """Coefficients, and the relative errors |expected - measured| / measured of the samples that they come from."""

    coefficients: Coefficients
    errors: tuple[float, ...]

    def summary(self) -> dict[str, float]:
        """Number of samples, median and largest error."""
        return {"samples": len(self.errors), "error_median": statistics.median(self.errors), "error_max": max(self.errors)}


def nnls(a: Tensor, b: Tensor) -> Tensor:
    """The x >= 0 with the least |a x - b| (Lawson and Hanson's active sets)."""
    x = torch.zeros(a.shape[1], dtype=a.dtype)
    used: list[int] = []
    for _ in range(3 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        entering = [i for i in range(len(x)) if i not in used and gradient[i] > 1e-12]
        if not entering:
            break
        used = sorted([*used, max(entering, key=lambda i: float(gradient[i]))])
        while used:
            best = torch.linalg.lstsq(a[:, used], b[:, None]).solution[:, 0]
            if bool((best > 0).all()):
                x = torch.zeros_like(x).index_copy(0, torch.tensor(used), best)
                break
            here = x[used]
            share = min(float(h / (h - s)) for h, s in zip(here, best) if s <= 0)
            kept = here + share * (best - here)
            x = torch.zeros_like(x).index_copy(0, torch.tensor(used), kept.clamp(min=0))
            used = [i for i, v, s in zip(used, kept, best) if v > 1e-14 and (s > 0 or v > 1e-9)]
    return x


def fit(samples: Sequence[Sample]) -> Fit:
    """Coefficients of a plan. The longest overlapped group of each sample is found by turns: guess it, fit, guess again."""
    prior = PRIOR_GEMM if any(work.get("iterations") for work, _ in samples) else PRIOR
    names = [n for n in prior if any(work.get(n) for work, _ in samples)]
    us = torch.tensor([t for _, t in samples], dtype=torch.float64)
    # Columns relative to the prior and rows to the measured time: what is fitted is about 1, and so is its target.
    scaled = torch.tensor([[work.get(n, 0.0) * prior[n] / t for n in names] for work, t in samples], dtype=torch.float64)
    groups = [torch.tensor([n in group for n in names]) for group in OVERLAPPED]
    serial = torch.tensor([n in SERIAL for n in names])

    def longest(x: Tensor) -> Tensor:
        return torch.stack([(scaled * x)[:, g].sum(1) for g in groups]).argmax(0)

    def predicted(x: Tensor) -> Tensor:
        return (scaled * x)[:, serial].sum(1) + torch.stack([(scaled * x)[:, g].sum(1) for g in groups]).amax(0)

    def loss(x: Tensor) -> float:
        return float(((predicted(x) - 1) ** 2).sum() + RIDGE * ((x - 1) ** 2).sum())

    pull = RIDGE**0.5 * torch.eye(len(names), dtype=torch.float64)
    target = torch.cat([torch.ones(len(us), dtype=torch.float64), RIDGE**0.5 * torch.ones(len(names), dtype=torch.float64)])
    found: list[Tensor] = []
    for group in groups:
        for factor in _PULLS:
            x = torch.where(group, factor, 1.0).to(torch.float64)
            guess = None
            for _ in range(_ROUNDS):
                now = longest(x)
                if guess is not None and bool((now == guess).all()):
                    break
                guess = now
                counted = serial | torch.stack(groups)[guess]
                x = nnls(torch.cat([scaled * counted, pull]), target)
                found.append(x)
    best = min(found, key=loss)
    errors = tuple(float(e) for e in (predicted(best) - 1).abs())
    return Fit(Coefficients({n: float(f"{v * prior[n]:.5g}") for n, v in zip(names, best.tolist()) if v}), errors)
