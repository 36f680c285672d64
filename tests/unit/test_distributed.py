"""DTensor on two processes of the CPU: results, gradients and placements, and that nothing is communicated."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed
from torch import multiprocessing

import cutlass_ops

PROCESSES = 2
POOLED, VECTORS = cutlass_ops.conv2d_sub_tanh_sub_avgpool, cutlass_ops.conv2d_min_add_mul


def given(op, n=5, requires_grad=False):
    """x, weight and vectors, the same on each process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, 3, 9, 8), (6, 3, 3, 3), *((6,) for _ in op.spec.vectors)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(requires_grad) for s in shapes]


def a_batch_is_shared(mesh):
    """Also where stride, padding or pool change after an equal call: DTensor must not take the result of another for it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    for op in (POOLED, VECTORS, cutlass_ops.conv2d):
        for n in (4, 5, 1):
            tensors = given(op, n)
            shared = [distribute_tensor(t, mesh, [Replicate() if i else Shard(0)]) for i, t in enumerate(tensors)]
            for arguments in ({}, {"padding": 1}, {"stride": (2, 1)}, {"pool": 3} if op.spec.pool else {"dilation": 2}, {}):
                with CommDebugMode() as communication:
                    y = op(*shared, **arguments)
                if n >= PROCESSES:  # DTensor gathers a batch with fewer images than processes
                    assert (y.placements, communication.get_total_counts()) == ((Shard(0),), 0), (op, n, arguments)
                torch.testing.assert_close(y.full_tensor(), op(*tensors, **arguments))


def torch_ops_are_shared_from_the_first_call(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    tensors = given(cutlass_ops.conv2d_relu_hardswish)
    shared = [distribute_tensor(t, mesh, [Replicate() if i else Shard(0)]) for i, t in enumerate(tensors)]
    with torch.inference_mode():
        for stride in (1, 2, 1):
            rest = [[stride] * 2, [0, 0], [1, 1], None]
            y = torch.ops.cutlass_ops.conv2d_relu_hardswish(*shared, *rest)
            assert y.placements == (Shard(0),)
            assert y.shape == cutlass_ops.conv2d_relu_hardswish(*tensors, stride=stride).shape


def channels_may_be_shared(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    x, weight, v, bias = given(VECTORS)
    v = v.reshape(1, 6, 1, 1)
    placements = [Replicate(), Shard(0), Shard(1), Shard(0)]
    shared = [distribute_tensor(t, mesh, [p]) for t, p in zip((x, weight, v, bias), placements)]
    with CommDebugMode() as communication:
        y = VECTORS(*shared)
    assert y.placements == (Shard(1),)
    assert communication.get_total_counts() == 0
    torch.testing.assert_close(y.full_tensor(), VECTORS(x, weight, v, bias))


def an_absent_vector_and_other_placements_work(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight, _ = given(POOLED)
    for dimension in (0, 1, 2, 3):
        shared = distribute_tensor(x, mesh, [Shard(dimension)])
        for placement in (Replicate(), Shard(0), Shard(1)):
            y = POOLED(shared, distribute_tensor(weight, mesh, [placement]))
            torch.testing.assert_close(y.full_tensor(), POOLED(x, weight))


def gradients_are_those_of_one_process(mesh):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    for op in (POOLED, VECTORS):
        for kinds in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(2), Replicate()]):
            tensors = given(op, requires_grad=True)
            placements = [kinds[0], kinds[1], *[kinds[1]] * len(op.spec.vectors)]
            shared = [distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in zip(tensors, placements)]
            y = op(*shared)
            factor = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
            shared_factor = distribute_tensor(factor, mesh, y.placements)
            with CommDebugMode() as communication:
                torch.autograd.backward(y, shared_factor)
            op(*tensors).backward(factor)
            for mine, alone in zip(shared, tensors):
                torch.testing.assert_close(mine.grad.full_tensor(), alone.grad)
            if kinds[0] == Shard(0):
                assert communication.get_total_counts() == 0
                assert shared[0].grad.placements == (Shard(0),)
                assert shared[1].grad.placements == (Partial(),)
    y = POOLED(*shared[:2])
    with pytest.raises(NotImplementedError, match="expected one derivative of DTensors"):
        torch.autograd.grad(y.sum(), shared[0], create_graph=True)


def a_compiled_call_is_shared(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    tensors = given(POOLED, n=4)
    shared = [distribute_tensor(t, mesh, [Replicate() if i else Shard(0)]) for i, t in enumerate(tensors)]
    compiled = torch.compile(lambda *t: POOLED(*t, padding=1), fullgraph=True, backend="aot_eager")
    y = compiled(*shared)
    assert y.placements == (Shard(0),)
    torch.testing.assert_close(y.full_tensor(), POOLED(*tensors, padding=1))


CHECKS = [
    torch_ops_are_shared_from_the_first_call,
    a_batch_is_shared,
    channels_may_be_shared,
    an_absent_vector_and_other_placements_work,
    gradients_are_those_of_one_process,
    a_compiled_call_is_shared,
]


def process(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (PROCESSES,))
    for check in CHECKS:
        check(mesh)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs a PyTorch with torch.distributed")
def test_dtensors_on_two_processes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    multiprocessing.spawn(process, (port,), PROCESSES)  # a check that fails is in the traceback of its process


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_throughput_script_says_what_it_lacks(repository):
    environment = os.environ | {"PYTHONPATH": str(repository)}
    command = [sys.executable, str(repository / "scripts" / "scaling.py")]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("not measured: needs a Hopper GPU")
