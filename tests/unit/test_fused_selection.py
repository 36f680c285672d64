"""Which fused kernel serves a problem, and where the family ends."""

from __future__ import annotations

import dataclasses

import pytest

from cutlass_ops.problem import PoolArguments
from cutlass_ops.selection import select
from cutlass_ops.work import gathered

from .fake_driver import H200
from .records import LARGE, all_records, problem

RECORDS = all_records("op")
ALL = frozenset(r.sha256 for r in RECORDS)
HALF = {"dtype": "f16", "precision": "f16"}
F32_NHWC = {"channels_last": True}
NHWC = HALF | F32_NHWC
ONE_BY_ONE = {"weight_shape": (128, 64, 1, 1)}


def reason(selection):
    """Why fused-f16 was rejected."""
    return next(r.reason for r in selection.rejected if r.name == "fused-f16")


def few(channels):
    return {"x_shape": (2, channels, 40, 64), "weight_shape": (24, channels, 3, 3)}


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"padding": (1, 1)}, "f32_nchw_c64_3x3_shifted"),
        ({"padding": (1, 4)}, "f32_nchw_c64_3x3"),
        ({"padding": (3, 0)}, "f32_nchw_c64_3x3"),
        (few(16), "f32_nchw_c16_3x3_shifted"),
        (few(1) | {"padding": (1, 1)}, "f32_nchw_c16_3x3_shifted"),
        (few(17), "f32_nchw_c64_3x3"),
        ({"x_shape": (2, 64, 40, 126)}, "f32_nchw_c64_3x3"),
        ({"x_shape": (2, 64, 40, 2), "padding": (0, 1)}, "f32_nchw_c64_3x3_shifted"),
        ({"x_shape": (2, 64, 40, 63)}, "f32_nchw_c64_3x3"),
        ({"alignment": 4}, "f32_nchw_c64_3x3"),
        ({"weight_aligned": False}, "f32_nchw_c64_3x3"),
        ({"x_shape": (2, 64, 40, 63), "padding": (1, 1)}, "f32_nchw_c64_3x3_shifted"),
        (HALF | {"x_shape": (2, 64, 14, 14), "padding": (1, 1)}, "f16_nchw_c64_3x3_shifted"),
        (HALF | {"alignment": 4}, "f16_nchw_c64_3x3_shifted"),
        (ONE_BY_ONE, "f32_nchw_c64_1x1"),
        (ONE_BY_ONE | {"padding": (1, 8)}, "f32_nchw_c64_1x1"),
        (few(8) | {"weight_shape": (24, 8, 1, 1)}, "f32_nchw_c64_1x1"),
        (HALF, "f16_nchw_c64_3x3_shifted"),
        (HALF | few(3), "f16_nchw_c16_3x3_shifted"),
        (HALF | ONE_BY_ONE | {"padding": (1, 3)}, "f16_nchw_c64_1x1_shifted"),
        (NHWC | {"padding": (2, 1)}, "f16_nhwc_c64_3x3"),
        (F32_NHWC | {"padding": (2, 1)}, "f32_nhwc_c64_3x3"),
        (F32_NHWC | few(12), "f32_nhwc_c16_3x3"),
        (F32_NHWC | few(20), "f32_nhwc_c64_3x3"),
        (F32_NHWC | ONE_BY_ONE | {"padding": (0, 1)}, "f32_nhwc_c64_1x1"),
        (NHWC | few(8), "f16_nhwc_c16_3x3"),
        (NHWC | ONE_BY_ONE, "f16_nhwc_c64_1x1"),
        ({"weight_shape": (1, 64, 3, 3)}, "f32_nchw_c64_3x3"),
        ({"weight_shape": (132 // 2 * 128, 64, 3, 3)}, "f32_nchw_c64_3x3"),
        ({"pool": PoolArguments("avg", (2, 2), (2, 2), ceil_mode=True)}, "f32_nchw_c64_3x3"),
        ({"pool": PoolArguments("avg", (2, 2), (2, 2), count_include_pad=False, divisor_override=4)}, "f32_nchw_c64_3x3"),
    ],
)
def test_the_fused_kernel_of_a_problem(changes, kernel):
    plan = select(problem(**changes), H200, RECORDS, ALL).plan
    dtype = changes.get("dtype", "f32")
    assert (plan.name, plan.kernels) == ("fused-f16", (f"pack_{dtype}_f16", f"op_fused_{kernel}"))


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"x_shape": (2, 64, 40, 64)}, "f32_nchw_c64_3x3_shifted"),
        ({"x_shape": (2, 64, 40, 64), "padding": (1, 1)}, "f32_nchw_c64_3x3_shifted"),
        ({"x_shape": (2, 64, 40, 68), "padding": (0, 0)}, "f32_nchw_c64_3x3_wide"),
        ({"padding": (1, 1)}, "f32_nchw_c64_3x3_wide"),
        (ONE_BY_ONE, "f32_nchw_c64_1x1_wide"),
        (ONE_BY_ONE | {"x_shape": (2, 64, 40, 64)}, "f32_nchw_c64_1x1"),
        (ONE_BY_ONE | {"x_shape": (2, 64, 40, 60), "padding": (0, 1)}, "f32_nchw_c64_1x1_wide"),  # no narrow one is shifted
        (HALF, "f16_nchw_c64_3x3_wide"),
        (HALF | {"x_shape": (2, 64, 40, 64)}, "f16_nchw_c64_3x3_shifted"),
        (few(16), "f32_nchw_c16_3x3_shifted"),
        (NHWC, "f16_nhwc_c64_3x3"),
        (F32_NHWC, "f32_nhwc_c64_3x3"),
    ],
)
def test_what_is_not_pooled_is_stored_in_whole_rows(changes, kernel):
    records = all_records("op", "none")
    plan = select(problem(**{"pool": None} | changes), H200, records, frozenset(r.sha256 for r in records)).plan
    dtype = changes.get("dtype", "f32")
    assert (plan.name, plan.kernels) == ("fused-f16", (f"pack_{dtype}_f16", f"op_fused_{kernel}"))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("width", [63, 127, 301])
def test_rows_of_an_odd_number_of_results_are_stored_by_narrow_kernels(dtype, width):
    records = all_records("op", "none")
    changes = {"pool": None, "x_shape": (2, 64, 40, width), "dtype": dtype, "precision": "tf32" if dtype == "f32" else dtype}
    verified = frozenset(r.sha256 for r in records)
    plan = select(problem(**changes), H200, records, verified).plan
    assert plan.kernels == (f"pack_{dtype}_f16", f"op_fused_{dtype}_nchw_c64_3x3_shifted")
    wide = [r for r in records if r.family != "fused" or r.name.endswith("_wide")]
    least = 32 if dtype == "f32" else 64
    found = reason(select(problem(**changes), H200, wide, verified))
    assert found == f"expected a result of an even number of columns, at least {least}, got {width - 2}"


def test_narrow_kernels_serve_where_a_wide_one_is_left_out():
    records = [r for r in all_records("op", "none") if not r.name.endswith("_wide")]
    verified = frozenset(r.sha256 for r in records)
    plan = select(problem(pool=None, padding=(1, 1)), H200, records, verified).plan
    assert plan.kernels == ("pack_f32_f16", "op_fused_f32_nchw_c64_3x3_shifted")


@pytest.mark.parametrize(("dtype", "least"), [("f32", 32), ("f16", 64)])
def test_a_wide_kernel_serves_no_row_that_is_shorter_than_a_line(dtype, least):
    records = [r for r in all_records("op", "none") if r.family != "fused" or r.name.endswith("_wide")]
    verified = frozenset(r.sha256 for r in records)
    for width, padding, serves in ((least, 0, True), (least - 8, 3, False), (least - 16, 7, False)):
        changes = {"pool": None, "dtype": dtype, "precision": "tf32" if dtype == "f32" else dtype, "padding": (0, padding)}
        plan = select(problem(**changes, **ONE_BY_ONE, x_shape=(2, 64, 40, width)), H200, records, verified, force="fused-f16")
        assert (plan.plan is not None) == serves
        if not serves:
            assert reason(plan) == f"expected a result of an even number of columns, at least {least}, got {width + 2 * padding}"


@pytest.mark.parametrize(
    ("pool", "width", "padding", "kernel", "copied"),
    [
        ("avg", 128, 0, "1x1", 0),
        ("avg", 128, 4, "1x1", 0),
        ("avg", 128, 2, "1x1", 2),
        ("avg", 128, 1, "1x1", 1),
        ("avg", 126, 1, "1x1", 1),
        ("avg", 126, 2, "1x1", 2),
        ("avg", 127, 4, "1x1", 1),
        ("none", 128, 1, "1x1_wide", 0),
        ("none", 32, 1, "1x1_wide", 0),
        ("none", 32, 4, "1x1", 0),
        ("none", 20, 2, "1x1", 2),
        ("none", 20, 3, "1x1", 1),
        ("none", 127, 1, "1x1", 1),
        ("none", 126, 1, "1x1_wide", 2),
        ("none", 58, 2, "1x1", 2),
        ("none", 54, 1, "1x1", 1),
        ("none", 56, 1, "1x1_wide", 0),
    ],
)
def test_1_x_1_filters_of_float32_with_any_padding(pool, width, padding, kernel, copied):
    """No kernel for them begins early where it pools or rows are short: without whole 16 bytes before the image x is gathered."""
    records = all_records("op", pool)
    own = None if pool == "none" else PoolArguments(pool, (2, 2), (2, 2))
    padded = problem(pool=own, padding=(0, padding), x_shape=(2, 64, 40, width), **ONE_BY_ONE)
    plan = select(padded, H200, records, frozenset(r.sha256 for r in records), force="fused-f16").plan
    assert plan.kernels[1] == f"op_fused_f32_nchw_c64_{kernel}"
    record = next(r for r in records if r.name == plan.kernels[1])
    assert gathered(padded, record) == copied
    if record.variant[3] != "shifted":
        elsewhere = [gathered(dataclasses.replace(padded, alignment=alignment), record) for alignment in (8, 4)]
        assert elsewhere == [2 if width % 2 == 0 and padding % 2 == 0 else 1, 1]


@pytest.mark.parametrize("pool", ["none", "max"])
def test_a_fused_kernel_serves_its_own_pool_alone(pool):
    records = all_records("op", pool)
    verified = frozenset(r.sha256 for r in records)
    own = None if pool == "none" else PoolArguments(pool, (2, 2), (2, 2))
    assert select(problem(pool=own), H200, records, verified).plan.name == "fused-f16"
    assert reason(select(LARGE, H200, records, verified)) == f"expected pool {pool}, got avg"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_shape": (2, 65, 128, 128), "weight_shape": (8, 65, 3, 3)}, "expected at most 64 input channels, got 65"),
        (NHWC | few(12), "expected pixels of whole 16 bytes for TMA, got 24 bytes at multiples of 16"),
        (NHWC | {"alignment": 8}, "expected pixels of whole 16 bytes for TMA, got 128 bytes at multiples of 8"),
        ({"weight_shape": (8, 64, 5, 5)}, "expected a filter of 3 x 3, got 5 x 5"),
        ({"weight_shape": (8, 64, 1, 3)}, "expected a filter of 3 x 3, got 1 x 3"),
        ({"stride": (2, 1)}, "expected stride and dilation 1, got (2, 1), (1, 1)"),
        ({"dilation": (1, 2)}, "expected stride and dilation 1, got (1, 1), (1, 2)"),
        (F32_NHWC | few(6), "expected pixels of whole 16 bytes for TMA, got 24 bytes"),
        ({"x_strides": (64 * 128 * 129, 1, 64 * 129, 64)} | F32_NHWC, "expected a dense channels_last input and result, got strides"),
        ({"x_strides": (65 * 128 * 128, 128 * 128, 128, 1)}, "expected a dense contiguous (NCHW) input and result, got strides"),
        ({"weight_shape": (132 // 2 * 128 + 1, 64, 3, 3)}, "expected at most 132 strips x channel blocks, got width 63, 8449 channels"),
        (
            few(1) | {"x_shape": (2**15, 1, 2**17 + 2, 4)},
            "expected at most 2147483647 result rows and channels of all images, got 32768 x 65536",
        ),
        (few(1) | {"x_shape": (1, 1, 2**30 + 2, 4)}, "expected at most 1073741823 rows and columns, got 1073741826 x 4"),
        (few(1) | {"x_shape": (1, 1, 2_098_180, 4096)}, "expected at most 2147483647 result pixels an image, got 1049089 x 2047"),
        ({"pool": PoolArguments("avg", (3, 3), (2, 2))}, "expected a 2 x 2 pool with stride 2, got (3, 3) with stride (2, 2)"),
        ({"pool": PoolArguments("avg", (2, 2), (2, 2), (1, 0))}, "expected a 2 x 2 pool with stride 2"),
        ({"pool": PoolArguments("avg", (2, 2), (1, 1))}, "expected a 2 x 2 pool with stride 2, got (2, 2) with stride (1, 1)"),
        (
            {"pool": PoolArguments("avg", (2, 2), (2, 2), ceil_mode=True), "weight_shape": (8, 64, 3, 3), "padding": (1, 1)}
            | {"x_shape": (2, 64, 127, 128)},
            "expected whole pooling windows, got ceil_mode on an odd size",
        ),
        ({"pool": PoolArguments("avg", (2, 2), (2, 2), divisor_override=3)}, "expected the mean of 4 values, got divisor_override 3"),
        ({"precision": "ieee"}, "expected tensors of f32 at tf32, f16 at f16, got f32 at ieee"),
        ({"dtype": "bf16", "precision": "bf16"}, "expected tensors of f32 at tf32, f16 at f16, got bf16 at bf16"),
    ],
)
def test_the_first_problem_beyond_the_fused_family_is_rejected(changes, message):
    """With what the kernel of its dtype, layout and filter expects, not with what another one does."""
    selection = select(problem(**changes), H200, RECORDS, ALL, force="fused-f16")
    assert selection.plan is None
    assert reason(selection).startswith(message)
