"""What holds compiled kernels: a cubin, a folder or a wheel, with the manifests and GPU check records that lie beside them."""

from __future__ import annotations

import hashlib
import lzma
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import InstallationError
from ..manifest import KernelRecord, Manifest, read_checks

__all__ = ["Artifact", "sha256_of"]

#: What zipfile raises for a damaged archive, for compression or encryption that it does not know, and for a full disk.
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError, OSError)


@dataclass(frozen=True)
class Artifact:
    """The cubins of a file or folder by path, with records and passed GPU checks by sha256, and who built them."""

    path: Path
    images: dict[str, bytes]
    records: dict[tuple[str, str], KernelRecord]  # by sha256 and kernel
    checks: dict[str, dict[str, Any]]
    provenance: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> Artifact:
        """Read a cubin, a wheel, or a folder of kernels. Raises InstallationError where there is no cubin, or a damaged manifest."""
        if path.is_dir():
            return _of_folder(path, path)
        if not path.is_file():
            raise InstallationError(f"expected a cubin, a wheel or a folder of cubins at {path}, found none; name another path")
        if path.suffix != ".whl":
            folder = path.parent.parent if path.parent.name == "cubins" else path.parent
            return _made(path, {path.name: path.read_bytes()}, [folder])
        with tempfile.TemporaryDirectory(prefix="cutlass_ops_inspect_") as temporary:
            try:
                with zipfile.ZipFile(path) as archive:
                    names = [n for n in archive.namelist() if n.endswith((".cubin", "/manifest.json", "/gpu_checks.json"))]
                    archive.extractall(temporary, names)  # which keeps within the folder
            except _DAMAGE as error:
                raise InstallationError(f"expected a wheel at {path}, could not read it ({error}); build or fetch it again") from error
            return _of_folder(Path(temporary), path)

    @property
    def verified(self) -> int:
        """Number of cubins with a record of a passed GPU check."""
        return sum(sha256_of(data) in self.checks for data in self.images.values())

    def hashes(self) -> set[str]:
        """sha256 of every cubin."""
        return {sha256_of(data) for data in self.images.values()}


def _of_folder(folder: Path, path: Path) -> Artifact:
    """All cubins below a folder, with the manifests that lie there."""
    images = {str(PurePosixPath(p.relative_to(folder))): p.read_bytes() for p in sorted(folder.rglob("*.cubin"))}
    folders = [p.parent for p in folder.rglob("manifest.json")]
    return _made(path, images, folders or [folder.parent])  # the folder cubins/ itself was named


def _made(path: Path, images: dict[str, bytes], folders: list[Path]) -> Artifact:
    if not images:
        raise InstallationError(f"expected cubins in {path}, found none; build the kernels or name another path")
    manifests = [Manifest.load(f / "manifest.json") for f in folders if (f / "manifest.json").exists()]
    checks = {sha256: check for f in folders for sha256, check in read_checks(f / "gpu_checks.json").items() if check.get("passed") is True}
    records = {(k.sha256, k.name): k for manifest in manifests for k in manifest.kernels}
    provenance = {name: value for manifest in manifests for name, value in manifest.provenance.items()}
    return Artifact(path, images, records, checks, provenance)


def sha256_of(data: bytes) -> str:
    """As hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()
