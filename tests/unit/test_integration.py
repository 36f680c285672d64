"""The operators inside PyTorch: opcheck, gradients, fake tensors, torch.compile, torch.export, modules."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import cutlass_ops
from cutlass_ops import FusedConv2d, MaxPool2d, Operator, Vector, operator, use_plan
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


#: Name -> the same values laid out in that way.
LAYOUTS = {
    "contiguous": lambda v: v,
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "window": lambda v: torch.nn.functional.pad(v, (1, 2, 1, 1)).contiguous(memory_format=torch.channels_last)[:, :, 1:-1, 1:-2],
    "transposed": lambda v: v.transpose(2, 3).contiguous().transpose(2, 3),
}


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
        found = forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent), *others)).tangent
        torch.testing.assert_close(found, expected)


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


# ---- compile and export ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_operator
def test_compile_without_graph_breaks_gives_equal_values(op, fresh_dynamo):
    compiled = torch.compile(lambda *t: op(*t, padding=1) + 1, fullgraph=True, backend="aot_eager")
    given = tensors(op)
    torch.testing.assert_close(compiled(*given), op(*given, padding=1) + 1)


def test_compile_differentiates(fresh_dynamo):
    op = cutlass_ops.conv2d_sub_tanh_sub_avgpool
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    ours, theirs = tensors(op, gradients=True), tensors(op, gradients=True)
    compiled(*ours).sum().backward()
    op(*theirs).sum().backward()
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a.grad, b.grad)


@each_operator
def test_compile_with_dynamic_shapes_compiles_once(op, fresh_dynamo):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, *rest: op(x, *rest), fullgraph=True, backend=counter)
    for n, h, w in ((11, 13, 17), (12, 19, 14), (14, 15, 23)):  # sizes in another order must not need another graph
        _, *rest = tensors(op)
        x = torch.randn(n, 3, h, w, dtype=torch.float64)
        for dimension in (0, 2, 3):
            torch._dynamo.mark_dynamic(x, dimension)
        torch.testing.assert_close(compiled(x, *rest), op(x, *rest))
    assert counter.frame_count == 1


def test_compile_takes_a_scalar_that_changes(fresh_dynamo):
    op = cutlass_ops.conv2d_min_add_mul
    compiled = torch.compile(lambda *t, scale: op(*t, scale=scale), fullgraph=True, backend="aot_eager")
    given = tensors(op)
    for scale in (1.0, 2.0, 3.5):
        torch.testing.assert_close(compiled(*given, scale=scale), op(*given, scale=scale))


@pytest.mark.parametrize("dynamic", [False, True])
def test_export_gives_equal_values_and_one_operator(dynamic, fresh_dynamo):
    module = FusedConv2d(cutlass_ops.conv2d_sub_tanh_sub_avgpool, 3, 4, 3, padding=1, pool=2)
    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC}} if dynamic else None
    program = torch.export.export(module, (torch.randn(2, 3, 12, 10),), dynamic_shapes=shapes)
    called = [str(n.target) for n in program.graph.nodes if n.op == "call_function" and "cutlass_ops" in str(n.target)]
    assert called == ["cutlass_ops.conv2d_sub_tanh_sub_avgpool.default"]
    x = torch.randn(3, 3, 14, 10) if dynamic else torch.randn(2, 3, 12, 10)
    torch.testing.assert_close(program.module()(x), module(x))


# ---- modules -----------------------------------------------------------------------------------------------------


def example_module():
    return FusedConv2d(cutlass_ops.conv2d_min_add_mul, 3, 4, (3, 2), stride=2, padding=(1, 0), dilation=1, constant=0.25)


def test_a_module_has_kernelbenchs_parameters():
    assert {name: tuple(t.shape) for name, t in example_module().state_dict().items()} == {
        "v": (4, 1, 1),
        "conv.weight": (4, 3, 3, 2),
        "conv.bias": (4,),
    }
    assert set(FusedConv2d(cutlass_ops.conv2d, 3, 4, 3, bias=False).state_dict()) == {"conv.weight"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"subtract3": 1.0}, TypeError, "got an unexpected keyword argument 'subtract3'"),
        ({"padding": "same"}, TypeError, "expected padding to be an int or a pair of ints, got 'same'"),
        ({"pool": 0}, ValueError, "expected pool of at least 1"),
        ({"subtract1": "a"}, TypeError, "expected subtract1 to be a number"),
    ],
)
def test_a_module_refuses_at_once_what_its_operator_would(arguments, error, message):
    with pytest.raises(error, match=message):
        FusedConv2d(cutlass_ops.conv2d_sub_tanh_sub_avgpool, 3, 4, 3, **arguments)


def test_a_module_keeps_vectors_as_parameters_only():
    with pytest.raises(TypeError, match="expected no argument v: it is a parameter of the module"):
        FusedConv2d(cutlass_ops.conv2d_min_add_mul, 3, 4, 3, v=torch.zeros(4))
    with pytest.raises(TypeError, match="expected an operator of cutlass_ops, got <built-in"):
        FusedConv2d(torch.tanh, 3, 4, 3)


def test_a_module_calls_its_operator_with_its_arguments():
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    expected = cutlass_ops.conv2d_min_add_mul(x, module.conv.weight, module.v, module.conv.bias, stride=2, padding=(1, 0), constant=0.25)
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])  # noqa: S301
def test_a_copied_module_computes_the_same(copied):
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    twin = copied(module)
    assert twin.conv.weight is not module.conv.weight
    assert torch.equal(twin(x), module(x))


def test_a_saved_state_is_loaded():
    module, other, x = example_module(), example_module(), torch.randn(2, 3, 9, 9)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), module(x))


def test_a_module_follows_dtype_and_trains():
    module = example_module().double()
    module(torch.randn(2, 3, 9, 9, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in module.parameters())


def test_a_modules_repr_names_operator_and_arguments():
    assert "conv2d_min_add_mul, stride=(2, 2), padding=(1, 0), dilation=(1, 1), constant=0.25" in repr(example_module())
