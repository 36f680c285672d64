"""FusedConv2d as any other module: parameters, copies, states, dtypes, devices, parametrizations."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils import checkpoint

import cutlass_ops
from cutlass_ops import FusedConv2d


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


def test_a_module_of_an_operator_without_a_bias_has_none():
    @cutlass_ops.operator()
    def unit_modules_scale(accum, v: cutlass_ops.Vector):
        return accum * v

    module = FusedConv2d(cutlass_ops.Operator(unit_modules_scale), 3, 5, 3)
    assert set(module.state_dict()) == {"conv.weight", "v"}
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(module(x), torch.nn.functional.conv2d(x, module.conv.weight) * module.v)


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


def test_a_whole_module_is_saved_and_loaded():
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), module(x))


def test_an_operator_is_copied_as_a_name():
    op = cutlass_ops.conv2d
    assert copy.copy(op) is copy.deepcopy(op) is pickle.loads(pickle.dumps(op)) is op  # noqa: S301


@pytest.mark.parametrize(("change", "dtype"), [("half", torch.float16), ("bfloat16", torch.bfloat16), ("double", torch.float64)])
def test_a_module_changes_dtype_as_others_do(change, dtype):
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    expected = module(x)
    assert getattr(module, change)() is module
    assert {p.dtype for p in module.parameters()} == {dtype}
    y = module(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)


def test_a_module_moves_to_another_memory_format():
    module, x = example_module().to(memory_format=torch.channels_last), torch.randn(2, 3, 9, 9)
    y = module(x)
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, module.to(memory_format=torch.contiguous_format)(x))


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_is_made_on_the_meta_device_and_filled_later(inside):
    arguments = {"stride": 2, "padding": (1, 0), "constant": 0.25}
    with torch.device("meta" if inside else "cpu"):
        module = FusedConv2d(cutlass_ops.conv2d_min_add_mul, 3, 4, (3, 2), **arguments, device=None if inside else "meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    x, other = torch.randn(2, 3, 9, 9), example_module()
    shape = module(x.to("meta"))
    assert (shape.device.type, shape.shape, shape.stride()) == ("meta", other(x).shape, other(x).stride())
    filled = module.to_empty(device="cpu")
    filled.load_state_dict(other.state_dict())
    assert torch.equal(filled(x), other(x))
    with torch.device("meta"):
        assigned = FusedConv2d(cutlass_ops.conv2d_min_add_mul, 3, 4, (3, 2), **arguments)
    assigned.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(assigned(x), other(x))


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_may_be_parametrized(compiled):
    torch._dynamo.reset()
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    weight, v = module.conv.weight.detach().clone(), module.v.detach().clone()
    parametrize.register_parametrization(module.conv, "weight", Halved())
    parametrize.register_parametrization(module, "v", Halved())
    f = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    y = f(x)
    torch.testing.assert_close(
        y, cutlass_ops.conv2d_min_add_mul(x, weight / 2, v / 2, module.conv.bias, stride=2, padding=(1, 0), constant=0.25)
    )
    y.sum().backward()
    assert module.conv.parametrizations.weight.original.grad is not None
    assert module.parametrizations.v.original.grad is not None
    with parametrize.cached():
        assert torch.equal(module(x), y)
    for owner, name in ((module.conv, "weight"), (module, "v")):
        parametrize.remove_parametrizations(owner, name)
    torch.testing.assert_close(module(x), y)


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm, prune.identity])
def test_pytorchs_own_reparametrizations_train(change):
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    change(module.conv, "weight")
    module.eval()  # in training, spectral_norm's weight is another one each time
    y = module(x)
    torch.testing.assert_close(
        y, cutlass_ops.conv2d_min_add_mul(x, module.conv.weight, module.v, module.conv.bias, stride=2, padding=(1, 0), constant=0.25)
    )
    y.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def conv_result(module, x):
    return cutlass_ops.conv2d_min_add_mul(x, module.conv.weight, module.v, module.conv.bias, stride=2, padding=(1, 0), constant=0.25)


@pytest.mark.parametrize("change", [lambda conv: prune.l1_unstructured(conv, "weight", 0.5), torch.nn.utils.weight_norm])
def test_weights_that_a_hook_computes_follow_what_they_are_computed_from(change):
    """torch.nn.utils' pruning and old weight_norm compute the weight anew before each call of the layer."""
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    change(module.conv)
    source = next(p for name, p in module.conv.named_parameters() if name in ("weight_orig", "weight_v"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        before = module(x)
        module.conv(x)  # brings the weight up to date by itself
        assert torch.equal(before, conv_result(module, x))
        optimizer.zero_grad()
        before.sum().backward()
        assert source.grad is not None
        optimizer.step()
        assert not torch.equal(module(x), before)


def test_a_pre_hook_of_conv_may_change_its_input():
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    expected = module(2 * x)
    plain = module.conv.register_forward_pre_hook(lambda conv, args: (2 * args[0],))
    assert torch.equal(module(x), expected)
    plain.remove()
    module.conv.register_forward_pre_hook(lambda conv, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    assert torch.equal(module(x), expected)


def test_a_forward_hook_of_conv_is_refused():
    module = example_module()
    module.conv.register_forward_hook(lambda conv, args, result: None)
    with pytest.raises(RuntimeError, match=r"expected no forward hooks on conv.*register them on the FusedConv2d"):
        module(torch.randn(2, 3, 9, 9))


def test_a_module_is_called_with_other_parameters():
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    parameters = {name: p.detach() * 2 for name, p in module.named_parameters()}
    y = torch.func.functional_call(module, parameters, (x,))
    expected = cutlass_ops.conv2d_min_add_mul(
        x, parameters["conv.weight"], parameters["v"], parameters["conv.bias"], stride=2, padding=(1, 0), constant=0.25
    )
    assert torch.equal(y, expected)
    stacked = {name: torch.stack([p, p * 2]) for name, p in parameters.items()}
    ensemble = torch.func.vmap(lambda p: torch.func.functional_call(module, p, (x,)))(stacked)
    torch.testing.assert_close(ensemble[0], expected)


def test_a_module_under_activation_checkpointing_has_the_same_gradients():
    module, x = example_module(), torch.randn(2, 3, 9, 9)
    module(x).sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    checkpoint.checkpoint(module, x, use_reentrant=False).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected))
