"""Costs: what a plan must do for a problem, as a few features, and how long that is expected to take. Pure.

The expected time is a sum over serial features plus the longest of three that overlap:

    us = launches + convert + pool + result + max(compute, stage, move)        each a coefficient times its feature

with coefficients for each plan and dtype, fitted by scripts/sweep.py to times measured on a GPU (plan_costs.json, beside this
module: kernels of every folder, also a user's, run by the same plans).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from .errors import InstallationError
from .manifest import KernelRecord
from .problem import Problem
from .work import FusedWork, gathered, operand_channels, operands_to_convert, round_up

__all__ = ["FEATURES", "OVERLAPPED", "PATH", "SCHEMA", "SERIAL", "Coefficients", "Costs", "features", "shipped_costs"]

SCHEMA = 1
PATH = Path(__file__).with_name("plan_costs.json")

#: Feature -> its meaning. MB are 10^6 bytes, kilo-elements 10^3. "Busiest": of the CTA with most to do, padding counted.
FEATURES = {
    "launches": "kernels and the clearing of the guard's flag",
    "convert": "MB that the conversion reads and writes",
    "pool": "MB of the convolution's result that the pooling kernel reads",
    "result": "MB that the pooling kernel writes",
    "flops": "MFLOP of the busiest",
    "outputs": "kilo-elements of the convolution's result that the busiest computes",
    "iterations": "k-steps of the busiest (implicit GEMM)",
    "staged": "kilo-elements of x that the busiest brings into its ring (fused)",
    "gathered": "thousands of copies by which it brings them where TMA cannot (fused)",
    "single_loads": "kilo-elements of 16 bits that it converts one by one, where they lie at no multiples of 4 bytes (fused)",
    "single_stores": "kilo-elements of the result that it stores one by one, in rows of an odd number (fused, no pool)",
    "moved": "MB that the convolution's kernel reads and writes",
}
#: One after the other, and the groups of features that take place at once.
SERIAL = ("launches", "convert", "pool", "result")
OVERLAPPED = (("flops", "outputs", "iterations", "single_stores"), ("staged", "gathered", "single_loads"), ("moved",))

Features = Mapping[str, float]
_BYTES = {"f32": 4, "tf32": 4, "f16": 2, "bf16": 2}


def features(problem: Problem, kernels: Sequence[KernelRecord], sm_count: int) -> dict[str, float]:
    """What a plan's kernels, in launch order, must do for a problem."""
    if kernels[-1].family == "fused":
        return _fused(problem, kernels[-1], sm_count)
    return _two_kernel(problem, kernels, sm_count)


def _fused(problem: Problem, record: KernelRecord, sm_count: int) -> dict[str, float]:
    n, c, h, w = problem.x_shape
    r, s = problem.weight_shape[2:]
    pixels, block, channels = record.tile
    work = FusedWork.of(problem, record, sm_count)
    steps, slots = work.busiest(n, r)
    nhwc, size = record.variant[1] == "nhwc", _BYTES[problem.dtype]
    loaded = channels if nhwc else min(channels, round_up(c, 8))
    rows_begin_at = gathered(problem, record)
    copied = max(rows_begin_at, 4 // size)  # elements at a time
    strip = record.epilogue_tile[0] * (2 if problem.pool else 1)
    columns = record.box_columns if size == 4 else (strip + s + 1) // 2 * 2  # kGatheredColumns (codegen/include/cutlass_ops/fused/tile.hpp)
    singly_stored = not nhwc and problem.pool is None and problem.output_shape[3] % 2
    staged = slots * work.rows * record.box_columns * loaded / 1e3
    return {
        "launches": 2,
        "flops": steps * 2 * pixels * block * channels * r * s / 1e6,
        "outputs": steps * pixels * block / 1e3,
        "staged": staged,
        "gathered": slots * work.rows * columns * c / copied / 1e3 if rows_begin_at else 0.0,
        "single_loads": staged if size == 2 and rows_begin_at == 1 else 0.0,
        "single_stores": steps * pixels * block / 1e3 if singly_stored else 0.0,
        "moved": (n * c * h * w + math.prod(problem.output_shape)) * size / 1e6,
    }


def _two_kernel(problem: Problem, kernels: Sequence[KernelRecord], sm_count: int) -> dict[str, float]:
    """Of the guarded plan's kernels those with fp16 operands, which come first, do the work; the others return at once."""
    gemms = [r for r in kernels if r.family == "implicit_gemm"]
    gemm, size = gemms[0], _BYTES[problem.dtype]
    n, c, h, w = problem.x_shape
    k, _, r, s = problem.weight_shape
    p, q = problem.conv_size
    tile_m, tile_n, tile_k = gemm.tile
    needs, channels, operand = operands_to_convert(problem), operand_channels(problem), _BYTES[gemm.variant[0]]
    waves = -(-(-(-n * p * q // tile_m) * -(-k // tile_n)) // sm_count)
    iterations = waves * r * s * -(-channels // tile_k)
    between = n * p * q * round_up(k, 4) * 4 / 1e6
    converted = [rows * (c * size + channels * operand) for rows in (n * h * w, k * r * s)]
    converts = len(gemms) if needs else 0
    return {
        "launches": converts + len(gemms) + 1 + (len(gemms) > 1),
        "convert": sum(converted[i] for i in needs) / 1e6,
        "pool": between,
        "result": math.prod(problem.output_shape) * size / 1e6,
        "flops": iterations * 2 * tile_m * tile_n * tile_k / 1e6,
        "outputs": waves * tile_m * tile_n / 1e3,
        "iterations": iterations,
        "moved": n * h * w * channels * operand / 1e6 + between,
    }


@dataclass(frozen=True)
class Coefficients:
    """Microseconds a unit of each feature; a feature that is not listed costs nothing."""

    us: Mapping[str, float]

    def expected(self, work: Features) -> float:
        """Microseconds."""

        def cost(names: Sequence[str]) -> float:
            return sum(self.us.get(name, 0.0) * work.get(name, 0.0) for name in names)

        return cost(SERIAL) + max(cost(group) for group in OVERLAPPED)


@dataclass(frozen=True)
class Costs:
    """Coefficients by plan and dtype; none at all orders nothing."""

    coefficients: Mapping[tuple[str, str], Coefficients] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def of(self, plan: str, dtype: str) -> Optional[Coefficients]:
        """A plan's coefficients for a dtype, else those of the first plan of its family ("fused", "two-kernel") with the dtype."""
        own = self.coefficients.get((plan, dtype))
        family = next((f for f in ("fused", "two-kernel") if plan.startswith(f"{f}-")), None)
        if own is not None or family is None:
            return own
        relatives = sorted(key for key in self.coefficients if key[0].startswith(f"{family}-") and key[1] == dtype)
        return self.coefficients[relatives[0]] if relatives else None

    def expected(self, plan: str, problem: Problem, kernels: Sequence[KernelRecord], sm_count: int) -> Optional[float]:
        """Expected microseconds on the GPU; None for a plan without kernels or coefficients."""
        found = self.of(plan, problem.dtype) if kernels else None
        return None if found is None else found.expected(features(problem, kernels, sm_count))

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Read and check a file of coefficients. Raises InstallationError: missing, unreadable, another schema, damaged."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']!r} instead of {SCHEMA}")
            found = {_key(name): _checked(entry["us"]) for name, entry in data["coefficients"].items()}
            return cls(found, dict(data["provenance"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InstallationError(
                f"expected the plans' costs at {path}, could not read them ({error!r}); reinstall the wheel, "
                "or measure them again with scripts/sweep.py"
            ) from error


def _key(name: str) -> tuple[str, str]:
    plan, dtype = name.split(" ")
    return plan, dtype


def _checked(us: Mapping[str, Any]) -> Coefficients:
    for name, value in us.items():
        if name not in FEATURES or isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"expected a number for a feature among {', '.join(FEATURES)}, got {name!r}: {value!r}")
        if not 0 <= value < math.inf:
            raise ValueError(f"expected a coefficient of at least 0, got {name!r}: {value!r}")
    return Coefficients(dict(us))


@functools.cache
def shipped_costs() -> Costs:
    """The costs that travel with the package, read once a process."""
    return Costs.load(PATH)
