"""Random problems against float64: 60 of the session's seed, or as many as CUTLASS_OPS_RANDOM_CASES says.

    CUTLASS_OPS_RANDOM_CASES=2000 python -m pytest -q tests/gpu/test_random.py

A failure prints its seed and number: CUTLASS_OPS_TEST_SEED=... pytest "tests/gpu/test_random.py::...[number]" repeats it alone.
"""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

from cutlass_ops import accuracy

from .helpers import GENERAL_PLANS, SEED, SEED_VARIABLE, call, poisoned, serving
from .random_cases import OPERATORS, RandomCase

COUNT_VARIABLE = "CUTLASS_OPS_RANDOM_CASES"
COUNT = int(os.environ.get(COUNT_VARIABLE) or 60)


@contextlib.contextmanager
def _without_cudnn():
    """cuDNN builds a plan for every new shape, which takes longer than all else, and may choose other sums for 0 * infinity.

    The criterion then allows what operands rounded to TF32 cost, and no more.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


@pytest.mark.parametrize("index", range(COUNT))
def test_random_problem_is_accurate(index):
    case = RandomCase(SEED, index)
    (x, weight), arguments = case.tensors()
    told = f"{SEED_VARIABLE}={SEED}, case {index}: {case}"
    plans = serving(case.op, x, weight, **arguments)
    assert GENERAL_PLANS[case.dtype] <= set(plans), told
    with _without_cudnn():
        criterion = accuracy.Criterion(case.op, x, weight, **arguments)
    with poisoned():
        results = {"the plan that a call takes": case.op(x, weight, **arguments)}
    results |= {plan: call(plan, case.op, x, weight, **arguments) for plan in plans}
    for plan, y in results.items():
        found = criterion.judge(y)
        assert found.passed, f"{plan}: {found}\n{told}"


def test_random_cases_are_their_own_and_cover_the_operators():
    cases = [RandomCase(SEED, index) for index in range(200)]
    assert repr(RandomCase(SEED, 7)) == repr(cases[7])
    assert len({repr(case) for case in cases}) == len(cases)
    assert {case.op for case in cases} == set(OPERATORS)
    assert {case.dtype for case in cases} == set(GENERAL_PLANS)
    assert any(case.specials for case in cases)
