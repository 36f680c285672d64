"""What is measured: KernelBench's models, their inputs, and which competitors run on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from ..errors import CutlassOpsError

SEED = 42  # KernelBench's

#: torch.compile's modes, as rows name them; the last copies its inputs into a CUDA graph's memory at each call.
COMPILE_DEFAULT, MAX_AUTOTUNE, CUDA_GRAPHS = "default", "max-autotune-no-cudagraphs", "max-autotune"


#: Batch sizes of problem 46, and timed calls where a curve or a table needs no more.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FEW_TRIALS = 20


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
    """One input and the competitors on it: eager, torch.compile in some modes, and plans of ours."""

    case: Case
    batch: int
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    modes: tuple[str, ...] = (COMPILE_DEFAULT,)
    #: "ieee": TF32 forbidden in convolutions, for all competitors. Of no meaning but for float32.
    precision: str = "tf32"
    #: Timed calls of each, at most; None: as many as the run has.
    most_trials: Optional[int] = None
    #: Whether every plan that serves the input is timed, or the one alone that a call takes.
    every_plan: bool = True
    #: Whether the launches of each plan are timed one by one, and whether a CUDA graph of a call is.
    launches: bool = False
    graph: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of x."""
        return self.batch, self.case.channels, self.case.size, self.case.size

    @property
    def facts(self) -> dict[str, Any]:
        """What every row of the group says of its input."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "case": self.case.operator,
            "problem": self.case.problem,
            "shape": list(self.shape),
            "dtype": dtype,
            "layout": "channels_last" if self.channels_last else "contiguous",
            "precision": self.precision if self.dtype is torch.float32 else dtype,
        }

    def __str__(self) -> str:
        f = self.facts
        return f"{f['case']}, x {tuple(f['shape'])} {f['dtype']} {f['layout']}{' ieee' if f['precision'] == 'ieee' else ''}"


def groups(operators: Sequence[str], *, quick: bool) -> list[Group]:
    """The groups of a run, the most important first. `quick`: KernelBench's input in fp32 NCHW alone, no max-autotune.

    Full trials go to what README.md and the plots quote; the time of a run goes into compiling for each group.
    """
    if quick:
        return [Group(CASES[name], CASES[name].batch, launches=True) for name in operators]
    found: list[Group] = []
    for name in operators:
        case = CASES[name]
        is_main = case is MAIN
        modes = (COMPILE_DEFAULT, MAX_AUTOTUNE, *([CUDA_GRAPHS] if is_main else []))
        found.append(Group(case, case.batch, modes=modes, launches=True, graph=is_main))
        few = None if is_main else FEW_TRIALS
        found.append(Group(case, case.batch, torch.float16, most_trials=few))
        found.append(Group(case, case.batch, torch.float16, channels_last=True, most_trials=few))
        if is_main:
            found.append(Group(case, case.batch, torch.bfloat16, channels_last=True))
            found.append(Group(case, case.batch, channels_last=True))
            found.append(Group(case, case.batch, precision="ieee", most_trials=FEW_TRIALS))
            found += [Group(case, n, most_trials=FEW_TRIALS, every_plan=False, graph=n == 1) for n in BATCHES if n != case.batch]
    return sorted(found, key=lambda group: not group.launches)  # KernelBench's inputs of all operators first


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
