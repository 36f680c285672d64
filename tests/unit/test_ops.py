"""The operators on the CPU: values against formulas written with torch.nn.functional, arguments, formats, refusals."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch.nn import functional

import cutlass_ops
from cutlass_ops import AvgPool2d, MaxPool2d, Operator, Vector, operator, use_plan
from cutlass_ops.chain import maximum

OPERATORS = [cutlass_ops.conv2d, cutlass_ops.conv2d_sub_tanh_sub_avgpool, cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul]


@operator(pool=MaxPool2d(3))
def unit_conv2d_floor_maxpool(accum, bias: Vector = None, floor: float = -0.25):
    return maximum(accum + bias, floor)


MAXPOOL = Operator(unit_conv2d_floor_maxpool)


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(dtype=torch.float64, n=2):
    """x, weight, bias, v of a small convolution."""
    return (
        randn(n, 3, 11, 9, dtype=dtype),
        randn(5, 3, 3, 2, dtype=dtype, seed=1),
        randn(5, dtype=dtype, seed=2),
        randn(5, dtype=dtype, seed=3),
    )


def formula(name, x, weight, bias=None, v=None, conv=(1, 0, 1), pool=None):
    """What an operator computes with its default scalars, independent of the package."""
    y = functional.conv2d(x, weight, bias, *conv)
    if name == "conv2d_sub_tanh_sub_avgpool":
        return functional.avg_pool2d(torch.tanh(y - 0.5) - 0.2, **{"kernel_size": 2} | (pool or {}))
    if name == "conv2d_relu_hardswish":
        y = torch.relu(y)
        return y * torch.clamp((y + 3) / 6, 0, 1)
    if name == "conv2d_min_add_mul":
        return (torch.minimum(y, torch.tensor(0.5, dtype=y.dtype)) + v.reshape(-1, 1, 1)) * 2
    if name == MAXPOOL.spec.name:
        return functional.max_pool2d(y.clamp(min=-0.25), **{"kernel_size": 3} | (pool or {}))
    return y


def call(op, x, weight, bias=None, v=None, **arguments):
    vectors = {"v": v} if any(a.name == "v" for a in op.spec.vectors) else {}
    return op(x, weight, bias=bias, **vectors, **arguments)


def assert_close(found, expected):
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


each_operator = pytest.mark.parametrize("op", [*OPERATORS, MAXPOOL], ids=lambda op: op.spec.name)


@each_operator
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_bias", [True, False])
def test_an_operator_computes_its_formula(op, dtype, with_bias):
    x, weight, bias, v = inputs(dtype)
    bias = bias if with_bias else None
    copies = [t.clone() for t in (x, weight, v)]
    found = call(op, x, weight, bias, v)
    assert found.dtype == dtype
    assert_close(found, formula(op.spec.name, x, weight, bias, v))
    assert all(torch.equal(a, b) for a, b in zip((x, weight, v), copies))


@each_operator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half_precision(op, dtype):
    tensors = inputs(dtype)
    found = call(op, *tensors)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), formula(op.spec.name, *(t.double() for t in tensors)), rtol=0.05, atol=0.05)


@each_operator
@pytest.mark.parametrize(("stride", "padding", "dilation"), [((1, 2), 0, 1), (2, (1, 0), 1), (1, (2, 3), (2, 1)), ([3], [1, 2], (1, 2))])
def test_stride_padding_and_dilation_are_the_convolutions(op, stride, padding, dilation):
    tensors = inputs()
    found = call(op, *tensors, stride=stride, padding=padding, dilation=dilation, **({"pool": 2} if op.spec.pool else {}))
    expected = formula(op.spec.name, *tensors, conv=(stride, padding, dilation), pool={"kernel_size": 2})
    assert_close(found, expected)


@pytest.mark.parametrize("kernel", [1, 3, (2, 3)])
@pytest.mark.parametrize("stride", [None, 1, (2, 3)])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pool_arguments_are_pytorchs(kernel, stride, padding, ceil_mode):
    if kernel == 1 and padding:
        with pytest.raises(ValueError, match="expected pool_padding of at most half"):
            call(MAXPOOL, *inputs(), pool=kernel, pool_padding=padding)
        return
    shared = {"pool": kernel, "pool_stride": stride, "pool_padding": padding, "ceil_mode": ceil_mode}
    theirs = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode}
    for include, divisor in itertools.product([True, False], [None, 3]):
        own = {"count_include_pad": include, "divisor_override": divisor}
        op = cutlass_ops.conv2d_sub_tanh_sub_avgpool
        assert_close(call(op, *inputs(), **shared, **own), formula(op.spec.name, *inputs(), pool=theirs | own))
    for dilation in (1, 2, (1, 2)):
        found = call(MAXPOOL, *inputs(), **shared, pool_dilation=dilation)
        assert_close(found, formula(MAXPOOL.spec.name, *inputs(), pool=theirs | {"dilation": dilation}))


@each_operator
def test_scalars_are_arguments_by_position_and_name(op):
    if not op.spec.scalars:
        assert call(op, *inputs()).shape[1] == 5
        return
    x, weight, bias, v = inputs()
    vectors = [bias if a.name == "bias" else v for a in op.spec.vectors]
    values = [6.0 * (i + 1) for i in range(len(op.spec.scalars))]
    # The shipped chains take vectors before scalars.
    by_position = op(x, weight, *vectors, *values)
    by_name = op(x, weight, *vectors, **dict(zip((a.name for a in op.spec.scalars), values)))
    assert torch.equal(by_position, by_name)
    assert not torch.equal(by_position, op(x, weight, *vectors))


def test_scalars_enter_where_the_formula_has_them():
    x, weight, bias, v = inputs()
    found = cutlass_ops.conv2d_min_add_mul(x, weight, v, bias, constant=-0.5, scale=3)
    y = functional.conv2d(x, weight, bias).clamp(max=-0.5)
    assert_close(found, (y + v.reshape(-1, 1, 1)) * 3)
    found = cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, weight, bias, subtract1=-1, subtract2=2.5)
    assert_close(found, functional.avg_pool2d(torch.tanh(functional.conv2d(x, weight, bias) + 1) - 2.5, 2))


@pytest.mark.parametrize("shape", [(5,), (5, 1, 1), (1, 5, 1, 1)])
def test_a_vector_may_have_any_shape_of_k_elements(shape):
    x, weight, bias, v = inputs()
    found = cutlass_ops.conv2d_min_add_mul(x, weight, v.reshape(shape), bias)
    assert torch.equal(found, cutlass_ops.conv2d_min_add_mul(x, weight, v, bias))


@each_operator
@pytest.mark.parametrize("which", ["neither", "x", "weight", "both"])
def test_the_result_is_channels_last_where_an_input_is(op, which):
    x, weight, bias, v = inputs()
    if which in ("x", "both"):
        x = x.contiguous(memory_format=torch.channels_last)
    if which in ("weight", "both"):
        weight = weight.contiguous(memory_format=torch.channels_last)
    found = call(op, x, weight, bias, v)
    memory_format = torch.contiguous_format if which == "neither" else torch.channels_last
    assert found.is_contiguous(memory_format=memory_format)
    assert_close(found, formula(op.spec.name, x, weight, bias, v).contiguous(memory_format=memory_format))


@each_operator
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_an_empty_batch_gives_an_empty_result(op, memory_format):
    tensors = [t.contiguous(memory_format=memory_format) if t.dim() == 4 else t for t in inputs(n=0)]
    found = call(op, *tensors)
    assert found.shape == (0, *call(op, *inputs()).shape[1:])


@each_operator
def test_nan_and_infinity_pass_as_in_pytorch(op):
    x, weight, bias, v = inputs()
    x[0, 0, 0, 0], x[1, 1, 5, 5] = float("nan"), float("inf")
    torch.testing.assert_close(call(op, x, weight, bias, v), formula(op.spec.name, x, weight, bias, v), equal_nan=True)


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        (
            (None, 0.5, 0.2, 2),
            {},
            TypeError,
            r"conv2d_sub_tanh_sub_avgpool: too many positional arguments; expected \(x, weight, bias=None",
        ),
        ((), {"strides": 1}, TypeError, "got an unexpected keyword argument 'strides'; expected"),
        ((None,), {"bias": None}, TypeError, "multiple values for argument 'bias'"),
        ((), {"pool_dilation": 1}, TypeError, "unexpected keyword argument 'pool_dilation'"),
        ((), {"subtract1": "1"}, TypeError, "expected subtract1 to be a number, got str"),
        ((), {"subtract1": True}, TypeError, "expected subtract1 to be a number, got bool"),
        ((), {"subtract2": None}, TypeError, "expected subtract2 to be a number, got NoneType"),
        ((), {"stride": (1, 2, 3)}, TypeError, r"expected stride to be an int or a pair of ints, got \(1, 2, 3\)"),
        ((), {"padding": "same"}, TypeError, "expected padding to be an int or a pair of ints, got 'same'"),
        ((), {"padding": (1.0, 1)}, TypeError, "expected padding to be an int or a pair of ints"),
        ((), {"dilation": 0}, ValueError, r"expected dilation of at least 1, got \(0, 0\)"),
        ((), {"pool": 0}, ValueError, r"expected pool of at least 1, got \(0, 0\)"),
        ((), {"pool": 99}, ValueError, r"expected a pool no larger than the convolution's result \(9, 8\), got \(99, 99\)"),
        ((), {"divisor_override": 0}, ValueError, "expected a divisor_override other than 0"),
        ((), {"divisor_override": 1.5}, TypeError, "expected divisor_override to be an int or None, got 1.5"),
        ((), {"precision": "fp32"}, ValueError, "expected precision None for torch.float64 tensors"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, keywords, error, message):
    x, weight, _, _ = inputs()
    with pytest.raises(error, match=message):
        cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, weight, *arguments, **keywords)


@pytest.mark.parametrize("value", [True, 1.0])
def test_a_value_that_equals_a_known_one_is_still_refused(value):
    x, weight, _, _ = inputs()
    cutlass_ops.conv2d(x, weight, stride=1)
    with pytest.raises(TypeError, match="stride"):
        cutlass_ops.conv2d(x, weight, stride=value)


def test_a_required_vector_is_required():
    x, weight, _, _ = inputs()
    with pytest.raises(TypeError, match="conv2d_min_add_mul: missing a required argument: 'v'"):
        cutlass_ops.conv2d_min_add_mul(x, weight)


def test_help_says_what_an_operator_computes_and_what_a_call_takes():
    shown = cutlass_ops.conv2d.__doc__
    assert shown.startswith("Convolution with bias, as torch.nn.functional.conv2d.")
    assert "- x: tensor (N, C, H, W)" in shown
    assert "spec:" not in shown  # an argument of the class
    assert "pool_stride" in str(inspect.signature(cutlass_ops.conv2d_sub_tanh_sub_avgpool))


def test_a_name_can_be_registered_only_once():
    with pytest.raises(ValueError, match=r"got 'conv2d' of cutlass_ops .*, which is registered already, by cutlass_ops .*; rename"):
        Operator(cutlass_ops.OPERATORS["conv2d"])


def test_use_plan_refuses_unknown_plans_and_ends_with_its_block():
    with pytest.raises(ValueError, match=r"expected a plan among .*two-kernel-f16-guarded, .*, pytorch, got 'fast'"), use_plan("fast"):
        pass
    x, weight, _, _ = inputs()
    h200 = cutlass_ops.DeviceFacts("H200", (9, 0), 132)
    with use_plan("pytorch"):
        with use_plan("two-kernel-f16"):
            assert "plan: none" in cutlass_ops.conv2d.explain(x, weight, device=h200)
        assert "plan: pytorch" in cutlass_ops.conv2d.explain(x, weight, device=h200)


# ---- chains that an operator must survive ------------------------------------------------------------------------


@operator(pool=AvgPool2d(1))
def unit_conv2d_in_place(accum, bias: Vector):
    bias += 1.0
    return accum + bias


@operator()
def unit_conv2d_function_of_a_vector(accum, bias: Vector = None):
    return accum + maximum(bias, 0.5)


def test_a_chain_that_works_in_place_leaves_the_callers_tensors_alone():
    x, weight, bias, _ = inputs()
    before = bias.clone()
    found = Operator(unit_conv2d_in_place)(x, weight, bias)
    assert torch.equal(bias, before)
    assert_close(found, functional.conv2d(x, weight, before + 1))


def test_an_absent_vector_is_zero_wherever_the_chain_uses_it():
    x, weight, _, _ = inputs()
    found = Operator(unit_conv2d_function_of_a_vector)(x, weight)
    assert_close(found, functional.conv2d(x, weight) + 0.5)
