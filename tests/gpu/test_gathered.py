"""Rows of x that TMA cannot read, which fused kernels gather: the same bits as of the same values where TMA can."""

from __future__ import annotations

import itertools

import pytest
import torch

import cutlass_ops
from cutlass_ops import accuracy, conv2d, conv2d_sub_tanh_sub_avgpool

from .helpers import FUSED_PLANS, activation, assert_same_bits, call, filters, generator, integers, name_of, reference64, vectors

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: x, weight and padding of every fused NCHW kernel: many CTAs with several steps each, strips and blocks with remainders.
PROBLEMS = {
    "3 x 3": ((9, 40, 34, 136), (130, 40, 3, 3), 0),
    "3 x 3, padded": ((9, 64, 33, 72), (72, 64, 3, 3), 1),
    "few channels": ((35, 5, 37, 144), (70, 5, 3, 3), 1),
    "few channels, narrow": ((40, 16, 20, 24), (64, 16, 3, 3), 2),
    "12 channels": ((30, 12, 21, 64), (64, 12, 3, 3), 0),
    "60 channels": ((9, 60, 21, 64), (64, 60, 3, 3), 1),
    "1 x 1": ((16, 24, 40, 56), (136, 24, 1, 1), 0),
    "1 x 1, padded": ((16, 64, 21, 104), (40, 64, 1, 1), 8),
}
each_problem = pytest.mark.parametrize("name", PROBLEMS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
each_operator = pytest.mark.parametrize("op", [conv2d, conv2d_sub_tanh_sub_avgpool], ids=name_of)


def beside(x, elements=2):
    """The same values, dense, so many elements behind a 16-byte boundary, between NaN."""
    return x.new_full((x.numel() + elements + 8,), float("nan"))[elements:-8].view(x.shape).copy_(x)


def inputs(op, name, dtype):
    x_shape, weight_shape, padding = PROBLEMS[name]
    random = generator(op.spec.name, name, dtype)
    x, weight = activation(x_shape, dtype, random), filters(weight_shape, dtype, random)
    arguments = {"padding": padding} | ({"precision": "tf32"} if dtype is torch.float32 else {})
    return x, [weight, *vectors(op, weight_shape[0], dtype, random)], arguments


@each_operator
@each_dtype
@each_problem
def test_results_are_those_of_the_same_values_that_tma_reads(op, dtype, name):
    x, others, arguments = inputs(op, name, dtype)
    expected = call(FUSED_PLANS[dtype], op, x, *others, **arguments)
    call(
        FUSED_PLANS[dtype],
        conv2d,
        torch.full((40, 64, 16, 64), float("nan"), device="cuda", dtype=dtype),
        others[0].new_zeros(64, 64, 3, 3),
    )
    for elements in (1, 2, 3, 4, 6):
        found = [call(FUSED_PLANS[dtype], op, beside(x, elements), *others, **arguments) for _ in range(3)]
        for y in found:
            assert_same_bits(y, expected)


@each_operator
@each_problem
def test_values_that_fp16_cannot_hold_are_computed_again(op, name):
    x, others, arguments = inputs(op, name, torch.float32)
    some = x.clone()
    some[0, 0, 0, 0], some[len(x) // 2, -1, -1, -1], some[-1, 0, 7, 5] = 1e6, float("inf"), float("nan")
    for changed in (x * 1e6, x * 1e-9, some):
        expected = call("fused-f16", op, changed, *others, **arguments)
        for elements in (1, 2):
            assert_same_bits(call("fused-f16", op, beside(changed, elements), *others, **arguments), expected)


@each_dtype
@pytest.mark.parametrize("channels", [3, 16, 64])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 7, 14, 15, 30, 62, 63, 65, 66, 67, 98, 126, 127, 129, 130, 190, 225, 254, 255])
@pytest.mark.parametrize("padding", [1, 2, 3])
def test_rows_of_any_width_are_exact(dtype, channels, width, padding):
    random = generator("widths", dtype, channels, width, padding)
    x, weight = integers((5, channels, 19 + padding, width), -2, 2, random), integers((66, channels, 3, 3), -2, 2, random)
    expected = reference64(conv2d, x, weight, padding=padding)
    x, weight = x.to(dtype), weight.to(dtype)
    for values in (x, beside(x, 1)):
        assert torch.equal(call(FUSED_PLANS[dtype], conv2d, values, weight, padding=padding), expected.round().to(dtype))


each_padded_width = pytest.mark.parametrize(
    ("width", "padding"), [*itertools.product([1, 4, 7, 14, 16, 20, 58, 60, 64, 126, 127, 128, 131], [1, 2, 3, 5, 6])]
)


@pytest.mark.parametrize("factor", [1, 1e6])
@each_padded_width
def test_1_x_1_filters_of_float32_with_any_padding(width, padding, factor):
    """Kernels that do not begin early: also where TMA could read rows that begin elsewhere. Times a power of ten, computed again."""
    random = generator("1 x 1", width, padding, factor)
    x, weight = activation((9, 40, 21, width), torch.float32, random) * factor, filters((136, 40, 1, 1), torch.float32, random)
    for op in (conv2d, conv2d_sub_tanh_sub_avgpool):
        arguments = {"padding": padding, "precision": "tf32"}
        others = [weight, *vectors(op, 136, torch.float32, random)]
        for moved in (x, beside(x, 1), beside(x, 2)):
            found = accuracy.Criterion(op, x, *others, **arguments).judge(call("fused-f16", op, moved, *others, **arguments))
            assert found.passed, found


@each_dtype
@each_padded_width
def test_1_x_1_filters_with_any_padding_are_exact(dtype, width, padding):
    random = generator("1 x 1, exact", dtype, width, padding)
    x, weight = integers((5, 40, 21, width), -2, 2, random), integers((66, 40, 1, 1), -2, 2, random)
    expected = reference64(conv2d, x, weight, padding=padding).round().to(dtype)
    x, weight = x.to(dtype), weight.to(dtype)
    arguments = {"padding": padding} | ({"precision": "tf32"} if dtype is torch.float32 else {})
    for values in (x, beside(x, 1), beside(x, 2)):
        assert torch.equal(call(FUSED_PLANS[dtype], conv2d, values, weight, **arguments), expected)


@each_dtype
@pytest.mark.parametrize("channels", [3, 16, 64])
@pytest.mark.parametrize(("width", "padding"), [(1, 2), (3, 1), *itertools.product((7, 15, 63, 65, 127, 225), (0, 1, 2))])
def test_rows_of_any_odd_width_before_a_pool(dtype, channels, width, padding):
    op, random = conv2d_sub_tanh_sub_avgpool, generator("odd", dtype, channels, width, padding)
    x, weight = activation((5, channels, 19, width), dtype, random), filters((66, channels, 3, 3), dtype, random)
    arguments = {"padding": padding} | ({"precision": "tf32"} if dtype is torch.float32 else {})
    found = accuracy.Criterion(op, x, weight, **arguments).judge(call(FUSED_PLANS[dtype], op, x, weight, **arguments))
    assert found.passed, found


@each_dtype
@pytest.mark.parametrize(("channels", "padding"), [(33, 0), (33, 1), (7, 0), (7, 1)])
@pytest.mark.parametrize("op", [conv2d, conv2d_sub_tanh_sub_avgpool], ids=name_of)
def test_images_of_an_odd_number_of_elements(op, dtype, channels, padding):
    """A CTA crosses images: where the next begins is odd where the one before was even."""
    random = generator("odd images", op.spec.name, dtype, channels, padding)
    x, weight = activation((40, channels, 21, 63), dtype, random), filters((66, channels, 3, 3), dtype, random)
    arguments = {"padding": padding} | ({"precision": "tf32"} if dtype is torch.float32 else {})
    others = [weight, *vectors(op, 66, dtype, random)]
    found = accuracy.Criterion(op, x, *others, **arguments).judge(call(FUSED_PLANS[dtype], op, x, *others, **arguments))
    assert found.passed, found


@pytest.mark.parametrize("channels", [12, 40])
def test_odd_rows_without_a_pool_are_computed_again(channels):
    random = generator("odd, again", channels)
    x, weight = activation((33, channels, 36, 127), torch.float32, random) * 1e6, filters((40, channels, 3, 3), torch.float32, random)
    found = accuracy.Criterion(conv2d, x, weight, precision="tf32").judge(call("fused-f16", conv2d, x, weight, precision="tf32"))
    assert found.passed, found


@each_dtype
def test_a_second_layer_takes_one_kernel_too(dtype):
    """Problem 46's result has rows of 63 columns."""
    op = conv2d_sub_tanh_sub_avgpool
    first, second = (cutlass_ops.FusedConv2d(op, c, 64, 3).to("cuda", dtype) for c in (3, 64))
    with torch.no_grad():
        hidden = first(torch.rand(16, 3, 128, 128, device="cuda").to(dtype))
        assert hidden.shape[-1] == 63
        arguments = {"precision": "tf32"} if dtype is torch.float32 else {}
        assert f"plan: {FUSED_PLANS[dtype]}" in op.explain(hidden, second.conv.weight, second.conv.bias, **arguments)
        expected = reference64(op, hidden, second.conv.weight, second.conv.bias)
        torch.testing.assert_close(second(hidden).double(), expected, atol=5e-3 if dtype is torch.bfloat16 else 2e-3, rtol=0)
