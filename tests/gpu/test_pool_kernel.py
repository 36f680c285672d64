"""The pool kernel, launched directly, against PyTorch's pools."""

from __future__ import annotations

import math

import pytest
import torch

from cutlass_ops.problem import PoolArguments, pool_size
from cutlass_ops.reference import apply_pool
from cutlass_ops.two_kernel import PoolParams
from cutlass_ops.work import round_up

from .helpers import DEVICE, DTYPES, Target, assert_same_bits, generator, integers, launch, name_of

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def pool_of(kind, kernel, stride=None, **arguments):
    return PoolArguments(kind, kernel, stride or kernel, **arguments)


POOLS = [
    *(pool_of(kind, kernel) for kind in ("avg", "max") for kernel in [(1, 1), (2, 2), (3, 3), (4, 4), (2, 3), (4, 1)]),
    *(pool_of(kind, (2, 2), stride) for kind in ("avg", "max") for stride in [(1, 1), (3, 3), (1, 2)]),
    *(pool_of(kind, (1, 1), (2, 3)) for kind in ("avg", "max")),
    *(pool_of(kind, (3, 3), (2, 2), padding=(1, 1)) for kind in ("avg", "max")),
    *(pool_of(kind, (4, 3), (3, 1), padding=(2, 0)) for kind in ("avg", "max")),
    *(pool_of(kind, kernel, ceil_mode=True) for kind in ("avg", "max") for kernel in [(2, 2), (4, 4), (3, 2)]),
    *(pool_of(kind, (4, 4), (3, 3), padding=(2, 2), ceil_mode=True) for kind in ("avg", "max")),
    *(pool_of(kind, (2, 2), (5, 4), padding=(1, 1), ceil_mode=True) for kind in ("avg", "max")),
    pool_of("avg", (2, 2), padding=(1, 1), count_include_pad=False),
    pool_of("avg", (4, 4), (3, 3), padding=(2, 2), count_include_pad=False, ceil_mode=True),
    pool_of("avg", (3, 3), (2, 2), ceil_mode=True, count_include_pad=False),
    pool_of("avg", (2, 2), divisor_override=3),
    pool_of("avg", (2, 2), divisor_override=-5),
    pool_of("avg", (3, 3), (2, 2), padding=(1, 1), divisor_override=-1),
    pool_of("avg", (3, 2), (2, 2), padding=(1, 1), ceil_mode=True, divisor_override=1, count_include_pad=False),
    pool_of("max", (2, 2), dilation=(2, 2)),
    pool_of("max", (3, 2), (1, 2), dilation=(2, 3)),
    pool_of("max", (3, 3), (2, 2), padding=(1, 1), dilation=(2, 1), ceil_mode=True),
    pool_of("max", (1, 1), (1, 1), dilation=(3, 3)),
]


def pool_name(pool):
    flags = [name for name in ("ceil_mode", "count_include_pad") if getattr(pool, name)]
    rest = f"p{pool.padding}-d{pool.dilation}-{pool.divisor_override}"
    return "-".join([pool.kind, f"{pool.kernel_size}", f"s{pool.stride}", rest, *flags]).replace(" ", "")


def run_pool(images, pool, dtype, channels_last):
    """The pool kernel on NCHW images, which it reads as NHWC with NaN in the channels that only pad; the result as NCHW."""
    n, c, h, w = images.shape
    source = torch.full((n, h, w, round_up(c, 4)), math.nan, device=DEVICE)
    source[..., :c] = images.permute(0, 2, 3, 1)
    out_h, out_w = pool_size((h, w), pool)
    target = Target((n, out_h, out_w, c) if channels_last else (n, c, out_h, out_w), dtype)
    params = PoolParams(source=source.data_ptr(), target=target.address, n=n, h=h, w=w, channels=c, ld=source.shape[3])
    params.out_h, params.out_w, params.channels_last = out_h, out_w, int(channels_last)
    for name, both in (("kernel", pool.kernel_size), ("stride", pool.stride), ("padding", pool.padding), ("dilation", pool.dilation)):
        setattr(params, f"{name}_h", both[0])
        setattr(params, f"{name}_w", both[1])
    params.count_include_pad, params.divisor_override = int(pool.count_include_pad), pool.divisor_override or 0
    launch(f"pool_{pool.kind}_{NAMES[dtype]}", params, grid=3)  # fewer blocks than tiles
    result = target.read()
    return result.permute(0, 3, 1, 2) if channels_last else result


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("pool", POOLS, ids=pool_name)
def test_pools_of_integers_are_pytorchs(pool, dtype):
    """Sums are exact, so that the one division and the rounding to the target decide every bit."""
    for c, h, w in [(1, 9, 11), (7, 8, 10), (64, 9, 11), (130, 37, 41)]:
        images = integers((2, c, h, w), -8, 8, generator("pool", pool, c))
        expected = apply_pool(images.double(), pool).float().to(dtype)
        for channels_last in (False, True):
            assert_same_bits(run_pool(images, pool, dtype, channels_last), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("pool", [p for p in POOLS if p.padding == (1, 1)], ids=pool_name)
def test_nan_and_infinity_pass_as_in_pytorch(pool, dtype):
    images = integers((2, 70, 12, 13), -8, 8, generator("special", pool))
    for value, step in ((math.nan, 11), (math.inf, 13), (-math.inf, 7)):
        images.view(-1)[step::step] = value
    images[1, 3], images[1, 4] = -math.inf, math.nan
    expected = apply_pool(images.double(), pool).float().to(dtype)
    for channels_last in (False, True):
        assert_same_bits(run_pool(images, pool, dtype, channels_last), expected)


@pytest.mark.parametrize("pool", [p for p in POOLS if p.kind == "avg"], ids=pool_name)
def test_averages_of_random_numbers_are_accurate(pool):
    """fp32 sums of k elements: an error below k roundings of the sum of magnitudes."""
    images = torch.randn(2, 33, 17, 19, generator=generator("average", pool), device=DEVICE)
    magnitude = apply_pool(images.double().abs(), pool).abs()
    error = (run_pool(images, pool, torch.float32, False).double() - apply_pool(images.double(), pool)).abs()
    assert (error <= (math.prod(pool.kernel_size) + 1) * 2.0**-24 * magnitude).all()
