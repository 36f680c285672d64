"""Streams: whose memory is reused when. PyTorch's rule holds: memory belongs to the stream it was allocated on."""

from __future__ import annotations

import math

import torch

import cutlass_ops

from ..helpers import DEVICE, gradients, tensors

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
LATE = 200_000_000  # cycles, about 0.1 s


def overwrite(*sizes):
    """Allocate on the current stream and fill with NaN, several times of each number of bytes."""
    kept = [torch.full((size // 4,), math.nan, device=DEVICE) for size in sizes for _ in range(8)]
    del kept


def test_an_input_recorded_on_a_stream_is_not_reused_early():
    given = tensors(POOLED, "recorded")
    expected = POOLED(*given)
    side = torch.cuda.Stream()
    for position in range(len(given)):
        mine = [t.clone() if i == position else t for i, t in enumerate(given)]
        size = mine[position].untyped_storage().nbytes()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            y = POOLED(*mine)
        mine[position].record_stream(side)  # as for any operator that runs on another stream than its input's
        del mine
        overwrite(size)
        side.synchronize()
        assert torch.equal(y, expected), position


def test_result_and_workspace_of_another_stream_are_its_own():
    given = tensors(POOLED, "own")
    expected = POOLED(*given)
    size = expected.untyped_storage().nbytes()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for dtype in (torch.float32, torch.float16):  # without and with a copy of the vectors
        mine = [t.to(dtype) for t in given]
        wanted = POOLED(*mine)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            results = [POOLED(*mine) for _ in range(4)]
        overwrite(size, 4 * size, 16 * size)
        side.synchronize()
        assert all(torch.equal(y, wanted) for y in results)


def test_inputs_that_must_be_copied_are_copied_on_the_current_stream():
    x, *rest = tensors(POOLED, "copied")
    layouts = [x.transpose(2, 3).contiguous().transpose(2, 3), x[:1].expand_as(x)]
    side = torch.cuda.Stream()
    for given in layouts:
        expected = POOLED(given, *rest)
        late = torch.zeros_like(given)
        if late.stride() != given.stride():  # an expanded tensor cannot be written to
            late = torch.zeros_like(x[:1])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            late.copy_(given[: late.shape[0]])
            y = POOLED(late.expand_as(x) if late.shape[0] == 1 else late, *rest)
        side.synchronize()
        assert torch.equal(y, expected)


def test_gradients_of_another_stream_are_the_same():
    given = tensors(POOLED, "backward")
    expected = gradients(POOLED, given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LATE)
        found = gradients(POOLED, given)
    torch.cuda.current_stream().wait_stream(side)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
