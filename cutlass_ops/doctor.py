"""What `cutlass-ops doctor` finds out: whether the kernels can be used here, and what would have to change.

Imports neither click nor rich, and raises nothing for what is missing or damaged: that is what it reports.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Optional

import torch

from . import __version__, driver
from .catalogue import Folder, available, hopper, plan_call
from .costs import shipped_costs
from .errors import CutlassOpsError
from .loader import ALLOW_UNVERIFIED, allow_unverified, device_facts
from .manifest import KernelRecord
from .ops import Operator
from .selection import DeviceFacts

__all__ = ["Finding", "Report", "examine", "main"]

Status = Literal["ok", "note", "FAIL"]

#: The call whose plan is shown: x (N, C, H, W) and weight (K, C, R, S), float32 (KernelBench's problems are as large).
EXAMPLE = ((128, 64, 128, 128), (128, 64, 3, 3))


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `remedy`: what would have to change; of a note: what would add something."""

    status: Status
    subject: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, and whether calls with tensors on a GPU use the kernels here."""

    findings: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether nothing failed."""
        return all(f.status != "FAIL" for f in self.findings)

    def text(self) -> str:
        """One line a finding, then what follows from them."""
        width = max(len(f.subject) for f in self.findings)
        lines = [f"{f.status:<4}  {f.subject:<{width}}  {f.found}" for f in self.findings]
        if self.usable:
            return "\n".join([*lines, "usable: calls with tensors on this GPU use the kernels"])
        remedies = dict.fromkeys(f"  {f.subject}: {f.remedy}" for f in self.findings if f.status == "FAIL")
        verdict = "not usable: not all kernels can be used here; on CPU tensors, operators compute with PyTorch's own. To change:"
        return "\n".join([*lines, verdict, *remedies])

    def json(self) -> str:
        """As JSON."""
        return json.dumps({"usable": self.usable, "findings": [asdict(f) for f in self.findings]}, indent=1)


def main(*, as_json: bool = False, kernels: Optional[Path] = None) -> int:
    """Print a report (of all operators' kernels, or those of one folder); returns the exit code: 0 usable, 1 not."""
    report = examine(kernels)
    print(report.json() if as_json else report.text())
    return 0 if report.usable else 1


def examine(kernels: Optional[Path] = None) -> Report:
    """Look at everything."""
    gpu, devices = _devices()
    known, broken = available()
    packages = [_failed("packages", error) for error in broken]
    folders = [kernels] if kernels else list(dict.fromkeys(op.kernels for op in known.values()))
    examined = [_folder(path) for path in folders]
    readable = {path for path, (_, usable) in zip(folders, examined) if usable}
    findings = [*_versions(), _driver(), *devices]
    findings += [finding for found, _ in examined for finding in found]
    findings += [*packages, _costs(), *_unverified(), *_extras()]
    findings += [_plan(op, gpu) for op in known.values() if op.kernels in readable]
    return Report(tuple(findings))


# ---- software ----------------------------------------------------------------------------------------------------


def _version(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    """The package, Python, PyTorch, cuda-bindings."""
    yield Finding("ok", "cutlass_ops", f"{__version__} in {Path(__file__).parent}")
    yield Finding("ok", "Python", f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}")
    cuda = torch.version.cuda
    if cuda is None:
        yield Finding(
            "FAIL",
            "PyTorch",
            f"{torch.__version__}, built without CUDA",
            "install a build of PyTorch for CUDA (https://pytorch.org/get-started/locally)",
        )
    else:
        yield Finding("ok", "PyTorch", f"{torch.__version__} for CUDA {cuda}")
    bindings = _version("cuda-bindings")
    if bindings is None:
        yield Finding("FAIL", "cuda-bindings", "not installed", "pip install 'cuda-bindings>=13.0,<14'")
    else:
        yield Finding("ok", "cuda-bindings", bindings)


def _driver() -> Finding:
    try:
        _, version = driver.api().cuDriverGetVersion()
    except CutlassOpsError as error:
        return _failed("driver", error)
    return Finding("ok", "driver", f"for CUDA {version // 1000}.{version % 1000 // 10}")


def _failed(subject: str, error: Exception) -> Finding:
    """A finding of one of the package's messages, which end with the remedy."""
    found, _, remedy = " ".join(str(error).split()).rpartition("; ")
    return Finding("FAIL", subject, found or remedy, remedy)


def _extras() -> Iterator[Finding]:
    """What is installed beyond what calls need; nothing of it decides whether the kernels are usable."""
    for extra, modules in {"cli": ("click", "rich"), "bench": ("matplotlib",)}.items():
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        yield _extra(extra, ", ".join(modules), ", ".join(missing))
    yield _builder()


def _extra(extra: str, present: str, missing: str) -> Finding:
    if missing:
        return Finding("note", f"extra {extra}", f"no {missing}", f"pip install 'cutlass_ops[{extra}]'")
    return Finding("ok", f"extra {extra}", present)


def _builder() -> Finding:
    """The compiler that the command `build` needs."""
    from .codegen import toolchain

    missing = [m for m in ("cutlass_library", "elftools") if importlib.util.find_spec(m) is None]
    if missing:
        return _extra("build", "", ", ".join(missing))
    try:
        nvcc = toolchain.find().version
    except CutlassOpsError as error:
        found, _, remedy = str(error).rpartition("; ")
        return Finding("note", "extra build", found, remedy)
    return Finding("ok", "extra build", f"nvcc {nvcc}, CUTLASS {_version('nvidia-cutlass')}")


# ---- GPUs --------------------------------------------------------------------------------------------------------


def _devices() -> tuple[Optional[DeviceFacts], list[Finding]]:
    """The first Hopper GPU that PyTorch can use, and a finding for each GPU."""
    found: list[DeviceFacts] = []
    try:
        if torch.cuda.is_available():
            found = [device_facts(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return None, [Finding("FAIL", "GPU", f"PyTorch failed: {error}", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")]
    usable = [facts for facts in found if facts.capability == (9, 0)]
    if not found:
        remedy = "run on a machine with a Hopper GPU (compute capability 9.0); look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return None, [Finding("FAIL", "GPU", "none that PyTorch can use", remedy)]
    if not usable:
        remedy = "use a Hopper GPU (compute capability 9.0: H100, H200, H800, H20, GH200); cutlass_ops.reference computes on this one"
        return None, [Finding("FAIL", f"GPU {i}", _describe(facts), remedy) for i, facts in enumerate(found)]
    return usable[0], [
        Finding("ok" if facts in usable else "note", f"GPU {i}", _describe(facts) + ("" if facts in usable else ", no Hopper GPU"))
        for i, facts in enumerate(found)
    ]


def _describe(facts: DeviceFacts) -> str:
    return f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}, {facts.sm_count} SMs"


# ---- operators and kernels -----------------------------------------------------------------------------------------------------


def _folder(path: Path) -> tuple[list[Finding], bool]:
    """Findings about a folder of kernels, and whether its manifest and records can be read."""
    try:
        folder = Folder.read(path)
    except CutlassOpsError as error:
        return [_failed("kernels", error)], False
    built = folder.kernels.manifest.provenance
    versions = f"nvcc {built.get('nvcc', '?')}, CUTLASS {built.get('cutlass', '?')}"
    manifest = Finding("ok", "kernels", f"{len(folder.records)} in {path}, built with {versions}")
    cubins = {record.cubin: record for record in folder.records}
    return [manifest, _integrity(folder, cubins), _verification(folder, cubins)], True


def _integrity(folder: Folder, cubins: dict[str, KernelRecord]) -> Finding:
    damages = [damage for damage in map(folder.damage, cubins.values()) if damage]
    if not damages:
        return Finding("ok", "cubins", f"{len(cubins)} cubins are those of the manifest (sha256)")
    first = _failed("cubins", damages[0])
    return Finding("FAIL", "cubins", f"{len(damages)} of {len(cubins)} cubins missing or damaged; {first.found}", first.remedy)


def _verification(folder: Folder, cubins: dict[str, KernelRecord]) -> Finding:
    missing = [name for name, record in cubins.items() if folder.check(record) is None]
    if not missing:
        return Finding("ok", "verified", f"{len(cubins)} cubins on {folder.verified(folder.records)}")
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    found = f"{len(missing)} of {len(cubins)} cubins have no record of a passed GPU check: {shown}"
    allowed = False
    with contextlib.suppress(ValueError):  # a finding of its own
        allowed = allow_unverified()
    if allowed:
        return Finding("note", "verified", f"{found}; {ALLOW_UNVERIFIED}=1 uses them")
    return Finding("FAIL", "verified", found, "run `cutlass-ops check` on a Hopper GPU, or reinstall the wheel")


def _costs() -> Finding:
    try:
        measured = shipped_costs().provenance
    except CutlassOpsError as error:
        return _failed("costs of plans", error)
    return Finding("ok", "costs of plans", f"measured on {measured.get('gpu', '?')} {measured.get('date', '')}".strip())


def _unverified() -> list[Finding]:
    """The environment variable, where it is set."""
    if ALLOW_UNVERIFIED not in os.environ:
        return []
    try:
        allowed = allow_unverified()
    except ValueError as error:
        return [Finding("FAIL", ALLOW_UNVERIFIED, str(error), "set it to 0 or 1, or unset it")]
    return [Finding("note" if allowed else "ok", ALLOW_UNVERIFIED, os.environ[ALLOW_UNVERIFIED])]


def _plan(op: Operator, gpu: Optional[DeviceFacts]) -> Finding:
    """What a float32 call of an operator takes."""
    facts = gpu or hopper("NVIDIA H200")
    x, weight = EXAMPLE
    where = f"x {x}, weight {weight} on {facts.name}: "
    prefix = where if gpu else f"here PyTorch's own operators (CPU tensors); {where}"
    try:
        _, selection = plan_call(op, facts, x, weight, precision="tf32")
    except (CutlassOpsError, ValueError) as error:
        return Finding("FAIL", op.spec.name, f"{prefix}{error}", "see the findings above")
    if selection.plan is None:
        reasons = {r.name: r.reason for r in selection.rejected}
        return Finding("FAIL", op.spec.name, f"{prefix}no plan", reasons.get("two-kernel-tf32", "cutlass-ops explain says why"))
    expected = selection.plan.expected_us
    return Finding("ok", op.spec.name, f"{prefix}{selection.plan.name}" + ("" if expected is None else f", {expected:.4g} us expected"))
