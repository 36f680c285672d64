"""Work goes to the device of the tensors, on that device's current stream, whichever device is current."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu.helpers import assert_devices_are_those_that_are_visible

import cutlass_ops
from cutlass_ops import FusedConv2d

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
OPERATORS = [cutlass_ops.conv2d, POOLED, cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.spec.name)
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture(autouse=True)
def _device_0_is_current_before_and_after():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


def tensors(op, device="cpu", seed=0, n=4):
    """x, weight and vectors: the same values on each device."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(n, 24, 20, 24), (40, 24, 3, 3), *((40,) for _ in op.spec.vectors)]
    return [torch.rand(s, generator=random).sub(0.5 if i else 0).to(device) for i, s in enumerate(shapes)]


@each_operator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_tensors_of_another_device_than_the_current_one(op, dtype):
    first, second = ([t.to(dtype) for t in tensors(op, gpu)] for gpu in GPUS)
    y = op(*second)
    assert y.device == GPUS[1]
    assert torch.equal(y.cpu(), op(*first).cpu())
    assert torch.equal(getattr(torch.ops.cutlass_ops, op.spec.name)(*second, *flat(op)).cpu(), y.cpu())


def flat(op):
    """The registered operator's arguments after the tensors, as its defaults have them."""
    *_, parameters = op.arguments.bind((), dict.fromkeys(op.arguments.vectors))
    return [*(a.default for a in op.spec.scalars), *parameters.flat(op.spec.pool is not None)]


def test_devices_in_turn():
    given = {gpu: tensors(POOLED, gpu) for gpu in GPUS}
    expected = POOLED(*given[GPUS[0]]).cpu()
    for i in range(40):
        gpu, current = GPUS[i % 2], GPUS[i // 2 % 2]
        with torch.cuda.device(current):
            assert torch.equal(POOLED(*given[gpu]).cpu(), expected)
            assert torch.cuda.current_device() == current.index


@pytest.mark.parametrize("current", [0, 1])
def test_work_goes_to_the_current_stream_of_the_tensors_device(current):
    given = tensors(POOLED, GPUS[1])
    expected = POOLED(*given)
    late = torch.zeros_like(given[0])
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: on another stream the operator would read zeros
        late.copy_(given[0])
        with torch.cuda.device(current):
            y = POOLED(late, *given[1:])
            assert torch.cuda.current_device() == current
    side.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("numbers", [(1,), (1, 0), (0, 1)], ids=str)
def test_devices_are_those_that_cuda_visible_devices_names_in_its_order(numbers):
    assert_devices_are_those_that_are_visible(*numbers)


def test_tensors_of_two_devices_are_refused():
    x, weight, bias = tensors(POOLED, GPUS[0])
    with pytest.raises(ValueError, match=r"expected weight on x's device cuda:0, got cuda:1"):
        POOLED(x, weight.to(GPUS[1]), bias)
    with pytest.raises(ValueError, match=r"expected bias on x's device cuda:1, got cuda:0"):
        POOLED(x.to(GPUS[1]), weight.to(GPUS[1]), bias)


def test_a_graph_of_another_device_replays():
    given = tensors(POOLED, GPUS[1])
    with torch.cuda.device(1):
        POOLED(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = POOLED(*given)
    fresh = tensors(POOLED, GPUS[1], seed=1)
    for old, new in zip(given, fresh):
        old.copy_(new)
    torch.cuda.synchronize(1)
    with torch.cuda.device(1):
        graph.replay()
    assert torch.equal(y, POOLED(*fresh))


def test_threads_use_both_devices_at_once():
    work = [(OPERATORS[i % 4], GPUS[i // 4]) for i in range(8)]
    given = [tensors(op, gpu, seed=i, n=3 + i) for i, (op, gpu) in enumerate(work)]
    expected = [op(*(t.to(GPUS[0]) for t in mine)).cpu() for (op, _), mine in zip(work, given)]
    start = threading.Barrier(len(work))

    def compute(i):
        start.wait()
        return all(torch.equal(work[i][0](*given[i]).cpu(), expected[i]) for _ in range(20))

    with ThreadPoolExecutor(len(work)) as pool:
        assert all(pool.map(compute, range(len(work))))


@each_operator
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_on_another_device_trains(op, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    modules = [FusedConv2d(op, 24, 40, 3, device=gpu) for gpu in GPUS]
    modules[1].load_state_dict(modules[0].state_dict())
    for module, gpu in zip(modules, GPUS):
        f = torch.compile(module, fullgraph=True) if compiled else module
        f(tensors(op, gpu)[0]).square().sum().backward()
    for p, q in zip(*(module.parameters() for module in modules)):
        torch.testing.assert_close(q.grad.cpu(), p.grad.cpu(), rtol=1e-3, atol=1e-3 * p.grad.abs().max().item())
