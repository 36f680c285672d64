"""A stand-in for cuda.bindings.driver that records what is asked of it, and reads the parameters of a launch as the driver does."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutlass_ops import DeviceFacts, driver, launch, loader, ops

H200 = DeviceFacts("H200", (9, 0), 132)
STREAM = 77


ERRORS = {
    2: ("OUT_OF_MEMORY", "out of memory"),
    46: ("DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"),
    100: ("NO_DEVICE", "no CUDA-capable device is detected"),
    200: ("INVALID_IMAGE", "device kernel image is invalid"),
    209: ("NO_BINARY_FOR_GPU", "no kernel image is available"),
    500: ("NOT_FOUND", "named symbol not found"),
    719: ("LAUNCH_FAILED", "unspecified launch failure"),
}


class _Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


@dataclass(frozen=True)
class Launched:
    """One kernel launch: the kernel's name, its grid and block, and the bytes of its parameter at that moment."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int
    stream: int
    params: bytes


@dataclass(frozen=True)
class Cleared:
    """One word set to zero."""

    address: int
    stream: int


class FakeDriver:
    """`params_sizes`: size of the parameter by kernel name; `failures`: call -> status that it returns from now on."""

    cuuint64_t = cuuint32_t = int
    version = 13000

    def __init__(self, params_sizes: dict[str, int]) -> None:
        self.params_sizes = params_sizes
        self.failures: dict[str, int] = {}
        self.loaded: list[str] = []  # sha256 of the images that were loaded
        self.work: list[Any] = []  # launches and cleared words in order
        self.maps: dict[bytes, tuple[str, tuple[Any, ...]]] = {}  # descriptor -> call and arguments that made it
        self.capture_mode = "CU_STREAM_CAPTURE_MODE_GLOBAL"  # of the thread
        self.limits: dict[str, int] = {}  # dynamic shared memory allowed, by kernel

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("CUtensorMap", "CUfunction", "CUstream")) or name in ("CUresult", "CUlaunchAttributeID"):
            return _Names()
        if name in ("CUlaunchConfig", "CUlaunchAttribute"):
            return lambda: SimpleNamespace(value=SimpleNamespace())
        if name.startswith("cu"):
            return lambda *arguments: self._call(name, arguments)
        raise AttributeError(name)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in self.failures:
            return self.failures[name], None, None
        return (0, *getattr(self, f"_{name}", lambda *_: (f"handle of {name}",))(*arguments))

    def _cuGetErrorName(self, status: int) -> tuple[bytes]:  # noqa: N802 (the driver's names)
        return (f"CUDA_ERROR_{ERRORS[status][0]}".encode(),)

    def _cuGetErrorString(self, status: int) -> tuple[bytes]:  # noqa: N802
        return (ERRORS[status][1].encode(),)

    def _cuInit(self, flags: int) -> tuple[()]:  # noqa: N802
        return ()

    def _cuDriverGetVersion(self) -> tuple[int]:  # noqa: N802
        return (self.version,)

    def _cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[str]:  # noqa: N802
        before, self.capture_mode = self.capture_mode, mode
        return (before,)

    def _cuLibraryLoadData(self, image: bytes, *_: Any) -> tuple[str]:  # noqa: N802
        assert self.capture_mode == "CU_STREAM_CAPTURE_MODE_RELAXED"
        self.loaded.append(hashlib.sha256(image).hexdigest())
        return (self.loaded[-1],)

    def _cuLibraryGetKernel(self, library: str, symbol: bytes) -> tuple[str]:  # noqa: N802
        return (symbol.decode(),)

    def _cuKernelGetParamInfo(self, kernel: str, index: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.params_sizes[kernel]

    def _cuKernelSetAttribute(self, attribute: str, value: int, kernel: str, device: Any) -> tuple[()]:  # noqa: N802
        assert attribute == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
        self.limits[kernel] = value
        return ()

    def _cuKernelGetFunction(self, kernel: str) -> tuple[str]:  # noqa: N802
        return (kernel,)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: Any) -> tuple[int]:  # noqa: N802
        return (2,)

    def _cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> tuple[()]:  # noqa: N802
        assert (value, count) == (0, 1)
        self.work.append(Cleared(address, stream))
        return ()

    def _encode(self, *arguments: Any) -> tuple[Any]:
        words = [len(self.maps) + 1] * 16  # what the driver writes is its own affair; here it names the call
        self.maps[b"".join(w.to_bytes(8, "little") for w in words)] = arguments
        return (SimpleNamespace(opaque=words),)

    def _cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[Any]:  # noqa: N802
        return self._encode("tiled", *arguments)

    def _cuTensorMapEncodeIm2col(self, *arguments: Any) -> tuple[Any]:  # noqa: N802
        return self._encode("im2col", *arguments)

    def _cuLaunchKernel(self, function: str, *arguments: Any) -> tuple[()]:  # noqa: N802
        *sizes, shared_memory, stream, pointers, _ = arguments
        pointer = ctypes.c_void_p.from_address(pointers).value
        params = ctypes.string_at(pointer, self.params_sizes[function])
        self.work.append(Launched(function, tuple(sizes[:3]), tuple(sizes[3:]), shared_memory, int(stream), params))
        return ()

    def _cuLaunchKernelEx(self, config: Any, function: str, pointers: int, extra: int) -> tuple[()]:  # noqa: N802
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        return self._cuLaunchKernel(function, *grid, *block, config.sharedMemBytes, config.hStream, pointers, extra)


class FakeMemory:
    """A device's memory: its tensors are made on the CPU, and kept."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return self.made[-1]


def install_whole(patch: pytest.MonkeyPatch, fake: FakeDriver) -> FakeMemory:
    """As `install`, and calls of an operator take the GPU's path by themselves."""

    def is_plain(*tensors: Any) -> bool:
        x, weight, vectors = tensors
        return all(type(t) is torch.Tensor for t in (x, weight, *(v for v in vectors if v is not None)))

    patch.setattr(ops, "is_plain", is_plain)
    return install(patch, fake)


def install(patch: pytest.MonkeyPatch, fake: FakeDriver) -> FakeMemory:
    """Let the package take CPU tensors for tensors of an H200 with this driver."""
    memory = FakeMemory()
    patch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", "1")
    patch.setattr(driver, "api", lambda: fake)
    patch.setattr(driver, "current_stream", lambda device: STREAM)
    patch.setattr(driver, "empty", memory.empty)
    patch.setattr(ops, "_thread", type(ops._thread)())  # no call that was prepared with another driver
    for module in (launch, loader, ops):
        patch.setattr(module, "device_facts", lambda device: H200)
    return memory
