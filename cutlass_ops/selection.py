"""Selection: (problem, device, kernels, costs) -> plan, or every candidate with the reason against it. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional, Union

from .costs import Costs
from .manifest import KernelRecord
from .problem import Problem
from .work import gathered, rows_of_step, starts_where_tma_can, team_size

#: Limits of im2col TMA on four-dimensional tensors (cuTensorMapEncodeIm2col, PTX ISA).
CORNER_MIN, CORNER_MAX, MAX_OFFSET, MAX_TRAVERSAL_STRIDE = -128, 127, 255, 8
MAX_INDEX = 2**31 - 1
MAX_OUTPUT_PIXELS = 2**31 - 512  # rounded up to whole tiles, still an int32


#: Below, three launches with TF32 operands take less time than the guarded plan's five and its flag: the latter cost about
#: 8 us more, in which fp16 operands save less than 2 GFLOP's worth of TF32 rate (400 TFLOP/s; docs/performance.md).
SMALL_FLOPS = 2_000_000_000


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice of a plan needs to know of a GPU.

    Attributes:
        name: As PyTorch names it, for messages.
        capability: Compute capability, major and minor: (9, 0) for Hopper.
        sm_count: Number of streaming multiprocessors.
    """

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
    #: Expected microseconds on the GPU; None where no costs are known.
    expected_us: Optional[float] = None


@dataclass(frozen=True)
class Rejection:
    """A candidate plan and the reason against it."""

    name: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The plan, if any, the plans that could serve too, from fast to slow, and the candidates that were rejected."""

    plan: Optional[Plan]
    rejected: tuple[Rejection, ...]
    others: tuple[Plan, ...] = ()


#: Fused plans by name: what tensors of a dtype they serve, at which precision, and why.
_FUSED: dict[str, dict[tuple[str, str], str]] = {
    "fused-f16": {
        ("f32", "tf32"): "one kernel from x to the result, operands rounded to fp16; where values do not fit, it computes again in parts",
        ("f16", "f16"): "one kernel from x to the result, fp32 accumulation",
    },
    "fused-bf16": {("bf16", "bf16"): "one kernel from x to the result, fp32 accumulation"},
}

_LAYOUTS = {False: "contiguous (NCHW)", True: "channels_last"}

#: Two-kernel plans by name: dtype they serve, precision, operand types of the implicit GEMM, why.
_TWO_KERNEL: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "two-kernel-f16-guarded": (
        "f32",
        "tf32",
        ("f16", "tf32"),
        "operands rounded to fp16 (as many mantissa bits as TF32) at twice the rate; a flag on the device sends others to TF32",
    ),
    "two-kernel-tf32": ("f32", "tf32", ("tf32",), "TF32 operands, rounded to nearest: right for every input"),
    "two-kernel-f16": ("f16", "f16", ("f16",), "the tensors' own dtype, fp32 accumulation"),
    "two-kernel-bf16": ("bf16", "bf16", ("bf16",), "the tensors' own dtype, fp32 accumulation"),
}
PYTORCH = "pytorch"
PLAN_NAMES = (*_FUSED, *_TWO_KERNEL, PYTORCH)


def select(
    problem: Problem,
    device: DeviceFacts,
    records: Iterable[KernelRecord],
    verified: frozenset[str],
    *,
    allow_unverified: bool = False,
    force: Optional[str] = None,
    costs: Costs = Costs(),  # noqa: B008 (frozen)
) -> Selection:
    """Choose the plan with the least expected time. `force` names the only plan to consider (benchmarks and tests)."""
    by_name = {r.name: r for r in records}
    serving: list[Plan] = []
    rejected: list[Rejection] = []
    for name in (name for name in _order(problem) if force in (None, name)):
        candidate = _candidate(name, problem, device, by_name)
        if isinstance(candidate, Plan):
            missing = _unusable(candidate, device, by_name, verified, allow_unverified)
            candidate = candidate if missing is None else missing
        if isinstance(candidate, Plan):
            kernels = [by_name[kernel] for kernel in candidate.kernels]
            expected = costs.expected(name, problem, kernels, device.sm_count)
            serving.append(dataclasses.replace(candidate, expected_us=expected))
        else:
            rejected.append(Rejection(name, candidate))
    if not serving:
        return Selection(None, tuple(rejected))
    best, *others = _by_time(serving)
    return Selection(best, tuple(rejected), tuple(others))


def _by_time(plans: list[Plan]) -> list[Plan]:
    """From fast to slow, equal times as they came. Where a plan's time is not known, times do not compare: as they came."""
    times = [plan.expected_us for plan in plans]
    if any(time is None for time in times):
        return plans
    return [plans[i] for i in sorted(range(len(plans)), key=lambda i: times[i] or 0.0)]


def _order(problem: Problem) -> tuple[str, ...]:
    """Plans as they are tried where no costs are known: by families, as docs/performance.md has them."""
    p, q = problem.conv_size
    flops = 2 * problem.x_shape[0] * p * q * math.prod(problem.weight_shape)
    if flops < SMALL_FLOPS:
        return tuple(sorted(PLAN_NAMES, key=lambda name: name == "two-kernel-f16-guarded"))
    return PLAN_NAMES


def _candidate(name: str, problem: Problem, device: DeviceFacts, records: dict[str, KernelRecord]) -> Union[Plan, str]:
    """The plan of this name, or why it cannot compute the problem."""
    if name == PYTORCH:
        return _pytorch(problem)
    return _fused(name, problem, device, records) if name in _FUSED else _two_kernel(name, problem)


def _pytorch(problem: Problem) -> Union[Plan, str]:
    """PyTorch's own operators: for the precisions that no kernel has, never instead of a kernel that is missing or broken."""
    if problem.precision in ("ieee", "f64"):
        return Plan(PYTORCH, (), f"no kernel has precision {problem.precision} yet; PyTorch's own operators do, and it is never lowered")
    return f"expected precision ieee or f64, got {problem.precision}"


def _two_kernel(name: str, problem: Problem) -> Union[Plan, str]:
    dtype, precision, operands, why = _TWO_KERNEL[name]
    if (problem.dtype, problem.precision) != (dtype, precision):
        return f"expected {dtype} tensors at precision {precision}, got {problem.dtype} at {problem.precision}"
    limit = implicit_gemm_limit(problem)
    if limit is not None:
        return limit
    kind = problem.pool.kind if problem.pool else "avg"
    converts = tuple(f"convert_{dtype}_{operand}" for operand in operands)
    gemms = tuple(f"{problem.operator}_{operand}" for operand in operands)
    return Plan(name, (*converts, *gemms, f"pool_{kind}_{dtype}"), why)


def _fused(name: str, problem: Problem, device: DeviceFacts, records: dict[str, KernelRecord]) -> Union[Plan, str]:
    """The first kernel of the family that can compute the problem: of few channels, read by TMA, of few strips, narrow, aligned.

    A row in one strip is stored whole; pieces of rows cost L2 twice (docs/performance.md), and serve where a user's chain does not fit
    the registers of a wide kernel.
    """
    why = _FUSED[name].get((problem.dtype, problem.precision))
    if why is None:
        served = ", ".join(f"{dtype} at {precision}" for dtype, precision in _FUSED[name])
        return f"expected tensors of {served}, got {problem.dtype} at {problem.precision}"
    family = [r for r in records.values() if r.family == "fused" and r.operator == problem.operator]
    reason = f"expected a fused kernel of {problem.operator}, found none"
    most = -1

    def order(record: KernelRecord) -> tuple[int, bool, int, int, bool, str]:
        columns = record.epilogue_tile[0]
        strips = -(-problem.output_shape[3] // columns)
        # Last, so that of x anywhere a step has the same tiles as by TMA, and with them the bits of its result.
        begun = not starts_where_tma_can(problem, record)
        return record.tile[2], gathered(problem, record) > 0, strips, columns, begun, record.variant[3]

    for record in sorted(family, key=order):
        met, limit = fused_limit(problem, device, record)
        if limit is None:
            operand = name.removeprefix("fused-")
            return Plan(name, (f"pack_{problem.dtype}_{operand}", record.name), why)
        if met >= most:  # of several kernels, what keeps the problem from the one that fits the longest
            most, reason = met, limit
    return reason


def _unusable(
    plan: Plan, device: DeviceFacts, records: dict[str, KernelRecord], verified: frozenset[str], allow_unverified: bool
) -> Optional[str]:
    """Why a plan's kernels cannot be launched on the device, or None."""
    for kernel in plan.kernels:
        record = records.get(kernel)
        if record is None:
            return f"expected the kernel {kernel} in the manifest, found none"
        if device.capability != (9, 0) or record.architecture != "sm_90a":
            return f"expected compute capability 9.0 for {record.architecture}, got {device.capability[0]}.{device.capability[1]}"
        if record.sha256 not in verified and not allow_unverified:
            return (
                f"expected a record of a passed GPU check for {kernel}, found none; run cutlass-ops check, "
                "or set CUTLASS_OPS_ALLOW_UNVERIFIED=1 for development"
            )
    return None


def fused_limit(problem: Problem, device: DeviceFacts, record: KernelRecord) -> tuple[int, Optional[str]]:
    """How many conditions hold up to the first that does not, and that one, or None. The one place that knows the fused kernels' limits."""
    n, c, h, w = problem.x_shape
    _, k, out_h, out_w = problem.output_shape
    element, layout, size, _, pool_kind = record.variant
    pool, r, s = problem.pool, *problem.weight_shape[2:]
    nhwc, bytes_of_element = layout == "nhwc", 4 if element == "f32" else 2
    strides = (h * w * c, 1, w * c, c) if nhwc else (c * h * w, h * w, w, 1)
    columns = 16 // bytes_of_element
    dense = f"a dense {_LAYOUTS[nhwc]} input and result, got strides {problem.x_strides} and a {_LAYOUTS[problem.channels_last]} result"
    checks = [
        (element == problem.dtype, f"{element} tensors, got {problem.dtype}"),
        (pool_kind == (pool.kind if pool else "none"), f"pool {pool_kind}, got {pool.kind if pool else 'none'}"),
        (problem.channels_last == nhwc, dense),
        (problem.x_strides == strides, dense),
        (size == f"{r}x{s}", f"a filter of {size.replace('x', ' x ')}, got {r} x {s}"),
        (problem.stride == (1, 1) and problem.dilation == (1, 1), f"stride and dilation 1, got {problem.stride}, {problem.dilation}"),
        (c <= record.tile[2], f"at most {record.tile[2]} input channels, got {c}"),
        (
            not nhwc or (c * bytes_of_element % 16 == 0 and problem.alignment == 16),
            f"pixels of whole 16 bytes for TMA, got {c * bytes_of_element} bytes at multiples of {problem.alignment}",
        ),
        (
            team_size(problem, record) <= device.sm_count,
            f"at most {device.sm_count} strips x channel blocks, got width {out_w}, {k} channels",
        ),
        (max(h, w) <= MAX_INDEX // 2, f"at most {MAX_INDEX // 2} rows and columns, got {h} x {w}"),
        (n * max(out_h, k) <= MAX_INDEX, f"at most {MAX_INDEX} result rows and channels of all images, got {n} x {max(out_h, k)}"),
        (out_h * out_w <= MAX_INDEX, f"at most {MAX_INDEX} result pixels an image, got {out_h} x {out_w}"),
        # A wide kernel's first row must reach the end of the 128-byte line that it begins in: what lies before it there is another CTA's.
        # It stores pairs.
        (
            rows_of_step(problem, record) != 1 or (out_w >= 8 * columns and out_w % 2 == 0),
            f"a result of an even number of columns, at least {8 * columns}, got {out_w}",
        ),
    ]
    if pool is not None:
        checks += [
            (
                (pool.kernel_size, pool.stride, pool.padding, pool.dilation) == ((2, 2), (2, 2), (0, 0), (1, 1)),
                f"a 2 x 2 pool with stride 2, got {pool.kernel_size} with stride {pool.stride}",
            ),
            (not pool.ceil_mode or all(i % 2 == 0 for i in problem.conv_size), "whole pooling windows, got ceil_mode on an odd size"),
            (pool.divisor_override in (None, 4), f"the mean of 4 values, got divisor_override {pool.divisor_override}"),
        ]
    unmet = next((i for i, (fits, _) in enumerate(checks) if not fits), None)
    return (len(checks), None) if unmet is None else (unmet, f"expected {checks[unmet][1]}")


def implicit_gemm_limit(problem: Problem) -> Optional[str]:
    """Why the implicit GEMM cannot compute a problem, or None. The one place that knows its limits."""
    n, _, h, w = problem.x_shape
    _, _, r, s = problem.weight_shape
    p, q = problem.conv_size
    if n * p * q > MAX_OUTPUT_PIXELS:
        return f"expected at most {MAX_OUTPUT_PIXELS} output pixels before the pool, got {n} x {p} x {q}; split the batch"
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


def headline(problem: Problem) -> str:
    """A problem in one line."""
    layout = "channels_last" if problem.channels_last else "contiguous"
    return (
        f"{problem.operator}: x {problem.x_shape} {problem.dtype}, weight {problem.weight_shape}, precision {problem.precision} "
        f"-> {problem.output_shape} {layout}"
    )


def describe(problem: Problem, selection: Selection, facts: Optional[DeviceFacts] = None) -> str:
    """The plan of a problem, the slower ones that could serve it too, and why the other candidates were rejected."""
    lines = [headline(problem) + (f" on {facts.name}" if facts else "")]
    if selection.plan:
        kernels = " -> ".join(selection.plan.kernels) or "PyTorch"
        lines.append(f"  plan: {selection.plan.name} ({kernels}): {selection.plan.reason}{_time(selection.plan)}")
    else:
        lines.append("  plan: none")
    lines += [f"  could serve too: {other.name}{_time(other)}" for other in selection.others]
    lines += [f"  rejected: {r.name}: {r.reason}" for r in selection.rejected]
    return "\n".join(lines)


def _time(plan: Plan) -> str:
    return "" if plan.expected_us is None else f"; expected to take {plan.expected_us:.4g} us"
