"""What there is to use: operators of this process, folders of kernels with their GPU check records, Hopper GPUs; nothing is loaded."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from . import ops, plugins
from .errors import CutlassOpsError, InstallationError
from .loader import KernelSet, device_facts
from .manifest import KernelRecord, read_checks
from .ops import Operator
from .problem import Problem
from .selection import DeviceFacts, Selection

__all__ = [
    "HOPPER",
    "Folder",
    "UnknownNameError",
    "available",
    "find_operator",
    "hopper",
    "loaded",
    "operators",
    "plan_call",
    "present_gpu",
    "summary",
]

#: Hopper GPUs by name, as PyTorch gives it without memory size and link -> number of SMs.
HOPPER = {"NVIDIA H200": 132, "NVIDIA H100": 132, "NVIDIA H100 PCIe": 114, "NVIDIA H800": 132, "NVIDIA H20": 78, "NVIDIA GH200": 132}

_MAX_BYTES = 2**63 - 1  # of a tensor of PyTorch, also on the meta device


class UnknownNameError(CutlassOpsError, LookupError):
    """No operator or GPU has this name."""


def loaded() -> dict[str, Operator]:
    """The operators of this process by name."""
    return dict(ops._OPERATORS)


def operators() -> dict[str, Operator]:
    """The operators of this process and of installed packages, which are imported. Raises InstallationError as `plugins.load` does."""
    for name in plugins.installed():
        plugins.load(name)
    return loaded()


def available() -> tuple[dict[str, Operator], list[InstallationError]]:
    """The operators that can be had, and what is wrong with those of other installed packages."""
    try:
        names = [*plugins.installed()]
    except InstallationError as error:  # two packages with one name: it is not known whose to import
        return loaded(), [error]
    errors = [error for error in map(_failure, names) if error]
    return loaded(), errors


def _failure(name: str) -> Optional[InstallationError]:
    """Why the operator of a package does not load, if it does not."""
    try:
        plugins.load(name)
    except InstallationError as error:
        return error
    return None


def find_operator(name: str, among: Optional[dict[str, Operator]] = None) -> Operator:
    """The operator of this name (among these; default: all). Raises UnknownNameError, with what the name may have meant."""
    known = loaded() if among is None else among
    if name not in known and among is None:
        known = operators()  # only now: a package that does not load keeps nobody from the others
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}? There" if close else "there"
        raise UnknownNameError(f"expected an operator, got {name!r}; {meant} are {', '.join(known) or 'none'}")
    return known[name]


def hopper(name: str) -> DeviceFacts:
    """A GPU of `HOPPER` by its name, in any case and with or without "NVIDIA". Raises UnknownNameError."""
    plain = name.lower().removeprefix("nvidia ")
    for known, sm_count in HOPPER.items():
        if known.lower() == f"nvidia {plain}":
            return DeviceFacts(known, (9, 0), sm_count)
    raise UnknownNameError(f"expected a Hopper GPU, got {name!r}; there are {', '.join(HOPPER)}")


def present_gpu() -> Optional[DeviceFacts]:
    """PyTorch's current GPU, of whatever kind; None where it can use none."""
    return device_facts(torch.cuda.current_device()) if torch.cuda.is_available() else None


def plan_call(
    op: Operator,
    gpu: DeviceFacts,
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    channels_last: bool = False,
    **arguments: Any,
) -> tuple[Problem, Selection]:
    """The problem of a call on a GPU, which need not be here, and how selection decides. Raises what the call would raise.

    `arguments`: those of the call after the tensors. Tensors have no data (PyTorch's meta device); all vectors are given.
    """
    if min(*x_shape, *weight_shape) < 0:
        raise ValueError(f"expected sizes of at least 0, got x {tuple(x_shape)} and weight {tuple(weight_shape)}")
    for name, shape in (("x", x_shape), ("weight", weight_shape)):
        if math.prod(max(size, 1) for size in shape) * dtype.itemsize > _MAX_BYTES:
            raise ValueError(f"expected {name} of less than 2**63 bytes, got sizes {tuple(shape)}; no tensor is as large")
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x, weight = (torch.empty(*shape, dtype=dtype, device="meta") for shape in (x_shape, weight_shape))
    if x.dim() == weight.dim() == 4:
        x, weight = (t.contiguous(memory_format=memory_format) for t in (x, weight))
    vectors = [torch.empty(weight.shape[0], dtype=dtype, device="meta") for _ in op.spec.vectors]
    given, _, parameters = op.arguments.bind((), dict(zip(op.arguments.vectors, vectors)) | arguments)
    op._check(x, weight, given, parameters)
    problem = op.problem(x, weight, parameters)
    return problem, op._select(problem, gpu, None)


@dataclass(frozen=True)
class Folder:
    """A folder of kernels: manifest, and GPU check records by cubin sha256."""

    path: Path
    kernels: KernelSet
    checks: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Folder:
        """Read manifest and records. Raises InstallationError."""
        return cls(path, KernelSet(path), read_checks(path / "gpu_checks.json"))

    @property
    def records(self) -> tuple[KernelRecord, ...]:
        """Of every kernel."""
        return self.kernels.manifest.kernels

    def check(self, record: KernelRecord) -> Optional[dict[str, Any]]:
        """The record of a passed GPU check of exactly this kernel's cubin, or None."""
        return self.checks[record.sha256] if record.sha256 in self.kernels.verified else None

    def damage(self, record: KernelRecord) -> Optional[InstallationError]:
        """What is wrong with the file of a kernel's cubin, if anything."""
        try:
            self.kernels.image(record)
        except InstallationError as error:
            return error
        return None

    def verified(self, records: Sequence[KernelRecord]) -> str:
        """Where and when kernels passed their GPU check, in a few words."""
        checks = [self.check(record) for record in records]
        passed = [check for check in checks if check is not None]
        if not passed:
            return "no"
        where = ", ".join(sorted({str(check.get("gpu", "a GPU")) for check in passed}))
        first, last = (f(str(check.get("date", "")) for check in passed)[:10] for f in (min, max))
        when = first if first == last else f"{first} to {last}"
        count = "" if len(passed) == len(checks) else f"{len(passed)} of {len(checks)}: "
        return f"{count}{where} {when}".strip()


def summary(check: Optional[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """What a passed GPU check says of where and when it took place, without the errors that it measured."""
    names = ("gpu", "driver", "torch", "cuda", "python", "date", "commit", "dirty")
    return None if check is None else {name: check.get(name) for name in names}
