"""How the plans share a problem out among CTAs: what their launches set up and what costs.py counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .manifest import KernelRecord
from .problem import Problem


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def team_size(problem: Problem, record: KernelRecord) -> int:
    """CTAs of a fused kernel that walk the same rows."""
    _, k, _, out_w = problem.output_shape
    columns, channels = record.epilogue_tile
    return -(-out_w // columns) * -(-k // channels)


def rows_of_step(problem: Problem, record: KernelRecord) -> int:
    """Rows of the convolution that a fused kernel computes at a time, and of the input in a slot of its ring."""
    return record.tile[0] // (record.epilogue_tile[0] * (2 if problem.pool else 1))


def starts_where_tma_can(problem: Problem, record: KernelRecord) -> bool:
    """Whether a fused kernel's tiles begin at whole 16 bytes of a row of x, given that the row does: shifted ones begin early for it."""
    return record.variant[1] == "nhwc" or record.variant[3] == "shifted" or problem.padding[1] % (16 // _size(problem)) == 0


def gathered(problem: Problem, record: KernelRecord) -> int:
    """Elements, 1 or 2, at whose multiples rows of a fused kernel's tiles begin where TMA, which knows whole 16 bytes, cannot read; or 0.

    The kernel gathers them: it copies so many at a time, but for those of 16 bits always two, since copies have 4 bytes at least.
    """
    width, size = problem.x_shape[3], _size(problem)
    if problem.channels_last or (width * size % 16 == 0 and problem.alignment == 16 and starts_where_tma_can(problem, record)):
        return 0
    pairs = width % 2 == 0 and problem.alignment >= 2 * size and (problem.padding[1] % 2 == 0 or starts_where_tma_can(problem, record))
    return 2 if pairs else 1


def _size(problem: Problem) -> int:
    return 4 if problem.dtype == "f32" else 2


@dataclass(frozen=True)
class FusedWork:
    """The fused kernel's: teams of strips x blocks CTAs walk the images' steps."""

    strips: int
    blocks: int  # of output channels
    teams: int
    rows: int  # of the convolution a step, and of the input a ring slot
    steps: int  # of an image
    #: Steps that a CTA claims at a time, a power of two; 0: each team has a slice of the batch.
    claim: int

    @classmethod
    def of(cls, problem: Problem, record: KernelRecord, sm_count: int) -> FusedWork:
        """A kernel's for a problem."""
        n, k, out_h, out_w = problem.output_shape
        columns, channels = record.epilogue_tile
        rows = rows_of_step(problem, record)
        steps = out_h if problem.pool else -(-out_h // rows)
        teams = min(sm_count // team_size(problem, record), n * steps)
        claim = 1 if record.claims else 0
        while teams and claim and n * steps > claim * teams * record.claims:  # CTAs have room for so many
            claim *= 2
        return cls(-(-out_w // columns), -(-k // channels), teams, rows, steps, claim)

    def busiest(self, images: int, filter_rows: int) -> tuple[int, int]:
        """Steps of the busiest team, and the ring slots that it reads: in a segment some more than steps."""
        halo = (filter_rows - 1) // self.rows
        if not self.teams:
            return 0, 0  # an empty batch
        count = -(-images * self.steps // self.teams)
        if self.claim:
            return count, count * (1 + halo)
        return count, count + halo * -(-count // self.steps)


def operands_to_convert(problem: Problem) -> tuple[int, ...]:
    """0 for the activation, 1 for the filter: those that the implicit GEMM cannot read where they are."""
    if problem.dtype == "f32":
        return (0, 1)

    def dense_nhwc(shape: Sequence[int], strides: Sequence[int]) -> bool:
        _, c, h, w = shape
        return tuple(strides) == (h * w * c, 1, w * c, c)

    whole = problem.x_shape[1] % 8 == 0 and problem.alignment == 16 and problem.weight_aligned
    pairs = ((problem.x_shape, problem.x_strides), (problem.weight_shape, problem.weight_strides))
    return tuple(i for i, (shape, strides) in enumerate(pairs) if not (whole and dense_nhwc(shape, strides)))


def operand_channels(problem: Problem) -> int:
    """Input channels of the implicit GEMM's operands: whole 16 bytes of fp16 for TMA.

    8 channels become 16 where both operands are converted, since im2col of 16-byte pixels takes 2.6 times as long.
    """
    channels = round_up(problem.x_shape[1], 8)
    return max(16, channels) if len(operands_to_convert(problem)) == 2 else channels
