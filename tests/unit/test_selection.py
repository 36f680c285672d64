"""Selection is pure: problem, device and records in, plan or reasons out."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import cutlass_ops
from cutlass_ops import DeviceFacts, explain, use_plan
from cutlass_ops.costs import Coefficients, Costs, shipped_costs
from cutlass_ops.problem import NO_POOL, PoolArguments
from cutlass_ops.selection import PLAN_NAMES, implicit_gemm_limit, select

from .fake_driver import H200
from .records import LARGE, all_records, problem

RECORDS = all_records("op")
ALL = frozenset(r.sha256 for r in RECORDS)
TWO_KERNEL = tuple(r for r in RECORDS if r.family not in ("fused", "pack"))
SMALL = {"x_shape": (1, 8, 16, 16), "weight_shape": (16, 8, 3, 3)}
STRIDED = {"stride": (2, 2)}  # which no fused kernel serves


def reasons(selection):
    return {r.name: r.reason for r in selection.rejected}


def test_every_plan_is_chosen_or_rejected_with_a_reason():
    selection = select(problem(precision="ieee"), H200, RECORDS, ALL, force=None)
    assert selection.plan.name == "pytorch"
    assert {selection.plan.name} | set(reasons(selection)) == set(PLAN_NAMES)
    assert all(r.startswith("expected ") and "got " in r for r in reasons(selection).values())


@pytest.mark.parametrize(
    ("changes", "plan", "kernels"),
    [
        (
            STRIDED,
            "two-kernel-f16-guarded",
            ("convert_f32_f16", "convert_f32_tf32", "op_f16", "op_tf32", "pool_avg_f32"),
        ),
        (SMALL | STRIDED, "two-kernel-tf32", ("convert_f32_tf32", "op_tf32", "pool_avg_f32")),
        (STRIDED | {"dtype": "f16", "precision": "f16"}, "two-kernel-f16", ("convert_f16_f16", "op_f16", "pool_avg_f16")),
        (STRIDED | {"dtype": "bf16", "precision": "bf16"}, "two-kernel-bf16", ("convert_bf16_bf16", "op_bf16", "pool_avg_bf16")),
        (SMALL | STRIDED | {"dtype": "f16", "precision": "f16"}, "two-kernel-f16", ("convert_f16_f16", "op_f16", "pool_avg_f16")),
        (SMALL | {"pool": PoolArguments("max", (2, 2), (2, 2))}, "two-kernel-tf32", ("convert_f32_tf32", "op_tf32", "pool_max_f32")),
        (SMALL | {"pool": None}, "two-kernel-tf32", ("convert_f32_tf32", "op_tf32", "pool_avg_f32")),
        ({}, "fused-f16", ("pack_f32_f16", "op_fused_f32_nchw_c64_3x3")),
        (SMALL, "fused-f16", ("pack_f32_f16", "op_fused_f32_nchw_c16_3x3_shifted")),
        ({"dtype": "f16", "precision": "f16"}, "fused-f16", ("pack_f16_f16", "op_fused_f16_nchw_c64_3x3_shifted")),
        ({"dtype": "bf16", "precision": "bf16"}, "fused-bf16", ("pack_bf16_bf16", "op_fused_bf16_nchw_c64_3x3_shifted")),
        ({"precision": "ieee"}, "pytorch", ()),
        ({"dtype": "f64", "precision": "f64"}, "pytorch", ()),
    ],
)
def test_the_plan_of_a_problem_with_verified_kernels(changes, plan, kernels):
    selection = select(problem(**changes), H200, RECORDS, ALL)
    assert (selection.plan.name, selection.plan.kernels) == (plan, kernels)
    assert selection.plan.reason


def test_unverified_kernels_are_rejected_with_the_remedy():
    selection = select(LARGE, H200, RECORDS, frozenset())
    assert selection.plan is None
    for plan, kernel in (("two-kernel-f16-guarded", "convert_f32_f16"), ("fused-f16", "pack_f32_f16")):
        reason = reasons(selection)[plan]
        assert reason.startswith(f"expected a record of a passed GPU check for {kernel}, found none; run cutlass-ops check")
        assert "CUTLASS_OPS_ALLOW_UNVERIFIED=1" in reason


def test_one_unverified_kernel_is_enough_to_reject_a_plan():
    hashes = {r.name: r.sha256 for r in RECORDS}
    unverified = {hashes[name] for name in ("pool_avg_f32", "op_fused_f32_nchw_c64_3x3")}
    selection = select(LARGE, H200, RECORDS, ALL - unverified)
    assert selection.plan is None
    assert "GPU check for pool_avg_f32" in reasons(selection)["two-kernel-f16-guarded"]
    assert "GPU check for op_fused_f32_nchw_c64_3x3" in reasons(selection)["fused-f16"]


def test_unverified_kernels_are_chosen_where_that_is_allowed():
    assert select(LARGE, H200, RECORDS, frozenset(), allow_unverified=True).plan.name == "fused-f16"


def test_a_missing_kernel_rejects_the_plans_that_need_it():
    records = [r for r in RECORDS if r.name not in ("op_f16", "pack_f32_f16")]
    selection = select(LARGE, H200, records, ALL)
    assert selection.plan.name == "two-kernel-tf32"
    assert reasons(selection)["two-kernel-f16-guarded"] == "expected the kernel op_f16 in the manifest, found none"
    assert reasons(selection)["fused-f16"] == "expected the kernel pack_f32_f16 in the manifest, found none"


def test_an_operator_without_fused_kernels_takes_a_two_kernel_plan():
    selection = select(LARGE, H200, TWO_KERNEL, ALL)
    assert selection.plan.name == "two-kernel-f16-guarded"
    assert reasons(selection)["fused-f16"] == "expected a fused kernel of op, found none"
    others = all_records("another")
    assert select(LARGE, H200, (*TWO_KERNEL, *others), ALL | {r.sha256 for r in others}).plan.name == "two-kernel-f16-guarded"


def test_a_missing_kernel_is_never_replaced_by_pytorch():
    selection = select(LARGE, H200, [], ALL)
    assert selection.plan is None
    assert reasons(selection)["pytorch"] == "expected precision ieee or f64, got tf32"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 1), (10, 0), (12, 0)])
def test_other_compute_capabilities_are_rejected(capability):
    device = DeviceFacts("other", capability, 100)
    selection = select(LARGE, device, RECORDS, ALL, allow_unverified=True)
    assert selection.plan is None
    expected = f"expected compute capability 9.0 for sm_90a, got {capability[0]}.{capability[1]}"
    assert reasons(selection)["two-kernel-f16-guarded"] == expected


def test_a_record_of_another_architecture_is_rejected():
    records = [dataclasses.replace(r, architecture="sm_100a") for r in RECORDS]
    selection = select(LARGE, H200, records, ALL)
    assert selection.plan is None
    assert "for sm_100a" in reasons(selection)["two-kernel-tf32"]


@pytest.mark.parametrize("name", PLAN_NAMES)
def test_a_forced_plan_is_the_only_candidate(name):
    selection = select(LARGE, H200, RECORDS, ALL, force=name)
    if name in ("fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"):
        assert selection.plan.name == name
        assert selection.rejected == ()
    else:
        assert selection.plan is None
        assert list(reasons(selection)) == [name]


# ---- the order of plans ------------------------------------------------------------------------------------------


def launch_costs(**by_plan):
    """Costs by which a plan's launches take so many microseconds each, all else nothing."""
    return Costs({(name.replace("_", "-"), "f32"): Coefficients({"launches": us}) for name, us in by_plan.items()})


@pytest.mark.parametrize(
    ("known", "names"),
    [
        (
            {"fused_f16": 1.0, "two_kernel_f16_guarded": 1.0, "two_kernel_tf32": 1.0},
            ("fused-f16", "two-kernel-tf32", "two-kernel-f16-guarded"),
        ),
        (
            {"fused_f16": 9.0, "two_kernel_f16_guarded": 1.0, "two_kernel_tf32": 1.0},
            ("two-kernel-tf32", "two-kernel-f16-guarded", "fused-f16"),
        ),
        (
            {"fused_f16": 9.0, "two_kernel_f16_guarded": 1.0, "two_kernel_tf32": 5.0},
            ("two-kernel-f16-guarded", "two-kernel-tf32", "fused-f16"),
        ),
        # Equal times: the order without costs.
        (
            {"fused_f16": 3.0, "two_kernel_f16_guarded": 1.0, "two_kernel_tf32": 2.0},
            ("fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"),
        ),
        # A plan that was not measured has its family's costs; a family that was not measured keeps the order without costs.
        ({"fused_f16": 9.0, "two_kernel_tf32": 1.0}, ("two-kernel-tf32", "two-kernel-f16-guarded", "fused-f16")),
        ({"two_kernel_f16_guarded": 1.0, "two_kernel_tf32": 1.0}, ("fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32")),
        ({}, ("fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32")),
    ],
)
def test_the_plan_with_the_least_expected_time_is_taken(known, names):
    selection = select(LARGE, H200, RECORDS, ALL, costs=launch_costs(**known))
    assert (selection.plan.name, *(p.name for p in selection.others)) == names
    assert selection == select(LARGE, H200, tuple(reversed(RECORDS)), ALL, costs=launch_costs(**known))


@pytest.mark.parametrize(("n", "side", "plan"), [(512, 14, "two-kernel-f16"), (512, 128, "fused-f16"), (1, 128, "fused-f16")])
def test_narrow_images_of_which_a_strip_is_mostly_empty_take_the_two_kernel_plan(n, side, plan):
    changes = {"dtype": "f16", "precision": "f16", "channels_last": True, "padding": (1, 1), "x_shape": (n, 64, side, side)}
    selection = select(problem(**changes), H200, RECORDS, ALL, costs=shipped_costs())
    assert selection.plan.name == plan
    assert {selection.plan.name, *(p.name for p in selection.others)} == {"fused-f16", "two-kernel-f16"}
    assert selection.plan.expected_us < selection.others[0].expected_us


def test_costs_make_no_plan_of_unverified_kernels():
    fast = launch_costs(fused_f16=0.001, two_kernel_tf32=1.0)
    fused = {r.sha256 for r in RECORDS if r.family == "fused"}
    selection = select(LARGE, H200, RECORDS, ALL - fused, costs=fast)
    assert selection.plan.name == "two-kernel-tf32"
    assert "GPU check for op_fused_f32_nchw_c64_3x3" in reasons(selection)["fused-f16"]
    assert select(LARGE, H200, RECORDS, frozenset(), costs=fast).plan is None


@pytest.mark.parametrize("name", ["fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"])
def test_a_forced_plan_is_taken_whatever_it_costs(name):
    selection = select(LARGE, H200, RECORDS, ALL, force=name, costs=launch_costs(fused_f16=5.0, two_kernel_tf32=1.0))
    assert (selection.plan.name, selection.others) == (name, ())


# ---- limits of the implicit GEMM ---------------------------------------------------------------------------------

ONE = {"x_shape": (1, 8, 600, 600), "weight_shape": (8, 8, 1, 1), "pool": NO_POOL}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_shape": (2**11, 8, 1024, 1024)}, "expected at most 2147483136 output pixels before the pool, got 2048 x 1024 x 1024; split"),
        ({"stride": (8, 9)}, "expected a stride of at most 8, got (8, 9)"),
        ({"weight_shape": (8, 8, 257, 1)}, "expected (filter height - 1) * dilation of at most 255, got 256"),
        ({"weight_shape": (8, 8, 1, 2), "dilation": (1, 256)}, "expected (filter width - 1) * dilation of at most 255, got 256"),
        ({"padding": (129, 0)}, "expected padding and padding - (filter height - 1) * dilation within [-128, 127], got 129 and 129"),
        ({"padding": (0, 128)}, "expected padding and padding - (filter width - 1) * dilation within [-128, 127], got 128 and 128"),
        (
            {"weight_shape": (8, 8, 130, 1)},
            "expected padding and padding - (filter height - 1) * dilation within [-128, 127], got 0 and -129",
        ),
    ],
)
def test_the_first_problem_beyond_a_limit_is_rejected(changes, message):
    assert implicit_gemm_limit(problem(**ONE)) is None
    beyond = problem(**ONE | changes)
    assert implicit_gemm_limit(beyond).startswith(message)
    selection = select(beyond, H200, RECORDS, ALL)
    assert selection.plan is None
    assert reasons(selection)["two-kernel-tf32"].startswith(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"x_shape": (2**11 - 1, 8, 1024, 1024)},
        {"stride": (8, 8)},
        {"weight_shape": (8, 8, 129, 1)},
        {"weight_shape": (8, 8, 256, 1), "padding": (127, 0)},
        {"padding": (127, 127)},
        {"padding": (128, 0), "weight_shape": (8, 8, 2, 1)},
        {"weight_shape": (8, 8, 1, 2), "dilation": (1, 128)},
    ],
)
def test_the_last_problem_within_a_limit_is_planned(changes):
    assert implicit_gemm_limit(problem(**ONE | changes)) is None


# ---- explain -----------------------------------------------------------------------------------------------------


def inputs(device="cpu", dtype=torch.float32):
    return torch.empty(2, 8, 10, 10, device=device, dtype=dtype), torch.empty(16, 8, 3, 3, device=device, dtype=dtype)


def test_explain_on_the_cpu_names_the_reference_and_prints(capsys):
    text = explain(cutlass_ops.conv2d_sub_tanh_sub_avgpool, *inputs(), precision="tf32")
    assert capsys.readouterr().out == text + "\n"
    assert text.splitlines()[0] == (
        "conv2d_sub_tanh_sub_avgpool: x (2, 8, 10, 10) f32, weight (16, 8, 3, 3), precision tf32 -> (2, 16, 4, 4) contiguous"
    )
    assert "plan: cpu reference (PyTorch's own operators" in text


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_plans_for_a_named_device(monkeypatch, device):
    monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", "1")
    text = explain(cutlass_ops.conv2d, *inputs(device), precision="tf32", dilation=(1, 2), device=H200)
    headline, plan, other, *rejected = text.splitlines()
    assert headline.endswith("-> (2, 16, 8, 6) contiguous on H200")
    assert plan.startswith("  plan: two-kernel-tf32 (convert_f32_tf32 -> conv2d_tf32 -> pool_avg_f32): ")
    assert re.search("; expected to take [0-9.]+ us$", plan)
    assert re.fullmatch("  could serve too: two-kernel-f16-guarded; expected to take [0-9.]+ us", other)
    assert all(line.startswith("  rejected: ") for line in rejected)


def test_explain_says_why_there_is_no_plan(monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", "1")
    text = explain(cutlass_ops.conv2d, *inputs("meta"), precision="tf32", device=DeviceFacts("A100", (8, 0), 108))
    assert "  plan: none" in text.splitlines()
    assert "  rejected: two-kernel-tf32: expected compute capability 9.0 for sm_90a, got 8.0" in text.splitlines()


def test_explain_follows_use_plan(monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", "1")
    with use_plan("two-kernel-f16-guarded"):
        text = explain(cutlass_ops.conv2d, *inputs("meta"), precision="tf32", device=H200)
    assert "plan: two-kernel-f16-guarded (" in text


def test_explain_names_pytorch_for_ieee():
    text = explain(cutlass_ops.conv2d, *inputs("meta"), precision="ieee", device=H200)
    assert "plan: pytorch (PyTorch): " in text


def test_explain_refuses_what_is_no_operator():
    with pytest.raises(TypeError, match="expected an operator of cutlass_ops, got"):
        explain(torch.relu, torch.empty(1))
