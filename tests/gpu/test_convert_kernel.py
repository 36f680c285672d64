"""The conversion kernel, launched directly: every type and layout, TF32 rounding, the range flag and the guard."""

from __future__ import annotations

import math

import pytest
import torch

from cutlass_ops.accuracy import round_to_tf32
from cutlass_ops.layout import flat_strides
from cutlass_ops.two_kernel import ConvertParams
from cutlass_ops.work import round_up

from .helpers import DEVICE, LAYOUTS, Target, assert_same_bits, expandable, generator, launch, lay_out

CONVERSIONS = {
    "convert_f32_f16": (torch.float32, torch.float16),
    "convert_f32_tf32": (torch.float32, torch.float32),
    "convert_f16_f16": (torch.float16, torch.float16),
    "convert_bf16_bf16": (torch.bfloat16, torch.bfloat16),
}
SHAPES = [(2, 3, 5, 7), (1, 64, 16, 16), (3, 130, 17, 4), (37, 1, 3, 3), (2, 8, 63, 5), (7, 12, 1, 1), (1, 70, 130, 1), (2, 65, 9, 127)]
#: What the kernel can walk; `presentable` copies the others.
WALKABLE = [name for name in LAYOUTS if name not in ("sliced_pixels", "transposed")]


def run_convert(name, *sources, flag=None, guard=None, guard_value=0):
    """The conversion kernel on one or two NCHW tensors (None: no work); the NHWC results (batch, pixels, padded channels)."""
    params, targets = ConvertParams(guard_value=guard_value), []
    for index, source in enumerate(sources):
        if source is None:
            continue
        n, c, h, w = source.shape
        job, padded = params.jobs[index], round_up(c, 8)
        targets.append(Target((n, h * w, padded), CONVERSIONS[name][1]))
        job.source, job.target = source.data_ptr(), targets[-1].address
        job.batch_stride, job.channel_stride, job.pixel_stride = flat_strides(source.shape, source.stride())
        job.batch, job.channels, job.pixels, job.padded_channels = n, c, h * w, padded
    params.flag, params.guard = (None if word is None else word.data_ptr() for word in (flag, guard))
    launch(name, params, grid=5)  # fewer blocks than tiles
    return [target.read() for target in targets]


def converted(name, source):
    """What the kernel must write: rounded values, channels padded with zeros."""
    n, c, h, w = source.shape
    target = CONVERSIONS[name][1]
    values = round_to_tf32(source).float() if name == "convert_f32_tf32" else source.to(target)
    result = torch.zeros(n, h * w, round_up(c, 8), dtype=target, device=source.device)
    result[..., :c] = values.permute(0, 2, 3, 1).reshape(n, h * w, c)
    return result


def wide(shape, dtype, random):
    """Numbers of every magnitude around fp16's range, zeros and infinities too."""
    exponents = torch.randint(-30, 18, shape, generator=random, device=DEVICE)
    values = torch.ldexp(torch.randn(shape, generator=random, device=DEVICE), exponents)
    for value, step in ((0.0, 17), (-0.0, 19), (math.inf, 23), (-math.inf, 29), (math.nan, 31), (65504.0, 37), (65520.0, 41)):
        values.view(-1)[step::step] = value
    return values.to(dtype)


@pytest.mark.parametrize("layout", WALKABLE)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_is_exact_in_every_layout(name, layout):
    for shape in SHAPES:
        values = wide(shape, CONVERSIONS[name][0], generator(name, shape)).nan_to_num(nan=1.0, posinf=2.0, neginf=-3.0)
        (found,) = run_convert(name, lay_out(expandable(values, layout), layout))
        assert_same_bits(found, converted(name, expandable(values, layout)))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_conversion_serves_both_operands_and_special_values(name):
    source = CONVERSIONS[name][0]
    x, weight = (wide(shape, source, generator(name, shape)) for shape in ((3, 70, 31, 33), (130, 70, 3, 3)))
    for jobs in ((x, weight), (x, None), (None, weight)):
        for found, given in zip(run_convert(name, *jobs), [job for job in jobs if job is not None]):
            assert_same_bits(found, converted(name, given))


def from_bits(words):
    """fp32 numbers of these bits, each in both signs, as a tensor (1, 2, 1, count)."""
    bits = torch.tensor([words, [word | 0x80000000 for word in words]], dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32).to(DEVICE).reshape(1, 2, 1, -1)


def test_tf32_is_rounded_to_nearest_with_ties_away_from_zero():
    exponents = [0, 1, 0x3F800000, 0x40000000, 0x477FE000, 0x7F000000, 0x7F7FE000]
    low = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001]
    values = from_bits([e + mantissa for e in exponents for mantissa in low if e + mantissa < 0x7F800000] + [0x7F800000])
    (found,) = run_convert("convert_f32_tf32", values)
    assert_same_bits(found, converted("convert_f32_tf32", values))
    # The reference itself, by hand: a tie between 1 and the next value 1 + 2^-10, and what lies beside it.
    by_hand = from_bits([0x3F800FFF, 0x3F801000, 0x3F803000])[0, 0, 0]
    assert round_to_tf32(by_hand).tolist() == [1.0, 1 + 2.0**-10, 1 + 2 * 2.0**-10]


def test_tf32_keeps_every_nan():
    """A NaN whose payload lies in the bits that TF32 lacks must not become infinity."""
    values = from_bits([0x7FC00000, 0x7FFFFFFF, 0x7F800001, 0x7F801FFF, 0x7F802000])
    (found,) = run_convert("convert_f32_tf32", values)
    assert found[..., :2].isnan().all(), found[..., :2]


# ---- range flag and guard ----------------------------------------------------------------------------------------


def flag_of(*sources, name="convert_f32_f16", before=0):
    flag = torch.full((1,), before, dtype=torch.int32, device=DEVICE)
    run_convert(name, *sources, flag=flag)
    return flag.item()


def filled(shape, value):
    return torch.full(shape, value, device=DEVICE)


BELOW = torch.nextafter(torch.tensor(2.0**-11), torch.tensor(0.0)).item()
ABOVE = torch.nextafter(torch.tensor(65504.0), torch.tensor(math.inf)).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_one_value_beyond_fp16_raises_the_flag(shape, layout):
    ordinary = torch.rand(shape, generator=generator("flag", shape), device=DEVICE) + 1
    places = torch.randint(ordinary.numel(), (4,), generator=generator("places", shape), device=DEVICE).tolist()
    for place in (0, ordinary.numel() - 1, *places):
        for value, expected in [(65504.0, 0), (-65504.0, 0), (0.0, 0), (ABOVE, 1), (-ABOVE, 1), (65519.0, 1), (65520.0, 1)] + [
            (special, 1) for special in (1e30, math.inf, -math.inf, math.nan)
        ]:
            values = ordinary.clone()
            values.view(-1)[place] = value
            assert flag_of(lay_out_any(values, layout)) == expected, (place, value)


def lay_out_any(values, layout):
    """`lay_out` without its check, which NaN would fail."""
    return LAYOUTS[layout](values)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_values_raise_the_flag_where_no_larger_one_is_near(shape):
    assert flag_of(filled(shape, 0.0)) == 0
    assert flag_of(filled(shape, 2.0**-11)) == 0
    assert flag_of(filled(shape, -(2.0**-11))) == 0
    assert flag_of(filled(shape, BELOW)) == 1
    assert flag_of(filled(shape, 1e-40)) == 1
    lonely = filled(shape, 0.0)
    lonely[-1, -1, -1, -1] = -1e-10
    assert flag_of(lonely) == 1


def test_a_small_patch_raises_the_flag_and_a_small_value_does_not():
    ordinary = torch.rand(2, 64, 16, 16, generator=generator("patch"), device=DEVICE) + 1
    patch, one = ordinary.clone(), ordinary.clone()
    patch[1].view(64, 256)[:, 64:128] *= 1e-5  # 64 channels x 64 pixels
    one[1, 5, 3, 2] = 1e-20
    assert (flag_of(ordinary), flag_of(one), flag_of(patch)) == (0, 0, 1)
    # A large enough value among every four neighbours: 4 are what a lane reads at once.
    sparse = filled((2, 64, 16, 16), 1e-10)
    sparse[..., ::4] = 2.0**-11
    assert flag_of(sparse) == 0
    sparse[0] = 1e-10
    assert flag_of(sparse) == 1


def test_either_operand_raises_the_flag_and_none_lowers_it():
    x, weight = filled((2, 12, 9, 9), 1.0), filled((7, 12, 3, 3), 0.5)
    assert flag_of(x, weight) == 0
    assert flag_of(x, weight * 1e6) == 1
    assert flag_of(x, weight * 1e-6) == 1
    assert flag_of(x * 1e6, weight) == 1
    assert flag_of(x, weight, before=1) == 1
    assert flag_of(x * 1e6, weight * 1e-6, name="convert_f32_tf32") == 0  # TF32 has fp32's range


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_conversion_honours_its_guard(name):
    x = filled((2, 12, 9, 9), 1e6).to(CONVERSIONS[name][0])
    guard, flag = (torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    (found,) = run_convert(name, x, guard=guard, guard_value=1, flag=flag)
    assert found.isnan().all()
    assert flag.item() == 0
    guard.fill_(1)
    (found,) = run_convert(name, x, guard=guard, guard_value=1, flag=flag)
    assert_same_bits(found, converted(name, x))
    assert flag.item() == (name == "convert_f32_f16")
