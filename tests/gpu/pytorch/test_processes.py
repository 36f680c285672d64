"""Processes and threads with a GPU: fork, spawn, workers of a DataLoader, kernels loaded by many threads at once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import cutlass_ops
from cutlass_ops import FusedConv2d

from ..helpers import DEVICE, assert_devices_are_those_that_are_visible, run_script

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool

FORK_BEFORE_CUDA = """
import os, torch, cutlass_ops
def compute():
    torch.manual_seed(0)
    x, weight = torch.rand(4, 24, 20, 24).cuda(), torch.rand(40, 24, 3, 3).cuda()
    return cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, weight).sum().item()
children = []
for _ in range(2):
    if (child := os.fork()) == 0:
        os._exit(0 if compute() == compute() else 1)
    children.append(child)
assert all(os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) == 0 for c in children)
compute()  # the parent, after its children
print("ok")
"""

FORK_AFTER_CUDA = """
import os, torch, cutlass_ops
x, weight = torch.rand(4, 24, 20, 24).cuda(), torch.rand(40, 24, 3, 3).cuda()
op = cutlass_ops.conv2d_sub_tanh_sub_avgpool
expected, less = op(x, weight), x[:1]
if (child := os.fork()) == 0:
    for given in ((x, weight), (less, weight)):  # a prepared call and a new one
        try:
            op(*given)
        except RuntimeError as error:
            if "Cannot re-initialize CUDA in forked subprocess" not in str(error):
                os._exit(1)
        else:
            os._exit(2)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 0, code
assert torch.equal(op(x, weight), expected)
print("ok")
"""

THREADS = """
import threading, torch, cutlass_ops
from concurrent.futures import ThreadPoolExecutor
from cutlass_ops import loader
loads = []
load = loader.driver.load_library
loader.driver.load_library = lambda image: loads.append(hash(image)) or load(image)
torch.manual_seed(0)
x = torch.rand(4, 24, 20, 24, device="cuda")
weight, vector = torch.rand(40, 24, 3, 3, device="cuda"), torch.rand(40, device="cuda")
operators = [getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS] * 2
start = threading.Barrier(8)
def work(op):
    start.wait()
    return [op(x, weight, *[vector for _ in op.spec.vectors], padding=i) for i in range(3)]
with ThreadPoolExecutor(8) as pool:
    results = list(pool.map(work, operators))
torch.cuda.synchronize()
for op, found in zip(operators, results):
    assert all(torch.equal(y, op(x, weight, *[vector for _ in op.spec.vectors], padding=i)) for i, y in enumerate(found))
assert loads and len(set(loads)) == len(loads), "a cubin was loaded twice"
print("ok")
"""


@pytest.mark.parametrize("script", [FORK_BEFORE_CUDA, FORK_AFTER_CUDA, THREADS], ids=["fork_before_cuda", "fork_after_cuda", "threads"])
def test_in_a_fresh_process(script):
    assert run_script(script) == "ok"


def test_a_device_that_is_named_in_cuda_visible_devices():
    assert_devices_are_those_that_are_visible(0)


def example():
    torch.manual_seed(0)
    return FusedConv2d(POOLED, 24, 40, 3), torch.rand(4, 24, 20, 24)


def compute(queue, module, x):
    """What a spawned child does."""
    with torch.no_grad():
        queue.put(module.to(DEVICE)(x.to(DEVICE)).cpu().numpy())


@torch.no_grad()
def test_a_spawned_process_computes_the_same():
    module, x = example()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=compute, args=(queue, module, x))
    child.start()
    found = torch.from_numpy(queue.get())
    child.join()
    assert child.exitcode == 0
    assert torch.equal(found, module.to(DEVICE)(x.to(DEVICE)).cpu())


class Images(Dataset):
    """Images that the operator makes on the GPU in the worker that loads them."""

    def __init__(self):
        self.module, self.x = example()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.module.to(DEVICE)((self.x + index).to(DEVICE))[0].cpu()


def test_workers_of_a_data_loader_use_the_gpu():
    images = Images()
    found = torch.cat(list(DataLoader(images, batch_size=2, num_workers=2, multiprocessing_context="spawn")))
    assert torch.equal(found, torch.stack([images[i] for i in range(4)]))
