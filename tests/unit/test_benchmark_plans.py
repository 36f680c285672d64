"""Which plans the benchmark times on an input, which of their launches are idle, and the bytes of each."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.benchmark import adapter, rows
from cutlass_ops.benchmark.cases import CASES, MAIN, Group, groups, make_input, make_model, operator_arguments
from cutlass_ops.benchmark.run import OPERATORS
from cutlass_ops.problem import PoolArguments
from cutlass_ops.selection import PLAN_NAMES, PYTORCH

from .benchmark_record import select_as_on_h200


@pytest.fixture(autouse=True)
def _on_h200(monkeypatch):
    select_as_on_h200(monkeypatch)


def problem_of(group):
    with torch.device("meta"):
        model, x = make_model(group, "meta"), make_input(group, "meta")
    operator = OPERATORS[group.case.operator]
    return operator, adapter.problem_of(operator, x, model.conv.weight, operator_arguments(group.case, model))


def expected_plans(group):
    """The fused plan first, where there is one."""
    if group.dtype is not torch.float32:
        kind = "bf16" if group.dtype is torch.bfloat16 else "f16"
        return [f"fused-{kind}", f"two-kernel-{kind}"]
    return ["fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"]


@pytest.mark.parametrize("group", groups(list(CASES), quick=False), ids=str)
def test_selection_says_which_plans_serve_a_group(group):
    operator, problem = problem_of(group)
    assert problem.pool == (PoolArguments("avg", (2, 2), (2, 2)) if group.case is MAIN else None)
    assert problem.channels_last == group.channels_last
    serving, rejected = adapter.candidates(operator, problem, 0)
    plans = [plan.name for plan in serving]
    assert plans == expected_plans(group)
    assert {*plans, *(r.name for r in rejected), PYTORCH} == set(PLAN_NAMES)
    assert adapter.selection(operator, problem, 0).plan.name == plans[0]


def test_the_tf32_fallback_of_a_guarded_plan_is_idle_and_no_launch_of_others():
    operator, problem = problem_of(Group(MAIN, 128))
    records = adapter.kernel_set(operator.kernels).records
    idle = {}
    for plan in adapter.candidates(operator, problem, 0)[0]:
        chosen = [records[name] for name in plan.kernels]
        idle[plan.name] = [r.name for r, is_idle in zip(chosen, adapter.idle_launches(chosen)) if is_idle]
    assert idle == {
        "fused-f16": [],
        "two-kernel-f16-guarded": ["convert_f32_tf32", f"{MAIN.operator}_tf32"],
        "two-kernel-tf32": [],
    }


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float16, 2)])
def test_a_launch_has_its_bytes(dtype, size):
    group = Group(MAIN, 128, dtype)
    operator, problem = problem_of(group)
    records = adapter.kernel_set(operator.kernels).records

    def moved(kernel):
        return adapter.stage_bytes(records[kernel], problem)

    pixels, between, y_bytes = 128 * 128**2 * 64, 128 * 126**2 * 128 * 4, 128 * 128 * 63**2 * size
    assert moved("convert_f32_f16") == pixels * (size + 2)
    assert moved("convert_f32_tf32") == pixels * (size + 4)
    assert moved(f"{MAIN.operator}_f16") == pixels * 2 + between
    assert moved("pool_avg_f32") == between + y_bytes
    pack, fused = adapter.selection(operator, problem, 0).plan.kernels
    assert moved(pack) == 0
    assert moved(fused) == pixels * size + y_bytes == adapter.minimum_bytes(problem)


def test_a_fused_kernel_is_held_to_the_fp16_rate_whatever_its_tensors():
    limits = {"copy_gbps": 4000.0, "fp16_tflops": 800.0, "tf32_tflops": 400.0}
    for operand in ("f32", "f16", "bf16"):
        assert rows.stage_figures("fused", operand, 1.0, 400_000_000_000, 0, limits)["fraction_of_limit"] == pytest.approx(0.5)
