"""What one process cannot measure beside the rest: the environment, and the first call in a fresh process."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import torch

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


def _output(*command: str, cwd: Optional[Path] = None) -> Optional[str]:
    """First line that a program prints; None where it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return None
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False, cwd=cwd)
    return None if done.returncode else (done.stdout.splitlines() or [""])[0].strip()


def commit_of(root: Path, given: Optional[str]) -> tuple[Optional[str], Optional[bool]]:
    """Commit of a checkout and whether tracked files differ from it; `given` as git describe --always --dirty prints it."""
    if given:
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    commit = _output("git", "rev-parse", "HEAD", cwd=root)
    if not commit:
        return None, None
    return commit, bool(_output("git", "status", "--porcelain", "--untracked-files=no", cwd=root))


def environment(root: Path, given_commit: Optional[str], command: str, trials: int) -> dict[str, Any]:
    """Where and how the figures were measured."""
    commit, dirty = commit_of(root, given_commit)
    index = torch.cuda.current_device()
    return {
        "gpu": torch.cuda.get_device_name(index),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "dirty": dirty,
        "command": command,
        "trials": trials,
    }
