"""The fused plan's launches: packing of the filter, and one kernel for convolution, chain and pool."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from . import driver
from .loader import LoadedKernel
from .problem import Problem
from .two_kernel import ALIGNMENT, Descriptor
from .work import FusedWork, gathered, round_up


class PackParams(ctypes.Structure):
    """Params of kernels/pack.cu."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("k_stride", "c_stride", "r_stride", "s_stride")),
        *((n, ctypes.c_void_p) for n in ("fragments", "scales", "counters")),
        *((n, ctypes.c_int32) for n in ("k", "c", "taps", "s", "channels", "members", "chunks")),
    ]


class Fused:
    """Packing and fused launch of one problem."""

    def __init__(self, problem: Problem, kernels: Sequence[LoadedKernel], sm_count: int) -> None:
        pack, fused = kernels
        record = self._record = fused.record
        n, c, h, w = problem.x_shape
        _, k, out_h, out_w = problem.output_shape
        _, _, r, s = problem.weight_shape
        channels, nhwc = record.tile[2], record.variant[1] == "nhwc"
        block = record.epilogue_tile[1]
        work = FusedWork.of(problem, record, sm_count)
        blocks, strips = work.blocks, work.strips
        members = strips * blocks

        chunks = 0 if nhwc else channels // 8
        self._pack_params = PackParams(None, *problem.weight_strides, None, None, None, k, c, r * s, s, channels, members, chunks)
        self._pack = pack.launch(blocks * block, self._pack_params)

        self._params = params = ctypes.create_string_buffer(record.params_size)
        size = 4 if record.variant[0] == "f32" else 2
        copied = gathered(problem, record)
        # Columns that a tile begins early, at whole 16 bytes for TMA. Gathered pairs of 16 bits begin at even columns.
        early = problem.padding[1] % 2 if copied and size == 2 else -problem.padding[1] % (16 // size)
        shift = early if record.variant[3] == "shifted" else 0
        values = {"n": n, "k": k, "out_h": out_h, "out_w": out_w, "padding_h": problem.padding[0], "padding_w": problem.padding[1]}
        values |= {"c": c, "h": h, "w": w, "gathered": copied}
        values |= {"shift": shift, "strips": strips, "channel_blocks": blocks, "steps": work.steps}
        values["claim_shift"] = max(work.claim, 1).bit_length() - 1
        if nhwc:
            box = (channels, record.box_columns, 1, 1)
            swizzle = 0 if size == 4 else 2 * channels  # what is converted is swizzled then
            tensor = driver.TiledMap(record.variant[0], (c, w, h, n), (c * size, w * c * size, h * w * c * size), box, swizzle=swizzle)
            values["box_bytes"] = 2 * channels * record.box_columns * size
        else:
            box = (record.box_columns, work.rows, min(channels, round_up(c, 8)), 1)
            tensor = driver.TiledMap(record.variant[0], (w, h, c, n), (w * size, h * w * size, c * h * w * size), box, swizzle=0)
            values["box_bytes"] = box[0] * box[1] * box[2] * size
        for name, value in values.items():
            struct.pack_into("<i", params, record.fields[name], value)
        if problem.pool:
            window = problem.pool.divisor_override or problem.pool.kernel_size[0] * problem.pool.kernel_size[1]
            struct.pack_into("<f", params, record.fields["pool_scale"], 1.0 / window)
        for where, constant in record.constants:
            struct.pack_into("<f", params, where, constant)
        self._input = None if copied else Descriptor(tensor, ctypes.addressof(params) + record.fields["input"])
        self._launch = fused.launch(work.teams * strips * blocks, params, overlap=True)

        self._scales_offset = round_up(blocks * block * channels * r * s * 2, ALIGNMENT)
        self._counters_offset = self._scales_offset + round_up(blocks * block * 4, ALIGNMENT)
        self.workspace_end = self._counters_offset + round_up(members * 4, ALIGNMENT)

    def stages(self) -> list[tuple[str, driver.Launch]]:
        """The launches in order, each with what it does."""
        return [("pack", self._pack), ("fused", self._launch)]

    def fill(self, base: int, sources: Sequence[int], vectors: dict[str, int], scalars: dict[str, float]) -> None:
        """Write the addresses and scalars of a call; the workspace holds the packed filter, its scales, and counters of claims."""
        scales, counters = base + self._scales_offset, base + self._counters_offset
        pack, record = self._pack_params, self._record
        pack.source, pack.fragments, pack.scales, pack.counters = sources[1], base, scales, counters
        if self._input is not None:
            self._input.point_to(sources[0])
        for name, address in (("x", sources[0]), ("weights", base), ("scales", scales), ("counters", counters)):
            struct.pack_into("<Q", self._params, record.fields[name], address)
        for name, address in vectors.items():
            struct.pack_into("<Q", self._params, record.vectors[name], address)
        for name, value in scalars.items():
            struct.pack_into("<f", self._params, record.scalars[name], value)

    def set_output(self, address: int) -> None:
        """Write the result's address."""
        struct.pack_into("<Q", self._params, self._record.fields["output"], address)
