"""Calls as users write them: what is prepared once, and what is asked for in each call."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch._inductor  # the profiler imports it, and would fail halfway while CPU tensors pass for a GPU's
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cutlass_ops import Operator, ops, use_plan
from cutlass_ops.reference import convolutions

from .fake_driver import FakeDriver, install
from .records import write_folder
from .test_launch import chain, inputs

_serial = itertools.count()


@pytest.fixture
def eager(monkeypatch, tmp_path):
    """The operator as users call it, CPU tensors passing for a GPU's: it launches, or gives "dispatched" or "transformed"."""
    name = f"unit_calls_{next(_serial)}"
    fake = FakeDriver({r.name: r.params_size for r in write_folder(tmp_path, name)})
    install(monkeypatch, fake)
    op = Operator(dataclasses.replace(chain, name=name), tmp_path)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.Tensor, "device", torch.device("cuda", 0), raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(op, "_op", lambda *_: "dispatched")
    monkeypatch.setattr(op, "_transformed", lambda *_: "transformed")
    return SimpleNamespace(call=op, prepared=ops._thread.calls[name], work=fake.work, name=name)


def misaligned(tensor, elements=1):
    return torch.cat([torch.zeros(elements), tensor.flatten()])[elements:].view(tensor.shape)


FACTS = {
    "x's shape": lambda x, w, v: ((x[:1], w, v), {}),
    "x's strides": lambda x, w, v: ((x.contiguous(memory_format=torch.channels_last), w, v), {}),
    "x's alignment": lambda x, w, v: ((misaligned(x), w, v), {}),
    "the filter's shape": lambda x, w, v: ((x, w[:, :, :2].contiguous(), v), {}),
    "the filter's strides": lambda x, w, v: ((x, w.transpose(2, 3).contiguous().transpose(2, 3), v), {}),
    "the dtype": lambda x, w, v: ((x.half(), w.half(), v.half()), {}),
    "a vector's shape": lambda x, w, v: ((x, w, v.view(-1, 1, 1)), {}),
    "a vector's strides": lambda x, w, v: ((x, w, v.repeat(2)[::2]), {}),
    "an absent vector": lambda x, w, v: ((x, w, v, v), {}),
    "the stride": lambda x, w, v: ((x, w, v), {"stride": 2}),
    "the padding": lambda x, w, v: ((x, w, v), {"padding": (0, 1)}),
    "the pool": lambda x, w, v: ((x, w, v), {"pool": 1}),
    "ceil_mode": lambda x, w, v: ((x, w, v), {"ceil_mode": True}),
    "the precision": lambda x, w, v: ((x, w, v), {"precision": "ieee"}),
}


@pytest.mark.parametrize("fact", FACTS)
def test_equal_calls_share_what_was_prepared_and_each_other_fact_prepares_anew(eager, fact):
    given = inputs(r=3, s=3)
    tensors, keywords = FACTS[fact](*given)
    for _ in range(2):
        eager.call(*given)
        eager.call(*(t.clone() for t in given), scale=3.0, pool_padding=0)
        eager.call(*given[:2], v=given[2], bias=None)
    assert len(eager.prepared) == 1
    for _ in range(2):
        eager.call(*tensors, **keywords)
    assert len(eager.prepared) == 2
    problem = eager.call.problem(*tensors[:2], eager.call.arguments.bind(tensors[2:], keywords)[2])
    last = list(eager.prepared.values())[-1]
    assert last is None if fact == "the precision" else last.problem == problem
    work = len(eager.work)
    eager.call(*given)
    assert [w.kernel for w in eager.work[work:]] == ["pack_f32_f16", f"{eager.name}_fused_f32_nchw_c16_3x3_shifted"]


def test_calls_share_what_was_prepared_for_their_alignment_alone(eager):
    x, w, v = inputs(w=8)
    for offset, prepared in ((2, 1), (1, 2), (0, 3), (3, 3), (4, 3), (5, 3), (6, 3)):
        eager.call(misaligned(x, offset), w, v)
        assert len(eager.prepared) == prepared
    assert sorted(call.problem.alignment for call in eager.prepared.values()) == [4, 8, 16]
    eager.call(x, misaligned(w), v)
    assert len(eager.prepared) == 4


def test_the_plan_and_pytorchs_precision_are_asked_for_in_each_call(eager):
    given = inputs()
    for plan, last in (("two-kernel-tf32", 3), ("two-kernel-f16-guarded", 6)) * 2:
        eager.work.clear()
        with use_plan(plan):
            eager.call(*given)
        assert len(eager.work) == last
    for setting, launches in (("ieee", 0), ("tf32", 3)) * 2:
        with convolutions(setting):
            eager.work.clear()
            eager.call(*given)
            assert len(eager.work) == launches


def test_autocast_is_asked_for_in_each_call(eager):
    given = inputs(c=8)
    for on, dtype in ((False, torch.float32), (True, torch.float16)) * 2:
        torch.set_autocast_enabled("cuda", on)
        try:
            assert eager.call(*given).dtype == dtype
            assert eager.call(*given, precision="tf32").dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


STATES = {
    "gradients": (contextlib.nullcontext, lambda t: t.clone().requires_grad_(), "dispatched"),
    "a mode": (_Mode, None, "dispatched"),
    "a function mode": (BaseTorchFunctionMode, None, "dispatched"),
    "the profiler": (torch.profiler.profile, None, "dispatched"),
    "a subclass": (contextlib.nullcontext, lambda t: t.as_subclass(type("Sub", (torch.Tensor,), {})), "dispatched"),
    "a lazy negation": (contextlib.nullcontext, torch._neg_view, "dispatched"),
    "forward derivatives": (forward_ad.dual_level, None, "transformed"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_pytorchs_state_is_looked_at_in_each_call(eager, state, which):
    context, change, expected = STATES[state]
    given = list(inputs())
    changed = [change(t) if change and i == which else t for i, t in enumerate(given)]
    for _ in range(2):
        assert isinstance(eager.call(*given), torch.Tensor)
        with context():
            assert eager.call(*changed) == expected
    if state == "gradients":
        with torch.no_grad():
            assert isinstance(eager.call(*changed), torch.Tensor)
