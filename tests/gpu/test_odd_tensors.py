"""Odd but legal tensors: offsets, strides of 0, overlaps, sizes of one, empty batches, counts beyond 16 and 32 bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import cutlass_ops
from cutlass_ops import accuracy, conv2d
from cutlass_ops.accuracy import uniform

from .helpers import DEVICE, DTYPES, GENERAL_PLANS, call, filters, generator, integers, name_of, serving, vectors

POOLED, ADDED = cutlass_ops.conv2d_sub_tanh_sub_avgpool, cutlass_ops.conv2d_min_add_mul
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


def exact_conv(x, weight, padding=0):
    """The convolution in float64 without cuDNN: exact for small integers, whatever the sizes."""
    x = functional.pad(x.double(), [padding] * 4)
    windows = x.unfold(2, weight.shape[2], 1).unfold(3, weight.shape[3], 1)  # N, C, P, Q, R, S
    return torch.einsum("ncpqrs,kcrs->nkpq", windows, weight.double())


def integer_maker(dtype, random):
    """Makes dense tensors of small integers."""
    return lambda shape: integers(shape, -2, 2, random).to(dtype)


def precision(dtype):
    return {"precision": "tf32"} if dtype is torch.float32 else {}


def assert_exact(x, weight, padding=0):
    """conv2d of integers is right to the last bit in every plan."""
    expected = exact_conv(x, weight, padding).to(x.dtype)
    arguments = {"padding": padding, **precision(x.dtype)}
    plans = serving(conv2d, x, weight, **arguments)
    assert GENERAL_PLANS[x.dtype] <= set(plans)
    for plan in plans:
        y = call(plan, conv2d, x, weight, **arguments)
        assert torch.equal(y, expected), f"{plan}: {int((y != expected).sum())} of {y.numel()} elements differ"


# ---- layouts -----------------------------------------------------------------------------------------------------


def shifted(elements):
    """Dense, some elements behind a 16-byte boundary."""
    return lambda shape, values: values((math.prod(shape) + elements,))[elements:].view(shape)


def expanded(*dimensions):
    """Stride 0 in these dimensions."""
    return lambda shape, values: values([1 if i in dimensions else n for i, n in enumerate(shape)]).expand(shape)


def every_second(dimension):
    """Every second element of a larger tensor in this dimension."""
    step = (slice(None),) * dimension + (slice(None, None, 2),)
    return lambda shape, values: values([2 * n if i == dimension else n for i, n in enumerate(shape)])[step]


def permuted(order):
    """Dimensions in this order in memory, the last innermost."""
    places = ["nchw".index(d) for d in order]
    return lambda shape, values: values([shape[i] for i in places]).permute([places.index(i) for i in range(4)])


def strided(*strides):
    """These strides; elements overlap."""
    return lambda shape, values: values((1 + sum((n - 1) * s for n, s in zip(shape, strides)),)).as_strided(shape, strides)


#: Name -> a tensor of a shape in this layout, from a function that makes dense ones.
LAYOUTS = {
    **{f"shifted by {e}": shifted(e) for e in (1, 2, 3, 4, 6, 8)},
    **{f"stride 0 in {''.join('nchw'[i] for i in d)}": expanded(*d) for d in ((0,), (1,), (2,), (3,), (2, 3), (0, 1), (0, 1, 2, 3))},
    **{f"every second {'nchw'[d]}": every_second(d) for d in range(4)},
    **{f"memory order {o}": permuted(o) for o in ("nhwc", "cnhw", "nwhc", "nchw", "hwcn", "wnch", "chwn", "whcn")},
    **{f"strides {s}": strided(*s) for s in ((7, 3, 2, 1), (1, 1, 1, 1), (1, 2, 3, 4), (64, 0, 8, 1))},
}


@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_layouts_of_x_and_weight_are_exact(layout, dtype):
    make = integer_maker(dtype, generator("odd", layout))
    for c in (5, 16):
        x_shape, weight_shape = (3, c, 9, 12), (7, c, 3, 3)
        x, weight = make(x_shape), make(weight_shape)
        odd_x, odd_weight = (LAYOUTS[layout](shape, make) for shape in (x_shape, weight_shape))
        for pair in ((odd_x, weight), (x, odd_weight), (odd_x, odd_weight)):
            assert_exact(*pair)
        assert_exact(odd_x, weight, padding=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_layouts_give_the_pooled_operator_the_bits_of_dense_ones(layout):
    """In plans that serve both; which plans those are depends on the layout."""
    random = generator("odd pooled", layout)
    x = LAYOUTS[layout]((2, 16, 10, 12), lambda shape: uniform(shape, 0, 1, torch.float32, random))
    weight = LAYOUTS[layout]((24, 16, 3, 3), lambda shape: uniform(shape, -0.1, 0.1, torch.float32, random))
    bias = vectors(POOLED, 24, torch.float32, random)
    dense = [x.contiguous(), weight.contiguous(), *bias]
    shared = set(serving(POOLED, x, weight, *bias, precision="tf32")) & set(serving(POOLED, *dense, precision="tf32"))
    assert GENERAL_PLANS[torch.float32] <= shared
    for plan in sorted(shared):
        assert torch.equal(call(plan, POOLED, x, weight, *bias, precision="tf32"), call(plan, POOLED, *dense, precision="tf32")), plan


#: Shapes whose dimensions of one element leave strides ambiguous: (x, weight, padding).
SHAPES_OF_ONE = [
    ((2, 1, 5, 6), (3, 1, 2, 2), 0),
    ((2, 1, 5, 6), (1, 1, 3, 3), 1),
    ((2, 5, 1, 1), (3, 5, 1, 1), 0),
    ((2, 8, 1, 1), (4, 8, 3, 3), 1),
    ((1, 1, 1, 1), (1, 1, 1, 1), 0),
    ((1, 16, 1, 9), (5, 16, 1, 3), 0),
    ((3, 16, 9, 1), (5, 16, 3, 1), 0),
    ((1, 8, 4, 4), (1, 8, 4, 4), 0),
    ((5, 1, 1, 7), (2, 1, 1, 1), 0),
]


def with_strides_of_ones(tensor, stride):
    """The same tensor; dimensions of one element, whose strides mean nothing, have this one."""
    return tensor.as_strided(tensor.shape, [stride if n == 1 else s for n, s in zip(tensor.shape, tensor.stride())])


@each_dtype
@pytest.mark.parametrize(("x_shape", "weight_shape", "padding"), SHAPES_OF_ONE, ids=[str(s[0]) + str(s[1]) for s in SHAPES_OF_ONE])
def test_sizes_of_one_are_exact_whatever_their_strides(x_shape, weight_shape, padding, dtype):
    make = integer_maker(dtype, generator("ones", x_shape, weight_shape))
    x, weight = make(x_shape), make(weight_shape)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        a, b = x.contiguous(memory_format=memory_format), weight.contiguous(memory_format=memory_format)
        assert_exact(a, b, padding)
        for stride in (0, 1, 3, 12345):
            assert_exact(with_strides_of_ones(a, stride), with_strides_of_ones(b, stride), padding)


# ---- vectors -----------------------------------------------------------------------------------------------------

#: A vector of K elements that is a view, from dense values.
VIEWS = {
    "a slice": lambda v: torch.cat([v.new_full((3,), math.nan), v, v.new_full((5,), math.nan)])[3:-5],
    "every second": lambda v: torch.stack([v, torch.full_like(v, math.nan)], 1).view(-1)[::2],
    "a column": lambda v: torch.stack([torch.full_like(v, math.nan), v, torch.full_like(v, math.nan)], 1)[:, 1],
    "(K, 1, 1) of a column": lambda v: torch.stack([v, torch.full_like(v, math.nan)], 1)[:, :1, None],
    "(1, K, 1, 1)": lambda v: v.view(1, -1, 1, 1),
    "transposed (K, 1)": lambda v: v[None].t(),
    "a diagonal": lambda v: torch.diag(v).diagonal(),
    "a parameter's view": lambda v: torch.nn.Parameter(torch.cat([v, v]), requires_grad=False)[: len(v)],
}


@each_dtype
@pytest.mark.parametrize("op", [POOLED, ADDED], ids=name_of)
def test_vectors_that_are_views_give_the_bits_of_dense_ones(op, dtype):
    random = generator("views", op.spec.name)
    x, weight = uniform((3, 12, 9, 16), 0, 1, dtype, random), filters((10, 12, 3, 3), dtype, random)
    dense = vectors(op, 10, dtype, random)
    repeated = [v[:1].expand(10) for v in dense]
    for plan in serving(op, x, weight, *dense, **precision(dtype)):
        expected = call(plan, op, x, weight, *dense, **precision(dtype))
        for name, view in VIEWS.items():
            y = call(plan, op, x, weight, *map(view, dense), **precision(dtype))
            assert torch.equal(y, expected), (plan, name)
        y = call(plan, op, x, weight, *repeated, **precision(dtype))  # stride 0
        assert torch.equal(y, call(plan, op, x, weight, *[v.contiguous() for v in repeated], **precision(dtype))), plan


def test_weights_that_are_views_of_one_parameter_are_read_where_they_lie():
    """As of a module whose filters are slices of one large tensor, changed in place between calls."""
    random = generator("weights")
    x = integers((2, 8, 7, 8), -2, 2, random)
    shared = integers((3, 12, 11, 3, 3), -2, 2, random)
    for _ in range(3):
        for weight in (shared[1], shared[:, 5], shared[2, 3:9]):
            assert_exact(x, weight[:, 2:10])
        shared.add_(1)


# ---- counts ------------------------------------------------------------------------------------------------------


@each_dtype
def test_an_empty_batch_is_empty_in_every_layout(dtype):
    make = integer_maker(dtype, generator("empty"))
    x, weight, bias = make((4, 5, 9, 12)), make((6, 5, 3, 3)), make((6,))
    last = x.contiguous(memory_format=torch.channels_last)
    empty = [x[:0], x[2:2], x[4:], last[:0], x[:1, :, :1, :1].expand(0, 5, 9, 12), x.new_empty(0, 5, 9, 12)]
    for nothing in (*empty, x[:0, :, 1:, 2:]):
        for op in (conv2d, POOLED, cutlass_ops.conv2d_relu_hardswish):
            y = op(nothing, weight, bias)
            full = op(x[..., : nothing.shape[2], : nothing.shape[3]], weight, bias)
            assert (y.shape, y.dtype) == ((0, *full.shape[1:]), dtype)
    assert_exact(x, weight)


@each_dtype
@pytest.mark.parametrize(
    ("x_shape", "weight_shape"),
    [
        ((1100, 64, 4, 4), (64, 64, 3, 3)),  # N * C and N * K
        ((70_000, 1, 3, 3), (2, 1, 2, 2)),  # N
        ((1, 66_000, 2, 2), (3, 66_000, 1, 1)),  # C
        ((1, 4, 3, 3), (66_000, 4, 2, 2)),  # K
        ((1, 1, 2, 70_000), (3, 1, 2, 2)),  # W
        ((1, 2, 70_000, 3), (3, 2, 2, 2)),  # H
    ],
)
def test_counts_beyond_16_bits_are_exact(x_shape, weight_shape, dtype):
    make = integer_maker(dtype, generator("counts", x_shape))
    assert_exact(make(x_shape), make(weight_shape))


@each_dtype
def test_a_pool_of_more_than_65535_channels_of_images_is_accurate(dtype):
    random = generator("counts", "pool")
    given = [uniform((1100, 16, 8, 8), 0, 1, dtype, random), filters((64, 16, 3, 3), dtype, random), *vectors(POOLED, 64, dtype, random)]
    criterion = accuracy.Criterion(POOLED, *given, **precision(dtype))
    for plan in serving(POOLED, *given, **precision(dtype)):
        found = criterion.judge(call(plan, POOLED, *given, **precision(dtype)))
        assert found.passed, f"{plan}: {found}"


#: x, output channels: 2^31 elements end with image 31, so that image 32 lies beyond.
LARGE = {"input": ((33, 64, 1024, 1024), 8), "output": ((33, 8, 1024, 1024), 64)}


@pytest.mark.large
@each_dtype
@pytest.mark.parametrize("which", LARGE)
def test_more_than_2_to_the_31_elements_are_accurate(which, dtype):
    """First, last before the limit and first beyond it of the images; the pooled operator's convolution has as many."""
    shape, k = LARGE[which]
    random = generator("large", which)
    x = torch.empty(shape, dtype=dtype, device=DEVICE).uniform_(-1, 1, generator=random)
    weight = filters((k, shape[1], 3, 3), dtype, random)
    try:
        for op in (conv2d, POOLED):
            given = vectors(op, k, dtype, random)
            arguments = {"padding": 1, **precision(dtype)}
            plans = serving(op, x, weight, *given, **arguments)
            assert GENERAL_PLANS[dtype] <= set(plans)
            for plan in plans:
                y = call(plan, op, x, weight, *given, **arguments)
                for image in (slice(0, 1), slice(31, 32), slice(32, 33)):
                    found = accuracy.Criterion(op, x[image], weight, *given, **arguments).judge(y[image])
                    assert found.passed, f"{op.spec.name} {plan} image {image.start}: {found}"
                del y
    finally:
        del x
        torch.cuda.empty_cache()
