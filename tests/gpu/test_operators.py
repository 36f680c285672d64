"""The operators of KernelBench against float64, on random data; `cutlass_ops.accuracy.Criterion` derives the limits."""

from __future__ import annotations

import random as python_random

import pytest
import torch

import cutlass_ops
from cutlass_ops import accuracy, reference

from .cases import CONVOLUTION, FUSED, FUSED_POOL, POOL, Case, fused_problems, missing_values, pairwise
from .helpers import (
    DTYPES,
    FUSED_DTYPES,
    FUSED_PLANS,
    GENERAL_PLANS,
    SEED,
    activation,
    call,
    errors,
    expandable,
    filters,
    generator,
    lay_out,
    name_of,
    reference64,
    serving,
    vectors,
)

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
PLAIN = (cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul)
PROBLEMS = {
    POOLED: pairwise(CONVOLUTION | POOL, 48, seed=2),
    **{op: pairwise(CONVOLUTION, 20, seed) for seed, op in enumerate(PLAIN, 3)},
}
OPERATORS = (cutlass_ops.conv2d, POOLED, *PLAIN)
FUSED_PROBLEMS = {op: fused_problems(FUSED_POOL if op is POOLED else {}, 15, seed) for seed, op in enumerate(OPERATORS, 5)}


def test_every_listed_value_occurs():
    assert missing_values(CONVOLUTION | POOL, PROBLEMS[POOLED]) == []
    for op in OPERATORS:
        for kind, cases in FUSED_PROBLEMS[op].items():
            assert missing_values(FUSED[kind] | (FUSED_POOL if op is POOLED else {}), cases) == []
    for op in PLAIN:
        assert missing_values(CONVOLUTION, PROBLEMS[op]) == []


def check(op, case: Case, dtype):
    """Every plan that serves the case is accurate; returns their names."""
    random = generator(op.spec.name, case, dtype)
    x = lay_out(expandable(activation(case.x_shape, dtype, random), case["x_layout"]), case["x_layout"])
    weight = lay_out(expandable(filters(case.weight_shape, dtype, random), case["weight_layout"]), case["weight_layout"])
    given = dict(zip((a.name for a in op.spec.vectors), vectors(op, case["k"], dtype, random)))
    if not case["bias"]:
        given["bias"] = None
    number = python_random.Random(f"{SEED} {case}")  # noqa: S311
    given |= {a.name: a.default * number.uniform(0.5, 1.5) for a in op.spec.scalars}
    given |= case.arguments | ({"precision": "tf32"} if dtype is torch.float32 else {})
    plans = serving(op, x, weight, **given)
    assert GENERAL_PLANS[dtype] <= set(plans)
    criterion = accuracy.Criterion(op, x, weight, **given)
    for plan in plans:
        found = criterion.judge(call(plan, op, x, weight, **given))
        assert found.passed, f"{plan}: {found}"
    return plans


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, cases in PROBLEMS.items() for case in cases], ids=name_of)
def test_operator_is_accurate(op, case, dtype):
    check(op, case, dtype)


@pytest.mark.parametrize(
    ("op", "case", "dtype"),
    [
        (op, case, dtype)
        for op, problems in FUSED_PROBLEMS.items()
        for (kind, _), cases in problems.items()
        for case in cases
        for dtype in FUSED_DTYPES[kind]
    ],
    ids=name_of,
)
def test_problems_of_the_fused_kernels_are_accurate(op, case, dtype):
    assert FUSED_PLANS[dtype] in check(op, case, dtype)


@pytest.mark.parametrize(
    ("op", "x_shape", "k"),
    [
        (POOLED, (16, 64, 128, 128), 128),  # its own batch is 128
        (cutlass_ops.conv2d_relu_hardswish, (128, 8, 128, 128), 64),
        (cutlass_ops.conv2d_min_add_mul, (128, 64, 128, 128), 128),
    ],
    ids=name_of,
)
def test_kernelbench_sizes_are_as_accurate_as_eager_tf32(op, x_shape, k):
    random = generator("kernelbench", op.spec.name)
    x, weight = activation(x_shape, torch.float32, random), filters((k, x_shape[1], 3, 3), torch.float32, random)
    given = vectors(op, k, torch.float32, random)
    with reference.convolutions("tf32"):
        bound, scalars, parameters = op.arguments.bind(given, {})
        eager = op._reference(x, weight, bound, scalars, parameters)
    expected = torch.cat([reference64(op, images, weight, *given) for images in x.split(16)])
    eager_max, eager_mean = errors(eager, expected)
    # For few channels cuDNN may choose an algorithm in true fp32, which no TF32 result comes close to.
    eager_is_tf32 = eager_mean > 1e-6
    assert eager_is_tf32 or op is not POOLED
    for plan in serving(op, x, weight, *given, precision="tf32"):
        y = call(plan, op, x, weight, *given, precision="tf32")
        if not eager_is_tf32:
            assert accuracy.Criterion(op, x[:16], weight, *given, precision="tf32").judge(y[:16]).passed, plan
            continue
        found_max, found_mean = errors(y, expected)
        assert found_max <= 1.05 * eager_max, plan
        assert found_mean <= 1.05 * eager_mean, plan
        torch.testing.assert_close(y, eager, atol=1e-4, rtol=1e-4, msg=lambda text, plan=plan: f"{plan}: {text}")


def test_the_criterion_refuses_what_is_not_accurate():
    """Truncated TF32 operands, one wrong element, one NaN; for fp16 an error of two places."""
    op = POOLED
    random = generator("criterion")
    x, weight = activation((4, 32, 30, 30), torch.float32, random), filters((16, 32, 3, 3), torch.float32, random)
    bias = vectors(op, 16, torch.float32, random)[0]
    criterion = accuracy.Criterion(op, x, weight, bias)
    exact = criterion.reference.float()
    assert criterion.judge(exact).passed

    def truncate(t):
        return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)

    truncated = reference64(op, truncate(x), truncate(weight), bias).float()
    assert not criterion.judge(truncated).passed
    for wrong in (float("nan"), float("inf"), exact[0, 0, 0, 0].item() + 0.01):
        y = exact.clone()
        y[1, 2, 3, 4] = wrong
        assert not criterion.judge(y).passed
    half = accuracy.Criterion(op, x.half(), weight.half(), bias.half())
    assert half.judge(half.reference.half()).passed
    assert not half.judge((half.reference * 1.002).half()).passed
