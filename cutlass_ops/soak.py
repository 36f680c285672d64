"""The soak behind scripts/soak.py: very many calls over changing shapes, streams and weights leave memory and results as they were.

Needs a Hopper GPU (a CPU serves to test the soak itself); using the operators needs nothing of it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch
from torch import Tensor

from . import arguments, ops
from .loader import ALLOW_UNVERIFIED
from .ops import Operator
from .verification import DTYPES_WITH_KERNELS

__all__ = ["Reading", "problems_of", "soak"]

MIB = 2**20
#: Growth in bytes that is no leak. Allocated: by PyTorch's count, nothing stays. Device: what others and the driver take.
#: Host: prepared calls (5 MiB with all caches full) and the allocator's fragmentation; in 200,000 calls, 168 bytes a call.
ALLOWED = {"allocated": MIB, "device": 64 * MIB, "host": 32 * MIB}
FRESH_SHAPES = 0.1  # of all calls: shapes that were (most likely) never seen; the others are of HOT problems
HOT, STREAMS = 40, 4


@dataclass(frozen=True)
class Reading:
    """Memory in bytes after so many calls: PyTorch's tensors, the whole device, this process; and the entries of all caches."""

    calls: int
    seconds: float
    allocated: int
    device: int
    host: int
    kept: int

    def __str__(self) -> str:
        sizes = "  ".join(f"{name} {getattr(self, name) / MIB:9.1f} MiB" for name in ALLOWED)
        return f"{self.calls:>9} calls  {self.seconds:7.1f} s  {sizes}  cached {self.kept:>5}"


def _caches(operators: Sequence[Operator]) -> dict[str, tuple[int, int]]:
    """Entries of each cache and its bound."""
    sizes = {}
    for op in operators:
        sizes[f"{op.spec.name}: prepared calls"] = len(ops._thread.calls[op.spec.name]), ops._CACHED_CALLS
        sizes[f"{op.spec.name}: checked values"] = len(op.arguments._checked_values), arguments._CACHED_VALUES
        sizes[f"{op.spec.name}: parameters"] = len(op.arguments._interned), arguments._CACHED_VALUES
    return sizes


@dataclass(frozen=True)
class _Problem:
    """What a call computes but for its data."""

    op: Operator
    dtype: torch.dtype
    x: tuple[int, ...]
    weight: tuple[int, ...]
    padding: int
    channels_last: bool

    @classmethod
    def random(cls, operators: Sequence[Operator], choose: random.Random) -> _Problem:
        n, c, k = choose.randint(1, 4), choose.choice((1, 3, 8, 16, 40, 64)), choose.randint(1, 140)
        # Narrow ones, and such as have more than 64 columns
        h, w = choose.randint(4, 32), 4 * choose.choice((choose.randint(1, 10), choose.randint(17, 32))) + choose.choice((0, 0, 1))
        dtype = choose.choice((torch.float32, *DTYPES_WITH_KERNELS))
        filters = choose.choice((1, 3, 3))
        return cls(choose.choice(operators), dtype, (n, c, h, w), (k, c, filters, filters), choose.randint(0, 2), choose.random() < 0.2)

    def data(self, device: str, generator: Optional[torch.Generator] = None, scale: float = 1.0) -> list[Tensor]:
        """New x, weight and vectors."""
        shapes = [self.x, self.weight, *((self.weight[0],) for _ in self.op.spec.vectors)]
        x, *others = (torch.rand(s, device=device, generator=generator).sub_(0.25).to(self.dtype) for s in shapes)
        x = x * scale if scale != 1.0 and self.dtype is torch.float32 else x
        return [x.contiguous(memory_format=torch.channels_last) if self.channels_last else x, *others]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The operator on these tensors."""
        precision: dict[str, Any] = {"precision": "tf32"} if self.dtype is torch.float32 else {}
        return self.op(*tensors, padding=self.padding, **precision)


class _Soak:
    """A soak in progress on one device."""

    def __init__(self, operators: Sequence[Operator], device: str, seed: int) -> None:
        self.operators, self.device = operators, device
        self._choose = random.Random(seed)  # noqa: S311
        self._hot = [_Problem.random(operators, self._choose) for _ in range(HOT)]
        count = STREAMS - 1 if device == "cuda" else 0
        self._streams = [torch.cuda.Stream() for _ in range(count)]  # type: ignore[no-untyped-call]
        generator = torch.Generator(device).manual_seed(seed)
        #: Calls whose data stays, and their first results.
        self._fixed = []
        for op in operators:
            for dtype in DTYPES_WITH_KERNELS:
                problem = _Problem(op, dtype, (3, 24, 20, 24), (40, 24, 3, 3), 1, False)
                tensors = problem.data(device, generator)
                self._fixed.append((problem, tensors, problem(tensors)))
        self._start = time.monotonic()

    def call(self) -> None:
        """One call: new data, on one of the streams; one in twenty beyond fp16's range."""
        choose = self._choose
        problem = _Problem.random(self.operators, choose) if choose.random() < FRESH_SHAPES else choose.choice(self._hot)
        with self._stream():
            problem(problem.data(self.device, scale=1e6 if choose.random() < 0.05 else 1.0))

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        if not self._streams or self._choose.random() < 1 / STREAMS:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._choose.choice(self._streams))

    def read(self, calls: int) -> Reading:
        """Memory now, with nothing in flight."""
        gc.collect()
        allocated = device = 0
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            allocated, device = torch.cuda.memory_allocated(), total - free
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        kept = sum(size for size, _ in _caches(self.operators).values())
        return Reading(calls, time.monotonic() - self._start, allocated, device, pages * os.sysconf("SC_PAGE_SIZE"), kept)

    def changed(self) -> Iterator[str]:
        """The fixed calls whose result is no longer the first one, bit for bit."""
        for problem, tensors, first in self._fixed:
            if not torch.equal(problem(tensors), first):
                yield f"{problem.op.spec.name} {problem.dtype}: the result is not the first one's bits"

    def unbounded(self) -> Iterator[str]:
        """The caches that hold more than they may."""
        for name, (size, bound) in _caches(self.operators).items():
            if size > bound:
                yield f"{name}: expected at most {bound}, got {size}"


def problems_of(readings: Sequence[Reading]) -> list[str]:
    """What grew since the first of the readings."""
    first, found = readings[0], []
    for name, allowed in ALLOWED.items():
        worst = max(readings, key=lambda reading: int(getattr(reading, name)))
        growth = getattr(worst, name) - getattr(first, name)
        if growth > allowed:
            found.append(f"{name} memory grew by {growth / MIB:.1f} MiB after {worst.calls} calls, expected at most {allowed / MIB:.0f}")
    return found


def soak(
    operators: Sequence[Operator],
    calls: int,
    seconds: Optional[float] = None,
    *,
    device: str = "cuda",
    seed: int = 0,
    report: Callable[[object], None] = print,
) -> list[str]:
    """Make `calls` calls, or as many as fit into `seconds`; returns what is wrong (nothing, where all is well).

    The first tenth (20,000 calls at most) warms up; memory is compared with what it was then. `report` gets a line now and then.
    """
    if calls < 20:
        raise ValueError(f"expected at least 20 calls, got {calls}")
    warm_up, step = min(calls // 10, 20_000), max(1, calls // 20)
    readings: list[Reading] = []
    wrong: list[str] = []
    with mock.patch.dict(os.environ, {ALLOW_UNVERIFIED: "1"}):
        soaking = _Soak(operators, device, seed)
        for done in range(1, calls + 1):
            soaking.call()
            late = seconds is not None and done % 100 == 0 and time.monotonic() - soaking._start > seconds
            last = done == calls or (late and len(readings) > 0)
            if done == warm_up or (done > warm_up and done % step == 0) or late or last:
                wrong += [*soaking.changed(), *soaking.unbounded()]
                readings.append(soaking.read(done))
                report(readings[-1])
            if wrong or last:
                break
    return wrong + problems_of(readings)
