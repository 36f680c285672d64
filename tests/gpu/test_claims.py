"""Kernels whose CTAs claim their steps while they run: every step once, and the same bits whoever claims it, in graphs and streams too."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import cutlass_ops
from cutlass_ops import launch, ops
from cutlass_ops.loader import device_facts

from .helpers import activation, call, filters, generator, integers

OPERATOR = cutlass_ops.conv2d_relu_hardswish
#: 33 x 17 steps: some claims for each CTA, in two blocks of output channels.
SHAPES = (33, 8, 35, 128), (70, 8, 3, 3)


def run(x, weight, bias=None):
    return call("fused-f16", OPERATOR, x, weight, bias, precision="tf32")


def with_misfits(x):
    """Values beyond fp16, in steps of early and late claims; powers of two, so that integers stay exact."""
    x = x.clone()
    x[0, 0, 5, 7], x[len(x) // 2, -1, -1, -1], x[-1, 0, 0, 0], x[-1, -1, -1, -1] = 2.0**20, -(2.0**18), 2.0**16, 2.0**20
    return x


@pytest.fixture(params=[False, True], ids=["fits", "misfits"])
def inputs(request):
    random = generator("claims", request.param)
    x, weight = activation(SHAPES[0], torch.float32, random), filters(SHAPES[1], torch.float32, random)
    return (with_misfits(x) if request.param else x), weight


@pytest.fixture
def sm_count(monkeypatch):
    """Lets launches share their work out to so many SMs."""

    def use(count):
        ops._thread.calls.clear()
        monkeypatch.setattr(launch, "device_facts", lambda device: dataclasses.replace(device_facts(device), sm_count=count))

    yield use
    monkeypatch.undo()
    ops._thread.calls.clear()


def test_results_are_the_same_bits_each_time(inputs):
    first = run(*inputs)
    assert all(torch.equal(run(*inputs), first) for _ in range(50))


@pytest.mark.parametrize("count", [2, 3, 16, 131])
def test_results_are_the_same_bits_with_fewer_ctas(inputs, sm_count, count):
    """From 561 claims of a CTA to some."""
    expected = run(*inputs)
    sm_count(count)
    assert torch.equal(run(*inputs), expected)


@pytest.mark.parametrize("misfits", [False, True])
@pytest.mark.parametrize(("count", "n", "claims"), [(1, 121, "2 steps, the last of 1"), (1, 300, "4 steps"), (3, 500, "2 steps")])
def test_claims_of_several_steps_are_exact(sm_count, misfits, count, n, claims):
    """Where a CTA has no room for as many claims as it has steps: 17 an image, and 2048 claims a CTA."""
    random = generator("claims", n)
    x, weight, bias = integers((n, 8, 34, 48), -4, 4, random), integers((24, 8, 3, 3), -2, 2, random), integers((24,), -3, 3, random)
    x = with_misfits(x) if misfits else x
    sm_count(count)
    y = call("fused-f16", cutlass_ops.conv2d, x, weight, bias, padding=1, precision="tf32")
    expected = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    assert torch.equal(y.double(), expected), claims


def test_graphs_and_streams_side_by_side_claim_from_counters_of_their_own(inputs):
    expected = run(*inputs)
    streams, graphs = [torch.cuda.Stream() for _ in range(3)], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*inputs)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream), cutlass_ops.use_plan("fused-f16"):
                graphs.append((graph, OPERATOR(*inputs, precision="tf32")))
    torch.cuda.synchronize()
    for _ in range(20):
        eager = []
        for stream, (graph, y) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                y.zero_()
                graph.replay()
                with cutlass_ops.use_plan("fused-f16"):
                    eager.append(OPERATOR(*inputs, precision="tf32"))
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y in eager + [y for _, y in graphs])


def test_a_problem_of_more_steps_than_all_ctas_have_claims_for():
    """An image of one step for each: 270,339 of them, three more than 132 SMs have room for; one image does not fit fp16."""
    n = 132 * 2048 + 3
    x = integers((n, 8, 2, 4), -4, 4, generator("many"))
    x[n // 2, 3, 1, 1] = 2.0**20
    weight = integers((3, 8, 3, 3), -2, 2, generator("many w"))
    y = call("fused-f16", cutlass_ops.conv2d, x, weight, padding=1, precision="tf32")
    expected = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    assert torch.equal(y.double(), expected)
