"""Processes and threads on the CPU: fork after import, spawn, workers of a DataLoader, first calls of many threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import cutlass_ops
from cutlass_ops import FusedConv2d, ops, use_plan
from cutlass_ops.ops import kernel_set

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool


def example():
    torch.manual_seed(0)
    return FusedConv2d(POOLED, 3, 4, 3, padding=1), torch.randn(2, 3, 9, 8)


def compute(queue, module, x):
    """What a child does."""
    torch.set_num_threads(1)
    queue.put(module(x).detach().numpy())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_another_process_computes_the_same(method):
    module, x = example()
    expected = module(x)  # the parent has called before
    context = torch.multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=compute, args=(queue, module, x))
    child.start()
    found = queue.get()
    child.join()
    assert child.exitcode == 0
    assert torch.equal(torch.from_numpy(found), expected)


class Images(Dataset):
    """Images that the operator has made in the worker that loads them."""

    def __init__(self):
        self.module, self.x = example()

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with torch.no_grad():
            return self.module(self.x * index)[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_call_operators(method):
    images = Images()
    found = torch.cat(list(DataLoader(images, batch_size=2, num_workers=2, multiprocessing_context=method)))
    torch.testing.assert_close(found, torch.stack([images[i] for i in range(6)]))


def test_threads_call_first_at_once_and_keep_what_is_theirs():
    """Autocast, grad mode and forced plan are each thread's own."""
    module, x = example()
    expected = module(x).detach()
    start = threading.Barrier(8)

    def work(i):
        start.wait()
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 1), torch.set_grad_enabled(i % 3 == 0), use_plan("pytorch"):
            ys = [module(x) for _ in range(20)]
        return all(
            y.dtype == (torch.bfloat16 if i % 2 else torch.float32)
            and y.requires_grad == (i % 3 == 0)
            and torch.allclose(y.detach().float(), expected, atol=0.05 if i % 2 else 1e-6)
            for y in ys
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_kernels_of_a_folder_are_read_once_by_threads_that_ask_at_once():
    start = threading.Barrier(8)
    ops._kernel_sets.cache_clear()

    def work(_):
        start.wait()
        return kernel_set(POOLED.kernels)

    with ThreadPoolExecutor(8) as pool:
        assert len({id(kernels) for kernels in pool.map(work, range(8))}) == 1
