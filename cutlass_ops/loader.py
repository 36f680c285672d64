"""Loader: manifest and cubins -> kernels that can be launched. Loads lazily, verified bytes only."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from . import driver
from .errors import InstallationError, UnsupportedDeviceError
from .manifest import KernelRecord, Manifest, read_cubin, verified_hashes
from .selection import DeviceFacts

ALLOW_UNVERIFIED = "CUTLASS_OPS_ALLOW_UNVERIFIED"


def allow_unverified() -> bool:
    """Whether the environment allows kernels without a GPU check record (development)."""
    value = os.environ.get(ALLOW_UNVERIFIED, "0")
    if value not in ("0", "1"):
        raise ValueError(f"expected {ALLOW_UNVERIFIED} to be 0 or 1, got {value!r}")
    return value == "1"


def shipped_kernels() -> Path:
    """Folder of the shipped manifest: in the wheel below the package, in a checkout beside it."""
    package = Path(__file__).parent
    inside = package / "generated"
    return inside if inside.is_dir() else package.parent / "generated"


def provenance(folder: Optional[Path] = None) -> dict[str, Any]:
    """How the kernels of a folder (default: the shipped ones) came to be: `Manifest.provenance`. Raises InstallationError."""
    return Manifest.load((folder or shipped_kernels()) / "manifest.json").provenance


@functools.cache
def device_facts(device: int) -> DeviceFacts:
    """Name, compute capability and SM count of a device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, (properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device: its record, its function handle, and how many of its blocks an SM holds."""

    record: KernelRecord
    function: Any
    blocks_per_sm: int

    def launch(self, grid: int, params: Any, *, overlap: bool = False) -> driver.Launch:
        """A launch with these parameters, a ctypes object. Raises InstallationError where the kernel takes others."""
        record, size = self.record, ctypes.sizeof(params)
        if size != record.params_size:  # built by another version
            raise InstallationError(
                f"expected {record.name} to take {size} bytes of parameters, the manifest says {record.params_size}; build the kernels "
                "again, or reinstall the wheel"
            )
        return driver.Launch(self.function, grid, record.threads, record.shared_memory, params, overlap=overlap)


class KernelSet:
    """The kernels of one folder (manifest.json, gpu_checks.json, cubins/)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest.load(folder / "manifest.json")
        self.verified = verified_hashes(folder / "gpu_checks.json")
        self.records = {k.name: k for k in self.manifest.kernels}
        self._lock = threading.Lock()
        self._libraries: dict[str, Any] = {}
        self._loaded: dict[tuple[str, int], LoadedKernel] = {}

    def get(self, name: str, device: int) -> LoadedKernel:
        """A kernel on a device whose context is current: loaded, resolved and checked once.

        Raises InstallationError for a cubin that is missing, damaged or not what the manifest says, CudaError where the
        driver refuses it, UnsupportedDeviceError for a device it is not built for.
        """
        key = (name, device)
        with self._lock:
            if key not in self._loaded:
                if name not in self.records:
                    raise InstallationError(
                        f"expected the kernel {name} in {self.folder / 'manifest.json'}, found none; reinstall the wheel"
                    )
                with driver.loading():
                    self._loaded[key] = self._load(self.records[name], device)
            return self._loaded[key]

    def _load(self, record: KernelRecord, device: int) -> LoadedKernel:
        require_hopper(device_facts(device))
        if record.architecture != "sm_90a":
            raise InstallationError(f"expected {record.cubin} for sm_90a, the manifest says {record.architecture}; reinstall the wheel")
        if record.sha256 not in self.verified and not allow_unverified():
            raise InstallationError(f"expected a record of a passed GPU check for {record.cubin}, found none; run cutlass-ops check")
        library = self._libraries.get(record.cubin)
        if library is None:
            library = self._libraries[record.cubin] = driver.load_library(self.image(record))
        kernel = driver.get_kernel(library, record.name)
        size = driver.parameter_size(kernel)
        if size != record.params_size:
            raise InstallationError(
                f"expected {record.name} to take {record.params_size} bytes of parameters, the cubin takes {size}; reinstall the wheel"
            )
        function = driver.get_function(kernel, record.shared_memory, device)
        api = driver.api()
        blocks = driver.check(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            api.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, record.threads, record.shared_memory),
        )
        if blocks < 1:
            raise InstallationError(
                f"expected an SM to hold {record.threads} threads of {record.name} with {record.shared_memory} bytes of shared memory, "
                "it holds none; reinstall the wheel"
            )
        return LoadedKernel(record, function, blocks)

    def image(self, record: KernelRecord) -> bytes:
        """The bytes of a record's cubin. Raises InstallationError unless they are exactly those of the record."""
        return read_cubin(self.folder, record)


def require_hopper(facts: DeviceFacts) -> None:
    """Raise UnsupportedDeviceError unless the kernels run on the device."""
    if facts.capability != (9, 0):
        major, minor = facts.capability
        raise UnsupportedDeviceError(
            f"expected compute capability 9.0 (the shipped cubins are for sm_90a: H100, H200, H800, H20, GH200), got {major}.{minor} "
            f"({facts.name}); use cutlass_ops.reference for PyTorch's own operators"
        )
