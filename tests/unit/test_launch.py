"""What a call launches: order, guards, parameter bytes, descriptors and workspace, through a driver that only records."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cutlass_ops import AvgPool2d, Operator, Vector, conv2d, operator, use_plan
from cutlass_ops.layout import flat_strides, presentable
from cutlass_ops.two_kernel import ConvertParams, PoolParams

from .fake_driver import STREAM, Cleared, FakeDriver, install
from .records import FIELDS, all_records, write_folder

NUMBERS = [name for name in FIELDS if name not in ("activation", "filter", "output", "guard", "guard_value")]
_serial = itertools.count()


@operator(pool=AvgPool2d(2))
def chain(accum, v: Vector, bias: Vector = None, scale: float = 2.0):
    return (accum + bias) * v * scale


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An operator `chain` with kernels, on a GPU that only records; `gpu.run(...)` calls its CUDA implementation."""
    name = f"unit_launch_{next(_serial)}"
    fake = FakeDriver({r.name: r.params_size for r in write_folder(tmp_path, name)})
    memory = install(monkeypatch, fake)
    op = Operator(dataclasses.replace(chain, name=name), tmp_path)

    def run(x, weight, v, bias=None, scale=2.0, *, stride=1, padding=0, dilation=1, plan="two-kernel-f16-guarded", **pool):
        pairs = [[p, p] if isinstance(p, int) else list(p) for p in (stride, padding, dilation, *(pool.get("pool", (2, 2)),) * 2)]
        precision = "tf32" if x.dtype is torch.float32 else None
        fake.work.clear()
        memory.made.clear()
        with use_plan(plan):
            return op._cuda(x, weight, v, bias, scale, *pairs, [0, 0], [1, 1], False, True, None, precision)

    return SimpleNamespace(run=run, driver=fake, op=op, memory=memory, name=name)


def inputs(n=2, c=5, h=9, w=10, k=6, r=3, s=2, dtype=torch.float32):
    return torch.randn(n, c, h, w).to(dtype), torch.randn(k, c, r, s).to(dtype), torch.randn(k).to(dtype)


def field(launched, name):
    return struct.unpack_from("<i", launched.params, FIELDS[name])[0]


def pointer(launched, offset):
    return struct.unpack_from("<Q", launched.params, offset)[0]


def number(launched, offset):
    return struct.unpack_from("<f", launched.params, offset)[0]


def tensor_map(gpu, launched, name):
    """(call, arguments) of the descriptor in a launch's parameter."""
    call, *arguments = gpu.driver.maps[launched.params[FIELDS[name] : FIELDS[name] + 128]]
    return call, arguments


def family(gpu, prefix):
    return [w for w in gpu.driver.work if not isinstance(w, Cleared) and w.kernel.startswith(prefix)]


def test_the_guarded_plan_clears_the_flag_then_converts_multiplies_and_pools(gpu):
    gpu.run(*inputs())
    cleared, *launches = gpu.driver.work
    assert isinstance(cleared, Cleared)
    expected = ["convert_f32_f16", "convert_f32_tf32", f"{gpu.name}_f16", f"{gpu.name}_tf32", "pool_avg_f32"]
    assert [w.kernel for w in launches] == expected
    assert {w.stream for w in gpu.driver.work} == {STREAM}
    assert all(w.grid[1:] == (1, 1) and w.block[1:] == (1, 1) for w in launches)
    assert [w.block[0] for w in launches] == [256, 256, 384, 384, 256]
    assert [w.shared_memory for w in launches] == [0, 0, 200_000, 200_000, 0]


def test_only_the_first_conversion_raises_the_flag_and_one_branch_works(gpu):
    gpu.run(*inputs())
    flag = gpu.driver.work[0].address
    first, second = (ConvertParams.from_buffer_copy(w.params) for w in family(gpu, "convert"))
    assert (first.flag, first.guard) == (flag, None)
    assert (second.flag, second.guard, second.guard_value) == (None, flag, 1)
    for value, gemm in enumerate(family(gpu, gpu.name)):
        assert (pointer(gemm, FIELDS["guard"]), field(gemm, "guard_value")) == (flag, value)


def test_an_unguarded_plan_has_no_guard(gpu):
    gpu.run(*inputs(), plan="two-kernel-tf32")
    assert [w.kernel for w in gpu.driver.work] == ["convert_f32_tf32", f"{gpu.name}_tf32", "pool_avg_f32"]
    params = ConvertParams.from_buffer_copy(gpu.driver.work[0].params)
    assert (params.flag, params.guard) == (None, None)
    assert pointer(gpu.driver.work[1], FIELDS["guard"]) == 0


@pytest.mark.parametrize("order", [("v", "bias"), ("v",)])
def test_every_chain_argument_lies_at_its_own_offset(gpu, order):
    x, weight, v = inputs()
    bias = torch.randn(6) if "bias" in order else None
    gpu.run(x, weight, v, bias, 3.5)
    (record,) = (r for r in all_records(gpu.name) if r.name == f"{gpu.name}_f16")
    for gemm in family(gpu, gpu.name):
        assert pointer(gemm, record.vectors["v"]) == v.data_ptr()
        assert pointer(gemm, record.vectors["bias"]) == (0 if bias is None else bias.data_ptr())
        assert number(gemm, record.scalars["scale"]) == 3.5
        assert number(gemm, record.constants[0][0]) == record.constants[0][1]


def test_the_implicit_gemm_gets_the_convolutions_numbers(gpu):
    gpu.run(*inputs(n=2, c=5, h=9, w=10, k=6, r=3, s=2), stride=(2, 1), padding=(1, 0), dilation=(1, 3))
    for gemm in family(gpu, gpu.name):
        found = {name: field(gemm, name) for name in NUMBERS}
        p, q = 5, 7
        # c: 5 channels padded to 16
        assert found == dict(zip(NUMBERS, (2 * p * q, 6, 16, 3, 2, p, q, 2, 1, 1, 0, 1, 3)))


@pytest.mark.parametrize(("operand", "size", "element"), [("f16", 2, "FLOAT16"), ("tf32", 4, "FLOAT32")])
def test_descriptors_describe_the_converted_operands_and_the_result(gpu, operand, size, element):
    gpu.run(*inputs(n=2, c=5, h=9, w=10, k=6, r=3, s=2), stride=(2, 1), padding=(1, 2), dilation=(2, 3))
    (gemm,) = family(gpu, f"{gpu.name}_{operand}")
    convert = ConvertParams.from_buffer_copy(family(gpu, f"convert_f32_{operand}")[0].params)
    tile_k = 128 // size
    call, arguments = tensor_map(gpu, gemm, "activation")
    assert (call, arguments[:2]) == ("im2col", [f"CU_TENSOR_MAP_DATA_TYPE_{element}", 4])
    assert arguments[2] == convert.jobs[0].target
    assert arguments[3:5] == [[16, 10, 9, 2], [16 * size, 160 * size, 1440 * size]]  # C, W, H, N
    assert arguments[5:7] == [[-2, -1], [2 - 3, 1 - 4]]  # corners: W, H
    assert arguments[7:10] == [tile_k, 192, [1, 1, 2, 1]]  # channels, pixels, traversal strides
    call, arguments = tensor_map(gpu, gemm, "filter")
    assert (call, arguments[:2]) == ("tiled", [f"CU_TENSOR_MAP_DATA_TYPE_{element}", 3])
    assert arguments[2] == convert.jobs[1].target
    assert arguments[3:7] == [[16, 6, 6], [16 * size, 96 * size], [tile_k, 1, 128], [1, 1, 1]]  # C, R * S, K
    call, arguments = tensor_map(gpu, gemm, "output")
    p, q = 4, 11
    assert (call, arguments[:2]) == ("tiled", ["CU_TENSOR_MAP_DATA_TYPE_FLOAT32", 3])
    assert arguments[2] == PoolParams.from_buffer_copy(family(gpu, "pool")[0].params).source
    assert arguments[3:7] == [[6, 2 * p * q, 1], [8 * 4, 2 * p * q * 8 * 4], [32, 64, 1], [1, 1, 1]]  # K, pixels; rows of 8 floats


def test_conversions_read_the_callers_tensors_as_they_lie(gpu):
    x, weight, v = inputs()
    x = x.contiguous(memory_format=torch.channels_last)
    gpu.run(x, weight, v)
    for launched in family(gpu, "convert"):
        activation, filters = ConvertParams.from_buffer_copy(launched.params).jobs
        assert (activation.source, filters.source) == (x.data_ptr(), weight.data_ptr())
        assert (activation.batch_stride, activation.channel_stride, activation.pixel_stride) == (450, 1, 5)
        assert (filters.batch_stride, filters.channel_stride, filters.pixel_stride) == (30, 6, 1)
        assert (activation.batch, activation.channels, activation.pixels, activation.padded_channels) == (2, 5, 90, 16)
        assert (filters.batch, filters.channels, filters.pixels, filters.padded_channels) == (6, 5, 6, 16)


def test_the_pool_reads_the_implicit_gemms_rows_and_writes_the_result(gpu):
    y = gpu.run(*inputs(n=2, c=5, h=9, w=10, k=6, r=3, s=2))
    (launched,) = family(gpu, "pool")
    pool = PoolParams.from_buffer_copy(launched.params)
    assert pool.target == y.data_ptr()
    assert (pool.n, pool.h, pool.w, pool.channels, pool.ld, pool.out_h, pool.out_w) == (2, 7, 9, 6, 8, 3, 4)
    assert (pool.kernel_h, pool.kernel_w, pool.stride_h, pool.stride_w) == (2, 2, 2, 2)
    assert (pool.padding_h, pool.padding_w, pool.dilation_h, pool.dilation_w) == (0, 0, 1, 1)
    assert (pool.count_include_pad, pool.divisor_override, pool.channels_last) == (1, 0, 0)
    assert y.shape == (2, 6, 3, 4)


def test_half_precision_in_nhwc_is_read_where_it_lies(gpu):
    x, weight, v = (t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs(c=8, dtype=torch.float16))
    y = gpu.run(x, weight, v, plan="two-kernel-f16")
    assert [w.kernel for w in gpu.driver.work] == [f"{gpu.name}_f16", "pool_avg_f16"]
    gemm, pool = gpu.driver.work
    assert tensor_map(gpu, gemm, "activation")[1][2] == x.data_ptr()
    assert tensor_map(gpu, gemm, "filter")[1][2] == weight.data_ptr()
    assert PoolParams.from_buffer_copy(pool.params).channels_last == 1
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_vectors_become_float32(gpu):
    given = inputs(c=8, dtype=torch.float16)
    gpu.run(*given, plan="two-kernel-f16")
    (record,) = (r for r in all_records(gpu.name) if r.name == f"{gpu.name}_f16")
    assert pointer(family(gpu, gpu.name)[0], record.vectors["v"]) not in (0, given[2].data_ptr())


@pytest.mark.parametrize("shape", [{}, {"n": 1, "c": 1, "h": 3, "w": 2, "k": 1}, {"c": 64, "k": 130, "n": 3}, {"h": 33, "w": 31}])
def test_nothing_in_the_workspace_overlaps(gpu, shape):
    given = inputs(**shape)
    (n, c, h, w), (k, _, r, s) = given[0].shape, given[1].shape
    gpu.run(*given, pool=(1, 1))
    (workspace,) = (t for t in gpu.memory.made if t.dtype is torch.uint8)
    base, channels, ld = workspace.data_ptr(), -(-c // 8) * 8, -(-k // 4) * 4
    flag = gpu.driver.work[0].address
    f16, tf32 = (ConvertParams.from_buffer_copy(launched.params) for launched in family(gpu, "convert"))
    result = PoolParams.from_buffer_copy(family(gpu, "pool")[0].params).source
    regions = [
        (flag, 4),
        (f16.jobs[1].target, k * r * s * channels * 2),
        (tf32.jobs[1].target, k * r * s * channels * 4),
        (f16.jobs[0].target, n * h * w * channels * 2),
        (tf32.jobs[0].target, n * h * w * channels * 4),
        (result, n * (h - r + 1) * (w - s + 1) * ld * 4),
    ]
    # The two activations share their place: only one of them is ever used.
    for (a, size_a), (b, size_b) in itertools.combinations(regions, 2):
        shared = {a, b} == {f16.jobs[0].target, tf32.jobs[0].target}
        assert shared or a + size_a <= b or b + size_b <= a
    for start, size in regions:
        assert base <= start
        assert start + size <= base + workspace.numel()
        assert (start - base) % 16 == 0


@pytest.mark.parametrize(("n", "gemms"), [(1, 1), (1000, 132)])
def test_grids_are_as_large_as_the_work_and_no_larger_than_the_gpu(gpu, n, gemms):
    gpu.run(*inputs(n=n))
    assert [w.grid[0] for w in family(gpu, gpu.name)] == [gemms, gemms]
    assert all(1 <= w.grid[0] <= 132 * 2 for w in gpu.driver.work[1:])


def test_a_second_call_launches_its_own_addresses_and_scalars(gpu):
    first, second = inputs(), inputs()
    gpu.run(*first, None, 1.0)
    encoded = len(gpu.driver.maps)
    y = gpu.run(*second, None, 4.0)
    (record,) = (r for r in all_records(gpu.name) if r.name == f"{gpu.name}_f16")
    gemm = family(gpu, gpu.name)[0]
    assert pointer(gemm, record.vectors["v"]) == second[2].data_ptr()
    assert number(gemm, record.scalars["scale"]) == 4.0
    assert ConvertParams.from_buffer_copy(family(gpu, "convert")[0].params).jobs[0].source == second[0].data_ptr()
    assert PoolParams.from_buffer_copy(family(gpu, "pool")[0].params).target == y.data_ptr()
    assert len(gpu.driver.maps) >= encoded  # descriptors are encoded again at most


def test_scalars_reach_the_kernel_by_their_bits(gpu):
    given = inputs()
    (record,) = (r for r in all_records(gpu.name) if r.name == f"{gpu.name}_f16")
    # In this order one prepared call sees them all: a sign of zero, and what is beyond fp32, as PyTorch has it.
    for scale, expected in ((0.0, 0.0), (-0.0, -0.0), (1e39, math.inf), (-1e39, -math.inf), (1.0, 1.0)):
        gpu.run(*given, None, scale)
        found = number(family(gpu, gpu.name)[0], record.scalars["scale"])
        assert (found, math.copysign(1.0, found)) == (expected, math.copysign(1.0, expected))


def test_a_fill_that_fails_is_done_again(gpu, monkeypatch):
    first, second = inputs(), inputs()
    gpu.run(*first)
    kept = list(gpu.memory.made)  # another workspace for the second call, so that it encodes descriptors
    with monkeypatch.context() as broken:
        broken.setitem(gpu.driver.failures, "cuTensorMapEncodeTiled", 719)
        broken.setitem(gpu.driver.failures, "cuTensorMapEncodeIm2col", 719)
        with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"):
            gpu.run(*second)
    del kept
    gpu.run(*first)
    assert ConvertParams.from_buffer_copy(family(gpu, "convert")[0].params).jobs[0].source == first[0].data_ptr()


def test_an_empty_batch_launches_nothing(gpu):
    y = gpu.run(*inputs(n=0))
    assert y.shape == (0, 6, 3, 4)
    assert gpu.driver.work == []


def test_a_failed_launch_names_the_error(gpu):
    gpu.driver.failures |= {"cuLaunchKernel": 719, "cuLaunchKernelEx": 719}
    with pytest.raises(RuntimeError, match=r"cuLaunchKernel\w* failed: CUDA_ERROR_LAUNCH_FAILED \(unspecified launch failure\)"):
        gpu.run(*inputs())


# ---- strides -----------------------------------------------------------------------------------------------------

sizes, steps = st.integers(1, 4), st.integers(0, 13)


@given(shape=st.tuples(sizes, sizes, sizes, sizes), strides=st.tuples(steps, steps, steps, steps), even=st.booleans())
def test_flat_strides_walk_the_same_elements_or_there_are_none(shape, strides, even):
    if even:
        strides = (*strides[:2], shape[3] * strides[3], strides[3])

    def offset(*index):
        return sum(i * s for i, s in zip(index, strides))

    n, c, h, w = shape
    pixels = [offset(0, 0, i, j) for i in range(h) for j in range(w)]
    is_even = all(p == i * (pixels[1] if len(pixels) > 1 else 0) for i, p in enumerate(pixels))
    flat = flat_strides(shape, strides)
    assert (flat is not None) == is_even
    if flat is not None:
        batch, channel, pixel = flat
        for index in itertools.product(range(n), range(c), range(h), range(w)):
            assert offset(*index) == index[0] * batch + index[1] * channel + (index[2] * w + index[3]) * pixel


def test_a_tensor_that_cannot_be_walked_is_copied_in_its_own_memory_format():
    x = torch.randn(2, 8, 10, 12)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        whole = x.contiguous(memory_format=memory_format)
        assert presentable(whole) is whole
        cropped = whole[:, :, 1:-1, 1:-2]
        copied = presentable(cropped)
        assert copied.is_contiguous(memory_format=memory_format)
        assert torch.equal(copied, cropped)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_elsewhere_is_aligned_as_its_offset_would_be_on_a_gpu(device):
    storage, weight = torch.empty(8 + 2 * 4 * 6 * 8, device=device), torch.empty(3, 4, 3, 3, device=device)
    parameters = conv2d.arguments.bind((), {})[2]
    for offset, alignment in ((0, 16), (1, 4), (2, 8), (4, 16)):
        x = storage[offset : offset + 2 * 4 * 6 * 8].view(2, 4, 6, 8)
        found = conv2d.problem(x, weight, parameters)
        assert (found.alignment, found.weight_aligned) == (alignment, True)
    moved = torch.empty(2 + weight.numel(), device=device)[2:].view(weight.shape)
    found = conv2d.problem(x, moved, parameters)
    assert (found.alignment, found.weight_aligned) == (16, False)
