"""Convolution with the identity chain on small integers: every plan must be exact, to the last bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cutlass_ops import conv2d, driver

from .cases import CONVOLUTION, FUSED, Case, fused_problems, missing_values, pairwise
from .helpers import (
    DTYPES,
    FUSED_DTYPES,
    FUSED_PLANS,
    GENERAL_PLANS,
    call,
    expandable,
    generator,
    integers,
    lay_out,
    name_of,
    poisoned,
    reference64,
    serving,
)

#: One problem more, of some thousand tiles: every CTA walks through many.
MANY_TILES = Case(
    {"n": 37, "h": 127, "w": 63, "c": 8, "k": 130, "filter": (3, 3), "stride": 1, "padding": 0, "dilation": 1}
    | {"x_layout": "contiguous", "weight_layout": "contiguous", "bias": True}
)
PROBLEMS = [*pairwise(CONVOLUTION, 60, seed=1), MANY_TILES]
FUSED_PROBLEMS = fused_problems({}, 18, seed=9)
DRAWN = {kind: len(cases) for kind, cases in FUSED_PROBLEMS.items()}  # those that follow are chosen
#: Likewise for the fused kernels, whose CTAs walk through rows: of a slice of the batch, or of steps that they claim.
MANY_ROWS = Case(MANY_TILES.values | {"h": 66, "w": 72, "c": 24, "padding": 1})
for _kind in FUSED:
    _layout = "channels_last" if "channels_last" in _kind[0] else "contiguous"
    _changes = {"x_layout": _layout, "filter": (int(_kind[1][0]),) * 2} | ({"padding": 0} if _kind[1] == "1x1" else {})
    FUSED_PROBLEMS[_kind].append(Case(MANY_ROWS.values | _changes))
    if _layout == "channels_last":  # more than 8 of the last 16 channels, and less: 141 is 8 * 16 + 13, 130 is 8 * 16 + 2
        FUSED_PROBLEMS[_kind].append(Case(MANY_ROWS.values | _changes | {"n": 7, "k": 141}))
#: Few input channels, whose results leave in runs of whole rows: two rows of a narrow image are one run, those of a wide one are not.
for _kind in (("f32", "3x3"), ("half", "3x3")):
    FUSED_PROBLEMS[_kind] += [
        Case(MANY_ROWS.values | {"n": 33, "h": 35, "w": 128, "c": 8, "k": 64, "padding": 0}),
        Case(MANY_ROWS.values | {"n": 19, "h": 34, "w": 264, "c": 12, "k": 77}),
    ]
#: Whole rows that leave in whole lines, which begin anywhere in a channel's first line and do so elsewhere in the next one's; whole
#: sets of 16 channels and others, of less than 8 and of more; rows of more than one strip; rows that are whole lines themselves.
WHOLE_ROWS = [
    Case(MANY_ROWS.values | {"n": n, "h": h, "w": w, "k": k, "padding": padding})
    for n, h, w, k, padding in (
        (19, 37, 72, 128, 0),
        (9, 50, 104, 144, 1),
        (5, 66, 128, 128, 0),
        (11, 61, 128, 128, 1),
        (13, 45, 120, 40, 0),
        (7, 41, 112, 77, 0),
        (4, 40, 264, 128, 0),
        (6, 48, 128, 128, 1),
        (5, 33, 256, 144, 1),
        (3, 45, 192, 88, 1),
        (4, 40, 136, 141, 1),  # some rows of an image are whole lines, others are not
    )
]
for _kind in (("f32", "3x3"), ("half", "3x3")):
    FUSED_PROBLEMS[_kind] += WHOLE_ROWS


def test_every_listed_value_occurs():
    assert missing_values(CONVOLUTION, PROBLEMS) == []
    assert all(missing_values(FUSED[kind], cases) == [] for kind, cases in FUSED_PROBLEMS.items())


def test_fresh_memory_is_poisoned():
    with poisoned():
        floats = [driver.empty((1000,), (1,), d) for d in DTYPES]  # as results and workspaces are made
        words = driver.empty((1000,), (1,), torch.uint8)
    assert all(t.isnan().all() for t in floats)
    assert (words == 0xFF).all()


def integer_problem(case):
    """Integers as fp32, and the result in float64: exact, since no sum exceeds 2^24."""
    random = generator("exact", case)
    x = expandable(integers(case.x_shape, -2, 2, random), case["x_layout"])
    weight = expandable(integers(case.weight_shape, -2, 2, random), case["weight_layout"])
    bias = integers((case["k"],), -9, 9, random) if case["bias"] else None
    # Rounding takes back what an algorithm such as FFT, should cuDNN choose one for float64, adds.
    expected = reference64(conv2d, x, weight, bias, **case.arguments).round()
    return SimpleNamespace(case=case, x=x, weight=weight, bias=bias, expected=expected)


def assert_exact(problem, dtype, scale=None):
    """Every plan that serves the problem gives its result to the last bit; returns their names. `scale`: of x and result, fp32."""
    x, expected = problem.x.to(dtype), problem.expected.to(dtype)
    if scale is not None:
        x, expected = x * scale, expected * scale
    x, weight = lay_out(x, problem.case["x_layout"]), lay_out(problem.weight.to(dtype), problem.case["weight_layout"])
    bias = None if problem.bias is None else problem.bias.to(dtype)
    arguments = problem.case.arguments | ({"precision": "tf32"} if dtype is torch.float32 else {})
    plans = serving(conv2d, x, weight, bias, **arguments)
    assert GENERAL_PLANS[dtype] <= set(plans)
    for plan in plans:
        y = call(plan, conv2d, x, weight, bias, **arguments)
        assert y.dtype is dtype
        assert y.shape == expected.shape
        wrong = int((y != expected).sum())
        most = (y.double() - expected.double()).abs().max().item()
        assert wrong == 0, f"{plan}: {wrong} of {y.numel()} elements differ, by up to {most}"
    return plans


@pytest.fixture(scope="module", params=PROBLEMS, ids=name_of)
def problem(request):
    return integer_problem(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_conv2d_of_integers_is_exact(problem, dtype):
    assert_exact(problem, dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for (kind, _), cases in FUSED_PROBLEMS.items() for case in cases for dtype in FUSED_DTYPES[kind]],
    ids=name_of,
)
def test_conv2d_of_integers_is_exact_in_the_fused_kernels(case, dtype):
    assert FUSED_PLANS[dtype] in assert_exact(integer_problem(case), dtype)


@pytest.mark.parametrize("width", [16, 20, 32, 40])
def test_rows_that_are_shorter_than_a_line_are_exact(width):
    """Of a filter that TMA reads for wide kernels alone (float32, 1 x 1, padding that is no multiple of 4), several rows for a CTA."""
    values = {"n": 64, "h": 20, "w": width, "k": 128, "c": 24, "padding": 1, "filter": (1, 1)}
    assert_exact(integer_problem(Case(MANY_ROWS.values | values)), torch.float32)


@pytest.mark.parametrize("exponents", [(20,), (-30,), (100,), (-100,), (0, 20, -30, 17)], ids=str)
@pytest.mark.parametrize(
    "case",
    [case for kind, cases in FUSED_PROBLEMS.items() if kind[0] == "f32" for case in (*cases[:2], *cases[DRAWN[kind] :])],
    ids=name_of,
)
def test_integers_that_fp16_cannot_hold_are_exact_in_the_fused_kernels(case, exponents):
    """Times powers of two, image by image: the steps that are computed again are right to the last bit as well."""
    problem = integer_problem(Case(case.values | {"bias": False}))
    chosen = torch.tensor([exponents[i % len(exponents)] for i in range(case["n"])], device=problem.x.device)
    scale = ((chosen + 127) << 23).to(torch.int32).view(torch.float32).view(-1, 1, 1, 1)
    assert FUSED_PLANS[torch.float32] in assert_exact(problem, torch.float32, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_default_plan_is_exact(dtype):
    """Without a forced plan and by the dispatcher's path, which torch.ops takes."""
    random = generator("default", dtype)
    x, weight = integers((3, 12, 17, 63), -2, 2, random).to(dtype), integers((7, 12, 3, 3), -2, 2, random).to(dtype)
    expected = reference64(conv2d, x, weight).round().to(dtype)
    with poisoned():
        assert torch.equal(conv2d(x, weight), expected)
        assert torch.equal(torch.ops.cutlass_ops.conv2d(x, weight, None, [1, 1], [0, 0], [1, 1], None), expected)
