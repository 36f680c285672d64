"""The operators inside PyTorch: opcheck, gradients, fake tensors, torch.compile, torch.export, modules."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import cutlass_ops
from cutlass_ops import MaxPool2d, Operator, Vector, operator, use_plan
from cutlass_ops.chain import relu


@operator(pool=MaxPool2d(2))
def unit_conv2d_relu_maxpool(accum, v: Vector, shift: float = 0.25):
    return relu(accum * v + shift)


OPERATORS = [
    cutlass_ops.conv2d,
    cutlass_ops.conv2d_sub_tanh_sub_avgpool,
    cutlass_ops.conv2d_relu_hardswish,
    cutlass_ops.conv2d_min_add_mul,
    Operator(unit_conv2d_relu_maxpool),
]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.spec.name)


#: Name -> the same values laid out in that way.
LAYOUTS = {
    "contiguous": lambda v: v,
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "window": lambda v: torch.nn.functional.pad(v, (1, 2, 1, 1)).contiguous(memory_format=torch.channels_last)[:, :, 1:-1, 1:-2],
    "transposed": lambda v: v.transpose(2, 3).contiguous().transpose(2, 3),
}


def tensors(op, dtype=torch.float64, *, gradients=False, n=2, size=7):
    """x, weight and the operator's vectors."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, 3, size, size + 1), (4, 3, 3, 2), *((4,) for _ in op.spec.vectors)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_(gradients) for s in shapes]


def flat(op, **changes):
    """The registered operator's arguments after the tensors."""
    scalars = [a.default for a in op.spec.scalars]
    pool = [[2, 2], [2, 2], [0, 0], [1, 1], False, True, None] if op.spec.pool else []
    return [*scalars, [1, 1], [1, 1], [1, 1], *pool, None]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_operator
@pytest.mark.parametrize(
    ("dtype", "layouts"),
    [
        (torch.float32, ("contiguous", "contiguous")),
        (torch.float32, ("channels_last", "contiguous")),
        (torch.float32, ("window", "transposed")),
        (torch.float64, ("contiguous", "channels_last")),
        (torch.float16, ("channels_last", "channels_last")),
        (torch.bfloat16, ("transposed", "window")),
    ],
)
def test_opcheck(op, dtype, layouts):
    given = tensors(op, dtype)
    given[:2] = [LAYOUTS[layout](t) for layout, t in zip(layouts, given)]
    given = [t.requires_grad_() for t in given]
    registered = getattr(torch.ops.cutlass_ops, op.spec.name).default
    results = torch.library.opcheck(registered, (*given, *flat(op)))  # also with dynamic shapes
    assert set(results.values()) == {"SUCCESS"}


@each_operator
@pytest.mark.parametrize("shapes", [((1, 1, 5, 5), (1, 1, 3, 3)), ((0, 3, 7, 8), (4, 3, 3, 2)), ((2, 1, 4, 4), (4, 1, 1, 1))])
def test_opcheck_of_sizes_that_compilers_treat_apart(op, shapes):
    given = [torch.randn(s) for s in (*shapes, *((shapes[1][0],) for _ in op.spec.vectors))]
    registered = getattr(torch.ops.cutlass_ops, op.spec.name).default
    assert set(torch.library.opcheck(registered, (*given, *flat(op))).values()) == {"SUCCESS"}


@each_operator
def test_gradients_are_those_of_finite_differences(op):
    assert torch.autograd.gradcheck(lambda *t: op(*t, padding=1), tensors(op, gradients=True, n=1, size=4))


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1), (1, 4)])
def test_gradients_have_the_shapes_of_their_vectors(shape):
    x, weight, *vectors = tensors(cutlass_ops.conv2d_min_add_mul, gradients=True, n=1, size=4)
    given = [x, weight, *(v.detach().reshape(shape).requires_grad_() for v in vectors)]
    assert torch.autograd.gradcheck(lambda *t: cutlass_ops.conv2d_min_add_mul(*t, stride=2), given)


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_do_not_depend_on_layout(op, layout):
    given = tensors(op, gradients=True)
    laid_out = [LAYOUTS[layout](t.detach()).requires_grad_() if t.dim() == 4 else t.detach().requires_grad_() for t in given]
    for t in (given, laid_out):
        op(*t, padding=1).square().sum().backward()
    for mine, theirs in zip(laid_out, given):
        torch.testing.assert_close(mine.grad, theirs.grad)


@each_operator
def test_second_gradients_are_those_of_finite_differences(op):
    assert torch.autograd.gradgradcheck(lambda *t: op(*t, padding=1), tensors(op, gradients=True, n=1, size=3))


WAYS = ["function", "torch.ops", "compiled function", "compiled torch.ops"]


def through(way, op):
    """A function of tensors: the operator, called in one of four ways."""

    def registered(*given):
        return getattr(torch.ops.cutlass_ops, op.spec.name)(*given, *flat(op))

    f = registered if way.endswith("torch.ops") else (lambda *given: op(*given, padding=1))
    return torch.compile(f, fullgraph=True, backend="aot_eager") if way.startswith("compiled") else f


@pytest.mark.parametrize("way", WAYS)
@each_operator
def test_transforms_and_forward_derivatives_are_those_of_pytorch(op, way, fresh_dynamo):
    x, *others = tensors(op, n=2, size=5)
    tangent = torch.randn_like(x)

    def f(t):
        return op(t, *others, padding=1)

    def run(transform, *given):
        """A transform of the operator, all of it compiled where the way says so."""
        operator = through(way.removeprefix("compiled "), op)
        whole = transform(lambda t: operator(t, *others))
        return (torch.compile(whole, fullgraph=True, backend="aot_eager") if way.startswith("compiled") else whole)(*given)

    reverse = torch.func.vjp(f, x)[1]
    primal, forward = run(lambda g: lambda a, b: torch.func.jvp(g, (a,), (b,)), x, tangent)
    torch.testing.assert_close(primal, f(x))
    torch.testing.assert_close((forward * primal).sum(), (reverse(primal)[0] * tangent).sum())
    torch.testing.assert_close(run(lambda g: torch.func.grad(lambda t: g(t).sum()), x), reverse(torch.ones_like(primal))[0])
    torch.testing.assert_close(run(torch.func.vmap, torch.stack([x, -x])), torch.stack([f(x), f(-x)]))
    per_sample = run(lambda g: torch.func.vmap(torch.func.grad(lambda t: g(t).square().sum())), torch.stack([x, -x]))
    torch.testing.assert_close(per_sample[1], torch.func.vjp(f, -x)[1](2 * f(-x))[0])


@pytest.mark.parametrize("way", WAYS)
@each_operator
def test_forward_mode_keeps_its_tangent(op, way, fresh_dynamo):
    x, *others = tensors(op, n=2, size=5)
    tangent, f = torch.randn_like(x), through(way, op)
    expected = torch.func.jvp(lambda t: op(t, *others, padding=1), (x,), (tangent,))[1]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        if way.startswith("compiled") and torch.__version__ >= (2, 14):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="dual tensor"):  # of any operator
                f(dual, *others)
        else:
            torch.testing.assert_close(forward_ad.unpack_dual(f(dual, *others)).tangent, expected)


@each_operator
def test_transforms_refuse_a_plan_of_kernels(op):
    x, *others = tensors(op)
    with use_plan("two-kernel-tf32"), pytest.raises(cutlass_ops.NoPlanError, match=r"expected plan 'two-kernel-tf32', but forward-mode"):
        torch.func.vmap(lambda t: op(t, *others))(x[None])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_operator
def test_autocast_casts_as_for_conv2d_also_for_gradients(op, way, dtype, fresh_dynamo):
    given = [t.detach().float().requires_grad_() for t in tensors(op)]
    with torch.autocast("cpu", dtype):
        y = through(way, op)(*given)
    assert y.dtype == dtype
    lowered = [t.detach().to(dtype).requires_grad_() for t in given]
    expected = op(*lowered, padding=1)
    torch.testing.assert_close(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    for t, low in zip(given, lowered):
        assert t.grad.dtype == torch.float32
        torch.testing.assert_close(t.grad, low.grad.float())


@pytest.mark.parametrize("way", WAYS)
def test_autocast_leaves_float64_alone_and_mixed_tensors_meet(way, fresh_dynamo):
    op = cutlass_ops.conv2d
    x, weight, bias = tensors(op)
    f = through(way, op)
    with torch.autocast("cpu", torch.bfloat16):
        assert f(x, weight, bias).dtype == torch.float64
        assert f(x.bfloat16(), weight.float(), bias.half()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert f(x.float(), weight.float(), bias.float()).dtype == torch.float32


@each_operator
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_keeps_the_dtype_of_a_call_with_a_precision(op, compiled, fresh_dynamo):
    given = [t.float() for t in tensors(op)]
    f = torch.compile(op, fullgraph=True, backend="aot_eager") if compiled else op
    registered = getattr(torch.ops.cutlass_ops, op.spec.name)
    with torch.autocast("cpu", torch.bfloat16):
        kept, direct = f(*given, precision="ieee"), registered(*given, *flat(op)[:-1], "ieee")
    assert (kept.dtype, direct.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(kept, op(*given))
    torch.testing.assert_close(direct, op(*given, padding=1))


@operator()
def unit_conv2d_unused_vector(accum, v: Vector, bias: Vector = None):
    return accum + bias


def test_a_vector_that_the_chain_ignores_has_no_gradient():
    x, weight, v, bias = (t.requires_grad_() for t in (*tensors(cutlass_ops.conv2d), torch.zeros(4, dtype=torch.float64)))
    Operator(unit_conv2d_unused_vector)(x, weight, v, bias).sum().backward()
    assert v.grad is None
    assert all(t.grad is not None for t in (x, weight, bias))


def test_only_wanted_gradients_are_computed():
    x, weight, bias = tensors(cutlass_ops.conv2d)
    weight.requires_grad_()
    cutlass_ops.conv2d(x, weight, bias).sum().backward()
    assert (x.grad, bias.grad) == (None, None)
    assert weight.grad.shape == weight.shape


def test_gradients_pass_an_absent_vector():
    x, weight, _ = tensors(cutlass_ops.conv2d, gradients=True)
    cutlass_ops.conv2d(x, weight).sum().backward()
    expected = torch.autograd.grad(torch.nn.functional.conv2d(x, weight).sum(), (x, weight))
    torch.testing.assert_close((x.grad, weight.grad), expected)


# ---- fake tensors ------------------------------------------------------------------------------------------------


@each_operator
@pytest.mark.parametrize("x_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weight_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_fake_results_are_like_real_ones(op, x_format, weight_format, n):
    given = tensors(op, torch.float32, n=n)
    given[0], given[1] = given[0].contiguous(memory_format=x_format), given[1].contiguous(memory_format=weight_format)
    real = op(*given, stride=(1, 2), padding=1)
    with FakeTensorMode() as mode:
        fake = op(*map(mode.from_tensor, given), stride=(1, 2), padding=1)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)


def test_fake_tensors_are_checked_as_real_ones():
    with FakeTensorMode(), pytest.raises(ValueError, match="expected weight for x's 3 channels"):
        cutlass_ops.conv2d(torch.empty(1, 3, 8, 8), torch.empty(4, 5, 3, 3))
