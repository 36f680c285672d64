"""Random problems against float64, drawn by hypothesis: 60 of the session's seed, or as many as CUTLASS_OPS_RANDOM_CASES says.

    CUTLASS_OPS_RANDOM_CASES=2000 python -m pytest -q tests/gpu/test_random.py

A failure prints the number of its problem: CUTLASS_OPS_RANDOM_CASE=NUMBER repeats that one alone. Problems are not shrunk: a number's
neighbours are other problems.
"""

from __future__ import annotations

import contextlib
import os

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cutlass_ops import accuracy

from .helpers import GENERAL_PLANS, SEED, SEED_VARIABLE, call, poisoned, serving
from .random_cases import OPERATORS, RandomCase

COUNT_VARIABLE = "CUTLASS_OPS_RANDOM_CASES"
COUNT = int(os.environ.get(COUNT_VARIABLE) or 60)
CASE_VARIABLE = "CUTLASS_OPS_RANDOM_CASE"
CASE = os.environ.get(CASE_VARIABLE)
NUMBERS = st.just(int(CASE)) if CASE else st.integers(0, 2**63 - 1)


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


@hypothesis.seed(SEED)
@settings(max_examples=COUNT, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(number=NUMBERS)
def test_random_problem_is_accurate(number):
    case = RandomCase(number)
    (x, weight), arguments = case.tensors()
    told = f"{CASE_VARIABLE}={number} ({SEED_VARIABLE}={SEED}): {case}"
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
    cases = [RandomCase(SEED + index) for index in range(200)]
    assert repr(RandomCase(SEED + 7)) == repr(cases[7])
    assert len({repr(case) for case in cases}) == len(cases)
    assert {case.op for case in cases} == set(OPERATORS)
    assert {case.dtype for case in cases} == set(GENERAL_PLANS)
    assert any(case.specials for case in cases)
