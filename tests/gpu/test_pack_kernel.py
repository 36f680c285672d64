"""The packing kernel of the fused family, launched directly: scaled fp16 fragments of the filter, scales, the cleared flag."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.fused import PackParams

from .helpers import DEVICE, LAYOUTS, Target, assert_same_bits, generator, launch

BLOCK = 128  # output channels of a CTA


def run_pack(weight):
    """The kernel on a filter (K, C <= 64, 3, 3): fragments as halves, scales, the flag, which was 7 before."""
    blocks = -(-weight.shape[0] // BLOCK)
    fragments = Target((blocks, 8, 9, 4, 32, 4, 2), torch.float16)  # warp, tap, K step, lane, register, half
    scales = Target((blocks * BLOCK,), torch.float32)
    flag = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    addresses = fragments.address, scales.address, flag.data_ptr()
    params = PackParams(weight.data_ptr(), *weight.stride(), *addresses, weight.shape[0], weight.shape[1])
    launch("pack_f32_f16", params, grid=blocks * BLOCK)
    return fragments.read(), scales.read(), flag.item()


def power_of_two(exponents):
    """Exactly, which torch.pow and torch.ldexp do not promise on a GPU; exponents within fp32's normal range."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)


def packed(weight):
    """What the kernel must write, by the layout that kernels/pack.cu documents."""
    k, c = weight.shape[:2]
    whole = torch.zeros(-(-k // BLOCK) * BLOCK, 64, 9, dtype=torch.float64, device=weight.device)
    whole[:k, :c] = weight.reshape(k, c, 9).double()
    largest = torch.where(whole.isfinite(), whole, 0.0).abs().amax((1, 2))
    exponents = torch.where(largest > 0, 14 - torch.frexp(largest).exponent, 0)  # frexp's mantissa is in [1/2, 1)
    halves = (whole * power_of_two(exponents)[:, None, None].double()).float().half()
    blocks, warps, taps, steps, lanes, registers, parts = torch.meshgrid(
        *(torch.arange(n, device=weight.device) for n in (len(whole) // BLOCK, 8, 9, 4, 32, 4, 2)), indexing="ij"
    )
    row = lanes // 4 + 8 * (registers % 2)
    position = steps * 16 + 2 * (lanes % 4) + 8 * (registers // 2) + parts
    fragments = halves[blocks * BLOCK + warps * 16 + row, position // 8 + 8 * (position % 8), taps]
    return fragments, power_of_two(-exponents)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced_channels", "unaligned"])
@pytest.mark.parametrize(("k", "c"), [(1, 1), (7, 3), (64, 8), (128, 64), (130, 12)])
def test_filters_are_scaled_rounded_and_placed(k, c, layout):
    random = generator("pack", k, c)
    scales = power_of_two(torch.randint(-60, 60, (k, 1, 1, 1), generator=random, device=DEVICE))
    weight = torch.randn(k, c, 3, 3, generator=random, device=DEVICE) * scales
    weight[k // 2] = 0  # a channel without any weight keeps the scale 1
    fragments, expected_scales = packed(weight)
    found, found_scales, flag = run_pack(LAYOUTS[layout](weight))
    assert_same_bits(found, fragments)
    assert_same_bits(found_scales, expected_scales)
    assert flag == 0


def test_special_weights_stay_special():
    weight = torch.randn(5, 3, 3, 3, generator=generator("special"), device=DEVICE)
    weight[0, 0, 0, 0], weight[1, 1, 1, 1], weight[2, 2, 2, 2] = float("nan"), float("inf"), float("-inf")
    weight[3], weight[4, 0, 0, 0] = float("nan"), 1e-42
    found, scales, _ = run_pack(weight)
    fragments, expected_scales = packed(weight)
    assert_same_bits(found, fragments)
    assert_same_bits(scales, expected_scales)
