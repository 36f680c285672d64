"""The fused plan's launches: packing of the filter, and one kernel for convolution, chain and pool."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from . import driver
from .loader import LoadedKernel
from .problem import Problem, team_size
from .two_kernel import ALIGNMENT, Descriptor, round_up

_STRIP = 32  # pooled columns of a CTA
_CHANNELS = 64  # input channels, padded in shared memory
_FRAGMENT_BYTES = 9 * 4 * 32 * 16  # of a warp's 16 output channels


class PackParams(ctypes.Structure):
    """Params of kernels/pack.cu."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("k_stride", "c_stride", "r_stride", "s_stride")),
        *((n, ctypes.c_void_p) for n in ("fragments", "scales", "flag")),
        *((n, ctypes.c_int32) for n in ("k", "c")),
    ]


class Fused:
    """Packing and fused launch of one problem. The fused kernel raises the flag where a value does not fit fp16."""

    def __init__(self, problem: Problem, kernels: Sequence[LoadedKernel], sm_count: int, offset: int) -> None:
        pack, fused = kernels
        record = self._record = fused.record
        n, c, h, w = problem.x_shape
        _, k, out_h, out_w = problem.output_shape
        blocks = -(-k // record.tile[1])
        self._pack_params = PackParams(None, *problem.weight_strides, None, None, None, k, c)
        self._pack = driver.Launch(pack.function, blocks * record.tile[1], pack.record.threads, 0, self._pack_params)

        self._params = params = ctypes.create_string_buffer(record.params_size)
        assert problem.pool is not None
        window = problem.pool.kernel_size[0] * problem.pool.kernel_size[1]
        values = {"n": n, "k": k, "out_h": out_h, "out_w": out_w, "padding_h": problem.padding[0], "padding_w": problem.padding[1]}
        shift = -problem.padding[1] % 4
        values |= {"shift": shift, "strips": -(-out_w // _STRIP), "channel_blocks": blocks}
        for name, value in values.items():
            struct.pack_into("<i", params, record.fields[name], value)
        struct.pack_into("<f", params, record.fields["pool_scale"], 1.0 / (problem.pool.divisor_override or window))
        for where, constant in record.constants:
            struct.pack_into("<f", params, where, constant)
        box = (2 * _STRIP + (12 if shift else 4), 2, _CHANNELS, 1)
        tensor = driver.TiledMap("f32", (w, h, c, n), (w * 4, h * w * 4, c * h * w * 4), box, swizzle=False)
        self._input = Descriptor(tensor, ctypes.addressof(params) + record.fields["input"])

        team = team_size(problem, record.tile)
        grid = min(sm_count // team, n * out_h) * team
        self._launch = driver.Launch(fused.function, grid, record.threads, record.shared_memory, params, overlap=True)
        self._fragments_offset = offset
        self._scales_offset = offset + blocks * 8 * _FRAGMENT_BYTES
        self.workspace_end = self._scales_offset + round_up(blocks * record.tile[1] * 4, ALIGNMENT)

    def stages(self) -> list[tuple[str, driver.Launch]]:
        """The launches in order, each with what it does."""
        return [("pack", self._pack), ("fused", self._launch)]

    def fill(self, base: int, sources: Sequence[int], vectors: dict[str, int], scalars: dict[str, float]) -> None:
        """Write the addresses and scalars of a call; the flag is the workspace's first word."""
        fragments, scales = base + self._fragments_offset, base + self._scales_offset
        pack, record = self._pack_params, self._record
        pack.source, pack.fragments, pack.scales, pack.flag = sources[1], fragments, scales, base
        self._input.point_to(sources[0])
        for name, address in (("weights", fragments), ("scales", scales), ("flag", base)):
            struct.pack_into("<Q", self._params, record.fields[name], address)
        for name, address in vectors.items():
            struct.pack_into("<Q", self._params, record.vectors[name], address)
        for name, value in scalars.items():
            struct.pack_into("<f", self._params, record.scalars[name], value)

    def set_output(self, address: int) -> None:
        """Write the result's address."""
        struct.pack_into("<Q", self._params, self._record.fields["output"], address)
