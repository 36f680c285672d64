"""Two processes, a GPU each: DTensor, DistributedDataParallel, and the throughput script."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed
from torch import multiprocessing

import cutlass_ops
from cutlass_ops import FusedConv2d

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
REPOSITORY = Path(__file__).parents[2]


def example():
    torch.manual_seed(0)
    return FusedConv2d(POOLED, 24, 40, 3), torch.rand(8, 24, 20, 24)


def process(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cuda", (2,))
    module, x = example()
    module, x = module.cuda(), x.cuda()
    given = [x, module.conv.weight.detach(), module.conv.bias.detach()]
    shared = [distribute_tensor(t, mesh, [Replicate() if i else Shard(0)]) for i, t in enumerate(given)]
    for arguments in ({}, {"padding": 1}, {"stride": 2}):
        with CommDebugMode() as communication:
            y = POOLED(*shared, **arguments)
        assert y.placements == (Shard(0),)
        assert communication.get_total_counts() == 0
        torch.testing.assert_close(y.full_tensor(), POOLED(*given, **arguments), rtol=2e-3, atol=2e-3)  # another plan, it may be

    parallel = torch.nn.parallel.DistributedDataParallel(module, device_ids=[rank])
    parallel(x.chunk(2)[rank]).square().sum().backward()
    alone, _ = example()
    alone.cuda()(x).square().sum().backward()
    for p, q in zip(module.parameters(), alone.parameters()):  # DistributedDataParallel takes the mean of the processes
        torch.testing.assert_close(p.grad * 2, q.grad, rtol=2e-3, atol=2e-3 * q.grad.abs().max().item())
    torch.distributed.destroy_process_group()


def test_dtensor_and_data_parallel_training():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    multiprocessing.spawn(process, (port,), 2)


def test_the_throughput_script_runs():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "scripts/scaling.py", "--trials=10"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "scaling efficiency" in run.stdout
