"""Selection: (problem, device, kernels) -> plan, or every candidate with the reason against it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional, Union

from .errors import CutlassOpsError
from .manifest import KernelRecord
from .problem import Problem

#: Limits of im2col TMA on four-dimensional tensors (cuTensorMapEncodeIm2col, PTX ISA).
CORNER_MIN, CORNER_MAX, MAX_OFFSET, MAX_TRAVERSAL_STRIDE = -128, 127, 255, 8
MAX_INDEX = 2**31 - 1


#: Below, three launches with TF32 operands take less time than the guarded plan's five and its flag: the latter cost about
#: 8 us more, in which fp16 operands save less than 2 GFLOP's worth of TF32 rate (400 TFLOP/s; docs/performance.md).
SMALL_FLOPS = 2_000_000_000


class NoPlanError(CutlassOpsError, ValueError):
    """No plan serves the problem; the message gives the reason against each."""


@dataclass(frozen=True)
class DeviceFacts:
    """What selection needs to know of a device."""

    name: str
    capability: tuple[int, int]
    sm_count: int


@dataclass(frozen=True)
class Plan:
    """How a problem is computed: the launches in order, and why this plan."""

    name: str
    #: Kernel names in launch order; none for the plan that calls PyTorch.
    kernels: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Rejection:
    """A candidate plan and the reason against it."""

    name: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The plan, if any, and the candidates that were rejected."""

    plan: Optional[Plan]
    rejected: tuple[Rejection, ...]


#: Two-kernel plans by name: dtype they serve, precision, operand types of the implicit GEMM, why.
#: The first that fits is taken; measured times order them (docs/performance.md).
_TWO_KERNEL: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "two-kernel-f16-guarded": (
        "f32",
        "tf32",
        ("f16", "tf32"),
        "rounded fp16 operands, exact as TF32 while values fit, at twice the rate; a flag on the device sends others to TF32",
    ),
    "two-kernel-tf32": ("f32", "tf32", ("tf32",), "TF32 operands, rounded to nearest: right for every input"),
    "two-kernel-f16": ("f16", "f16", ("f16",), "the tensors' own dtype, fp32 accumulation"),
    "two-kernel-bf16": ("bf16", "bf16", ("bf16",), "the tensors' own dtype, fp32 accumulation"),
}
PYTORCH = "pytorch"
PLAN_NAMES = (*_TWO_KERNEL, PYTORCH)


def select(
    problem: Problem,
    device: DeviceFacts,
    records: Iterable[KernelRecord],
    verified: frozenset[str],
    *,
    allow_unverified: bool = False,
    force: Optional[str] = None,
) -> Selection:
    """Choose a plan. `force` names the only plan to consider (benchmarks and tests)."""
    by_name = {r.name: r for r in records}
    rejected: list[Rejection] = []
    for name in _order(problem):
        if force is not None and name != force:
            continue
        candidate = _pytorch(problem) if name == PYTORCH else _two_kernel(name, problem, device, by_name, verified, allow_unverified)
        if isinstance(candidate, Plan):
            return Selection(candidate, tuple(rejected))
        rejected.append(Rejection(name, candidate))
    return Selection(None, tuple(rejected))


def _order(problem: Problem) -> tuple[str, ...]:
    """Plans from fast to slow by measured times."""
    p, q = problem.conv_size
    flops = 2 * problem.x_shape[0] * p * q * math.prod(problem.weight_shape)
    if flops < SMALL_FLOPS:
        return tuple(sorted(PLAN_NAMES, key=lambda name: name != "two-kernel-tf32"))
    return PLAN_NAMES


def _pytorch(problem: Problem) -> Union[Plan, str]:
    """PyTorch's own operators: for the precisions that no kernel has, never instead of a kernel that is missing or broken."""
    if problem.precision in ("ieee", "f64"):
        return Plan(PYTORCH, (), f"no kernel has precision {problem.precision} yet; PyTorch's own operators do, and it is never lowered")
    return f"expected precision ieee or f64, got {problem.precision}"


def _two_kernel(
    name: str,
    problem: Problem,
    device: DeviceFacts,
    records: dict[str, KernelRecord],
    verified: frozenset[str],
    allow_unverified: bool,
) -> Union[Plan, str]:
    dtype, precision, operands, why = _TWO_KERNEL[name]
    if (problem.dtype, problem.precision) != (dtype, precision):
        return f"expected {dtype} tensors at precision {precision}, got {problem.dtype} at {problem.precision}"
    limit = implicit_gemm_limit(problem)
    if limit is not None:
        return limit
    kind = problem.pool.kind if problem.pool else "avg"
    kernels = (
        *(f"convert_{dtype}_{operand}" for operand in operands),
        *(f"{problem.operator}_{operand}" for operand in operands),
        f"pool_{kind}_{dtype}",
    )
    for kernel in kernels:
        record = records.get(kernel)
        if record is None:
            return f"expected the kernel {kernel} in the manifest, found none"
        if device.capability != (9, 0) or record.architecture != "sm_90a":
            return f"expected compute capability 9.0 for {record.architecture}, got {device.capability[0]}.{device.capability[1]}"
        if record.sha256 not in verified and not allow_unverified:
            return (
                f"expected a record of a passed GPU check for {kernel}, found none; run scripts/check_gpu.py, "
                "or set CUTLASS_OPS_ALLOW_UNVERIFIED=1 for development"
            )
    return Plan(name, kernels, why)


def implicit_gemm_limit(problem: Problem) -> Optional[str]:
    """Why the implicit GEMM cannot compute a problem, or None. The one place that knows its limits."""
    n, _, h, w = problem.x_shape
    _, _, r, s = problem.weight_shape
    p, q = problem.conv_size
    if n * p * q > MAX_INDEX:
        return f"expected at most {MAX_INDEX} output pixels before the pool, got {n} x {p} x {q}; split the batch"
    if max(problem.stride) > MAX_TRAVERSAL_STRIDE:
        return f"expected a stride of at most {MAX_TRAVERSAL_STRIDE}, got {problem.stride}"
    for name, size, i in (("height", r, 0), ("width", s, 1)):
        reach = (size - 1) * problem.dilation[i]
        upper = problem.padding[i] - reach
        if reach > MAX_OFFSET:
            return f"expected (filter {name} - 1) * dilation of at most {MAX_OFFSET}, got {reach}"
        if not -problem.padding[i] >= CORNER_MIN or not CORNER_MIN <= upper <= CORNER_MAX:
            return (
                f"expected padding and padding - (filter {name} - 1) * dilation within [{CORNER_MIN}, {CORNER_MAX}], "
                f"got {problem.padding[i]} and {upper}"
            )
    if h * w > MAX_INDEX or r * s > MAX_INDEX:
        return f"expected at most {MAX_INDEX} pixels an image, got {h} x {w}"
    return None
