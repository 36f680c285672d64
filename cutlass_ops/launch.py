"""Plan -> launches: a `PreparedCall` is a plan made ready for one problem on one device.

It is made once and used by one thread; a call then allocates result and workspace, writes the addresses that changed
into the parameter bytes of its launches, and launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import driver
from .fused import Fused
from .loader import KernelSet, device_facts
from .manifest import require_arguments
from .problem import Problem
from .selection import Plan
from .two_kernel import ALIGNMENT, TwoKernel

__all__ = ["PreparedCall"]


class PreparedCall:
    """A plan made ready for one problem on one device. Not for two threads at once."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        kernels: KernelSet,
        device: int,
        vector_names: Sequence[str],
        scalar_names: Sequence[str],
    ) -> None:
        """Load the plan's kernels; `vector_names` and `scalar_names` name what calls pass, in their order."""
        self.problem, self.plan = problem, plan
        self._vector_names, self._scalar_names = vector_names, scalar_names
        self._scalar_bytes = struct.Struct(f"{len(scalar_names)}d").pack
        #: Whether the caller's x and weight must be made presentable() first, and vectors dense fp32 (set by who knows them).
        self.copies = self.copies_vectors = False
        self._index = device
        self._output_shape = problem.output_shape
        _, k, h, w = problem.output_shape
        self._output_strides = (k * h * w, 1, k * w, k) if problem.channels_last else (k * h * w, h * w, w, 1)
        self._is_empty = problem.output_shape[0] == 0  # every other dimension is positive
        self._state: Any = None
        if self._is_empty:
            return
        driver.make_context_current(device)
        loaded = [kernels.get(name, device) for name in plan.kernels]
        for kernel in loaded:
            require_arguments(kernel.record, vector_names, scalar_names)
        sm_count = device_facts(device).sm_count
        self._part: Union[Fused, TwoKernel]
        if loaded[0].record.family == "pack":
            self._part, self._clears_flag = Fused(problem, loaded, sm_count), False
        else:
            # The workspace starts with the flag, on a line of its own.
            self._part = TwoKernel(problem, loaded, sm_count, ALIGNMENT)
            self._clears_flag = self._part.raises_flag
        self.workspace_bytes = self._part.workspace_end
        self._launches = [launch for _, launch in self.stages()]

    def stages(self) -> list[tuple[str, driver.Launch]]:
        """The launches of a call in order, each with what it does (for benchmarks)."""
        return self._part.stages()

    def __call__(self, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], scalars: Sequence[float]) -> Tensor:
        """Compute on the current stream of the tensors' device, which is current; inputs are those of the problem, vectors dense fp32."""
        y = driver.empty(self._output_shape, self._output_strides, x.dtype)
        if self._is_empty:
            return y
        # Freed at return: later work of this stream may use it, which is ordered behind ours.
        workspace = driver.empty((self.workspace_bytes,), (1,), torch.uint8)
        self.launch(workspace.data_ptr(), y, x, weight, vectors, scalars)
        return y

    def launch(
        self, base: int, y: Tensor, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], scalars: Sequence[float]
    ) -> None:
        """Launch into the result `y`, with `workspace_bytes` of workspace at the address `base`."""
        addresses = [0 if v is None else v.data_ptr() for v in vectors]
        # Scalars by their bytes: 0.0 == -0.0, and a NaN is not equal to itself.
        state = (base, x.data_ptr(), weight.data_ptr(), addresses, self._scalar_bytes(*scalars))
        if state != self._state:
            self._state = None  # what an interrupted fill leaves is nobody's state
            rounded = [ctypes.c_float(s).value for s in scalars]  # beyond fp32 an infinity, as in PyTorch
            chain = dict(zip(self._vector_names, addresses)), dict(zip(self._scalar_names, rounded))
            self._part.fill(base, (state[1], state[2]), *chain)
            self._state = state
        self._part.set_output(y.data_ptr())
        stream = driver.current_stream(self._index)
        if self._clears_flag:
            driver.clear_word(base, stream)
        for launch in self._launches:
            launch(stream)
