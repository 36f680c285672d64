"""The CUDA driver calls that the package makes, with errors that say which call failed and why.

cuda.bindings is imported at the first use of a GPU, not before: the package imports without libcuda.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Union

import torch

from .errors import CudaError, InstallationError

Pair = tuple[int, int]
DESCRIPTOR_BYTES = 128


#: What the shipped cubins need, as cuDriverGetVersion counts: they are compiled with CUDA 13.0.
_DRIVER_VERSION = 13000
_NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND

#: Driver error -> what to do about it.
_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": "the driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "the driver has no GPU of this number; look at nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process holds the GPU (exclusive mode); wait for it or take another GPU",
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory of the GPU (torch.cuda.empty_cache(), other processes) and call again",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel module differ; install one driver, then restart",
}
_REFUSED_IMAGES = frozenset(f"CUDA_ERROR_{e}" for e in ("UNSUPPORTED_PTX_VERSION", "NO_BINARY_FOR_GPU", "INVALID_IMAGE", "INVALID_SOURCE"))


@functools.cache
def api() -> ModuleType:
    """cuda.bindings.driver. Raises InstallationError without that package, CudaError without a driver new enough for the cubins."""
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise InstallationError(
            f"expected the package cuda-bindings, could not import it ({error}); pip install 'cuda-bindings>=13.0,<14'"
        ) from error

    driver: ModuleType = module
    try:
        status = driver.cuInit(0)[0]
    except Exception as error:  # cuda.bindings raises its own kinds, which differ between its releases
        raise CudaError(f"expected the NVIDIA driver library libcuda, could not load it ({error}); install the driver") from error
    if status != 0:
        raise CudaError(_explain(driver, "cuInit", status))
    _, version = driver.cuDriverGetVersion()
    if version < _DRIVER_VERSION:  # now, since an older one lacks calls that are made before a cubin is loaded
        raise CudaError(f"expected {_versions(version)}; install a newer driver")
    return driver


def _versions(found: int) -> str:
    """The driver that the cubins need and the one found."""
    needed = f"{_DRIVER_VERSION // 1000}.{_DRIVER_VERSION % 1000 // 10}"
    return f"a driver for CUDA {needed} (580) or newer, as the cubins need, got one for CUDA {found // 1000}.{found % 1000 // 10}"


def _explain(driver: ModuleType, call: str, status: Any) -> str:
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    named = name.decode() if name else str(status)
    hint = f"; {_REMEDIES[named]}" if named in _REMEDIES else ""
    if named in _REFUSED_IMAGES:
        _, version = driver.cuDriverGetVersion()
        hint = f"; expected {_versions(version)}, and a GPU that the cubin is for (sm_90a); reinstall the wheel if both are right"
    return f"{call} failed: {named} ({text.decode() if text else 'no description'}){hint}"


def check(call: str, result: Sequence[Any]) -> Any:
    """The value of a driver call's result tuple. Raises CudaError unless it succeeded."""
    if result[0] != 0:
        raise CudaError(_explain(api(), call, result[0]))
    return result[1] if len(result) > 1 else None


def make_context_current(device: int) -> None:
    """Make the device's primary context, which PyTorch uses and holds, current in this thread."""
    driver = api()
    handle = check("cuDeviceGet", driver.cuDeviceGet(device))
    context = check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
    check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    check("cuDevicePrimaryCtxRelease", driver.cuDevicePrimaryCtxRelease(handle))  # PyTorch's reference stays


def is_capturing() -> bool:
    """Whether PyTorch's current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """A block in which this thread may load kernels, also while it captures a CUDA graph (loading is not part of the graph)."""
    driver = api()
    exchange = driver.cuThreadExchangeStreamCaptureMode
    before = check("cuThreadExchangeStreamCaptureMode", exchange(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        yield
    except CudaError as error:
        if is_capturing():
            raise CudaError(f"{error}; call the operator once with tensors of this shape before the CUDA graph is captured") from error
        raise
    finally:
        check("cuThreadExchangeStreamCaptureMode", exchange(before))


def load_library(image: bytes) -> Any:
    """Load a cubin (CUlibrary)."""
    return check("cuLibraryLoadData", api().cuLibraryLoadData(image, [], [], 0, [], [], 0))


def get_kernel(library: Any, symbol: str) -> Any:
    """An entry point of a library (CUkernel). Raises InstallationError where the cubin has none of this name."""
    result = api().cuLibraryGetKernel(library, symbol.encode())
    if result[0] == _NOT_FOUND:
        raise InstallationError(f"expected the entry point {symbol} in its cubin, found none; reinstall the wheel")
    return check(f"cuLibraryGetKernel({symbol})", result)


def parameter_size(kernel: Any) -> int:
    """Size in bytes of a kernel's first parameter, as the cubin has it."""
    driver = api()
    status, _, size = driver.cuKernelGetParamInfo(kernel, 0)
    check("cuKernelGetParamInfo", (status, size))
    return int(size)


def get_function(kernel: Any, shared_memory: int, device: int) -> Any:
    """The kernel's handle (CUfunction) in the current context, with its dynamic shared memory allowed."""
    driver = api()
    if shared_memory > 48 * 1024:
        handle = check("cuDeviceGet", driver.cuDeviceGet(device))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check("cuKernelSetAttribute", driver.cuKernelSetAttribute(attribute, shared_memory, kernel, handle))
    return check("cuKernelGetFunction", driver.cuKernelGetFunction(kernel))


@dataclass(frozen=True)
class TiledMap:
    """A tiled tensor map but for its address: extents and box innermost first, byte strides from the second dimension."""

    element: str  # "f16", "bf16" or "f32"
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128  # bytes; 32 or 0 (none)


@dataclass(frozen=True)
class Im2colMap:
    """An im2col tensor map of an NHWC tensor but for its address (extents C, W, H, N)."""

    element: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    lower_corner: Pair  # W, H
    upper_corner: Pair
    channels: int
    pixels: int
    traversal: Pair  # W, H


def encode(tensor_map: Union[TiledMap, Im2colMap], address: int) -> bytes:
    """The 128 bytes of a TMA descriptor: zero fill, no interleave."""
    driver = api()
    types = driver.CUtensorMapDataType
    element = {
        "f16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f32": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[tensor_map.element]
    rank = len(tensor_map.extents)
    extents = [driver.cuuint64_t(e) for e in tensor_map.extents]
    strides = [driver.cuuint64_t(s) for s in tensor_map.strides]
    swizzles = driver.CUtensorMapSwizzle
    swizzle = {
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
    }[128 if isinstance(tensor_map, Im2colMap) else tensor_map.swizzle]
    tail = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if isinstance(tensor_map, TiledMap):
        box = [driver.cuuint32_t(b) for b in tensor_map.box]
        steps = [driver.cuuint32_t(1)] * rank
        encoded = check(
            "cuTensorMapEncodeTiled", driver.cuTensorMapEncodeTiled(element, rank, address, extents, strides, box, steps, *tail)
        )
    else:
        steps = [driver.cuuint32_t(t) for t in (1, *tensor_map.traversal, 1)]
        encoded = check(
            "cuTensorMapEncodeIm2col",
            driver.cuTensorMapEncodeIm2col(
                element,
                rank,
                address,
                extents,
                strides,
                list(tensor_map.lower_corner),
                list(tensor_map.upper_corner),
                tensor_map.channels,
                tensor_map.pixels,
                steps,
                *tail,
            ),
        )
    return struct.pack("<16Q", *(int(word) for word in encoded.opaque))


class Launch:
    """A kernel ready to be launched again and again: function, grid, block, and the bytes of its one parameter."""

    def __init__(self, function: Any, grid: int, threads: int, shared_memory: int, params: Any, *, overlap: bool = False) -> None:
        """`overlap`: the kernel may start before its predecessor ends, and waits for it itself (programmatic launch)."""
        driver = api()
        #: A ctypes object that the caller fills; the driver copies it at each launch.
        self.params = params
        self.grid = grid
        self._function = function
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._pointers_address = ctypes.addressof(self._pointers)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_memory
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._config, self._stream = config, -1
        self._call = driver.cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        """Launch on a stream."""
        if stream != self._stream:
            self._config.hStream = stream
            self._stream = stream
        status = self._call(self._config, self._function, self._pointers_address, 0)[0]
        if status != 0:
            raise CudaError(_explain(api(), "cuLaunchKernelEx", status))


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor on the current device."""
    if torch.are_deterministic_algorithms_enabled():  # PyTorch may fill new memory then; our tests let it
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    # What torch.compile's code calls: torch.empty without its dispatch, in 0.5 us instead of 1.1 to 1.5.
    tensor: torch.Tensor = torch._C._dynamo.guards._empty_strided_cuda(shape, strides, dtype)  # type: ignore[attr-defined]
    return tensor


def current_stream(device: int) -> int:
    """Handle of PyTorch's current stream on a device."""
    handle: int = torch._C._cuda_getCurrentRawStream(device)  # what torch.cuda.current_stream asks, at a thirtieth of the time
    return handle


def clear_word(address: int, stream: int) -> None:
    """Set a 32-bit word on the device to zero, on a stream."""
    check("cuMemsetD32Async", api().cuMemsetD32Async(address, 0, 1, stream))
