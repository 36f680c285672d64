"""The two-kernel plan's launches: conversion of the operands, implicit GEMM with the chain, pool."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Union

from . import driver
from .layout import flat_strides
from .loader import LoadedKernel
from .problem import NO_POOL, Problem
from .work import operand_channels, operands_to_convert, round_up

ALIGNMENT = 256  # of everything in the workspace, in bytes
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
            *("n", "h", "w", "channels", "ld", "out_h", "out_w", "kernel_h", "kernel_w", "stride_h", "stride_w"),
            *("padding_h", "padding_w", "dilation_h", "dilation_w", "count_include_pad", "divisor_override", "channels_last"),
        )
    ]


class Descriptor:
    """A TMA descriptor inside parameter bytes, encoded again only when its address changes."""

    def __init__(self, tensor_map: Union[driver.TiledMap, driver.Im2colMap], target: int) -> None:
        self._map = tensor_map
        self._target = memoryview((ctypes.c_char * driver.DESCRIPTOR_BYTES).from_address(target)).cast("B")
        self._address = 0
        self._encoded: dict[int, bytes] = {}

    def point_to(self, address: int) -> None:
        """Describe the tensor at another address."""
        if address == self._address:
            return
        encoded = self._encoded.get(address)
        if encoded is None:
            if len(self._encoded) >= _CACHED_DESCRIPTORS:
                self._encoded.clear()
            encoded = self._encoded[address] = driver.encode(self._map, address)
        self._target[:] = encoded  # 0.2 us; ctypes.memmove takes 0.7
        self._address = address


class _ImplicitGemm:
    """One implicit-GEMM launch: the parameters that PersistentConvFprop::Params lists, at the offsets of the record."""

    def __init__(self, kernel: LoadedKernel, problem: Problem, channels: int, sm_count: int, *, overlap: bool) -> None:
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
        self.activation = Descriptor(activation, self._base + record.fields["activation"])
        self.filter = Descriptor(filters, self._base + record.fields["filter"])
        self.result = Descriptor(result, self._base + record.fields["output"])

        tiles = -(-n * p * q // tile_m) * -(-k // tile_n)
        grid = min(tiles, sm_count)
        self.launch = kernel.launch(grid, params, overlap=overlap)

    def fill(self, activation: int, filters: int, result: int, vectors: dict[str, int], scalars: dict[str, float]) -> None:
        """Write the addresses and scalars of a call."""
        self.activation.point_to(activation)
        self.filter.point_to(filters)
        self.result.point_to(result)
        for name, address in vectors.items():
            struct.pack_into("<Q", self._params, self.record.vectors[name], address)
        for name, value in scalars.items():
            struct.pack_into("<f", self._params, self.record.scalars[name], value)

    def guard(self, address: int, value: int) -> None:
        """Let the kernel work only where the word at `address` is `value`."""
        struct.pack_into("<Q", self._params, self.record.fields["guard"], address)
        struct.pack_into("<i", self._params, self.record.fields["guard_value"], value)


class _Convert:
    """One conversion launch for the operands that need one (0: the activation, 1: the filter)."""

    def __init__(
        self, kernel: LoadedKernel, problem: Problem, channels: int, operands: Sequence[int], sm_count: int, *, overlap: bool
    ) -> None:
        self.params = ConvertParams()
        self._operands = operands
        blocks = 0
        for index in operands:
            shape = (problem.x_shape, problem.weight_shape)[index]
            strides = flat_strides(shape, (problem.x_strides, problem.weight_strides)[index])
            assert strides is not None, "presentable() copies such tensors"
            job = self.params.jobs[index]
            job.batch_stride, job.channel_stride, job.pixel_stride = strides
            job.batch, job.channels, job.pixels, job.padded_channels = shape[0], shape[1], shape[2] * shape[3], channels
            # An upper bound of the kernel's tiles is enough: blocks beyond them have no work.
            blocks += shape[0] * -(-shape[2] * shape[3] // 64) * -(-channels // 64)
        grid = max(1, min(blocks, sm_count * kernel.blocks_per_sm))
        self.launch = kernel.launch(grid, self.params, overlap=overlap)

    def fill(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Write the operands' addresses."""
        for index in self._operands:
            job = self.params.jobs[index]
            job.source, job.target = sources[index], targets[index]


class _Pool:
    """The pool's launch."""

    def __init__(self, kernel: LoadedKernel, problem: Problem, sm_count: int) -> None:
        self.params = params = PoolParams()
        pool = problem.pool or NO_POOL
        n, k, out_h, out_w = problem.output_shape
        params.n, (params.h, params.w), params.channels, params.ld = n, problem.conv_size, k, round_up(k, 4)
        params.out_h, params.out_w = out_h, out_w
        for name, both in (("kernel", pool.kernel_size), ("stride", pool.stride), ("padding", pool.padding), ("dilation", pool.dilation)):
            setattr(params, f"{name}_h", both[0])
            setattr(params, f"{name}_w", both[1])
        params.count_include_pad = int(pool.count_include_pad)
        params.divisor_override = pool.divisor_override or 0
        params.channels_last = int(problem.channels_last)
        tiles = n * -(-out_h * out_w // 256) * -(-k // 32)
        grid = max(1, min(tiles, sm_count * kernel.blocks_per_sm))
        self.launch = kernel.launch(grid, params, overlap=True)


class TwoKernel:
    """Conversion(s), implicit GEMM(s) and pool of one problem.

    With two operand types the second is the fallback of the first: the first conversion raises the flag where a value does
    not fit, and of both only one works.
    """

    def __init__(self, problem: Problem, kernels: Sequence[LoadedKernel], sm_count: int, offset: int) -> None:
        needs = self._needs = operands_to_convert(problem)
        channels = operand_channels(problem)
        by_family: dict[str, list[LoadedKernel]] = {"convert": [], "implicit_gemm": [], "pool": []}
        for kernel in kernels:
            by_family[kernel.record.family].append(kernel)
        # Every launch but a call's first may come up before its predecessor ends (programmatic launch).
        self._converts = [
            _Convert(k, problem, channels, needs, sm_count, overlap=i > 0) for i, k in enumerate(by_family["convert"]) if needs
        ]
        gemms = by_family["implicit_gemm"]
        self._gemms = [_ImplicitGemm(k, problem, channels, sm_count, overlap=bool(self._converts)) for k in gemms]
        (pool,) = by_family["pool"]
        self._pool = _Pool(pool, problem, sm_count)
        self.raises_flag = len(self._gemms) == 2
        self._lay_out(problem, channels, offset)

    def _lay_out(self, problem: Problem, channels: int, offset: int) -> None:
        """Offsets in the workspace: filters, activation (shared by both operand types), result of the implicit GEMM."""
        n, _, h, w = problem.x_shape
        k, _, r, s = problem.weight_shape
        p, q = problem.conv_size
        sizes = [_OPERAND_BYTES[g.record.variant[0]] * channels for g in self._gemms]
        self._filter_offsets = []
        for size in sizes:
            self._filter_offsets.append(offset)
            offset += round_up(k * r * s * size, ALIGNMENT) if 1 in self._needs else 0
        self._activation_offset = offset
        # Only one of two guarded conversions is used, so both write to the same place: the fp16 activation is no longer
        # needed where TF32 takes over.
        offset += round_up(n * h * w * max(sizes), ALIGNMENT) if 0 in self._needs else 0
        self._result_offset = offset
        self.workspace_end = offset + n * p * q * self._gemms[0].ld * 4

    def stages(self) -> list[tuple[str, driver.Launch]]:
        """The launches in order, each with what it does."""
        converts = [(f"convert {i}" if i else "convert", c.launch) for i, c in enumerate(self._converts)]
        gemms = [(f"implicit GEMM {g.record.variant[0]}", g.launch) for g in self._gemms]
        return [*converts, *gemms, ("pool", self._pool.launch)]

    def fill(self, base: int, sources: Sequence[int], vectors: dict[str, int], scalars: dict[str, float]) -> None:
        """Write the addresses and scalars of a call; the flag is the workspace's first word."""
        for i, convert in enumerate(self._converts):
            convert.fill(sources, (base + self._activation_offset, base + self._filter_offsets[i]))
            convert.params.flag = base if self.raises_flag and i == 0 else None
            # The first of two finds out whether its values fit, so it always works.
            convert.params.guard, convert.params.guard_value = (base, 1) if i else (None, 0)
        for i, gemm in enumerate(self._gemms):
            activation = base + self._activation_offset if 0 in self._needs else sources[0]
            filters = base + self._filter_offsets[i] if 1 in self._needs else sources[1]
            gemm.fill(activation, filters, base + self._result_offset, vectors, scalars)
            if self.raises_flag:
                gemm.guard(base, i)
        self._pool.params.source = base + self._result_offset

    def set_output(self, address: int) -> None:
        """Write the result's address."""
        self._pool.params.target = address
