"""Costs of plans: what they count, what they expect, and the file they come from."""

from __future__ import annotations

import dataclasses
import json
import zlib

import pytest

from cutlass_ops import InstallationError, costs
from cutlass_ops.costs import FEATURES, OVERLAPPED, SERIAL, Coefficients, Costs, features, shipped_costs
from cutlass_ops.selection import PLAN_NAMES, PYTORCH, select
from cutlass_ops.work import FusedWork

from .fake_driver import H200
from .records import all_records, fused_records, problem

RECORDS = {pool: {r.name: r for r in all_records("op", pool)} for pool in ("avg", "none")}
HALF = {"dtype": "f16", "precision": "f16", "channels_last": True}


def work(plan, **changes):
    """Features of a plan on the problem (128, 64, 128, 128) -> 128, 3 x 3, 2 x 2 pool, with changes."""
    made = problem(**changes)
    records = RECORDS["avg" if made.pool else "none"]
    chosen = select(made, H200, records.values(), frozenset(), allow_unverified=True, force=plan).plan
    return features(made, [records[name] for name in chosen.kernels], H200.sm_count)


def test_the_work_of_a_fused_kernel_with_a_pool():
    # 63 steps an image; 2 strips of 32 pooled columns: 66 teams, of which the busiest has ceil(128 * 63 / 66) = 123 steps in two images.
    assert work("fused-f16") == {
        "launches": 2,
        "flops": pytest.approx(123 * 2 * 128 * 128 * 64 * 9 / 1e6),
        "outputs": pytest.approx(123 * 128 * 128 / 1e3),
        "staged": pytest.approx((123 + 2) * 2 * 68 * 64 / 1e3),
        "gathered": 0,
        "single_loads": 0,
        "single_stores": 0,
        "moved": pytest.approx((128 * 64 * 128 * 128 + 128 * 128 * 63 * 63) * 4 / 1e6),
    }


def test_the_work_of_a_fused_kernel_without_a_pool_and_with_few_channels():
    # 63 units of a step an image; 128 columns are a strip, 64 channels a block: 132 teams, ceil(8064 / 132) = 62 units of 2 slots each.
    found = work("fused-f16", x_shape=(128, 3, 128, 128), weight_shape=(64, 3, 3, 3), pool=None)
    assert found["flops"] == pytest.approx(62 * 2 * 256 * 64 * 16 * 9 / 1e6)  # 3 channels are padded to 16
    assert found["outputs"] == pytest.approx(62 * 256 * 64 / 1e3)
    assert found["staged"] == pytest.approx(62 * 2 * 2 * 144 * 8 / 1e3)  # and loaded as 8
    assert found["moved"] == pytest.approx((128 * 3 * 128 * 128 + 128 * 64 * 126 * 126) * 4 / 1e6)


def test_float32_channels_last_takes_slices_and_loads_all_channels_of_its_tile():
    # 63 steps an image, ceil(128 * 63 / 132) = 62 for the busiest team, in two images at most.
    few = {"x_shape": (128, 8, 128, 128), "weight_shape": (64, 8, 3, 3), "pool": None, "channels_last": True}
    found = work("fused-f16", **few)
    assert found["outputs"] == pytest.approx(62 * 256 * 64 / 1e3)
    assert found["staged"] == pytest.approx((62 + 1) * 2 * 130 * 16 / 1e3)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"x_shape": (8, 64, 40, 126)}, 1 / 2),
        ({"x_shape": (8, 64, 40, 125)}, 1),
        ({"alignment": 8}, 1 / 2),
        ({"alignment": 4}, 1),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 28, 28)}, 1 / 2 * 68 / 80),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 28, 27)}, 1 / 2 * 68 / 80),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 32, 32), "alignment": 2}, 1 / 2 * 68 / 80),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 32, 32)}, 0),
        ({"x_shape": (8, 64, 28, 28)}, 0),
        (HALF | {"x_shape": (8, 64, 28, 27)}, 0),
    ],
)
def test_copies_of_what_no_tma_load_can_bring_count_too(changes, share):
    found = work("fused-f16", **changes)
    assert found["gathered"] == pytest.approx(share * found["staged"])


@pytest.mark.parametrize(
    ("changes", "single"),
    [
        ({"x_shape": (8, 64, 40, 125), "pool": None}, (False, True)),
        ({"x_shape": (8, 64, 40, 125)}, (False, False)),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 28, 27), "pool": None}, (True, True)),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 32, 32), "alignment": 2}, (True, False)),
        (HALF | {"channels_last": False, "x_shape": (8, 64, 28, 28), "pool": None}, (False, False)),
        (HALF | {"x_shape": (8, 64, 28, 27), "pool": None}, (False, False)),
    ],
)
def test_what_is_converted_or_stored_one_by_one_counts_more(changes, single):
    found = work("fused-f16", **changes)
    assert found["single_loads"] == (found["staged"] if single[0] else 0)
    assert found["single_stores"] == (found["outputs"] if single[1] else 0)


def test_columns_of_an_empty_strip_count():
    """An image of 14 columns costs a fused kernel what one of 64 does."""
    narrow = work("fused-f16", **HALF, x_shape=(128, 64, 14, 14), padding=(1, 1), pool=None)
    wide = work("fused-f16", **HALF, x_shape=(128, 64, 14, 64), padding=(1, 1), pool=None)
    assert (narrow["flops"], narrow["outputs"], narrow["staged"]) == (wide["flops"], wide["outputs"], wide["staged"])
    assert narrow["flops"] == pytest.approx(7 * 2 * 128 * 128 * 64 * 9 / 1e6)


def test_the_work_of_a_two_kernel_plan():
    # 128 * 126 * 126 pixels are ceil(10584) tiles of 192: ceil(10584 / 132) = 81 waves, each 9 taps x one k-step of 64 channels.
    between = 128 * 126 * 126 * 128 * 4 / 1e6
    pixels, filters = 128 * 128 * 128, 128 * 9
    guarded = work("two-kernel-f16-guarded")
    assert guarded == {
        "launches": 6,  # two conversions, two implicit GEMMs, the pool, and the clearing of the flag
        "convert": pytest.approx((pixels + filters) * 64 * (4 + 2) / 1e6),
        "pool": pytest.approx(between),
        "result": pytest.approx(128 * 128 * 63 * 63 * 4 / 1e6),
        "flops": pytest.approx(729 * 2 * 192 * 128 * 64 / 1e6),
        "outputs": pytest.approx(81 * 192 * 128 / 1e3),
        "iterations": 729,
        "moved": pytest.approx(pixels * 64 * 2 / 1e6 + between),
    }
    tf32 = work("two-kernel-tf32")
    assert (tf32["launches"], tf32["iterations"]) == (3, 2 * 729)
    assert tf32["convert"] == pytest.approx((pixels + filters) * 64 * 8 / 1e6)


def test_operands_that_are_read_where_they_are_cost_no_conversion():
    found = work("two-kernel-f16", **HALF)
    assert (found["launches"], found["convert"]) == (2, 0)
    assert work("two-kernel-f16", dtype="f16", precision="f16")["launches"] == 3
    few = work("two-kernel-f16", dtype="f16", precision="f16", x_shape=(1, 3, 16, 16), weight_shape=(8, 3, 3, 3), pool=None)
    assert few["convert"] == pytest.approx((256 + 8 * 9) * (3 + 16) * 2 / 1e6)  # padded to 16 channels


def test_an_empty_batch_has_no_work():
    found = work("fused-f16", x_shape=(0, 64, 128, 128))
    assert {name for name, value in found.items() if value} == {"launches"}


@pytest.mark.parametrize("n", [1, 2, 5, 66, 67, 128])
@pytest.mark.parametrize(
    ("pool", "kernel", "rows", "claim", "halo"),
    [("avg", "c64_3x3", 2, 0, 1), ("none", "c64_3x3_wide", 1, 0, 2), ("none", "c16_3x3_shifted", 2, 1, 1)],
)
def test_the_busiest_team_has_at_least_its_share_and_at_most_a_step_more(n, pool, kernel, rows, claim, halo):
    (record,) = (r for r in fused_records("op", pool) if r.name == f"op_fused_f32_nchw_{kernel}")
    made = FusedWork.of(problem(x_shape=(n, record.tile[2], 128, 128), **({} if pool == "avg" else {"pool": None})), record, 132)
    assert (made.rows, made.claim) == (rows, claim)
    steps, slots = made.busiest(n, 3)
    assert n * made.steps <= steps * made.teams < n * made.steps + made.teams
    segments = steps if claim else -(-steps // made.steps)
    assert slots == steps + halo * segments


@pytest.mark.parametrize(
    ("n", "sms", "claims", "claim"),
    [
        *((8, 132, 2048, 1), (4290, 132, 2048, 1), (4292, 132, 2048, 2), (128, 1, 2048, 4), (128, 4, 1, 2048)),
        *((0, 132, 2048, 1), (8, 0, 2048, 1), (8, 132, 0, 0)),
    ],
)
def test_a_cta_claims_as_few_steps_at_a_time_as_it_has_room_for(n, sms, claims, claim):
    """63 steps an image; too few SMs for a team are selection's to refuse."""
    (record,) = (r for r in fused_records("op", "none") if r.name == "op_fused_f32_nchw_c16_3x3_shifted")
    made = problem(x_shape=(n, 8, 128, 128), weight_shape=(64, 8, 3, 3), pool=None)
    assert FusedWork.of(made, dataclasses.replace(record, claims=claims), sms).claim == claim


@pytest.mark.parametrize(("dtype", "claim"), [("f32", 1), ("f16", 0), ("bf16", 0)])
def test_steps_of_few_channels_are_claimed_in_float32_alone(dtype, claim):
    """NCHW without a pool (docs/performance.md)."""
    (record,) = (r for r in fused_records("op", "none") if r.name == f"op_fused_{dtype}_nchw_c16_3x3_shifted")
    precision = "tf32" if dtype == "f32" else dtype
    made = problem(x_shape=(8, 8, 128, 128), weight_shape=(64, 8, 3, 3), pool=None, dtype=dtype, precision=precision)
    assert FusedWork.of(made, record, 132).claim == claim


# ---- expectation -------------------------------------------------------------------------------------------------


def test_serial_features_add_up_and_of_the_overlapped_the_longest_counts():
    c = Coefficients({"launches": 2.0, "pool": 1.0, "flops": 1.0, "outputs": 1.0, "moved": 3.0})
    assert c.expected({"launches": 3, "pool": 4, "flops": 5, "outputs": 6, "moved": 1}) == 6 + 4 + 11
    assert c.expected({"launches": 3, "pool": 4, "flops": 5, "outputs": 6, "moved": 10}) == 6 + 4 + 30
    assert set(SERIAL) | {name for group in OVERLAPPED for name in group} == set(FEATURES)


def test_a_plan_without_coefficients_takes_those_of_its_family_and_dtype():
    fused, gemm = Coefficients({"launches": 1.0}), Coefficients({"launches": 2.0})
    known = Costs({("fused-f16", "f32"): fused, ("two-kernel-tf32", "f32"): gemm})
    assert known.of("fused-f16", "f32") is fused
    assert known.of("fused-new", "f32") is fused
    assert known.of("two-kernel-f16-guarded", "f32") is gemm
    assert known.of("fused-f16", "f16") is None
    assert known.of(PYTORCH, "f32") is None
    assert Costs().of("fused-f16", "f32") is None


# ---- the file ----------------------------------------------------------------------------------------------------


def test_the_shipped_costs_know_every_plan_and_say_where_they_come_from():
    shipped = shipped_costs()
    dtypes = {"fused-f16": ("f32", "f16"), "fused-bf16": ("bf16",), "two-kernel-f16": ("f16",), "two-kernel-bf16": ("bf16",)}
    for plan in PLAN_NAMES:
        for dtype in dtypes.get(plan, ("f32",)) if plan != PYTORCH else ():
            assert (plan, dtype) in shipped.coefficients
    assert {"gpu", "driver", "date", "commit", "sm_count"} <= set(shipped.provenance)


def test_the_file_lies_in_the_package_which_the_wheel_holds_whole():
    assert costs.PATH.parent.name == "cutlass_ops"
    assert costs.PATH.exists()


def damaged(change):
    data = json.loads(costs.PATH.read_text())
    change(data)
    return json.dumps(data)


def first(data):
    return next(iter(data["coefficients"].values()))["us"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "{",
        "[]",
        "3",
        damaged(lambda d: d.update(schema=99)),
        damaged(lambda d: d.pop("schema")),
        damaged(lambda d: d.pop("coefficients")),
        damaged(lambda d: d.pop("provenance")),
        damaged(lambda d: d["coefficients"].update(name={"us": {}})),
        damaged(lambda d: d["coefficients"].update({"fused-f16 f32": {}})),
        damaged(lambda d: d["coefficients"].update({"fused-f16 f32": []})),
        damaged(lambda d: first(d).update(launches=-1.0)),
        damaged(lambda d: first(d).update(launches=float("nan"))),
        damaged(lambda d: first(d).update(launches=float("inf"))),
        damaged(lambda d: first(d).update(launches="3")),
        damaged(lambda d: first(d).update(launches=True)),
        damaged(lambda d: first(d).update(unknown=1.0)),
    ],
    ids=lambda text: f"{zlib.crc32((text or 'missing').encode()):x}",
)
def test_a_missing_or_damaged_file_is_an_error_of_the_installation(tmp_path, text):
    path = tmp_path / "plan_costs.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        InstallationError, match=r"expected the plans' costs at .*, could not read them .*; reinstall the wheel, or measure"
    ):
        Costs.load(path)
