"""What a compiled cubin says of itself: the ptxas report, the ELF header, constants, the SASS; and a canonical form."""

from __future__ import annotations

import io
import re
import struct
from dataclasses import dataclass

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from ..errors import BuildError

_EM_CUDA = 190


class RegistersError(BuildError):
    """A kernel does not fit its registers."""


@dataclass(frozen=True)
class Resources:
    """ptxas's report of one entry point."""

    registers: int
    static_shared_memory: int


def canonical(data: bytes) -> bytes:
    """A cubin without its one dependence on the folder it was compiled in.

    nvcc hashes paths into the names of internal symbols (_INTERNAL_<8 hex digits>_...), which nothing refers to by name.
    """
    data = re.sub(rb"_INTERNAL_[0-9a-f]{8}_", b"_INTERNAL_00000000_", data)
    return re.sub(rb"_GLOBAL__N__[0-9a-f]{8}_", b"_GLOBAL__N__00000000_", data)


def ptxas_report(kernel: str, text: str) -> dict[str, Resources]:
    """Resources by entry point. Raises RegistersError on spills, local memory or serialised wgmmas, BuildError without a report."""
    found = {}
    for block in text.split("Compiling entry function '")[1:]:
        name = block.split("'", 1)[0]
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block)
        used = re.search(r"Used (\d+) registers", block)
        if frame is None or used is None:
            raise BuildError(f"{kernel}: expected ptxas to report stack frame and registers of {name}, got: {block[:300]}")
        if any(int(n) for n in frame.groups()):
            raise RegistersError(f"{kernel}: {name} uses local memory ({frame[0]}); it must fit its registers")
        shared = re.search(r"(\d+) bytes smem", block)
        found[name] = Resources(int(used[1]), int(shared[1]) if shared else 0)
    warning = re.search(r"\(C75\d\d\)[^\n]*serialized[^\n]*", text)
    if warning:
        raise RegistersError(f"{kernel}: ptxas gave up on asynchronous wgmmas: {warning[0]}")
    if not found:
        raise BuildError(f"{kernel}: expected a ptxas report, got: {text[:300]}")
    return found


def check_architecture(kernel: str, data: bytes, architecture: str) -> None:
    """Raise BuildError unless the ELF is CUDA code for `architecture` (such as sm_90a)."""
    elf = ELFFile(io.BytesIO(data))
    note = data.find(f"-arch {architecture} ".encode())  # ptxas records its command line; e_flags alone cannot tell sm_90a
    sm = (elf["e_flags"] >> 8) & 0xFF
    expected = int(re.sub(r"\D", "", architecture))
    if elf["e_machine"] not in ("EM_CUDA", _EM_CUDA) or sm != expected or note < 0:
        found = f"machine {elf['e_machine']}, sm_{sm}, {'with' if note >= 0 else 'without'} the note of {architecture}"
        raise BuildError(f"{kernel}: expected an ELF for {architecture}, got {found}")


def read_words(kernel: str, data: bytes, symbol: str) -> tuple[int, ...]:
    """The 32-bit words of a constant in the cubin."""
    elf = ELFFile(io.BytesIO(data))
    for table in elf.iter_sections():
        if not isinstance(table, SymbolTableSection):
            continue
        for entry in table.get_symbol_by_name(symbol) or ():
            section = elf.get_section(entry["st_shndx"])
            start = entry["st_value"]
            raw = section.data()[start : start + entry["st_size"]]
            return struct.unpack(f"<{len(raw) // 4}I", raw)
    raise BuildError(f"{kernel}: expected the constant {symbol} in the cubin, found none")


def count_hgmma(sass: str) -> int:
    """Number of wgmma instructions."""
    return len(re.findall(r"\bHGMMA\b", sass))
