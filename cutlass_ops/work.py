"""How the plans share a problem out among CTAs: what their launches set up and what costs.py counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .problem import Problem


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def team_size(problem: Problem, tile: Sequence[int]) -> int:
    """CTAs of the fused kernel that walk the same rows. `tile` is a CTA's: columns of the result x output channels."""
    _, k, _, out_w = problem.output_shape
    return -(-out_w // tile[0]) * -(-k // tile[1])


def unit_of_work(problem: Problem, tile: Sequence[int]) -> int:
    """Steps (of two rows) of a unit of work, dealt to the teams in turn; 0: a slice of the batch for each.

    Where NCHW is not pooled, small units keep all SMs writing to the same few images, which DRAM takes faster than as many
    streams as there are SMs; 16-bit values in strips are faster in two steps, which share an input row. What is pooled is few bytes, and
    channels_last is written in long runs: there a slice, which reads every input row once, is faster (docs/performance.md).
    """
    if problem.pool or problem.channels_last:
        return 0
    return 2 if problem.dtype != "f32" and tile[0] == 64 else 1


@dataclass(frozen=True)
class FusedWork:
    """The fused kernel's: teams of strips x blocks CTAs walk the images' steps, each of two rows of the convolution."""

    strips: int
    blocks: int  # of output channels
    teams: int
    steps: int  # of an image
    #: Steps of a unit that is dealt to the teams in turn, and units of an image; 0: each team has a slice of the batch.
    unit: int
    units: int

    @classmethod
    def of(cls, problem: Problem, tile: Sequence[int], sm_count: int) -> FusedWork:
        """`tile` is a CTA's: columns of the result x output channels."""
        n, k, out_h, out_w = problem.output_shape
        steps = out_h if problem.pool else -(-out_h // 2)
        unit = min(unit_of_work(problem, tile), steps)
        units = -(-steps // unit) if unit else 0
        teams = min(sm_count // team_size(problem, tile), n * (units or steps))
        return cls(-(-out_w // tile[0]), -(-k // tile[1]), teams, steps, unit, units)

    def busiest(self, images: int, halo: int) -> tuple[int, int]:
        """Steps of the busiest team, and the ring slots (of two input rows) that it reads: `halo` more than the steps of a segment."""
        if not self.teams:
            return 0, 0  # an empty batch
        if self.unit:
            count = -(-images * self.units // self.teams)
            return count * self.unit, count * (self.unit + halo)
        count = -(-images * self.steps // self.teams)
        return count, count + halo * -(-count // self.steps)


def operands_to_convert(problem: Problem) -> tuple[int, ...]:
    """0 for the activation, 1 for the filter: those that the implicit GEMM cannot read where they are."""
    if problem.dtype == "f32":
        return (0, 1)

    def dense_nhwc(shape: Sequence[int], strides: Sequence[int]) -> bool:
        _, c, h, w = shape
        return tuple(strides) == (h * w * c, 1, w * c, c)

    whole = problem.x_shape[1] % 8 == 0 and problem.aligned
    pairs = ((problem.x_shape, problem.x_strides), (problem.weight_shape, problem.weight_strides))
    return tuple(i for i, (shape, strides) in enumerate(pairs) if not (whole and dense_nhwc(shape, strides)))


def operand_channels(problem: Problem) -> int:
    """Input channels of the implicit GEMM's operands: whole 16 bytes of fp16 for TMA.

    8 channels become 16 where both operands are converted, since im2col of 16-byte pixels takes 2.6 times as long.
    """
    channels = round_up(problem.x_shape[1], 8)
    return max(16, channels) if len(operands_to_convert(problem)) == 2 else channels
