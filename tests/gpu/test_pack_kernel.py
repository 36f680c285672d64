"""The packing kernels of the fused family, launched directly: fragments of the filter, and scales where fp32 becomes fp16."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.fused import PackParams

from .helpers import DEVICE, LAYOUTS, Target, assert_same_bits, generator, launch

CHANNELS = (64, 16)


def run_pack(weight, channels, planar, kernel="pack_f32_f16", members=37):
    """The kernel on a filter (K, C <= channels, R, S): fragments as halves and scales. Counters of claims are zero after it."""
    k, c, r, s = weight.shape
    tiles = -(-k // 16)
    element = torch.bfloat16 if "bf16" in kernel else torch.float16
    fragments = Target((tiles, r * s, channels // 16, 32, 4, 2), element)  # 16 channels, tap, K step, lane, register, half
    scales = Target((tiles * 16,), torch.float32)
    chunks = channels // 8 if planar else 0
    counters = Target((members,), torch.float32)
    addresses = fragments.address, scales.address, counters.address
    params = PackParams(weight.data_ptr(), *weight.stride(), *addresses, k, c, r * s, s, channels, members, chunks)
    launch(kernel, params, grid=tiles * 16)
    assert_same_bits(counters.read(), torch.zeros(members, device=DEVICE))
    return fragments.read(), scales.read()


def power_of_two(exponents):
    """Exactly, which torch.pow and torch.ldexp do not promise on a GPU; exponents within fp32's normal range."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)


def packed(weight, channels, planar):
    """What the kernel must write, by the layout that kernels/pack.cu documents."""
    k, c, r, s = weight.shape
    whole = torch.zeros(-(-k // 16) * 16, channels, r * s, dtype=torch.float64, device=weight.device)
    whole[:k, :c] = weight.reshape(k, c, r * s).double()
    exponents = torch.zeros(len(whole), dtype=torch.int64, device=weight.device)
    if weight.dtype is torch.float32:
        largest = torch.where(whole.isfinite(), whole, 0.0).abs().amax((1, 2))
        exponents = torch.where(largest > 0, 14 - torch.frexp(largest).exponent, 0)  # frexp's mantissa is in [1/2, 1)
    element = torch.float16 if weight.dtype is torch.float32 else weight.dtype
    halves = (whole * power_of_two(exponents)[:, None, None].double()).float().to(element)
    tiles, taps, steps, lanes, registers, parts = torch.meshgrid(
        *(torch.arange(n, device=weight.device) for n in (len(whole) // 16, r * s, channels // 16, 32, 4, 2)), indexing="ij"
    )
    row = lanes // 4 + 8 * (registers % 2)
    position = steps * 16 + 2 * (lanes % 4) + 8 * (registers // 2) + parts
    channel = position // 8 + channels // 8 * (position % 8) if planar else position
    return halves[tiles * 16 + row, channel, taps], power_of_two(-exponents)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced_channels", "unaligned"])
@pytest.mark.parametrize(("k", "c", "size"), [(1, 1, 3), (7, 3, 3), (64, 8, 1), (128, 64, 3), (130, 12, 3)])
def test_filters_are_scaled_rounded_and_placed(k, c, size, layout):
    random = generator("pack", k, c, size)
    scales = power_of_two(torch.randint(-60, 60, (k, 1, 1, 1), generator=random, device=DEVICE))
    weight = torch.randn(k, c, size, size, generator=random, device=DEVICE) * scales
    weight[k // 2] = 0  # a channel without any weight keeps the scale 1
    for channels in (n for n in CHANNELS if n >= c):
        for planar in (True, False):
            fragments, expected_scales = packed(weight, channels, planar)
            found, found_scales = run_pack(LAYOUTS[layout](weight), channels, planar)
            assert_same_bits(found, fragments)
            assert_same_bits(found_scales, expected_scales)


@pytest.mark.parametrize(("kernel", "dtype"), [("pack_f16_f16", torch.float16), ("pack_bf16_bf16", torch.bfloat16)])
def test_half_precision_filters_are_placed_as_they_are(kernel, dtype):
    weight = torch.randn(37, 12, 3, 3, generator=generator(kernel), device=DEVICE).to(dtype)
    for planar in (True, False):
        fragments, scales = packed(weight, 16, planar)
        found, found_scales = run_pack(weight, 16, planar, kernel)
        assert_same_bits(found, fragments)
        assert_same_bits(found_scales, scales)


def test_special_weights_stay_special():
    weight = torch.randn(5, 3, 3, 3, generator=generator("special"), device=DEVICE)
    weight[0, 0, 0, 0], weight[1, 1, 1, 1], weight[2, 2, 2, 2] = float("nan"), float("inf"), float("-inf")
    weight[3], weight[4, 0, 0, 0] = float("nan"), 1e-42
    found, scales = run_pack(weight, 64, planar=True)
    fragments, expected_scales = packed(weight, 64, planar=True)
    assert_same_bits(found, fragments)
    assert_same_bits(scales, expected_scales)
