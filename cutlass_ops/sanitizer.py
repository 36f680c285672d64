"""compute-sanitizer over a suite that launches every kernel and plan: what scripts/sanitize.py runs.

Needs a Hopper GPU and compute-sanitizer (CUDA toolkit); using the operators needs nothing of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Optional, Union
from unittest import mock

import torch

from . import launch
from .accuracy import serving
from .arguments import Arguments
from .loader import ALLOW_UNVERIFIED, device_facts
from .manifest import Manifest
from .ops import Operator, use_plan
from .problem import DTYPES
from .selection import DeviceFacts, Plan
from .spec import MaxPool2d
from .verification import DTYPES_WITH_KERNELS, Sample, launches

__all__ = ["SUITES", "TOOLS", "Findings", "find_sanitizer", "launch_suite", "parse", "run", "suite"]

#: Tool -> suite that it watches. What initcheck reports falsely (see EXCLUSIONS), it reports for each thread: a tiny suite.
TOOLS = {"memcheck": "small", "racecheck": "small", "synccheck": "small", "initcheck": "tiny"}

#: Further options of a tool. Memory between allocations: what runs over the end of one must not land in the next.
_OPTIONS = {"memcheck": ("--padding", "512")}


# ---- reports -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exclusion:
    """Reports that are known not to be errors: by tool, first line and kernel (regular expressions), with the reason."""

    tool: str
    headline: str
    kernel: str
    reason: str


EXCLUSIONS = (
    Exclusion(
        "initcheck",
        r"^Uninitialized __global__ memory read\b",
        r"\bpool_(avg|max)_(f32|f16|bf16)\b",
        "pooling kernels read what the implicit GEMM wrote by TMA, which initcheck does not track",
    ),
)
#: Said beside every result, since --report-api-errors no leaves them out.
NOT_REPORTED = "API errors are not reported: cuda.bindings asks the driver for functions that it may lack (cuGetProcAddress)"
_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) errors?\s*$")
_RACES = re.compile(r"^=+ RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_HEADLINE = re.compile(r"^=+ (?!COMPUTE-SANITIZER|\w+ SUMMARY|Target application|Internal Sanitizer)(\S.*)$")
_DETAIL = re.compile(r"^=+ {2,}(\S.*)$")


@dataclass(frozen=True)
class Findings:
    """What a log says: errors but for the excluded ones, warnings, how many were excluded for which reason, the first few errors."""

    errors: int
    warnings: int
    excluded: dict[str, int]
    examples: tuple[str, ...]
    #: Whether the tool came to its summary.
    complete: bool


def _reports(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each report's first line and the line that says where: "at KERNEL+0x10 in ..." or "at 0x10 in KERNEL"."""
    headline, where = None, ""
    for line in [*lines, "========= end"]:
        start, detail = _HEADLINE.match(line), _DETAIL.match(line)
        if start:
            if headline is not None:
                yield headline, where
            headline, where = start.group(1), ""
        elif detail and headline is not None and not where and re.search(r"\bat\b", detail.group(1)):
            where = detail.group(1)


def parse(tool: str, log: str) -> Findings:
    """Read a tool's log. What the tool counts but did not print is an error."""
    total, warnings, complete = 0, 0, False
    for line in log.splitlines():
        summary, races = _SUMMARY.match(line), _RACES.match(line)
        if summary:
            total, complete = total + int(summary.group(1)), True
        elif races:
            total, warnings, complete = total + int(races.group(1)), warnings + int(races.group(2)), True
    excluded: dict[str, int] = {}
    examples: list[str] = []
    for headline, where in _reports(log.splitlines()):
        known = [e for e in EXCLUSIONS if e.tool == tool and re.search(e.headline, headline) and re.search(e.kernel, f"{headline} {where}")]
        if known:
            excluded[known[0].reason] = excluded.get(known[0].reason, 0) + 1
        elif len(examples) < 5:
            examples.append(f"{headline} {where}".strip())
    errors = max(total - sum(excluded.values()), 0)
    return Findings(errors, warnings, excluded, tuple(examples) if errors or warnings or not complete else (), complete)


# ---- running the tools -------------------------------------------------------------------------------------------


def find_sanitizer(given: Optional[Path] = None) -> Optional[str]:
    """compute-sanitizer: the one given, on PATH, in a CUDA toolkit, or in a package of NVIDIA's; None where there is none."""
    if given is not None:
        return shutil.which(str(given))
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    toolkits += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    toolkits += [folder for entry in sys.path if entry for folder in sorted(Path(entry, "nvidia").glob("*"), reverse=True)]
    places = [t / below for t in toolkits for below in ("bin", "compute-sanitizer", "bin/compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(map(str, places)))


def _exit_code(command: Sequence[str], output: IO[str], variables: dict[str, str], timeout: float) -> Union[int, str]:
    """A program's exit code; past its time it is ended with all that it started."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"none within {timeout:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(sanitizer: str, tool: str, child: Sequence[str], out: Path, timeout: float) -> bool:
    """Run a tool over a child program, write OUT/TOOL.log and OUT/TOOL.child.log, print what it found; returns whether all is well."""
    log, output = out / f"{tool}.log", out / f"{tool}.child.log"
    log.unlink(missing_ok=True)
    options = ["--tool", tool, "--report-api-errors", "no", "--print-limit", "0", "--show-backtrace", "no"]
    options += [*_OPTIONS.get(tool, ()), "--log-file", str(log)]
    # Without PyTorch's caching every tensor is an allocation of its own, beyond which memcheck sees.
    variables = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with output.open("w", encoding="utf-8") as file:
        code = _exit_code([sanitizer, *options, *child], file, variables, timeout)
    found = parse(tool, log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
    passed = found.complete and code == 0 and found.errors == 0
    verdict, took = "" if passed else "  FAILED", time.monotonic() - start
    print(f"{tool:<10} {found.errors} errors, {found.warnings} warnings{verdict}  ({took:.0f} s)  {log}")
    lines = [f"excluded: {count} reports: {reason}" for reason, count in found.excluded.items()] + list(found.examples)
    if code != 0 or not found.complete:
        lines.append(f"the program's exit code: {code}{'' if found.complete else '; no summary in the log'}; its last lines, of {output}:")
        lines += output.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    for line in lines:
        print(f"           {line}")
    return passed


# ---- what runs below a tool --------------------------------------------------------------------------------------

#: SMs that a suite's launches share their work out to: few CTAs, each of which goes round its rings of shared memory.
SM_COUNT = 4

# Of 24 input channels and of few, 3 x 3 and 1 x 1, in both layouts: between them they reach every fused kernel.
_SMALL = (
    Sample("aligned", (5, 24, 12, 16), (24, 3, 3), pool=2),
    Sample("padded", (4, 24, 10, 16), (136, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("few channels", (8, 3, 9, 24), (72, 3, 3), pool=2, arguments=(("padding", 1),)),  # 20 claims for a CTA
    Sample("1 x 1", (10, 20, 7, 16), (40, 1, 1), pool=2),
    # Several rows for a CTA: what the first leaves of its last line goes on from row to row.
    Sample("wide", (3, 20, 7, 72), (16, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, wide", (4, 20, 8, 72), (16, 1, 1), pool=2),
    Sample("in strips", (2, 20, 6, 144), (16, 3, 3), pool=2),
    Sample("whole lines", (2, 20, 6, 128), (16, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("part of 16 channels", (3, 20, 9, 72), (29, 3, 3), pool=2),
    Sample("gathered", (5, 24, 12, 18), (24, 3, 3), pool=2),
    Sample("padded, gathered", (4, 24, 10, 14), (136, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("few channels, gathered", (8, 3, 9, 22), (72, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, gathered", (10, 20, 7, 14), (40, 1, 1), pool=2),
    Sample("wide, gathered", (3, 20, 7, 70), (16, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, wide, gathered", (4, 20, 8, 70), (16, 1, 1), pool=2),
    Sample("odd rows", (5, 24, 11, 17), (24, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("odd rows, few channels", (6, 5, 9, 23), (40, 3, 3), pool=2),
    Sample("wide, at odd elements", (3, 20, 7, 72), (16, 3, 3), "beside", pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, wide, at odd elements", (4, 20, 8, 72), (16, 1, 1), "beside", pool=2),
    Sample("channels_last", (8, 24, 9, 12), (16, 3, 3), "channels_last", pool=2, arguments=(("padding", 1),)),
    Sample("few channels_last", (6, 8, 9, 12), (72, 3, 3), "channels_last", pool=2),
    Sample("1 x 1 channels_last", (18, 24, 5, 7), (20, 1, 1), "channels_last", pool=2),
    Sample("odd", (3, 13, 11, 9), (70, 5, 2), arguments=(("padding", (2, 1)), ("dilation", (1, 2)))),
    Sample("sliced", (2, 19, 13, 15), (7, 3, 4), "sliced", arguments=(("stride", (2, 1)), ("padding", (0, 1)))),
    Sample("narrow", (2, 1, 5, 7), (7, 1, 1)),
    Sample("many tiles", (1, 16, 40, 132), (8, 3, 3), pool=2),  # more than CTAs
)
_TINY = (
    Sample("aligned", (1, 24, 6, 8), (8, 3, 3), pool=2),
    Sample("padded", (1, 24, 4, 8), (4, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("few channels", (1, 5, 4, 8), (4, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1", (1, 8, 4, 8), (8, 1, 1), pool=2),
    Sample("wide", (1, 24, 4, 72), (1, 3, 3), pool=2),
    Sample("1 x 1, wide", (1, 24, 2, 72), (1, 1, 1), pool=2),
    Sample("gathered", (1, 24, 4, 6), (4, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("few channels, gathered", (1, 5, 4, 6), (4, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("odd rows", (1, 24, 4, 7), (4, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("odd rows, few channels", (1, 5, 4, 7), (4, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("channels_last", (1, 24, 4, 6), (8, 3, 3), "channels_last"),
    Sample("few channels_last", (1, 8, 4, 6), (8, 3, 3), "channels_last"),
    Sample("1 x 1 channels_last", (1, 8, 2, 6), (8, 1, 1), "channels_last"),
)
SUITES = {"small": _SMALL, "tiny": _TINY}


def _with_max_pool(op: Operator) -> Operator:
    """The operator before a max pool, whose kernel no shipped operator has; it is not registered."""
    twin = object.__new__(Operator)
    twin.__dict__ |= op.__dict__
    twin.spec = dataclasses.replace(op.spec, pool=MaxPool2d(2))
    twin.arguments = Arguments(twin.spec)
    return twin


@dataclass(frozen=True)
class Call:
    """One call of a suite."""

    name: str
    op: Operator
    plan: Plan
    tensors: list[Any]
    arguments: dict[str, Any]


def suite(name: str, operators: Sequence[Operator], device: str = "cuda", facts: Optional[DeviceFacts] = None) -> Iterator[Call]:
    """Calls that together launch every kernel by every plan; fp32 ones within fp16's range and beyond it."""
    generator = torch.Generator(device).manual_seed(0)
    pooled = [_with_max_pool(op) for op in operators if op.spec.pool is None][:1]
    for op in (*operators, *pooled):
        own = f"{op.spec.name} before a max pool" if op in pooled else op.spec.name
        for sample, dtype in itertools.product(SUITES[name], DTYPES_WITH_KERNELS):
            (x, *others), arguments = sample.inputs(op, dtype, generator)
            for plan in serving(op, x, *others, device=facts, **arguments):
                if op in pooled and not any(kernel.startswith("pool_max") for kernel in plan.kernels):
                    continue
                label = f"{own} {DTYPES[dtype]} {plan.name} {sample.name}"
                yield Call(label, op, plan, [x, *others], arguments)
                if dtype is torch.float32:
                    yield Call(f"{label} beyond fp16", op, plan, [x * 1e6, *others], arguments)


def launch_suite(name: str, operators: Sequence[Operator], kernels: Path) -> list[str]:
    """Make a suite's calls; returns what is wrong: results that are not finite, kernels of the manifest that were not launched."""
    wrong, count = [], 0

    def few_sms(device: int) -> DeviceFacts:
        return dataclasses.replace(device_facts(device), sm_count=SM_COUNT)

    allowed = mock.patch.dict(os.environ, {ALLOW_UNVERIFIED: "1"})
    with allowed, mock.patch.object(launch, "device_facts", few_sms), launches() as launched:
        for call in suite(name, operators):
            with use_plan(call.plan.name):
                y = call.op(*call.tensors, **call.arguments)
            if not y.isfinite().all():
                wrong.append(f"{call.name}: expected finite results, got others")
            count += 1
    torch.cuda.synchronize()
    names = {kernel.name for kernel in Manifest.load(kernels / "manifest.json").kernels}
    print(f"{count} calls launched {len(launched & names)} of {len(names)} kernels")
    return [*wrong, *(f"never launched: {kernel}" for kernel in sorted(names - launched))]
