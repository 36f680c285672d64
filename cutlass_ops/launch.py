"""Plan -> launches: workspace, parameters (bytes, TMA descriptors) and grids of one problem on one device.

A `PreparedCall` is made once for a problem and used by one thread; a call then allocates result and workspace, writes
the addresses that changed into the parameter bytes, and launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import driver
from .loader import KernelSet, LoadedKernel, device_facts
from .problem import NO_POOL, Problem
from .selection import Plan

_ALIGNMENT = 256
_CACHED_DESCRIPTORS = 64
_OPERAND_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}
_ELEMENT = {"f16": "f16", "bf16": "bf16", "tf32": "f32"}  # of the tensor map


class ConvertJob(ctypes.Structure):
    """Job of kernels/convert.cu."""

    _fields_ = (
        [(n, ctypes.c_void_p) for n in ("source", "target")]
        + [(n, ctypes.c_int64) for n in ("batch_stride", "channel_stride", "pixel_stride")]
        + [(n, ctypes.c_int32) for n in ("batch", "channels", "pixels", "padded_channels")]
    )


class ConvertParams(ctypes.Structure):
    """Params of kernels/convert.cu."""

    _fields_ = [
        ("jobs", ConvertJob * 2),
        ("guard", ctypes.c_void_p),
        ("flag", ctypes.c_void_p),
        ("guard_value", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class PoolParams(ctypes.Structure):
    """Params of kernels/pool.cu."""

    _fields_ = [(n, ctypes.c_void_p) for n in ("source", "target")] + [
        (n, ctypes.c_int32)
        for n in (
            "n",
            "h",
            "w",
            "channels",
            "ld",
            "out_h",
            "out_w",
            "kernel_h",
            "kernel_w",
            "stride_h",
            "stride_w",
            "padding_h",
            "padding_w",
            "dilation_h",
            "dilation_w",
            "count_include_pad",
            "divisor_override",
            "channels_last",
        )
    ]


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def flat_strides(shape: Sequence[int], strides: Sequence[int]) -> Optional[tuple[int, int, int]]:
    """(batch, channel, pixel) strides of a 4-D tensor whose rows follow each other evenly, or None.

    The conversion kernel walks an image's pixels as one dimension: stride_h must be W * stride_w. Strides of dimensions
    of one element mean nothing.
    """
    _, _, h, w = shape
    batch, channel, row, column = strides
    if w == 1:
        pixel = row if h > 1 else 1
    elif h == 1 or row == w * column:
        pixel = column
    else:
        return None
    return batch, channel, pixel


class _Descriptor:
    """A TMA descriptor inside parameter bytes, encoded again only when its address changes."""

    def __init__(self, tensor_map: Union[driver.TiledMap, driver.Im2colMap], target: int) -> None:
        self._map, self._target = tensor_map, target
        self._address = 0
        self._encoded: dict[int, bytes] = {}

    def point_to(self, address: int) -> None:
        if address == self._address:
            return
        encoded = self._encoded.get(address)
        if encoded is None:
            if len(self._encoded) >= _CACHED_DESCRIPTORS:
                self._encoded.clear()
            encoded = self._encoded[address] = driver.encode(self._map, address)
        ctypes.memmove(self._target, encoded, len(encoded))
        self._address = address


class _ImplicitGemm:
    """One implicit-GEMM launch: the parameters that PersistentConvFprop::Params lists, at the offsets of the record."""

    def __init__(self, kernel: LoadedKernel, problem: Problem, channels: int, sm_count: int) -> None:
        record = kernel.record
        self.record = record
        params = ctypes.create_string_buffer(record.params_size)
        self._base = ctypes.addressof(params)
        self._params = params
        n, _, h, w = problem.x_shape
        k, _, r, s = problem.weight_shape
        p, q = problem.conv_size
        tile_m, tile_n, tile_k = record.tile
        operand = record.variant[0]
        element, size = _ELEMENT[operand], _OPERAND_BYTES[operand]
        self.ld = round_up(k, 4)  # of the result: TMA needs rows of whole 16 bytes

        values = {"m": n * p * q, "k": k, "c": channels, "r": r, "s": s, "p": p, "q": q}
        for name, both in (("stride", problem.stride), ("padding", problem.padding), ("dilation", problem.dilation)):
            values[f"{name}_h"], values[f"{name}_w"] = both
        for name, value in values.items():
            struct.pack_into("<i", params, record.fields[name], value)
        for offset, constant in record.constants:
            struct.pack_into("<f", params, offset, constant)

        reach_h, reach_w = (r - 1) * problem.dilation[0], (s - 1) * problem.dilation[1]
        activation = driver.Im2colMap(
            element,
            extents=(channels, w, h, n),
            strides=(channels * size, w * channels * size, h * w * channels * size),
            lower_corner=(-problem.padding[1], -problem.padding[0]),
            upper_corner=(problem.padding[1] - reach_w, problem.padding[0] - reach_h),
            channels=tile_k,
            pixels=tile_m,
            traversal=(problem.stride[1], problem.stride[0]),
        )
        filters = driver.TiledMap(element, (channels, r * s, k), (channels * size, r * s * channels * size), (tile_k, 1, tile_n))
        epi_m, epi_n = record.epilogue_tile
        result = driver.TiledMap("f32", (k, n * p * q, 1), (self.ld * 4, n * p * q * self.ld * 4), (epi_n, epi_m, 1))
        self.activation = _Descriptor(activation, self._base + record.fields["activation"])
        self.filter = _Descriptor(filters, self._base + record.fields["filter"])
        self.result = _Descriptor(result, self._base + record.fields["output"])

        tiles = -(-n * p * q // tile_m) * -(-k // tile_n)
        self.launch = driver.Launch(kernel.function, min(tiles, sm_count), record.threads, record.shared_memory, params)

    def fill(self, activation: int, filters: int, result: int, vectors: Sequence[int], scalars: Sequence[float]) -> None:
        """Write the addresses and scalars of a call."""
        self.activation.point_to(activation)
        self.filter.point_to(filters)
        self.result.point_to(result)
        for offset, address in zip(self.record.vectors.values(), vectors):
            struct.pack_into("<Q", self._params, offset, address)
        for offset, value in zip(self.record.scalars.values(), scalars):
            struct.pack_into("<f", self._params, offset, value)

    def guard(self, address: int, value: int) -> None:
        """Let the kernel work only where the word at `address` is `value`."""
        struct.pack_into("<Q", self._params, self.record.fields["guard"], address)
        struct.pack_into("<i", self._params, self.record.fields["guard_value"], value)


class _Convert:
    """One conversion launch for the operands that need one."""

    def __init__(self, kernel: LoadedKernel, problem: Problem, channels: int, operands: Sequence[int], sm_count: int) -> None:
        self.params = ConvertParams()
        blocks = 0
        for index in operands:
            shape = (problem.x_shape, problem.weight_shape)[index]
            strides = flat_strides(shape, (problem.x_strides, problem.weight_strides)[index])
            assert strides is not None, "prepare() makes such tensors contiguous"
            job = self.params.jobs[index]
            job.batch_stride, job.channel_stride, job.pixel_stride = strides
            job.batch, job.channels, job.pixels, job.padded_channels = shape[0], shape[1], shape[2] * shape[3], channels
            # An upper bound of the kernel's tiles is enough: blocks beyond them have no work.
            blocks += shape[0] * -(-shape[2] * shape[3] // 64) * -(-channels // 64)
        grid = max(1, min(blocks, sm_count * kernel.blocks_per_sm))
        self.launch = driver.Launch(kernel.function, grid, kernel.record.threads, 0, self.params)


class PreparedCall:
    """A plan made ready for one problem on one device. Not for two threads at once."""

    def __init__(self, problem: Problem, plan: Plan, kernels: KernelSet, device: int) -> None:
        self.problem, self.plan = problem, plan
        driver.make_context_current(device)
        self._device, self._index = torch.device("cuda", device), device
        self._output_shape = problem.output_shape
        self._is_empty = problem.output_shape[0] == 0  # every other dimension is positive
        self._state: Any = None
        if self._is_empty:
            return
        loaded = [kernels.get(name, device) for name in plan.kernels]
        sm_count = device_facts(device).sm_count
        self._channels = round_up(problem.x_shape[1], 8)
        self._needs = self._operands_to_convert()
        by_family: dict[str, list[LoadedKernel]] = {"convert": [], "implicit_gemm": [], "pool": []}
        for kernel in loaded:
            by_family[kernel.record.family].append(kernel)
        self._converts = [_Convert(k, problem, self._channels, self._needs, sm_count) for k in by_family["convert"] if self._needs]
        self._gemms = [_ImplicitGemm(k, problem, self._channels, sm_count) for k in by_family["implicit_gemm"]]
        self._guarded = len(self._gemms) == 2
        self._pool_params = PoolParams()
        (pool,) = by_family["pool"]
        self._pool = driver.Launch(pool.function, self._fill_pool(pool, sm_count), pool.record.threads, 0, self._pool_params)
        self._launches = [*(c.launch for c in self._converts), *(g.launch for g in self._gemms), self._pool]
        self._lay_out_workspace()

    def _operands_to_convert(self) -> tuple[int, ...]:
        """0 for the activation, 1 for the filter: those that the implicit GEMM cannot read where they are."""
        problem = self.problem
        if problem.dtype == "f32":
            return (0, 1)

        def dense_nhwc(shape: Sequence[int], strides: Sequence[int]) -> bool:
            _, c, h, w = shape
            return tuple(strides) == (h * w * c, 1, w * c, c)

        whole = problem.x_shape[1] % 8 == 0 and problem.aligned
        pairs = ((problem.x_shape, problem.x_strides), (problem.weight_shape, problem.weight_strides))
        return tuple(i for i, (shape, strides) in enumerate(pairs) if not (whole and dense_nhwc(shape, strides)))

    def _fill_pool(self, kernel: LoadedKernel, sm_count: int) -> int:
        """Fill the pool's parameters but for addresses; returns its grid."""
        problem, params = self.problem, self._pool_params
        pool = problem.pool or NO_POOL
        n, k, out_h, out_w = problem.output_shape
        p, q = problem.conv_size
        params.n, params.h, params.w, params.channels, params.ld = n, p, q, k, round_up(k, 4)
        params.out_h, params.out_w = out_h, out_w
        for name, both in (("kernel", pool.kernel_size), ("stride", pool.stride), ("padding", pool.padding), ("dilation", pool.dilation)):
            setattr(params, f"{name}_h", both[0])
            setattr(params, f"{name}_w", both[1])
        params.count_include_pad = int(pool.count_include_pad)
        params.divisor_override = pool.divisor_override or 0
        params.channels_last = int(problem.channels_last)
        tiles = n * -(-out_h * out_w // 256) * -(-k // 32)
        return max(1, min(tiles, sm_count * kernel.blocks_per_sm))

    def _lay_out_workspace(self) -> None:
        """Offsets in one allocation: flag, filters, activation (shared by both operand types), result of the implicit GEMM."""
        problem = self.problem
        n, _, h, w = problem.x_shape
        k, _, r, s = problem.weight_shape
        p, q = problem.conv_size
        sizes = [_OPERAND_BYTES[g.record.variant[0]] * self._channels for g in self._gemms]
        offset = _ALIGNMENT  # the flag has a line of its own
        self._filter_offsets = []
        for size in sizes:
            self._filter_offsets.append(offset)
            offset += round_up(k * r * s * size, _ALIGNMENT) if 1 in self._needs else 0
        self._activation_offset = offset
        # Only one of two guarded conversions works, so both write to the same place: the fp16 activation is no longer
        # needed where TF32 takes over.
        offset += round_up(n * h * w * max(sizes), _ALIGNMENT) if 0 in self._needs else 0
        self._result_offset = offset
        self.workspace_bytes = offset + n * p * q * self._gemms[0].ld * 4

    def __call__(self, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], scalars: Sequence[float]) -> Tensor:
        """Compute on the current stream of the tensors' device; the inputs are those of the problem, vectors dense fp32."""
        if self.problem.channels_last:
            y = torch.empty(self._output_shape, dtype=x.dtype, device=self._device, memory_format=torch.channels_last)
        else:
            y = x.new_empty(self._output_shape)
        if self._is_empty:
            return y
        # Freed at return: later work of this stream may use it, which is ordered behind ours.
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self._device)
        base = workspace.data_ptr()
        addresses = [0 if v is None else v.data_ptr() for v in vectors]
        state = (base, x.data_ptr(), weight.data_ptr(), addresses, scalars)
        if state != self._state:
            self._fill(*state)
            self._state = state
        self._pool_params.target = y.data_ptr()
        stream = driver.current_stream(self._index)
        if self._guarded:
            driver.clear_word(base, stream)
        for launch in self._launches:
            launch(stream)
        return y

    def _fill(self, base: int, x: int, weight: int, vectors: Sequence[int], scalars: Sequence[float]) -> None:
        """Write the addresses and scalars of a call into the parameters of its launches."""
        for i, convert in enumerate(self._converts):
            for index in self._needs:
                job = convert.params.jobs[index]
                job.source = (x, weight)[index]
                job.target = base + (self._filter_offsets[i] if index else self._activation_offset)
            if self._guarded:
                convert.params.flag, convert.params.guard = (base, None) if i == 0 else (None, base)
                convert.params.guard_value = i
        for i, gemm in enumerate(self._gemms):
            activation = base + self._activation_offset if 0 in self._needs else x
            filters = base + self._filter_offsets[i] if 1 in self._needs else weight
            gemm.fill(activation, filters, base + self._result_offset, vectors, scalars)
            if self._guarded:
                gemm.guard(base, i)
        self._pool_params.source = base + self._result_offset


def presentable(tensor: Tensor) -> Tensor:
    """The tensor itself where the conversion kernel can walk it, else a contiguous copy."""
    if not tensor.numel() or flat_strides(tensor.shape, tensor.stride()) is not None:
        return tensor
    return tensor.contiguous()
