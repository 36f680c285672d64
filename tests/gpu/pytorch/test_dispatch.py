"""What PyTorch's dispatcher does around an operator on a GPU: opcheck, layouts, autocast, transforms, compiled gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional

import cutlass_ops
from cutlass_ops import FusedConv2d, reference

from ..helpers import DEVICE, DTYPES, LAYOUTS, errors, gradients, in_pytorch, name_of, tensors

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
OPERATORS = [cutlass_ops.conv2d, POOLED, cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=name_of)
#: Ways to call an operator. Compiling takes seconds, so two operators stand for all. They have no kink: Inductor rounds a
#: chain less often, and a value that a rounding moves across a kink has another gradient.
CALLS = [(op, way) for op in OPERATORS for way in ("function", "torch.ops")]
CALLS += [(op, way) for op in (POOLED, cutlass_ops.conv2d) for way in ("compiled function", "compiled torch.ops")]
each_call = pytest.mark.parametrize(("op", "way"), CALLS, ids=name_of)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def flat(op, precision=None):
    """The registered operator's arguments after the tensors."""
    pool = [[2, 2], [2, 2], [0, 0], [1, 1], False, True, None] if op.spec.pool else []
    return [*(a.default for a in op.spec.scalars), [1, 1], [1, 1], [1, 1], *pool, precision]


def through(way, op):
    """A function of tensors: the operator, called in one of four ways."""

    def registered(*given):
        return getattr(torch.ops.cutlass_ops, op.spec.name)(*given, *flat(op))

    f = registered if way.endswith("torch.ops") else (lambda *given: op(*given, padding=1))
    return torch.compile(f, fullgraph=True) if way.startswith("compiled") else f


@each_operator
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        (torch.float32, "contiguous"),
        (torch.float32, "sliced_channels_last"),
        (torch.float32, "unaligned"),
        (torch.float16, "channels_last"),
        (torch.bfloat16, "transposed"),
        (torch.float64, "channels_last"),
    ],
    ids=name_of,
)
def test_opcheck(op, dtype, layout):
    given = [t.to(dtype) for t in tensors(op, "opcheck", size=(9, 8))]
    given[0] = LAYOUTS[layout](given[0]).requires_grad_()
    registered = getattr(torch.ops.cutlass_ops, op.spec.name).default
    # Gradients of small convolutions differ between calls of cuDNN by rounding alone.
    results = torch.library.opcheck(registered, (*given, *flat(op)), rtol=1e-2, atol=1e-2)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=name_of)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [{}, {"c": 1}, {"k": 1}, {"c": 1, "k": 1}, {"n": 1}, {"n": 0}, {"size": (3, 3)}, {"size": (3, 9)}], ids=str
)
def test_the_results_layout_is_that_of_pytorchs_conv2d(x_layout, dtype, sizes):
    x, weight, bias = (t.to(dtype) for t in tensors(cutlass_ops.conv2d, "layout", **sizes))
    if x_layout == "expanded" and not len(x):
        return
    x = LAYOUTS[x_layout](x)
    for weight_layout in ("contiguous", "channels_last", "sliced_channels_last", "transposed"):
        w = LAYOUTS[weight_layout](weight)
        y, expected = cutlass_ops.conv2d(x, w, bias), functional.conv2d(x, w, bias)
        assert (y.shape, y.stride()) == (expected.shape, expected.stride()), weight_layout


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=name_of)
@each_call
def test_autocast_is_as_for_conv2d(op, dtype, way):
    given = tensors(op, "autocast")
    lowered = [t.to(dtype) for t in given]
    expected = op(*lowered, padding=1)

    def f(*t):
        with torch.autocast(DEVICE, dtype):
            return through(way.removeprefix("compiled "), op)(*t)

    f = torch.compile(f, fullgraph=True) if way.startswith("compiled") else f
    assert torch.equal(f(*given), expected)
    for mine, theirs in zip(gradients(f, given), gradients(lambda *t: op(*t, padding=1), lowered)):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs.float(), rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


@each_call
def test_gradients_are_those_of_pytorch_in_every_way_to_call(op, way):
    for dtype in DTYPES:
        given = tensors(op, "gradient", dtype)
        with reference.convolutions("tf32"):
            expected = gradients(in_pytorch(op, padding=1), given)
            found = gradients(through(way, op), given)
        tolerance = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
        for mine, theirs in zip(found, expected):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * theirs.abs().max().item())


@each_call
def test_transforms_are_those_of_pytorch_in_every_way_to_call(op, way):
    x, *others = tensors(op, "transform")
    tangent = torch.rand_like(x)
    expected = in_pytorch(op, padding=1)

    def compare(transform, *given):
        """A transform of the operator, all of it compiled where the way says so, and the transform of PyTorch's own operators."""
        operator = through(way.removeprefix("compiled "), op)
        whole = transform(lambda t: operator(t, *others))
        found = (torch.compile(whole, fullgraph=True) if way.startswith("compiled") else whole)(*given)
        wanted = transform(lambda t: expected(t, *others))(*given)
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * wanted.abs().max().item())

    compare(torch.func.vmap, torch.stack([x, 1 - x]))
    compare(lambda f: torch.func.grad(lambda t: f(t).square().sum()), x)
    compare(lambda f: lambda a, b: torch.func.jvp(f, (a,), (b,))[1], x, tangent)
    if way.startswith("compiled"):
        return  # PyTorch 2.13 drops the tangent of whatever Inductor has compiled, ours or not
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        found, wanted = (forward_ad.unpack_dual(f(dual, *others)).tangent for f in (through(way, op), expected))
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * wanted.abs().max().item())


@pytest.mark.parametrize("op", [cutlass_ops.conv2d, POOLED], ids=name_of)
def test_compiled_gradients_at_ieee_precision_are_ieee(op):
    given = tensors(op, "compiled ieee gradient")
    exact = gradients(in_pytorch(op), [t.double() for t in given])
    with reference.convolutions("tf32"):  # PyTorch's default, which precision="ieee" must overrule
        found = gradients(torch.compile(lambda *t: op(*t, precision="ieee"), fullgraph=True), given)
    for mine, theirs in zip(found, exact):
        assert errors(mine, theirs)[0] <= 2.0**-16 * theirs.abs().max().item()


class Between(nn.Module):
    """NHWC in and out, with work before and after."""

    def __init__(self):
        super().__init__()
        self.fused = FusedConv2d(POOLED, 24, 40, 3, padding=1, device=DEVICE)

    def forward(self, x):
        return torch.relu(self.fused(x.permute(0, 3, 1, 2) * 2).permute(0, 2, 3, 1)) + 1


def exported(dynamic):
    """A module, its exported program, and inputs for both."""
    module, x = Between(), torch.rand(2, 20, 24, 24, device=DEVICE)
    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}} if dynamic else None
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    return module, program, [x, torch.rand(5, 34, 24, 24, device=DEVICE)] if dynamic else [x]


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_exported_and_compiled_it_gives_the_same_bits(dynamic):
    module, program, inputs = exported(dynamic)
    f = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for given in inputs:
        expected = module(given)
        for y in (f(given), program.module()(given)):
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride()


@torch.no_grad()
def test_a_module_is_copied_moved_and_changed_as_any_other():
    torch.manual_seed(0)
    on_cpu = FusedConv2d(POOLED, 24, 40, 3)
    module, x = copy.deepcopy(on_cpu).to(DEVICE), tensors(POOLED, "module")[0]
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    torch.testing.assert_close(module(x).cpu(), on_cpu(x.cpu()), rtol=1e-3, atol=1e-3)
    half = copy.deepcopy(module).half()
    assert torch.equal(half(x.half()), POOLED(x.half(), module.conv.weight.half(), module.conv.bias.half()))
    last = copy.deepcopy(module).to(memory_format=torch.channels_last)
    assert last(x).is_contiguous(memory_format=torch.channels_last)
    with torch.device("meta"):
        empty = FusedConv2d(POOLED, 24, 40, 3)
    empty.to_empty(device=DEVICE).load_state_dict(module.state_dict())
    assert torch.equal(empty(x), module(x))
    expected = module(x)
    module.conv.weight.zero_()  # the next call must see it
    assert not torch.equal(module(x), expected)
