#!/usr/bin/env python3
"""Throughput of an operator on one GPU and on all, each image on one of them.

    torchrun --standalone --nproc-per-node=2 scripts/scaling.py

Prints images a second of one GPU alone and of all at once, with the same batch on each ("own batch") and with one batch
that a DTensor shares out ("shared batch"), and the scaling efficiency: all / (number of GPUs x one).
Exit code 0: measured. 1: a result was wrong. 2: there is no Hopper GPU for each process; nothing was measured.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cutlass_ops
from cutlass_ops.verification import missing_gpu

SIZES = {  # KernelBench's: N, C, H, W; K
    "conv2d_sub_tanh_sub_avgpool": ((128, 64, 128, 128), 128),
    "conv2d_relu_hardswish": ((128, 8, 128, 128), 64),
    "conv2d_min_add_mul": ((128, 64, 128, 128), 128),
}


def seconds(call: Callable[[], object], trials: int) -> float:
    """Mean time of a call, from a start that all processes share to the end of the slowest."""
    for _ in range(10):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    dist.barrier()
    start.record()
    for _ in range(trials):
        call()
    end.record()
    torch.cuda.synchronize()
    slowest = torch.tensor(start.elapsed_time(end) / 1000 / trials, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure(name: str, trials: int) -> bool:
    """Measure one operator and print a line for each way to share the work; returns whether the results are right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    rank, world = dist.get_rank(), dist.get_world_size()
    op, (shape, k) = getattr(cutlass_ops, name), SIZES[name]
    torch.manual_seed(0)  # the same tensors on each GPU
    weight = torch.randn(k, shape[1], 3, 3, device="cuda") / (shape[1] * 9) ** 0.5
    given: list[Tensor] = [torch.rand(shape, device="cuda"), weight, *(torch.rand(k, device="cuda") for _ in op.spec.vectors)]
    mesh = init_device_mesh("cuda", (world,))
    shared = [distribute_tensor(t, mesh, [Replicate() if i else Shard(0)]) for i, t in enumerate(given)]
    with torch.no_grad():
        right = torch.allclose(op(*shared).full_tensor(), op(*given), rtol=1e-3, atol=1e-3)  # another batch may take another plan
        alone = seconds(lambda: op(*given) if rank == 0 else None, trials)
        own = seconds(lambda: op(*given), trials)
        together = seconds(lambda: op(*shared), trials)
    if rank == 0:
        one = shape[0] / alone
        print(f"{name}: one GPU {one:,.0f} images/s")
        for what, total in (("own batch", world * shape[0] / own), ("shared batch", shape[0] / together)):
            print(f"  {world} GPUs, {what:<12} {total:>12,.0f} images/s, scaling efficiency {total / (world * one):.1%}")
        if not right:
            print(f"error: {name}: expected the shared batch's result to be close to one GPU's, it is not", file=sys.stderr)
    return right


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="calls that a time is the mean of (default: 100)")
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"among {', '.join(SIZES)} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.operators) - set(SIZES):
        parser.error(f"expected operators among {', '.join(SIZES)}, got {', '.join(sorted(unknown))}")
    local, processes = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    missing = missing_gpu()
    if not missing and torch.cuda.device_count() < processes:
        missing = f"needs a GPU for each of {processes} processes; found {torch.cuda.device_count()}"
    if missing:
        print(f"not measured: {missing}", file=sys.stderr)
        return 2
    torch.cuda.set_device(local)
    # Without torchrun: a group of one.
    where: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group("nccl", device_id=torch.device("cuda", local), **where)
    try:
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {options.trials} calls a time")
        right = [measure(name, options.trials) for name in options.operators or SIZES]  # each process the same ones
        return 0 if all(right) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
