"""What is measured: KernelBench's models, their inputs, and which competitors run on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CutlassOpsError

SEED = 42  # KernelBench's

#: torch.compile's modes, as rows name them; the last copies its inputs into a CUDA graph's memory at each call.
COMPILE_DEFAULT, MAX_AUTOTUNE, CUDA_GRAPHS = "default", "max-autotune-no-cudagraphs", "max-autotune"


class BenchmarkError(CutlassOpsError):
    """The benchmark cannot run here, or cannot go on."""


class SubTanhSubAvgPool(nn.Module):
    """KernelBench level 2 problem 46."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3)
        self.avgpool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """As KernelBench's file has it."""
        x = self.conv(x)
        x = x - 0.5
        x = torch.tanh(x)
        x = x - 0.2
        y: Tensor = self.avgpool(x)
        return y


class ReluHardswish(nn.Module):
    """KernelBench level 2 problem 57."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        """As KernelBench's file has it."""
        x = self.conv(x)
        x = torch.relu(x)
        return x * torch.clamp((x + 3) / 6, 0, 1)


class MinAddMul(nn.Module):
    """KernelBench level 2 problem 31."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """As KernelBench's file has it."""
        x = self.conv(x)
        x = torch.min(x, torch.tensor(0.5))
        x = x + self.bias
        return x * 2.0


@dataclass(frozen=True)
class Case:
    """An operator and KernelBench's problem for it: x (128, channels, size, size), 3x3 filters, pool (1: none)."""

    operator: str
    problem: int
    model: Callable[[int, int], nn.Module]
    channels: int
    out_channels: int
    pool: int = 1
    batch: int = 128
    size: int = 128


CASES = {
    case.operator: case
    for case in (
        Case("conv2d_sub_tanh_sub_avgpool", 46, SubTanhSubAvgPool, 64, 128, pool=2),
        Case("conv2d_relu_hardswish", 57, ReluHardswish, 8, 64),
        Case("conv2d_min_add_mul", 31, MinAddMul, 64, 128),
    )
}
MAIN = CASES["conv2d_sub_tanh_sub_avgpool"]


@dataclass(frozen=True)
class Group:
    """One input and the competitors on it: eager, torch.compile in some modes, and every plan that serves it."""

    case: Case
    batch: int
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    modes: tuple[str, ...] = (COMPILE_DEFAULT,)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of x."""
        return self.batch, self.case.channels, self.case.size, self.case.size

    @property
    def output_elements(self) -> int:
        """Of y."""
        side: int = (self.case.size - 2) // self.case.pool
        return self.batch * self.case.out_channels * side * side

    @property
    def minimum_bytes(self) -> int:
        """Bytes that any implementation moves: x read once, y written once (the filters are left out)."""
        n, c, h, w = self.shape
        return (n * c * h * w + self.output_elements) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of the convolution alone, a multiply-add counted as two."""
        side = self.case.size - 2
        return 2 * self.batch * side * side * self.case.out_channels * self.case.channels * 9

    @property
    def facts(self) -> dict[str, Any]:
        """What every row of the group says of its input."""
        return {
            "case": self.case.operator,
            "problem": self.case.problem,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": "channels_last" if self.channels_last else "contiguous",
        }

    def __str__(self) -> str:
        f = self.facts
        return f"{f['case']}, x {tuple(f['shape'])} {f['dtype']} {f['layout']}"


def groups(operators: Sequence[str], *, quick: bool) -> list[Group]:
    """The groups of a run, the most important first. `quick`: KernelBench's input in fp32 NCHW alone, no max-autotune."""
    if quick:
        return [Group(CASES[name], CASES[name].batch) for name in operators]
    found: list[Group] = []
    for name in operators:
        case = CASES[name]
        is_main = case is MAIN
        found.append(Group(case, case.batch, modes=(COMPILE_DEFAULT, MAX_AUTOTUNE, *([CUDA_GRAPHS] if is_main else []))))
        if is_main:
            found.append(Group(case, case.batch, channels_last=True))
        found.append(Group(case, case.batch, torch.float16))
        found.append(Group(case, case.batch, torch.float16, channels_last=True))
        found.append(Group(case, case.batch, torch.bfloat16, channels_last=True))
        found += [Group(case, batch) for batch in (1, 8, 32)] if is_main else []
    return found


def make_model(group: Group, device: str) -> nn.Module:
    """The model with torch.nn's default initialisation, in the group's dtype and layout, without gradients."""
    torch.manual_seed(SEED)
    model = group.case.model(group.case.channels, group.case.out_channels).to(device=device, dtype=group.dtype)
    if group.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.requires_grad_(False)


def make_input(group: Group, device: str) -> Tensor:
    """X uniform in [0, 1)."""
    torch.manual_seed(SEED + 1)
    x = torch.rand(group.shape, device=device).to(group.dtype)
    return x.to(memory_format=torch.channels_last) if group.channels_last else x


def operator_arguments(case: Case, model: nn.Module) -> dict[str, Tensor]:
    """The model's per-channel vectors, by the names of the operator's arguments."""
    conv: Any = model.conv
    vectors: dict[str, Any] = {"bias": conv.bias}
    return vectors | ({"v": model.bias} if case.model is MinAddMul else {})
