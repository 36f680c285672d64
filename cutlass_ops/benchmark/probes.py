"""What one process cannot measure beside the rest: the first call in a fresh process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from .cases import BenchmarkError

#: Problem 46 at full size; CUDA is initialised and the input lies ready before the package is imported.
_FIRST_CALL = """
import json, time, torch
x = torch.rand(128, 64, 128, 128, device="cuda")
conv = torch.nn.Conv2d(64, 128, 3, device="cuda")
torch.cuda.synchronize()
times = [time.perf_counter()]
import cutlass_ops
times.append(time.perf_counter())
with torch.no_grad():
    for _ in range(2):
        cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, conv.weight, conv.bias)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
ms = [(b - a) * 1e3 for a, b in zip(times, times[1:])]
print(json.dumps(dict(zip(("import_ms", "first_call_ms", "second_call_ms"), ms))))
"""


def first_call(processes: int) -> dict[str, Any]:
    """Milliseconds of import, first and second call (each with a synchronisation) in fresh processes: medians."""
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_parent, *filter(None, [os.environ.get("PYTHONPATH")])])
    found = []
    for _ in range(processes):
        command = [sys.executable, "-c", _FIRST_CALL]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BenchmarkError(f"expected the first call in a fresh process to succeed, exit code {done.returncode}: {last}")
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {name: statistics.median(f[name] for f in found) for name in found[0]} | {"processes": processes}
