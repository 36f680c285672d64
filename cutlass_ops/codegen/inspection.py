"""Compiled kernels as they are: instructions, resources and origin of those in a cubin, a folder or a wheel; and two builds compared.

Reads with cuobjdump and nvdisasm (extra `build`); needs neither nvcc nor CUTLASS.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from ..catalogue import summary
from ..errors import BuildError
from ..manifest import KernelRecord
from .artifact import Artifact, sha256_of

__all__ = ["MIX", "RESOURCES", "Comparison", "Kernel", "compare", "disassembler", "kernels"]

#: Column -> opcodes, as a regular expression. What tells a kernel's character; JSON has every opcode.
MIX = {
    "wgmma": r"[HIQB]GMMA",
    "TMA": r"UTMA(LDG|STG|REDG|PF)|UBLK(CP|RED|PF)",
    "FFMA": r"FFMA2?",
    "FADD": r"FADD2?",
    "FMUL": r"FMUL2?",
    "MUFU": r"MUFU",
    "LDS": r"LDSM?",
    "STS": r"STSM?",
    "LDG": r"LDG",
    "STG": r"STG",
    "local": r"LDL|STL",  # spills and arrays that are no registers
    "SYNCS": r"SYNCS",  # mbarriers
    "BAR": r"BAR",
}

#: Column -> attribute of `Kernel`. Bytes of local memory a thread; bytes of shared memory that is not dynamic.
RESOURCES = {"registers": "registers", "local memory": "local_memory", "static shared": "static_shared_memory", "barriers": "barriers"}

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[^;]*;", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One entry point as the cubin has it, and what manifest and GPU check records say of exactly these bytes."""

    name: str
    #: Path of the cubin within the artifact, and the sha256 of its bytes.
    cubin: str
    sha256: str
    registers: int
    local_memory: int
    static_shared_memory: int
    barriers: int
    instructions: Mapping[str, int]
    #: sha256 of the disassembly.
    code: str
    record: Optional[KernelRecord]
    check: Optional[dict[str, Any]]

    @property
    def mix(self) -> dict[str, int]:
        """Number of instructions by the columns of `MIX`."""
        return {name: sum(n for op, n in self.instructions.items() if re.fullmatch(ops, op)) for name, ops in MIX.items()}

    @property
    def figures(self) -> dict[str, int]:
        """Everything that is a number, by column."""
        resources = {column: int(getattr(self, attribute)) for column, attribute in RESOURCES.items()}
        dynamic = {"dynamic shared": self.record.shared_memory, "threads": self.record.threads} if self.record else {}
        return resources | dynamic | {"instructions": sum(self.instructions.values())} | self.mix

    def differences(self, after: Kernel) -> dict[str, tuple[int, int]]:
        """The figures of both kernels that differ, by column: before and after."""
        old, new = self.figures, after.figures
        return {column: (old[column], new[column]) for column in old if column in new and old[column] != new[column]}


def disassembler() -> Path:
    """Cuobjdump: that of PyPI, else that on PATH, with nvdisasm, which it calls, beside it. Raises BuildError."""
    folders = [Path(folder) / "cu13" / "bin" for folder in _nvidia()]
    on_path = shutil.which("cuobjdump")
    folders += [Path(on_path).resolve().parent] if on_path else []
    for folder in folders:
        if all(os.access(folder / tool, os.X_OK) for tool in ("cuobjdump", "nvdisasm")):
            return folder / "cuobjdump"
    raise BuildError("expected cuobjdump and nvdisasm, found none; pip install 'cutlass_ops[build]' brings them")


def _nvidia() -> list[str]:
    try:
        import nvidia
    except ModuleNotFoundError:
        return []
    return [*nvidia.__path__]


def kernels(
    artifact: Artifact, tool: Path, *, without: frozenset[str] = frozenset(), step: Callable[[str, int, int], None]
) -> list[Kernel]:
    """Every entry point of an artifact, by name; `without`: sha256 of cubins to leave out. Raises BuildError for what is no cubin.

    `step` is told after each cubin: its path, how many are done, how many there are.
    """
    images = {path: data for path, data in artifact.images.items() if sha256_of(data) not in without}
    found: list[Kernel] = []
    with tempfile.TemporaryDirectory(prefix="cutlass_ops_inspect_") as temporary, ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def read(path: str) -> list[Kernel]:
            file = Path(temporary) / f"{sha256_of(path.encode())}.cubin"
            file.write_bytes(images[path])
            return [*_entry_points(artifact, tool, path, file, sha256_of(images[path]))]

        for done, (path, entries) in enumerate(zip(images, pool.map(read, images)), 1):
            found += entries
            step(PurePosixPath(path).name, done, len(images))
    return sorted(found, key=lambda kernel: (kernel.name, kernel.cubin))


def _entry_points(artifact: Artifact, tool: Path, path: str, file: Path, sha256: str) -> Iterator[Kernel]:
    usage = _dump(tool, "-res-usage", file, path)
    barriers = _barriers(_dump(tool, "-elf", file, path))
    code = _functions(_dump(tool, "-sass", file, path))
    resources = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if not resources or any(name not in code for name, *_ in resources):
        raise BuildError(f"expected cuobjdump to list the kernels of {path}, got: {usage.strip()[:300] or 'nothing'}")
    for name, registers, stack, shared, local in resources:
        yield Kernel(
            name=name,
            cubin=path,
            sha256=sha256,
            registers=int(registers),
            local_memory=int(stack) + int(local),
            static_shared_memory=int(shared),
            barriers=barriers.get(name, 0),
            instructions=dict(Counter(_INSTRUCTION.findall(code[name])).most_common()),
            code=sha256_of(code[name].encode()),
            record=artifact.records.get((sha256, name)),
            check=artifact.checks.get(sha256),
        )


def _dump(tool: Path, option: str, file: Path, path: str) -> str:
    result = subprocess.run([tool, option, file], capture_output=True, text=True, check=False)
    if result.returncode:
        shown = (result.stderr or result.stdout).strip().replace(str(file), path)[:500]
        raise BuildError(f"expected a cubin at {path}, cuobjdump could not read it ({shown}); build or fetch it again")
    return result.stdout


def _functions(sass: str) -> dict[str, str]:
    """Disassembly by kernel."""
    parts = re.split(r"^\s+Function : (\S+)$", sass, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2]))


def _barriers(elf: str) -> dict[str, int]:
    """Named barriers by kernel."""
    parts = re.split(r"^\.nv\.info\.(\S+)$", elf, flags=re.MULTILINE)[1:]
    counts = (
        (name, re.search(r"EIATTR_NUM_BARRIERS\s+Format:\s+\S+\s+Value:\s+(0x[0-9a-f]+)", text)) for name, text in zip(*[iter(parts)] * 2)
    )
    return {name: int(count[1], 16) for name, count in counts if count}


# ---- comparing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What differs between two artifacts: kernels by name."""

    added: tuple[Kernel, ...]
    removed: tuple[Kernel, ...]
    changed: tuple[tuple[Kernel, Kernel], ...]
    #: Kernels that have the same instructions and figures, though their cubins differ.
    same: tuple[str, ...]
    #: Cubins that both have byte for byte, which were not read.
    equal_cubins: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        changed = [{"name": a.name, "before": to_json(a), "after": to_json(b)} for a, b in self.changed]
        return {
            "added": [to_json(k) for k in self.added],
            "removed": [to_json(k) for k in self.removed],
            "changed": changed,
            "same": list(self.same),
            "equal_cubins": self.equal_cubins,
        }


def compare(before: Artifact, after: Artifact, tool: Path, *, step: Callable[[str, int, int], None]) -> Comparison:
    """Compare two artifacts. Raises BuildError."""
    equal = frozenset(before.hashes() & after.hashes())
    old, new = ({k.name: k for k in kernels(a, tool, without=equal, step=step)} for a in (before, after))
    both = [(old[name], new[name]) for name in sorted(old.keys() & new.keys())]
    changed = tuple((a, b) for a, b in both if a.code != b.code or a.differences(b))
    return Comparison(
        added=tuple(new[name] for name in sorted(new.keys() - old.keys())),
        removed=tuple(old[name] for name in sorted(old.keys() - new.keys())),
        changed=changed,
        same=tuple(sorted({a.name for a, _ in both} - {a.name for a, _ in changed})),
        equal_cubins=len(equal),
    )


def to_json(kernel: Kernel) -> dict[str, Any]:
    """A kernel as plain data: every opcode, and what is known of its origin."""
    return {
        "name": kernel.name,
        "cubin": kernel.cubin,
        "sha256": kernel.sha256,
        "code": kernel.code,
        "figures": kernel.figures,
        "instructions": dict(kernel.instructions),
        "record": kernel.record.to_json() if kernel.record else None,
        "verified": summary(kernel.check),
    }
