"""fp16 operands in place of TF32 ones: values that fp16 cannot hold are noticed on the device and served by TF32 operands."""

from __future__ import annotations

import math

import pytest
import torch

from cutlass_ops import accuracy, conv2d, conv2d_sub_tanh_sub_avgpool, use_plan

from .helpers import DEVICE, activation, assert_same_bits, call, filters, generator, name_of, serving

TF32 = "two-kernel-tf32"
GUARDED = "two-kernel-f16-guarded"  # the other plans with fp16 operands are of fused kernels
X, WEIGHT = (3, 24, 18, 20), (40, 24, 3, 3)
#: Problems of the other fused kernels of fp32 tensors; padding 1 has one of its own in NCHW.
OTHERS = {
    "few channels": ((33, 12, 36, 128), (40, 12, 3, 3), 0),  # several claims for a CTA
    "1 x 1": (X, (40, 24, 1, 1), 0),
    "padded": (X, WEIGHT, 1),
    "wide": ((40, 24, 18, 104), (48, 24, 3, 3), 0),  # several rows for a CTA
    "wide, 1 x 1": ((40, 24, 18, 104), (48, 24, 1, 1), 0),
    "channels_last": ((40, 24, 18, 104), (48, 24, 3, 3), 0),
    "channels_last, few channels": ((3, 12, 18, 20), (40, 12, 3, 3), 1),
    "channels_last, 1 x 1": (X, (40, 24, 1, 1), 0),
}
CENTRE, CORNERS = (1, 11, 9, 10), ((0, 0, 0, 0), (-1, -1, -1, -1), (0, -1, -1, 0), (-1, 0, 0, -1))
each_operator = pytest.mark.parametrize("op", [conv2d, conv2d_sub_tanh_sub_avgpool], ids=name_of)
each_layout = pytest.mark.parametrize("layout", ["contiguous", "channels_last"])


def with_one(value, where=CENTRE):
    """A change that puts a value into one place."""

    def change(tensor):
        changed = tensor.clone()
        changed[where] = value
        return changed

    return change


def with_every(step, value):
    """A change that puts a value into every step-th place."""

    def change(tensor):
        changed = tensor.clone()
        changed.view(-1)[::step] = value
        return changed

    return change


def pixel(value):
    return with_one(value, (1, slice(None), 9, 10))


def scaled(factor):
    """A change that multiplies. A tie, which kernels and criterion round to different sides, could move the largest error by 10 %."""
    return lambda tensor: accuracy.without_ties(tensor * factor)


MISFITTING_X = {
    "times 1e5": scaled(1e5),
    "times 1e-6": scaled(1e-6),
    "times 1e30": scaled(1e30),
    "times 1e-40": scaled(1e-40),  # all subnormal
    "one pixel of 1e6": pixel(1e6),
    "one value beyond fp16": with_one(65504.004),
    "one value of -1e30": with_one(-1e30),
    "infinity": with_one(math.inf),
    "-infinity": with_one(-math.inf),
    "NaN": with_one(math.nan),
    "a pixel of NaN and infinity": lambda x: with_one(math.nan, (1, 0, 9, 10))(pixel(math.inf)(x)),
    **{f"NaN at {where}": with_one(math.nan, where) for where in CORNERS},
    **{f"1e6 at {where}": with_one(1e6, where) for where in CORNERS},
    "rows of 1e6 and of 1e-7": lambda x: scaled(
        torch.tensor([1e6, 1e6, 1e6, 1e-7, 1e-7, 1e-7], device=DEVICE).repeat(x.shape[2] // 6)[:, None]
    )(x),
    "columns of 1e30 and of 1e-30": lambda x: scaled(torch.tensor([1e30, 1e-30, 1.0, 1.0], device=DEVICE).repeat(x.shape[3] // 4))(x),
    "a pixel of 1e-7 in an empty image": lambda x: pixel(1e-7)(x * 0),
    "an image of 1e-7 with a pixel of one": lambda x: pixel(1.0)(scaled(1e-7)(x)),
}
FITTING_X = {
    "as it is": scaled(1.0),
    "negative": scaled(-1.0),
    "zero": scaled(0.0),
    "times 65504": scaled(65503.0),
    "times 2^-4": scaled(2.0**-4),
    "one value of 65504": with_one(65504.0),
    "some subnormals": with_every(7, 1e-40),
    "some of 1e-7": with_every(5, 1e-7),
}
W = (7, 11, 1, 2)
MISFITTING_WEIGHT = {
    "times 1e6": scaled(1e6),
    "times 1e-7": scaled(1e-7),
    "one of 1e6": with_one(1e6, W),
    "one of -1e20": with_one(-1e20, W),
    "one of infinity": with_one(math.inf, W),
    "one of NaN": with_one(math.nan, W),
    "the last of 1e6": with_one(1e6, (-1, -1, -1, -1)),
}
FITTING_WEIGHT = {
    "as it is": scaled(1.0),
    "zero": scaled(0.0),
    "one of 1e-7": with_one(1e-7, W),
    "one of 65504": with_one(65504.0, W),
    "one subnormal": with_one(1e-40, W),
}


def in_layout(x, name):
    """x as the name of a problem says."""
    return x.contiguous(memory_format=torch.channels_last) if name.startswith("channels_last") else x


def inputs(op, key, change_x=None, change_weight=None, shapes=(X, WEIGHT), layout="contiguous"):
    """x and weight (no bias, which could hide small results), changed; and the guarded plans that serve them."""
    random = generator(op.spec.name, key)
    x, weight = (make(shape, torch.float32, random) for make, shape in zip((activation, filters), shapes))
    x, weight = change_x(x) if change_x else x, change_weight(weight) if change_weight else weight
    tensors = [in_layout(x, layout), weight]
    plans = guarded(op, tensors)
    assert GUARDED in plans
    return tensors, plans


def guarded(op, tensors):
    """The plans that serve a call with fp16 operands behind a guard."""
    return [plan for plan in serving(op, *tensors, precision="tf32") if plan != TF32]


def assert_accurate(op, tensors, plans, **arguments):
    criterion = accuracy.Criterion(op, *tensors, **arguments)
    for plan in plans:
        found = criterion.judge(call(plan, op, *tensors, precision="tf32", **arguments))
        assert found.passed, f"{plan}: {found}"


@each_operator
@pytest.mark.parametrize("change", MISFITTING_X)
def test_x_that_does_not_fit_is_served_by_tf32_operands(op, change):
    """NaN and infinity exactly where float64 has them (see `difference`); the guarded plan bit for bit as the TF32 plan."""
    tensors, plans = inputs(op, change, change_x=MISFITTING_X[change])
    assert_same_bits(call(GUARDED, op, *tensors, precision="tf32"), call(TF32, op, *tensors, precision="tf32"))
    assert_accurate(op, tensors, [*plans, TF32])


@each_operator
@pytest.mark.parametrize("problem", OTHERS)
@pytest.mark.parametrize("change", MISFITTING_X)
def test_each_fused_kernel_computes_what_does_not_fit_again(op, problem, change):
    *shapes, padding = OTHERS[problem]
    tensors, _ = inputs(op, (change, problem), change_x=MISFITTING_X[change], shapes=shapes, layout=problem)
    assert "fused-f16" in serving(op, *tensors, precision="tf32", padding=padding)
    assert_accurate(op, tensors, ["fused-f16"], padding=padding)


@each_operator
@pytest.mark.parametrize("change", FITTING_X)
def test_x_that_fits_is_as_accurate_as_eager_tf32(op, change):
    tensors, plans = inputs(op, change, change_x=FITTING_X[change])
    assert_accurate(op, tensors, [*plans, TF32])


@each_operator
@pytest.mark.parametrize("change", MISFITTING_WEIGHT)
def test_weights_that_do_not_fit_are_served_by_tf32_operands(op, change):
    """The fused kernel scales its weights, so they always fit; it must be accurate."""
    # tanh of a million tells nothing but signs, of which those of sums near zero are chance.
    smaller = scaled(1e-6) if change == "times 1e6" and op is conv2d_sub_tanh_sub_avgpool else None
    tensors, plans = inputs(op, change, change_x=smaller, change_weight=MISFITTING_WEIGHT[change])
    assert_same_bits(call(GUARDED, op, *tensors, precision="tf32"), call(TF32, op, *tensors, precision="tf32"))
    assert_accurate(op, tensors, [*plans, TF32])


@each_operator
@pytest.mark.parametrize("change", FITTING_WEIGHT)
def test_weights_that_fit_are_as_accurate_as_eager_tf32(op, change):
    tensors, plans = inputs(op, change, change_weight=FITTING_WEIGHT[change])
    assert_accurate(op, tensors, [*plans, TF32])


# ---- which operands did the work ---------------------------------------------------------------------------------

SMALL = 2.0**-20  # in fp16 the neighbours of SMALL are 2^-24 away, in TF32 2^-30


def witness(channels=8):
    """x and weight for which TF32 operands give SMALL * (1 + 2^-10) in y[0, :, 0, 0], and fp16 ones SMALL.

    Ones elsewhere, also at the same pixels, so that no patch is too small for fp16.
    """
    x = torch.ones(2, channels, 18, 20, device=DEVICE)
    x[0, 0, 1:3, 1:3] = SMALL * (1 + 2.0**-10)
    weight = torch.zeros(16, channels, 3, 3, device=DEVICE)
    weight[:, 0, 1, 1] = 1
    return x, weight


def operands(plan, op, x, weight, run):
    """The operand type that a call worked with, by the first 16 output channels."""
    zeros = {a.name: 0.0 for a in op.spec.scalars}
    y = run(plan, op, x, weight, **zeros, precision="tf32")
    excess = (y[0, :16, 0, 0].double() / SMALL - 1) * 2**10  # tanh.approx is good to 2^-16
    if (excess.abs() < 0.1).all():
        return "f16"
    assert ((excess - 1).abs() < 0.1).all(), f"expected 0 (fp16) or 1 (TF32), got {excess.tolist()}"
    return "tf32"


def call_in_used_memory(plan, op, *args, **kwargs):
    """A call whose workspace holds what the call before left in it, the flag too."""
    with use_plan(plan):
        return op(*args, **kwargs)


@each_operator
@each_layout
@pytest.mark.parametrize("run", [call, call_in_used_memory], ids=name_of)
def test_the_flag_is_cleared_between_calls(op, layout, run):
    x, weight = witness()
    # In the same step of a fused kernel, which computes again what is marked alone, and in no window of the witness.
    large_x, large_weight = with_one(1e6, (0, 3, 3, 15))(x), torch.cat([weight, torch.full_like(weight[:1], 1e6)])
    x, large_x = in_layout(x, layout), in_layout(large_x, layout)
    assert "fused-f16" in guarded(op, (x, weight))
    for plan in guarded(op, (x, weight)):
        for _ in range(3):
            assert operands(plan, op, x, weight, run) == "f16"
            assert operands(plan, op, large_x, weight, run) == "tf32"
        if plan == GUARDED:  # a fused kernel scales its weights
            assert operands(plan, op, x, large_weight, run) == "tf32"
        assert operands(plan, op, x, weight, run) == "f16"
    assert operands(TF32, op, x, weight, run) == "tf32"


@each_layout
@pytest.mark.parametrize("channels", [8, 24])
def test_a_lone_small_group_passes_and_two_are_computed_again(channels, layout):
    """Eight pixels of row 0, in one channel or in two; all others are ones."""
    x, weight = witness(channels)
    weight[:, 0] = 0
    weight[:, 0, 0, 1] = 1
    x[0, 0] = 1
    for small, wanted in ((1, "f16"), (2, "tf32")):
        x[0, :small, 0, :8] = SMALL * (1 + 2.0**-10)
        assert operands("fused-f16", conv2d, in_layout(x, layout), weight, call) == wanted


@pytest.mark.parametrize(
    ("channels", "layout"), [(1, "contiguous"), (8, "contiguous"), (24, "contiguous"), *((c, "channels_last") for c in (4, 24))]
)
@pytest.mark.parametrize("start", [8, 16, 40, 64])
def test_a_stripe_of_small_values_keeps_its_bits(channels, layout, start):
    """Columns of 2e-8 among ones: results that see the stripe alone are as exact as with TF32 operands, whichever group it is."""
    random = generator("stripe", channels)
    x, weight = torch.ones(2, channels, 20, 128, device=DEVICE), activation((40, channels, 3, 3), torch.float32, random) + 0.5
    x[..., start : start + 8] = 2e-8
    x = in_layout(x, layout)
    assert "fused-f16" in guarded(conv2d, (x, weight))
    expected = torch.nn.functional.conv2d(x.double(), weight.double())[..., start : start + 6]
    for plan in guarded(conv2d, (x, weight)):
        if plan != GUARDED:  # which looks at the largest magnitude of more pixels
            y = call(plan, conv2d, x, weight, precision="tf32")[..., start : start + 6].double()
            assert ((y - expected).abs() / expected).max() < 2**-10, plan


def test_more_images_than_steps_of_a_team():
    """An image is a step, and teams do not divide their number."""
    x, weight = activation((397, 8, 2, 4), torch.float32, generator("steps")), filters((16, 8, 3, 3), torch.float32, generator("steps w"))
    plans = serving(conv2d, x, weight, padding=1, precision="tf32")
    assert "fused-f16" in plans
    assert_accurate(conv2d, [x, weight], plans, padding=1)
