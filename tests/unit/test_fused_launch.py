"""What a call of a fused plan launches: parameter bytes, descriptors, workspace and work, through a driver that only records."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cutlass_ops import AvgPool2d, MaxPool2d, Operator, Vector, operator, use_plan
from cutlass_ops.fused import Fused, PackParams
from cutlass_ops.loader import LoadedKernel
from cutlass_ops.work import team_size

from .fake_driver import STREAM, Cleared, FakeDriver, install
from .records import FUSED_FIELDS, FUSED_NUMBERS, fused_records, problem, record, write_folder

POOLS = {"none": None, "avg": AvgPool2d(2), "max": MaxPool2d(2)}
_serial = itertools.count()


@operator()
def chain(accum, v: Vector, bias: Vector = None, scale: float = 2.0):
    return (accum + bias) * v * scale


@pytest.fixture(params=["avg"])
def gpu(request, monkeypatch, tmp_path):
    """An operator `chain` with a pool or none, on a GPU that only records; `gpu.run(...)` calls its CUDA implementation."""
    name = f"unit_fused_{next(_serial)}"
    fake = FakeDriver({r.name: r.params_size for r in write_folder(tmp_path, name, request.param)})
    memory = install(monkeypatch, fake)
    op = Operator(dataclasses.replace(chain, name=name, pool=POOLS[request.param]), tmp_path)

    def run(x, weight, v, bias=None, scale=2.0, *, padding=(0, 0)):
        fake.work.clear()
        memory.made.clear()
        pool = [] if request.param == "none" else [[2, 2], [2, 2], [0, 0], [1, 1], False, True, None]
        precision = "tf32" if x.dtype is torch.float32 else None
        with use_plan("fused-bf16" if x.dtype is torch.bfloat16 else "fused-f16"):
            return op._cuda(x, weight, v, bias, scale, [1, 1], list(padding), [1, 1], *pool, precision)

    return SimpleNamespace(run=run, driver=fake, memory=memory, name=name, pool=request.param)


each_pool = pytest.mark.parametrize("gpu", POOLS, indirect=True)


def inputs(n=2, c=5, h=9, w=16, k=6, size=3, dtype=torch.float32, channels_last=False):
    made = torch.randn(n, c, h, w).to(dtype), torch.randn(k, c, size, size).to(dtype), torch.randn(k)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return [t.contiguous(memory_format=layout) if t.dim() == 4 else t.to(dtype) for t in made]


def numbers(launched):
    return {name: struct.unpack_from("<i", launched.params, FUSED_FIELDS[name])[0] for name in FUSED_NUMBERS}


def pointer(launched, offset):
    return struct.unpack_from("<Q", launched.params, offset)[0]


def number(launched, offset):
    return struct.unpack_from("<f", launched.params, offset)[0]


def launches(gpu):
    """The parameters of the packing, and the fused launch."""
    assert not any(isinstance(w, Cleared) for w in gpu.driver.work)
    pack, fused = gpu.driver.work
    return PackParams.from_buffer_copy(pack.params), fused


@each_pool
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [18, 14, 2, 13])
def test_rows_that_tma_cannot_read_are_gathered(gpu, dtype, width):
    given = inputs(c=24, h=12, w=width, dtype=dtype)
    gpu.run(*given, padding=(0, 1))
    _, fused = launches(gpu)
    assert pointer(fused, FUSED_FIELDS["x"]) == given[0].data_ptr()
    assert fused.params[:128] == bytes(128)  # no descriptor
    found = numbers(fused)
    assert found["gathered"] == (1 if width % 2 else 2)
    assert found["shift"] == (3 if dtype is torch.float32 else 1)  # to whole 16 bytes, as by TMA; to an even column
    assert (found["n"], found["c"], found["h"], found["w"]) == (2, 24, 12, width)
    assert found["box_bytes"] % (24 * 2 * given[0].element_size()) == 0
    again = [t.clone() for t in given]
    gpu.run(*again, padding=(0, 1))
    assert pointer(launches(gpu)[1], FUSED_FIELDS["x"]) == again[0].data_ptr()


@pytest.mark.parametrize(("offset", "gathered"), [(1, 1), (2, 2), (4, 0)])
def test_so_are_rows_that_begin_elsewhere_than_at_16_bytes(gpu, offset, gathered):
    x, weight, v = inputs()
    moved = torch.empty(x.numel() + offset)[offset:].view(x.shape).copy_(x)
    gpu.run(moved, weight, v)
    _, fused = launches(gpu)
    assert numbers(fused)["gathered"] == gathered
    assert (fused.params[:128] == bytes(128)) == (gathered > 0)


@each_pool
def test_the_filter_is_packed_then_one_kernel_does_the_rest(gpu):
    gpu.run(*inputs(c=24, k=130))
    pack, fused = gpu.driver.work
    end = "_shifted" if gpu.pool == "none" else ""
    assert [w.kernel for w in gpu.driver.work] == ["pack_f32_f16", f"{gpu.name}_fused_f32_nchw_c64_3x3{end}"]
    assert (pack.grid, pack.block, pack.shared_memory, pack.stream) == ((256, 1, 1), (256, 1, 1), 0, STREAM)
    assert (fused.block, fused.shared_memory, fused.stream) == ((384, 1, 1), 200_000, STREAM)
    # Two channel blocks of 128; 7 conv rows are three pooled ones, and without a pool four steps, each a team's.
    assert fused.grid == ((2 * 2 * 3 if gpu.pool != "none" else 2 * 2 * 4), 1, 1)


def test_the_packing_reads_the_callers_filter_as_it_lies(gpu):
    x, weight, v = inputs(c=24, k=130)
    weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
    gpu.run(x, weight, v)
    pack, fused = launches(gpu)
    assert (pack.source, pack.k_stride, pack.c_stride, pack.r_stride, pack.s_stride) == (weight.data_ptr(), 9, 1170, 3, 1)
    assert (pack.k, pack.c, pack.taps, pack.s, pack.channels) == (130, 24, 9, 3, 64)
    assert pointer(fused, FUSED_FIELDS["weights"]) == pack.fragments
    assert pointer(fused, FUSED_FIELDS["scales"]) == pack.scales


@pytest.mark.parametrize(
    ("given", "channels", "chunks"),
    [
        (inputs(c=3), 16, 2),
        (inputs(c=17), 64, 8),
        (inputs(c=8, size=1), 64, 8),
        (inputs(c=12, channels_last=True), 16, 0),
        (inputs(c=8, dtype=torch.float16, channels_last=True), 16, 0),
        (inputs(c=24, dtype=torch.bfloat16, channels_last=True), 64, 0),
    ],
    ids=["few", "many", "1x1", "few of fp32 in nhwc", "few in nhwc", "many in nhwc"],
)
def test_the_packing_orders_channels_as_the_ring_does(gpu, given, channels, chunks):
    gpu.run(*given)
    pack, _ = launches(gpu)
    assert (pack.channels, pack.chunks) == (channels, chunks)


@each_pool
def test_nothing_in_the_workspace_overlaps_and_it_holds_the_packed_filter_and_counters_alone(gpu):
    gpu.run(*inputs(c=24, k=130))
    pack, _ = launches(gpu)
    (workspace,) = (t for t in gpu.memory.made if t.dtype is torch.uint8)
    base, fragments, scales = workspace.data_ptr(), 256 * 64 * 9 * 2, 256 * 4
    assert (pack.fragments, pack.scales, pack.counters) == (base, base + fragments, base + fragments + scales)
    assert workspace.numel() == fragments + scales + 256


@pytest.mark.parametrize(
    ("dtype", "padding", "shift", "kernel"),
    [
        (torch.float32, 0, 0, "f32_nchw_c64_3x3"),
        (torch.float32, 1, 3, "f32_nchw_c64_3x3_shifted"),
        (torch.float32, 2, 2, "f32_nchw_c64_3x3_shifted"),
        (torch.float32, 4, 0, "f32_nchw_c64_3x3"),
        (torch.float16, 0, 0, "f16_nchw_c64_3x3_shifted"),
        (torch.float16, 1, 7, "f16_nchw_c64_3x3_shifted"),
        (torch.bfloat16, 9, 7, "bf16_nchw_c64_3x3_shifted"),
    ],
)
def test_a_tile_starts_at_whole_16_bytes(gpu, dtype, padding, shift, kernel):
    gpu.run(*inputs(c=24, dtype=dtype), padding=(3, padding))
    _, fused = launches(gpu)
    assert fused.kernel == f"{gpu.name}_fused_{kernel}"
    found = numbers(fused)
    assert (found["padding_h"], found["padding_w"], found["shift"]) == (3, padding, shift)
    assert (padding + shift) * dtype.itemsize % 16 == 0


def tensor_map(gpu):
    call, *arguments = gpu.driver.maps[launches(gpu)[1].params[: FUSED_FIELDS["input"] + 128]]
    assert call == "tiled"
    element, rank, address, extents, strides, box, steps, interleave, swizzle, _, fill = arguments
    assert (rank, steps, interleave) == (4, [1, 1, 1, 1], "CU_TENSOR_MAP_INTERLEAVE_NONE")
    assert fill == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"
    return element.rsplit("_", 1)[1], address, extents, strides, box, swizzle.rsplit("_", 1)[1]


@pytest.mark.parametrize(
    ("c", "dtype", "element", "box"),
    [
        (5, torch.float32, "FLOAT32", [144, 2, 8, 1]),
        (24, torch.float32, "FLOAT32", [68, 2, 24, 1]),
        (64, torch.float16, "FLOAT16", [80, 2, 64, 1]),
        (17, torch.bfloat16, "BFLOAT16", [80, 2, 24, 1]),
    ],
)
def test_nchw_is_read_where_it_lies_two_rows_of_all_channels_at_a_time(gpu, c, dtype, element, box):
    x, weight, v = inputs(c=c, dtype=dtype)
    gpu.run(x, weight, v)
    size = dtype.itemsize
    assert tensor_map(gpu) == (element, x.data_ptr(), [16, 9, c, 2], [16 * size, 144 * size, c * 144 * size], box, "NONE")
    assert numbers(launches(gpu)[1])["box_bytes"] == box[0] * box[1] * box[2] * size


@pytest.mark.parametrize(("c", "box", "swizzle"), [(8, [16, 130, 1, 1], "32B"), (24, [64, 66, 1, 1], "128B")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_channels_last_is_read_where_it_lies_a_row_at_a_time(gpu, c, box, swizzle, dtype):
    x, weight, v = inputs(c=c, dtype=dtype, channels_last=True)
    y = gpu.run(x, weight, v)
    size, element = dtype.itemsize, str(dtype).removeprefix("torch.").upper()
    swizzle = "NONE" if size == 4 else swizzle  # what is converted is swizzled then
    assert tensor_map(gpu) == (element, x.data_ptr(), [c, 16, 9, 2], [c * size, 16 * c * size, 144 * c * size], box, swizzle)
    assert numbers(launches(gpu)[1])["box_bytes"] == 2 * box[0] * box[1] * size  # a slot has two rows
    assert y.is_contiguous(memory_format=torch.channels_last)


@each_pool
def test_the_kernel_gets_the_results_numbers_and_address(gpu):
    y = gpu.run(*inputs(n=3, c=24, h=9, w=132, k=130))
    _, fused = launches(gpu)
    found = numbers(fused)
    p, q = 7, 130
    size = (p, q) if gpu.pool == "none" else (p // 2, q // 2)
    assert y.shape == (3, 130, *size)
    assert pointer(fused, FUSED_FIELDS["output"]) == y.data_ptr()
    assert [found[name] for name in ("n", "k", "out_h", "out_w")] == [3, 130, *size]
    # Steps of two conv rows x 64 columns, or one x 128 where rows are stored whole; of 128 channels
    assert (found["strips"], found["channel_blocks"]) == (2 if gpu.pool == "none" else 3, 2)
    assert found["steps"] == (7 if gpu.pool == "none" else 3)
    assert found["claim_shift"] == 0
    assert number(fused, FUSED_FIELDS["pool_scale"]) == (0.0 if gpu.pool == "none" else 0.25)


@each_pool
def test_the_packing_resets_a_counter_of_claims_for_each_member_of_a_team(gpu):
    """A member is a strip of 128 columns x a block of 64 channels."""
    gpu.run(*inputs(c=8, w=140, k=130))
    pack, fused = launches(gpu)
    assert pack.members == 2 * 3
    assert pack.counters == pointer(fused, FUSED_FIELDS["counters"])
    assert pack.counters == pack.scales + 3 * 64 * 4
    (workspace,) = (t for t in gpu.memory.made if t.dtype is torch.uint8)
    assert workspace.numel() == pack.counters + 256 - workspace.data_ptr()


def test_the_chain_gets_its_arguments_at_their_own_offsets_and_each_call_its_own(gpu):
    record = fused_records("op", "avg")[0]
    first, second = inputs(c=24), inputs(c=24)
    bias = torch.randn(6)
    for (x, weight, v), own, scale in ((first, bias, 3.5), (second, None, -0.0)):
        y = gpu.run(x, weight, v, own, scale)
        pack, fused = launches(gpu)
        assert pack.source == weight.data_ptr()
        assert tensor_map(gpu)[1] == x.data_ptr()
        assert pointer(fused, record.vectors["v"]) == v.data_ptr()
        assert pointer(fused, record.vectors["bias"]) == (0 if own is None else own.data_ptr())
        assert struct.pack("<f", number(fused, record.scalars["scale"])) == struct.pack("<f", scale)
        assert number(fused, record.constants[0][0]) == record.constants[0][1]
        assert pointer(fused, FUSED_FIELDS["output"]) == y.data_ptr()


# ---- work --------------------------------------------------------------------------------------------------------


def walk(p, team, teams):
    """The segments (image, step, count) of a team, as fused::Slice in fused/work.hpp walks them."""
    total = p["n"] * p["steps"]
    first, left = total * team // teams, total * (team + 1) // teams - total * team // teams
    image, step = divmod(first, p["steps"])
    while left > 0:
        count = min(p["steps"] - step, left)
        yield image, step, count
        left, image, step = left - count, image + 1, 0


@given(
    n=st.integers(1, 40),
    h=st.integers(3, 60),
    w=st.integers(1, 40),
    k=st.integers(1, 400),
    sms=st.integers(40, 140),
    # The pool, the kernel, the size of its filter and the rows of the result in a step.
    choice=st.sampled_from(
        [("avg", "c64_1x1", 1, 1), ("none", "c64_1x1", 1, 2), ("none", "c64_1x1_wide", 1, 1), ("avg", "c16_3x3_shifted", 3, 1)]
    ),
)
def test_the_teams_compute_every_step_once_and_fit_the_gpu(n, h, w, k, sms, choice):
    pool, name, size, rows_of_step = choice
    pooled = pool == "avg"
    shape = (n, 12, h + pooled + size - 1, 4 * w + size - 1)
    of = problem(x_shape=shape, weight_shape=(k, 12, size, size), **({} if pooled else {"pool": None}))
    (kernel,) = (r for r in fused_records("op", pool) if r.name == f"op_fused_f32_nchw_{name}")
    assume(team_size(of, kernel) <= sms)
    pack = record("pack_f32_f16", "pack", ("f32", "f16"), params_size=ctypes.sizeof(PackParams))
    with pytest.MonkeyPatch.context() as patch:
        install(patch, FakeDriver({}))
        fused = Fused(of, [LoadedKernel(r, r.name, 1) for r in (pack, kernel)], sms)
    (_, launch) = fused.stages()[1]
    found = numbers(SimpleNamespace(params=bytes(launch.params)))
    members = found["strips"] * found["channel_blocks"]
    assert members <= launch.grid <= sms
    assert launch.grid % members == 0
    teams = launch.grid // members
    done = [(image, step + i) for t in range(teams) for image, step, count in walk(found, t, teams) for i in range(count)]
    assert sorted(done) == sorted(itertools.product(range(n), range(found["steps"])))
    assert 0 <= found["steps"] * rows_of_step - found["out_h"] < rows_of_step
