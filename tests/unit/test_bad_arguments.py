"""Every bad argument raises in Python before a launch, says what was expected and what came, and spoils no later call."""

from __future__ import annotations

import dataclasses
import decimal
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cutlass_ops import AvgPool2d, MaxPool2d, Operator, Vector, accuracy, operator

from .fake_driver import H200, FakeDriver, Launched, install_whole
from .records import write_folder

F32 = torch.float32


@operator(pool=AvgPool2d(2))
def unit_bad_avg(accum, v: Vector, bias: Vector = None, scale: float = 2.0):
    return (accum + bias) * v * scale


def randn(*shape, dtype=F32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


RIGHT = {"x": randn(2, 3, 9, 8), "weight": randn(4, 3, 3, 2), "v": randn(4), "bias": randn(4)}
PAIR = "to be an int or a pair of ints"
DENSE = r"to be a dense \(strided\) tensor"

#: What is changed in a right call -> the error and its message.
TABLE = [
    # tensors: kinds
    ({"x": None}, TypeError, r"expected x to be a tensor, got NoneType"),
    ({"x": np.zeros((2, 3, 9, 8), np.float32)}, TypeError, r"expected x to be a tensor, got ndarray"),
    ({"weight": [1.0]}, TypeError, r"expected weight to be a tensor, got list"),
    ({"v": None}, TypeError, r"expected a tensor for v, got None"),
    ({"v": 1.0}, TypeError, r"expected v to be a tensor, got float"),
    ({"bias": "zeros"}, TypeError, r"expected bias to be a tensor, got str"),
    ({"x": RIGHT["x"].to_sparse()}, TypeError, rf"expected x {DENSE}, got a torch.sparse_coo one; convert it first"),
    ({"weight": RIGHT["weight"].to_sparse()}, TypeError, rf"expected weight {DENSE}, got a torch.sparse_coo one; convert"),
    ({"bias": RIGHT["bias"].to_sparse()}, TypeError, rf"expected bias {DENSE}, got a torch.sparse_coo one; convert"),
    ({"x": torch.nested.nested_tensor([*RIGHT["x"]])}, TypeError, rf"expected x {DENSE}, got a nested one; convert"),
    ({"x": torch.quantize_per_tensor(RIGHT["x"], 0.1, 0, torch.quint8)}, TypeError, rf"expected x {DENSE}, got a quantized one; convert"),
    # tensors: dtypes and devices
    ({"x": RIGHT["x"].to(torch.int32)}, TypeError, r"expected x of dtype float32, .*, got torch.int32; convert it first"),
    ({"x": RIGHT["x"] > 0}, TypeError, r"expected x of dtype float32, .*, got torch.bool; convert it first"),
    ({"x": RIGHT["x"].to(torch.complex64)}, TypeError, r"expected x of dtype float32, .*, got torch.complex64; convert it first"),
    ({"x": RIGHT["x"].to(torch.float8_e4m3fn)}, TypeError, r"expected x of dtype float32, .*, got torch.float8_e4m3fn; convert it first"),
    ({"x": RIGHT["x"].half()}, TypeError, r"expected weight of x's dtype torch.float16, got torch.float32; convert one of them"),
    ({"bias": RIGHT["bias"].double()}, TypeError, r"expected bias of x's dtype torch.float32, got torch.float64; convert one of them"),
    ({"weight": RIGHT["weight"].to("meta")}, ValueError, r"expected weight on x's device cpu, got meta; move one of them"),
    ({"v": RIGHT["v"].to("meta")}, ValueError, r"expected v on x's device cpu, got meta; move one of them"),
    # tensors: shapes
    ({"x": randn(3, 9, 8)}, ValueError, r"expected x with 4 dimensions, got 3 \(shape \(3, 9, 8\)\)"),
    ({"x": randn()}, ValueError, r"expected x with 4 dimensions, got 0"),
    ({"weight": randn(4, 3, 3, 2, 1)}, ValueError, r"expected weight with 4 dimensions, got 5"),
    ({"x": randn(2, 5, 9, 8)}, ValueError, r"expected weight for x's 5 channels, got weight of shape \(4, 3, 3, 2\)"),
    ({"x": randn(2, 6, 9, 8)}, ValueError, r"for x's 6 channels, got weight of shape .*; groups other than 1 are not supported"),
    ({"v": randn(5)}, ValueError, r"expected v with 4 elements, one an output channel, got shape \(5,\)"),
    ({"v": randn()}, ValueError, r"expected v with 4 elements, one an output channel, got shape \(\)"),
    ({"bias": randn(2, 2)}, ValueError, r"expected bias with 4 elements, one an output channel, got shape \(2, 2\)"),
    ({"x": randn(2, 3, 0, 8)}, ValueError, r"expected non-empty channels, height, width and filter, got x \(2, 3, 0, 8\)"),
    ({"x": randn(2, 0, 9, 8), "weight": randn(4, 0, 3, 2)}, ValueError, r"expected non-empty channels, .*, got x \(2, 0, 9, 8\)"),
    ({"x": randn(2, 3, 2, 8)}, ValueError, r"expected a filter no larger than the padded input \(2, 8\), got \(3, 2\)"),
    # scalars
    ({"scale": "2"}, TypeError, r"expected scale to be a number, got str"),
    ({"scale": None}, TypeError, r"expected scale to be a number, got NoneType"),
    ({"scale": True}, TypeError, r"expected scale to be a number, got bool"),
    ({"scale": 1j}, TypeError, r"expected scale to be a number, got complex"),
    ({"scale": decimal.Decimal(1)}, TypeError, r"expected scale to be a number, got Decimal"),
    ({"scale": torch.tensor(2.0)}, TypeError, r"expected scale to be a number, got Tensor"),
    ({"scale": 10**400}, ValueError, r"expected scale within the range of a float, got an int beyond it"),
    # the convolution
    ({"stride": 0}, ValueError, r"expected stride of at least 1, got \(0, 0\)"),
    ({"stride": (1, -1)}, ValueError, r"expected stride of at least 1, got \(1, -1\)"),
    ({"stride": 1.0}, TypeError, rf"expected stride {PAIR}, got 1.0"),
    ({"stride": True}, TypeError, rf"expected stride {PAIR}, got True"),
    ({"stride": None}, TypeError, rf"expected stride {PAIR}, got None"),
    ({"stride": (1, 2, 3)}, TypeError, rf"expected stride {PAIR}, got \(1, 2, 3\)"),
    ({"stride": torch.tensor(1)}, TypeError, rf"expected stride {PAIR}, got tensor\(1\)"),
    ({"stride": 2**31}, ValueError, r"expected stride of at most 2147483647, got"),
    ({"padding": -1}, ValueError, r"expected padding of at least 0, got \(-1, -1\)"),
    ({"padding": "same"}, TypeError, rf"expected padding {PAIR}, got 'same'"),
    ({"padding": 10**30}, ValueError, r"expected padding of at most 2147483647, got"),
    ({"dilation": 0}, ValueError, r"expected dilation of at least 1, got \(0, 0\)"),
    ({"dilation": 5}, ValueError, r"expected a filter no larger than the padded input \(9, 8\), got \(11, 6\) \(dilation included\)"),
    # the pool
    ({"pool": 0}, ValueError, r"expected pool of at least 1, got \(0, 0\)"),
    ({"pool": None}, TypeError, rf"expected pool {PAIR}, got None"),
    ({"pool": []}, TypeError, rf"expected pool {PAIR}, got \[\]"),
    ({"pool": (8, 2)}, ValueError, r"expected a pool no larger than the convolution's result \(7, 7\), got \(8, 2\)"),
    ({"pool_stride": 0}, ValueError, r"expected pool_stride of at least 1, got \(0, 0\)"),
    ({"pool_stride": "2"}, TypeError, rf"expected pool_stride {PAIR}, got '2'"),
    ({"pool_padding": 2}, ValueError, r"expected pool_padding of at most half the pool's kernel size \(2, 2\), got \(2, 2\)"),
    ({"pool_padding": -1}, ValueError, r"expected pool_padding of at least 0, got \(-1, -1\)"),
    ({"ceil_mode": "no"}, TypeError, r"expected ceil_mode to be True or False, got 'no'"),
    ({"ceil_mode": 1}, TypeError, r"expected ceil_mode to be True or False, got 1"),
    ({"count_include_pad": None}, TypeError, r"expected count_include_pad to be True or False, got None"),
    ({"divisor_override": 0}, ValueError, r"expected a divisor_override other than 0, got 0"),
    ({"divisor_override": 0.5}, TypeError, r"expected divisor_override to be an int or None, got 0.5"),
    ({"divisor_override": 2**31}, ValueError, r"expected a divisor_override of at most 2147483647, got"),
    # precision and names
    ({"precision": "fp32"}, ValueError, r"expected precision 'tf32', 'ieee' or None, got 'fp32'"),
    ({"precision": 32}, TypeError, r"expected precision to be a string or None, got 32"),
    ({"groups": 3}, TypeError, r"got an unexpected keyword argument 'groups'; expected \(x, weight, v, bias=None, scale=2.0"),
    ({"pool_dilation": 2}, TypeError, r"got an unexpected keyword argument 'pool_dilation'; expected \("),
]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The operator and its kernels."""
    folder = tmp_path_factory.mktemp("kernels") / "unit_bad_avg"
    return Operator(unit_bad_avg, folder), write_folder(folder, "unit_bad_avg")


@pytest.fixture(params=["cpu", "gpu"])
def path(request, known, monkeypatch):
    """How the operator computes: on the CPU, or on a GPU whose driver only records; `check` makes a right call."""
    op, records = known
    expected = op(**RIGHT)
    fake = FakeDriver({r.name: r.params_size for r in records})
    if request.param == "gpu":
        install_whole(monkeypatch, fake)

    def check():
        fake.work.clear()
        y = op(**RIGHT, precision="tf32")
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
        if request.param == "gpu":
            plans = accuracy.serving(op, **RIGHT, precision="tf32", device=H200)
            assert tuple(w.kernel for w in fake.work if isinstance(w, Launched)) in {plan.kernels for plan in plans}
            fake.work.clear()
        else:
            assert torch.equal(y, expected)

    return SimpleNamespace(op=op, fake=fake, check=check)


def refuse(path, error, message, *args, **kwargs):
    loaded = list(path.fake.loaded)
    with pytest.raises(error) as caught:
        path.op(*args, **kwargs)
    assert caught.type is error
    assert re.search(message, str(caught.value))
    assert (path.fake.work, path.fake.loaded) == ([], loaded)


def name_of(change):
    return " ".join(f"{k}={type(v).__name__ if isinstance(v, (torch.Tensor, np.ndarray)) else v!r:.20}" for k, v in change.items())


@pytest.mark.parametrize(("change", "error", "message"), TABLE, ids=[f"{i}: {name_of(row[0])}" for i, row in enumerate(TABLE)])
def test_a_bad_argument_is_refused_before_any_launch_and_spoils_nothing(path, change, error, message):
    for _ in range(2):  # before and after a right call has been prepared
        refuse(path, error, message, **RIGHT | change)
        path.check()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, r"missing 2 required positional arguments: 'x' and 'weight'"),
        ((RIGHT["x"],), {}, r"missing 1 required positional argument: 'weight'"),
        ((RIGHT["x"], RIGHT["weight"]), {}, r"unit_bad_avg: missing a required argument: 'v'; expected \(x, weight, v"),
        ((*RIGHT.values(), 2.0, 1), {}, r"unit_bad_avg: too many positional arguments; expected \(x, weight, v"),
        (tuple(RIGHT.values()), {"v": RIGHT["v"]}, r"unit_bad_avg: multiple values for argument 'v'; expected"),
    ],
)
def test_a_call_that_does_not_fit_the_signature_is_refused(path, args, kwargs, message):
    for _ in range(2):
        refuse(path, TypeError, message, *args, **kwargs)
        path.check()


def test_a_right_call_is_not_taken_for_a_bad_one_that_compares_equal(path):
    """1 == True == 1.0: what is kept of a right call must not let a bad one pass, nor the other way round."""
    for value in (True, 1.0, (1, True)):
        refuse(path, TypeError, rf"expected stride {PAIR}", **RIGHT, stride=value)
        path.op(**RIGHT, stride=1)
        path.fake.work.clear()
        refuse(path, TypeError, rf"expected stride {PAIR}", **RIGHT, stride=value)


def test_a_max_pool_refuses_what_only_an_average_has(known, tmp_path):
    chain = dataclasses.replace(unit_bad_avg, name="unit_bad_max", pool=MaxPool2d(2))
    op = Operator(chain, tmp_path)
    expected = op(**RIGHT, pool_dilation=2)
    for change in ({"count_include_pad": True}, {"divisor_override": 2}):
        with pytest.raises(TypeError, match=r"unexpected keyword argument '\w+'; expected \("):
            op(**RIGHT, **change)
    with pytest.raises(ValueError, match=r"expected pool_dilation of at least 1, got \(0, 0\)"):
        op(**RIGHT, pool_dilation=0)
    assert torch.equal(op(**RIGHT, pool_dilation=2), expected)


#: The raw operator's lists, in the order of its schema.
LISTS = {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "pool": [2, 2], "pool_stride": [2, 2], "pool_padding": [1, 1]}
LISTS["pool_dilation"] = [1, 1]


def raw(**lists):
    """The operator by way of PyTorch's dispatcher, differentiated where gradients are wanted."""
    return torch.ops.cutlass_ops.unit_bad_avg(*RIGHT.values(), 2.0, *(LISTS | lists).values(), False, True, None, "tf32")


@pytest.mark.usefixtures("known")
def test_the_raw_operator_takes_lists_of_one_for_both():
    expected = raw()
    given = {name: pair[:1] for name, pair in LISTS.items()}
    assert torch.equal(raw(**given), expected)
    weight = RIGHT["weight"].clone().requires_grad_()
    y = torch.ops.cutlass_ops.conv2d(RIGHT["x"], weight, None, [1], [0], [1], None)
    y.sum().backward()
    assert torch.equal(y, torch.ops.aten.conv2d(RIGHT["x"], weight, None, [1], [0], [1]))
    assert weight.grad.shape == weight.shape


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("values", [[], [1, 1, 1]])
@pytest.mark.parametrize("name", LISTS)
def test_the_raw_operator_refuses_lists_of_other_lengths(name, values):
    with pytest.raises(ValueError, match=re.escape(f"expected {name} as a list of one or two ints, got {values}; give height and width")):
        raw(**{name: values})


def test_every_message_says_what_was_expected_and_what_came():
    for change, _, message in TABLE:
        assert "expected" in message or "for x's" in message, change
        assert "got" in message, change
