"""The soak itself, on the CPU: it makes its calls, and notices what it is there to notice."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import cutlass_ops
from cutlass_ops import soak
from cutlass_ops.soak import MIB, Reading, problems_of

OPERATORS = [getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS]
READING = Reading(calls=1000, seconds=1.0, allocated=10 * MIB, device=500 * MIB, host=900 * MIB, kept=7)


def run(calls=40, seconds=None):
    lines = []
    return soak.soak(OPERATORS, calls, seconds, device="cpu", report=lines.append), lines


def test_a_soak_makes_its_calls_and_reports():
    wrong, lines = run()
    assert wrong == []
    assert lines[0].calls == 4
    assert lines[-1].calls == 40
    assert "40 calls" in str(lines[-1])
    assert "host" in str(lines[-1])


def test_a_soak_ends_when_its_time_is_over():
    wrong, lines = run(calls=10_000, seconds=0.01)
    assert wrong == []
    assert lines[-1].calls < 10_000


def test_a_result_that_changes_is_noticed(monkeypatch):
    call, count = soak._Problem.__call__, itertools.count()

    def drifting(self, tensors):
        return call(self, tensors) + (0.0 if next(count) < 20 else 1e-3)

    monkeypatch.setattr(soak._Problem, "__call__", drifting)
    assert any("not the first one's bits" in line for line in run()[0])


def test_a_cache_beyond_its_bound_is_noticed(monkeypatch):
    monkeypatch.setattr(soak.arguments, "_CACHED_VALUES", 0)
    assert any("parameters: expected at most 0, got" in line for line in run()[0])


@pytest.mark.parametrize("name", ["allocated", "device", "host"])
def test_memory_that_grows_is_noticed(name):
    grown = dataclasses.replace(READING, calls=9000, **{name: getattr(READING, name) + 65 * MIB})
    last = dataclasses.replace(READING, calls=10_000)
    assert problems_of([READING, last]) == []
    (found,) = problems_of([READING, grown, last])
    assert found.startswith(f"{name} memory grew by 65.0 MiB after 9000 calls, expected at most")
