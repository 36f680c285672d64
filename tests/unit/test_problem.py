"""Sizes against PyTorch, and every check with its message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from cutlass_ops import OPERATORS
from cutlass_ops.problem import (
    PoolArguments,
    check_parameters,
    check_sizes,
    check_tensors,
    conv_size,
    pair,
    pool_size,
    precision_of,
    result_channels_last,
)

from .records import problem


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@given(size=pairs(1, 40), kernel=pairs(1, 7), stride=pairs(1, 5), padding=pairs(0, 6), dilation=pairs(1, 4))
@settings(max_examples=300, deadline=None)
def test_conv_size_is_pytorchs(size, kernel, stride, padding, dilation):
    x, weight = (torch.empty(shape, device="meta") for shape in ((2, 3, *size), (4, 3, *kernel)))
    found = conv_size(x.shape, weight.shape, stride, padding, dilation)
    if min(found) < 1:
        with pytest.raises(RuntimeError):  # not of meta tensors, of which PyTorch 2.6 takes any size
            functional.conv2d(torch.zeros(x.shape), torch.zeros(weight.shape), None, stride, padding, dilation)
        with pytest.raises(ValueError, match="expected a filter no larger than the padded input"):
            check_sizes(x, weight, stride, padding, dilation, None)
    else:
        assert tuple(functional.conv2d(x, weight, None, stride, padding, dilation).shape[2:]) == found
        check_sizes(x, weight, stride, padding, dilation, None)


@given(
    kind=st.sampled_from(["avg", "max"]),
    size=pairs(1, 40),
    kernel=pairs(1, 7),
    stride=pairs(1, 8),
    padding=pairs(0, 3),
    dilation=pairs(1, 3),
    ceil_mode=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_pool_size_is_pytorchs(kind, size, kernel, stride, padding, dilation, ceil_mode):
    assume(all(2 * p <= k for p, k in zip(padding, kernel)))
    dilation = dilation if kind == "max" else (1, 1)
    pool = PoolArguments(kind, kernel, stride, padding, dilation, ceil_mode)
    x = torch.empty((1, 1, *size), device="meta")
    try:
        if kind == "max":
            expected = tuple(functional.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode).shape[2:])
        else:
            expected = tuple(functional.avg_pool2d(x, kernel, stride, padding, ceil_mode).shape[2:])
    except RuntimeError as error:
        assert "too small" in str(error)  # noqa: PT017 (hypothesis: one draw in many does not fit)
        assert min(pool_size(size, pool)) < 1
    else:
        assert pool_size(size, pool) == expected


def test_a_problem_knows_its_sizes():
    p = problem()
    assert p.conv_size == (126, 126)
    assert p.output_shape == (128, 128, 63, 63)
    assert problem(pool=None).output_shape == (128, 128, 126, 126)


@pytest.mark.parametrize(("value", "expected"), [(3, (3, 3)), ((1, 2), (1, 2)), ([4, 5], (4, 5)), ((6,), (6, 6))])
def test_pair_takes_what_pytorch_takes(value, expected):
    assert pair("stride", value) == expected


@pytest.mark.parametrize("value", [(1, 2, 3), (), (1.0, 2), (True, 1), "12"])
def test_pair_refuses_what_is_no_pair_of_ints(value):
    with pytest.raises(TypeError, match="expected stride to be an int or a pair of ints, got"):
        pair("stride", value)


@pytest.mark.parametrize("value", [1.5, None, True])
def test_pair_refuses_what_is_no_int(value):
    with pytest.raises(TypeError, match=f"expected stride to be an int or a pair of ints, got {value!r}"):
        pair("stride", value)


AVG = PoolArguments("avg", (2, 2), (2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride": (0, 1)}, r"expected stride of at least 1, got \(0, 1\)"),
        ({"padding": (0, -1)}, r"expected padding of at least 0, got \(0, -1\)"),
        ({"dilation": (1, 0)}, r"expected dilation of at least 1, got \(1, 0\)"),
        ({"pool": PoolArguments("avg", (0, 2), (1, 1))}, r"expected pool of at least 1, got \(0, 2\)"),
        ({"pool": PoolArguments("avg", (2, 2), (1, 0))}, r"expected pool_stride of at least 1, got \(1, 0\)"),
        ({"pool": PoolArguments("avg", (2, 2), (1, 1), (-1, 0))}, r"expected pool_padding of at least 0, got \(-1, 0\)"),
        ({"pool": PoolArguments("max", (2, 2), (1, 1), (0, 0), (0, 1))}, r"expected pool_dilation of at least 1, got \(0, 1\)"),
        ({"pool": PoolArguments("avg", (3, 2), (1, 1), (2, 1))}, r"at most half the pool's kernel size \(3, 2\), got \(2, 1\)"),
        ({"pool": PoolArguments("avg", (2, 2), (2, 2), divisor_override=0)}, r"expected a divisor_override other than 0, got 0"),
    ],
)
def test_parameters_that_no_tensor_could_make_right_are_refused(arguments, message):
    right = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "pool": AVG}
    check_parameters(**right)
    with pytest.raises(ValueError, match=message):
        check_parameters(**right | arguments)


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1]}, TypeError, "expected x to be a tensor, got list"),
        ({"weight": None}, TypeError, "expected weight to be a tensor, got NoneType"),
        ({"x": t(3, 8, 8)}, ValueError, r"expected x with 4 dimensions, got 3 \(shape \(3, 8, 8\)\)"),
        ({"weight": t(4, 3, 3)}, ValueError, r"expected weight with 4 dimensions, got 3"),
        ({"x": t(2, 3, 8, 8, dtype=torch.int8)}, TypeError, r"expected x of dtype float32, .*, got torch.int8; convert it first"),
        ({"weight": t(4, 3, 3, 3, dtype=torch.float16)}, TypeError, r"weight of x's dtype torch.float32, got torch.float16; convert"),
        ({"weight": t(4, 3, 3, 3, device="meta")}, ValueError, r"expected weight on x's device cpu, got meta; move one of them"),
        ({"weight": t(4, 5, 3, 3)}, ValueError, r"expected weight for x's 3 channels, got weight of shape \(4, 5, 3, 3\)$"),
        ({"weight": t(4, 1, 3, 3)}, ValueError, r"weight of shape \(4, 1, 3, 3\); groups other than 1 are not supported"),
        ({"v": None}, TypeError, "expected a tensor for v, got None"),
        ({"v": 1.0}, TypeError, "expected v to be a tensor, got float"),
        ({"v": t(3)}, ValueError, r"expected v with 4 elements, one an output channel, got shape \(3,\)"),
        ({"v": t(2, 2)}, ValueError, r"expected v with 4 elements, one an output channel, got shape \(2, 2\)"),
        ({"bias": t(4, dtype=torch.float64)}, TypeError, r"expected bias of x's dtype torch.float32, got torch.float64"),
        ({"bias": t(4, device="meta")}, ValueError, r"expected bias on x's device cpu, got meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, error, message):
    spec = OPERATORS["conv2d_min_add_mul"]
    values = {"x": t(2, 3, 8, 8), "weight": t(4, 3, 3, 3), "v": t(4, 1, 1), "bias": None}
    check_tensors(spec, values["x"], values["weight"], [values["v"], values["bias"]])
    values |= change
    with pytest.raises(error, match=message):
        check_tensors(spec, values["x"], values["weight"], [values["v"], values["bias"]])


@pytest.mark.parametrize(
    ("x", "weight", "pool", "message"),
    [
        ((1, 0, 8, 8), (4, 0, 3, 3), None, r"expected non-empty channels, .*, got x \(1, 0, 8, 8\) and weight \(4, 0, 3, 3\)"),
        ((1, 3, 8, 0), (4, 3, 3, 3), None, r"expected non-empty channels"),
        ((1, 3, 8, 8), (0, 3, 3, 3), None, r"expected non-empty channels"),
        ((1, 3, 4, 2), (4, 3, 3, 3), None, r"expected a filter no larger than the padded input \(4, 2\), got \(3, 3\)"),
        ((1, 3, 4, 3), (4, 3, 3, 3), AVG, r"expected a pool no larger than the convolution's result \(2, 1\), got \(2, 2\) with stride"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(x, weight, pool, message):
    check_sizes(t(1, 3, 8, 8), t(4, 3, 3, 3), (1, 1), (0, 0), (1, 1), AVG)
    with pytest.raises(ValueError, match=message):
        check_sizes(t(*x), t(*weight), (1, 1), (0, 0), (1, 1), pool)


def test_an_empty_batch_is_a_fitting_size():
    check_sizes(t(0, 3, 8, 8), t(4, 3, 3, 3), (1, 1), (0, 0), (1, 1), AVG)


LAYOUTS = {
    "contiguous": lambda v: v.contiguous(),
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "channels_last strides": lambda v: torch.empty(v.shape, memory_format=torch.channels_last).copy_(v),
    "window": lambda v: functional.pad(v, (1, 2, 1, 1, 0, 4))[:, : v.shape[1], 1:-1, 1:-2],
    "window of channels_last": lambda v: functional.pad(v, (1, 2, 1, 1)).contiguous(memory_format=torch.channels_last)[:, :, 1:-1, 1:-2],
    "some channels of channels_last": lambda v: functional.pad(v, (0, 0, 0, 0, 0, 4)).contiguous(memory_format=torch.channels_last)[
        :, : v.shape[1]
    ],
    "transposed": lambda v: v.transpose(2, 3).contiguous().transpose(2, 3),
    "batch inside": lambda v: v.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
    "expanded": lambda v: v[:1].expand_as(v),
}


@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("weight_layout", LAYOUTS)
@pytest.mark.parametrize(
    ("x_shape", "weight_shape"),
    [
        ((2, 3, 7, 8), (4, 3, 3, 2)),
        ((1, 3, 7, 8), (4, 3, 1, 1)),
        ((2, 1, 7, 8), (4, 1, 3, 2)),
        ((2, 3, 7, 8), (1, 3, 3, 2)),
        ((2, 3, 7, 1), (4, 3, 3, 1)),
        ((2, 3, 3, 2), (1, 3, 3, 2)),
        ((0, 3, 7, 8), (4, 3, 3, 2)),
    ],
)
def test_the_results_format_is_that_of_pytorchs_conv2d(x_shape, weight_shape, x_layout, weight_layout):
    x, weight = LAYOUTS[x_layout](t(*x_shape)), LAYOUTS[weight_layout](t(*weight_shape))
    y = functional.conv2d(x, weight)
    ours = torch.empty(y.shape, memory_format=torch.channels_last if result_channels_last(x, weight) else torch.contiguous_format)
    assert ours.stride() == y.stride()


def test_cudnn_computes_float64_as_nchw():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = (torch.empty(2, 3, 4, 5, device="cuda", memory_format=torch.channels_last) for _ in range(2))
    assert result_channels_last(x, weight)
    assert not result_channels_last(x.double(), weight.double())


# ---- precision ---------------------------------------------------------------------------------------------------


@pytest.fixture
def backends():
    """PyTorch's precision settings, put back afterwards."""
    if not hasattr(torch.backends.cudnn, "conv"):
        pytest.skip("PyTorch before 2.9 has allow_tf32 alone, which another test sets")
    b = torch.backends
    before = b.fp32_precision, b.cudnn.fp32_precision, b.cudnn.conv.fp32_precision
    yield b
    b.fp32_precision, b.cudnn.fp32_precision, b.cudnn.conv.fp32_precision = before


@pytest.mark.parametrize(
    ("everywhere", "cudnn", "conv", "expected"),
    [
        ("none", "none", "tf32", "tf32"),
        ("none", "none", "ieee", "ieee"),
        ("tf32", "tf32", "ieee", "ieee"),
        ("ieee", "ieee", "tf32", "tf32"),
        ("none", "tf32", "none", "tf32"),
        ("tf32", "ieee", "none", "ieee"),
        ("tf32", "none", "none", "tf32"),
        ("ieee", "none", "none", "ieee"),
        ("none", "none", "none", "ieee"),
    ],
)
def test_float32_takes_pytorchs_conv_setting(backends, everywhere, cudnn, conv, expected):
    backends.fp32_precision, backends.cudnn.fp32_precision, backends.cudnn.conv.fp32_precision = everywhere, cudnn, conv
    assert precision_of(t(1), None) == expected


@pytest.mark.parametrize("requested", ["tf32", "ieee", None])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_given_precision_beats_the_setting_of_any_release(monkeypatch, allowed, requested):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    assert precision_of(t(1), requested) == (requested or ("tf32" if allowed else "ieee"))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "f16"), (torch.bfloat16, "bf16"), (torch.float64, "f64")])
def test_other_dtypes_have_their_own_precision(dtype, name):
    assert precision_of(t(1, dtype=dtype), None) == name
    assert precision_of(t(1, dtype=dtype), name) == name
    with pytest.raises(ValueError, match=rf"expected precision None for {dtype} tensors \(they have one\), got 'tf32'"):
        precision_of(t(1, dtype=dtype), "tf32")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="expected precision 'tf32', 'ieee' or None, got 'TF32'"):
        precision_of(t(1), "TF32")
