"""KernelBench's timing protocol on the GPU, competitors interleaved."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

WARM_UP, BLOCK = 5, 10
FLUSH_BYTES = 256 << 20
HOST_CALLS, HOST_BLOCK = 1000, 100  # a block stays within the GPU's queue of launches, so that the host never waits

Call = Callable[[], Any]


@dataclass(frozen=True)
class Competitor:
    """Something to time. `scope` is entered around each trial, outside what is timed."""

    what: str
    call: Call
    plan: Optional[str] = None
    scope: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    #: Keeps its result and temporaries in a CUDA graph's own pool, which the allocator's counters do not show.
    owns_memory: bool = False


def summary(ms: Sequence[float]) -> dict[str, float]:
    """Mean, median, least and standard deviation of trials."""
    return {
        "ms_mean": statistics.fmean(ms),
        "ms_median": statistics.median(ms),
        "ms_min": min(ms),
        "ms_std": statistics.pstdev(ms),
    }


def turn(number: int, count: int) -> list[int]:
    """Order of the competitors in a round: another one first each time, so that none always follows the same."""
    return [(number + i) % count for i in range(count)]


@functools.cache
def _flush_buffer() -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def one_trial(competitor: Competitor, idle_ms: float = 0.0) -> float:
    """Milliseconds of one call, the GPU left without work for `idle_ms` and L2 flushed before."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    with competitor.scope():
        torch.cuda.synchronize()
        if idle_ms:
            time.sleep(idle_ms / 1e3)
        _flush_buffer().fill_(42)
        start.record()
        competitor.call()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def interleaved(competitors: Sequence[Competitor], trials: int, idle_ms: float = 0.0) -> list[list[float]]:
    """Milliseconds of every trial of every competitor, in turns of BLOCK trials, after WARM_UP of each.

    The first trial of a turn does not count: other competitors' code has taken the host's caches, and a call that takes 45 us on the
    host took 61 to 93 after theirs (docs/performance.md), more than the flush of L2 hides. In KernelBench's protocol, too, a
    competitor's trials follow each other. Before each trial, also those that do not count, the GPU has no work for `idle_ms`.
    """
    times: list[list[float]] = [[] for _ in competitors]
    for competitor in competitors:
        for _ in range(WARM_UP):
            one_trial(competitor, idle_ms)
    for number, done in enumerate(range(0, trials, BLOCK)):
        for i in turn(number, len(competitors)):
            one_trial(competitors[i], idle_ms)
            times[i] += [one_trial(competitors[i], idle_ms) for _ in range(min(BLOCK, trials - done))]
    return times


def poison(size: int) -> None:
    """Leave `size` bytes of NaN as the only memory that the allocator has to give: stale right results are gone."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")  # 0xFF.. is NaN in every float format


def captured(call: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    """A call as a CUDA graph, so that its time is the GPU's alone."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph_pool_bytes() -> int:
    """Bytes that the CUDA graphs of this process keep in pools of their own, whole segments."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


def peak_extra_bytes(competitor: Competitor) -> Optional[int]:
    """Peak memory of a call beyond what was allocated before (inputs) and its result.

    Of a CUDA graph, which allocates nothing in a call: its pool less the result; None where it has no pool.
    """
    with competitor.scope():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y: Tensor = competitor.call()
        torch.cuda.synchronize()
        peak = graph_pool_bytes() if competitor.owns_memory else torch.cuda.max_memory_allocated() - before
        return int(peak - y.numel() * y.element_size()) if peak or not competitor.owns_memory else None


def limits(idle_ms: float = 0.0) -> dict[str, float]:
    """What the GPU reaches here: copy bandwidth (bytes read + written) and matmul rates, medians of 20, by the competitors' protocol."""
    with _tf32_matmul():
        tf32 = _matmul_tflops(torch.float32, idle_ms)
    return {"copy_gbps": _copy_gbps(idle_ms), "fp16_tflops": _matmul_tflops(torch.float16, idle_ms), "tf32_tflops": tf32}


def _copy_gbps(idle_ms: float) -> float:
    source = torch.rand(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _median_ms(lambda: target.copy_(source), idle_ms) / 1e6


def _matmul_tflops(dtype: torch.dtype, idle_ms: float, n: int = 8192) -> float:
    a, b = torch.randn(2, n, n, device="cuda").to(dtype).unbind()
    return float(2 * n**3 / _median_ms(lambda: torch.mm(a, b), idle_ms) / 1e9)


def _median_ms(call: Call, idle_ms: float, trials: int = 20) -> float:
    (times,) = interleaved([Competitor("", call)], trials, idle_ms)
    return statistics.median(times)


@contextlib.contextmanager
def _tf32_matmul() -> Iterator[None]:
    """Allow TF32 in matrix products; the setting is put back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def host_times(competitors: Sequence[Competitor]) -> list[dict[str, Any]]:
    """Host microseconds per call: blocks of calls, competitors interleaved, the GPU drained between blocks."""
    blocks: list[list[float]] = [[] for _ in competitors]
    for block in range(-1, HOST_CALLS // HOST_BLOCK):
        for i in turn(block, len(competitors)):
            with competitors[i].scope():
                call = competitors[i].call
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_BLOCK):
                    call()
                us = (time.perf_counter() - start) / HOST_BLOCK * 1e6
            torch.cuda.synchronize()
            if block >= 0:
                blocks[i].append(us)
    return [
        {"what": c.what, "us_mean": statistics.fmean(b), "us_median": statistics.median(b), "us_min": min(b), "calls": HOST_CALLS}
        for c, b in zip(competitors, blocks)
    ]
