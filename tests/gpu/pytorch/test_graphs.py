"""CUDA graphs: through torch.compile and make_graphed_callables, and with a first call ever inside the capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cutlass_ops
from cutlass_ops import FusedConv2d

from ..helpers import DEVICE, generator, name_of, run_script, tensors

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
OPERATORS = [cutlass_ops.conv2d, POOLED, cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul]
FIRST_CALL = """
import torch, cutlass_ops
torch.manual_seed(0)
x, weight, bias = (torch.rand(s, device="cuda") for s in ((4, 24, 20, 24), (40, 24, 3, 3), (40,)))
x, weight, bias = (t.to(torch.{dtype}) for t in (x, weight, bias))
op = cutlass_ops.{op}
vectors = [bias for _ in op.spec.vectors]
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="{mode}"):
    y = op(x, weight, *vectors)
x.copy_(torch.rand_like(x))
weight.copy_(torch.rand_like(weight) / 9)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, op(x, weight, *vectors))
print("ok")
"""


@pytest.mark.parametrize(
    ("op", "dtype", "mode"),
    [
        (POOLED, "float32", "global"),
        (POOLED, "float32", "thread_local"),
        (POOLED, "float32", "relaxed"),
        (POOLED, "float16", "global"),
        (cutlass_ops.conv2d_min_add_mul, "float32", "global"),
    ],
    ids=name_of,
)
def test_the_first_call_of_a_process_may_be_inside_a_capture(op, dtype, mode):
    assert run_script(FIRST_CALL.format(op=op.spec.name, dtype=dtype, mode=mode)) == "ok"


class Between(nn.Module):
    """An operator between others."""

    def __init__(self, op):
        super().__init__()
        self.fused = FusedConv2d(op, 24, 40, 3, device=DEVICE)

    def forward(self, x):
        return torch.relu(self.fused(x * 0.5)) + 1


@pytest.mark.parametrize(("op", "dtype"), [*((op, torch.float32) for op in OPERATORS), (POOLED, torch.float16)], ids=name_of)
def test_reduce_overhead_replays_with_new_data_and_weights(op, dtype):
    torch._dynamo.reset()
    module = Between(op).to(dtype)
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for i in range(6):  # the first calls warm up and record
            torch.compiler.cudagraph_mark_step_begin()
            x = tensors(op, ("reduce-overhead", i), dtype)[0]
            if i >= 3:
                for p in module.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator("weight", i), device=DEVICE) / 15)
            y = compiled(x).clone()
            tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[
                dtype
            ]  # Inductor rounds once where eager rounds twice
            torch.testing.assert_close(y, module(x), rtol=tolerance, atol=tolerance)
    torch._dynamo.reset()


@pytest.mark.parametrize("op", OPERATORS, ids=name_of)
def test_graphed_callables_train_with_new_data_and_weights(op):
    graphed, plain = Between(op), Between(op)
    plain.load_state_dict(graphed.state_dict())
    sample = tensors(op, "graphed")[0].requires_grad_()
    replayed = torch.cuda.make_graphed_callables(graphed, (sample,))
    for i in range(3):
        x = tensors(op, ("graphed", i))[0]
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = replayed(mine), plain(theirs)
        assert torch.equal(y, expected), i
        for result in (y, expected):
            result.backward(torch.linspace(-1, 1, result.numel(), device=DEVICE).view(result.shape))
        pairs = [(mine.grad, theirs.grad), *((p.grad, q.grad) for p, q in zip(graphed.parameters(), plain.parameters()))]
        for found, wanted in pairs:  # cuDNN may choose another algorithm in a graph
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * wanted.abs().max().item())
        with torch.no_grad():
            for p, q in zip(graphed.parameters(), plain.parameters()):
                q.sub_(p.grad * 0.01)
                p.copy_(q)
                p.grad, q.grad = None, None


def test_two_graphs_of_one_memory_pool_replay_in_turn():
    given = tensors(POOLED, "pool of graphs")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    POOLED(*given)
    torch.cuda.synchronize()
    with torch.cuda.graph(first):
        y = POOLED(*given)
    with torch.cuda.graph(second, pool=first.pool()):
        z = POOLED(*given, padding=1)
    for i in range(3):
        for old, new in zip(given, tensors(POOLED, ("pool of graphs", i))):
            old.copy_(new)
        first.replay()
        assert torch.equal(y, POOLED(*given))
        second.replay()
        assert torch.equal(z, POOLED(*given, padding=1))
