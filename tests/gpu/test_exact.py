"""Convolution with the identity chain on small integers: every plan must be exact, to the last bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cutlass_ops import conv2d, driver

from .cases import CONVOLUTION, Case, missing_values, pairwise
from .helpers import DTYPES, GENERAL_PLANS, call, expandable, generator, integers, lay_out, name_of, poisoned, reference64, serving

#: One problem more, of some thousand tiles: every CTA walks through many.
MANY_TILES = Case(
    {"n": 37, "h": 127, "w": 63, "c": 8, "k": 130, "filter": (3, 3), "stride": 1, "padding": 0, "dilation": 1}
    | {"x_layout": "contiguous", "weight_layout": "contiguous", "bias": True}
)
PROBLEMS = [*pairwise(CONVOLUTION, 60, seed=1), MANY_TILES]


def test_every_listed_value_occurs():
    assert missing_values(CONVOLUTION, PROBLEMS) == []


def test_fresh_memory_is_poisoned():
    with poisoned():
        floats = [driver.empty((1000,), (1,), d) for d in DTYPES]  # as results and workspaces are made
        words = driver.empty((1000,), (1,), torch.uint8)
    assert all(t.isnan().all() for t in floats)
    assert (words == 0xFF).all()


@pytest.fixture(scope="module", params=PROBLEMS, ids=name_of)
def problem(request):
    """Integers as fp32, and the result in float64: exact, since no sum exceeds 2^24."""
    case = request.param
    random = generator("exact", case)
    x = expandable(integers(case.x_shape, -2, 2, random), case["x_layout"])
    weight = expandable(integers(case.weight_shape, -2, 2, random), case["weight_layout"])
    bias = integers((case["k"],), -9, 9, random) if case["bias"] else None
    # Rounding takes back what an algorithm such as FFT, should cuDNN choose one for float64, adds.
    expected = reference64(conv2d, x, weight, bias, **case.arguments).round()
    return SimpleNamespace(case=case, x=x, weight=weight, bias=bias, expected=expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_conv2d_of_integers_is_exact(problem, dtype):
    x = lay_out(problem.x.to(dtype), problem.case["x_layout"])
    weight = lay_out(problem.weight.to(dtype), problem.case["weight_layout"])
    bias = None if problem.bias is None else problem.bias.to(dtype)
    arguments = problem.case.arguments | ({"precision": "tf32"} if dtype is torch.float32 else {})
    plans = serving(conv2d, x, weight, bias, **arguments)
    assert GENERAL_PLANS[dtype] <= set(plans)
    expected = problem.expected.to(dtype)
    for plan in plans:
        y = call(plan, conv2d, x, weight, bias, **arguments)
        assert y.dtype is dtype
        assert y.shape == expected.shape
        wrong = int((y != expected).sum())
        assert wrong == 0, f"{plan}: {wrong} of {y.numel()} elements differ, by up to {(y.double() - problem.expected).abs().max().item()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_default_plan_is_exact(dtype):
    """Without a forced plan and by the dispatcher's path, which torch.ops takes."""
    random = generator("default", dtype)
    x, weight = integers((3, 12, 17, 63), -2, 2, random).to(dtype), integers((7, 12, 3, 3), -2, 2, random).to(dtype)
    expected = reference64(conv2d, x, weight).round().to(dtype)
    with poisoned():
        assert torch.equal(conv2d(x, weight), expected)
        assert torch.equal(torch.ops.cutlass_ops.conv2d(x, weight, None, [1, 1], [0, 0], [1, 1], None), expected)
