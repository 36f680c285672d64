"""nvcc: where it is, whether it is the right one, and how it is called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ..errors import BuildError

#: Other releases give other bytes, which no GPU check record covers.
NVCC_RELEASE = "13.0"
ARCHITECTURE = "sm_90a"

FLAGS = (
    "-cubin",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-O3",
    "-DNDEBUG",  # an assert is a function call, and a call makes ptxas serialise the wgmmas (C7510)
    "--expt-relaxed-constexpr",
    "-Xptxas=-v",
)

_REMEDY = "pip install 'cutlass_ops[build]' brings one; --nvcc names another"


@dataclass(frozen=True)
class Toolchain:
    """A CUDA toolkit: the folder above bin/, and nvcc's full version."""

    home: Path
    version: str

    @property
    def nvcc(self) -> Path:
        """The compiler driver."""
        return self.home / "bin" / "nvcc"

    def sass(self, cubin: Path) -> str:
        """Disassembly of a cubin."""
        result = subprocess.run([self.home / "bin" / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=False)
        if result.returncode:
            raise BuildError(f"cuobjdump could not disassemble {cubin}: {result.stderr.strip()[:500]}")
        return result.stdout


def find(nvcc: Optional[str] = None) -> Toolchain:
    """The toolchain to build with: `nvcc` if given, else the one from PyPI. Raises BuildError with the remedy."""
    path = Path(nvcc) if nvcc else _from_pypi()
    resolved = shutil.which(path)
    if resolved is None:
        raise BuildError(f"expected an executable nvcc at {path}, found none; {_REMEDY}")
    try:
        result = subprocess.run([resolved, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"expected a working nvcc at {resolved}, could not run it ({error}); {_REMEDY}") from error
    match = re.search(r"release (\d+\.\d+), V([\d.]+)", result.stdout)
    if match is None:
        raise BuildError(f"expected nvcc at {resolved} to tell its version, got {result.stdout[:200]!r}; {_REMEDY}")
    if match[1] != NVCC_RELEASE:
        raise BuildError(
            f"expected nvcc release {NVCC_RELEASE} (other releases give other, unverified cubins), got {match[1]} at {resolved}; {_REMEDY}"
        )
    home = Path(resolved).parent.parent
    for tool in ("cuobjdump", "nvdisasm"):  # cuobjdump calls the other
        if not (home / "bin" / tool).exists():
            raise BuildError(f"expected {tool} beside nvcc in {home / 'bin'}, found none; {_REMEDY}")
    if shutil.which("g++") is None:
        raise BuildError(
            "expected the host compiler g++, which nvcc calls to preprocess, found none; install it (Debian: apt-get install g++)"
        )
    return Toolchain(home, match[2])


def _from_pypi() -> Path:
    """Nvcc of the PyPI package nvidia-cuda-nvcc, which lies in the namespace package `nvidia`."""
    try:
        import nvidia
    except ModuleNotFoundError:
        raise BuildError(f"expected nvcc from PyPI, found none; {_REMEDY}") from None
    for folder in nvidia.__path__:
        candidate = Path(folder) / "cu13" / "bin" / "nvcc"
        if candidate.exists():
            if not os.access(candidate, os.X_OK):
                raise BuildError(f"expected {candidate} to be executable, it is not; reinstall nvidia-cuda-nvcc")
            return candidate
    raise BuildError(f"expected nvcc from PyPI in {', '.join(nvidia.__path__)}, found none; {_REMEDY}")
