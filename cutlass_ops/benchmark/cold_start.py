"""Cold start: from a fresh process to the first result of problem 46, of ours, of PyTorch's eager mode and of torch.compile."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional
from unittest import mock

from .cases import COMPILE_DEFAULT, CUDA_GRAPHS, BenchmarkError
from .rows import Row

TIMEOUT_S = 300

#: torch is imported by all, and timed apart. CUDA is initialised and the input lies ready before the rest. With torch.compile the
#: parts of PyTorch that it needs are imported by the first call.
_PROCESS = """
import json, sys, time
mode = sys.argv[1]
times = [time.perf_counter()]
import torch
times.append(time.perf_counter())
x = torch.rand(128, 64, 128, 128, device="cuda")
conv = torch.nn.Conv2d(64, 128, 3, device="cuda").requires_grad_(False)
pool = torch.nn.functional.avg_pool2d

def call(x):
    return pool(torch.tanh(conv(x) - 0.5) - 0.2, 2)

torch.cuda.synchronize()
ready = time.perf_counter()
if mode == "cutlass_ops":
    import cutlass_ops
    def call(x):
        return cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, conv.weight, conv.bias)
times.append(time.perf_counter())
import_ms = (times[2] - ready) * 1e3
if mode not in ("cutlass_ops", "eager"):
    call = torch.compile(call, mode=mode)
with torch.no_grad():
    for _ in range(2):
        call(x)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
first, second = ((times[i + 1] - times[i]) * 1e3 for i in (2, 3))
figures = {"import_torch_ms": (times[1] - times[0]) * 1e3, "import_ms": import_ms, "first_call_ms": first, "second_call_ms": second}
print(json.dumps(figures))
"""


@dataclass(frozen=True)
class Start:
    """What is started: `mode` is the process's argument; `cache` says how torch.compile finds its folder of compiled code."""

    what: str
    mode: str
    cache: Optional[str] = None
    processes: int = 1


#: A filled cache is the one that the start before it left.
STARTS = (
    Start("cutlass_ops", "cutlass_ops", processes=3),
    Start("eager", "eager", processes=3),
    *(Start(f"torch.compile {mode}", mode, cache) for mode in (COMPILE_DEFAULT, CUDA_GRAPHS) for cache in ("empty", "filled")),
)


@contextlib.contextmanager
def caches(folder: Path) -> Iterator[None]:
    """Within the block, this process and those that it starts keep what torch.compile and Triton compile in a folder."""
    names = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    with mock.patch.dict(os.environ, names):
        yield


def measure(start: Start, folder: Path, *, once: bool) -> Row:
    """Milliseconds of imports, first and second call (each with a synchronisation) in fresh processes: medians.

    `folder` holds a cache for each mode; `once`: in one process, however many there should be.
    """
    processes = 1 if once else start.processes
    with caches(folder / start.mode):
        found = [_process(start) for _ in range(processes)]
    medians = {name: statistics.median(f[name] for f in found) for name in found[0]}
    return {"what": start.what, "cache": start.cache, "processes": processes} | medians


def _process(start: Start) -> dict[str, float]:
    """Figures of one process. Raises BenchmarkError where it fails."""
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_parent, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", _PROCESS, start.mode]
    variables = os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"expected {start.what} to start in {TIMEOUT_S} s in a fresh process, it did not; stopped") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchmarkError(f"expected {start.what} to start in a fresh process, exit code {done.returncode}: {last}")
    figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures
