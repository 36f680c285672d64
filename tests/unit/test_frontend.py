"""Chain -> normalized source: what it looks like, that it computes the same, and what is refused with which words."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cutlass_ops import OPERATORS, ChainError, chain, operator
from cutlass_ops.codegen.frontend import SUPPORTED, normalize

CHANNELS = 5


def body(spec):
    """Lines of the normalized source between `def` and `return`."""
    first, *lines, last = normalize(spec).source.splitlines()
    assert first == f"def chain({', '.join(['accum', *(i.internal for i in normalize(spec).inputs)])}):"
    assert last == "    return D"
    return [line.strip() for line in lines]


def evaluate_both(spec, seed=0):
    """Values of the chain and of its normalized source, on the same random float64 tensors."""
    generator = torch.Generator().manual_seed(seed)
    accum = torch.randn(2, CHANNELS, 3, 4, dtype=torch.float64, generator=generator)
    values = {}
    for argument in spec.arguments:
        vector = torch.randn(1, CHANNELS, 1, 1, dtype=torch.float64, generator=generator)
        values[argument.name] = vector if argument.kind == "vector" else argument.default
    traced = normalize(spec)
    namespace = {name: getattr(chain, name) for name in chain.FUNCTIONS}
    exec(traced.source, namespace)  # noqa: S102 (our own text, with nothing but the chain's functions in reach)
    # A copy: an augmented assignment changes a tensor in place where the chain is called as it stands.
    return spec.chain(accum.clone(), **values), namespace["chain"](accum, **{i.internal: values[i.name] for i in traced.inputs})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv2d", ["D = accum + in0"]),
        ("conv2d_sub_tanh_sub_avgpool", ["D = tanh(accum + in0 - in1) - in2"]),
        ("conv2d_relu_hardswish", ["D = hardswish(relu(accum + in0))"]),
        ("conv2d_min_add_mul", ["D = (minimum(accum + in1, in2) + in0) * in3"]),
    ],
)
def test_normalized_source_of_the_shipped_operators(name, expected):
    assert body(OPERATORS[name]) == expected


def test_inputs_keep_the_chains_order_names_and_kinds():
    inputs = normalize(OPERATORS["conv2d_min_add_mul"]).inputs
    assert [(i.internal, i.name, i.kind) for i in inputs] == [
        ("in0", "v", "vector"),
        ("in1", "bias", "vector"),
        ("in2", "constant", "scalar"),
        ("in3", "scale", "scalar"),
    ]


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ("return accum", ["D = accum"]),
        ("return accum * (1 + 2 * 3)", ["D = accum * 7.0"]),
        ("return accum / (1 / 4)", ["D = accum * 4.0"]),
        ("return accum / -2", ["D = accum * -0.5"]),
        ("return 2 / accum", ["D = 2.0 / accum"]),
        ("return accum / 1e38", ["D = accum / 1e+38"]),  # its reciprocal is no normal fp32 number
        ("return accum / 1e-39", ["D = accum / 1e-39"]),
        ("return accum / 0", ["D = accum / 0.0"]),
        ("return -accum", ["D = accum * -1.0"]),
        ("return +accum", ["D = accum"]),
        ("return accum + -3", ["D = accum + -3.0"]),
        ("return clamp(accum, -1, 1)", ["D = minimum(maximum(accum, -1.0), 1.0)"]),
        ("return clamp(max=6, min=0, x=accum)", ["D = minimum(maximum(accum, 0.0), 6.0)"]),
        ("return accum * LIMIT", ["D = accum * 7.5"]),
        ("return chain.tanh(accum)", ["D = tanh(accum)"]),
        ("a = 2\n    return accum * a", ["D = accum * 2.0"]),
        ("a = accum\n    return a + 1", ["D = accum + 1.0"]),
        ("a: float = relu(accum)\n    return a + a", ["var0 = relu(accum)", "D = var0 + var0"]),
        ("a = accum + 1\n    a = a * a\n    return a", ["var0 = accum + 1.0", "var1 = var0 * var0", "D = var1"]),
        ("accum = accum + 1\n    return accum * accum", ["var0 = accum + 1.0", "D = var0 * var0"]),
        ("accum = accum + 1\n    accum = accum * 2\n    return accum", ["var0 = accum + 1.0", "var1 = var0 * 2.0", "D = var1"]),
        ("D = accum + 1\n    var0 = D * D\n    return var0 - D", ["var0 = accum + 1.0", "var1 = var0 * var0", "D = var1 - var0"]),
    ],
)
def test_constructs_are_rewritten(import_source, statements, expected):
    module = import_source(f"LIMIT = 7.5\n@operator()\ndef f(accum):\n    '''Doc.'''\n    {statements}\n")
    assert body(module.f) == expected
    torch.testing.assert_close(*evaluate_both(module.f), rtol=0, atol=0)


def test_a_number_of_an_enclosing_function_is_a_constant(import_source):
    module = import_source(
        """
        def make(limit):
            @operator()
            def f(accum):
                return minimum(accum, limit)
            return f
        """
    )
    assert body(module.make(4)) == ["D = minimum(accum, 4.0)"]


def test_an_argument_shadows_a_global_number(import_source):
    module = import_source("scale = 7.5\n@operator()\ndef f(accum, scale=2.0):\n    return accum * scale\n")
    assert body(module.f) == ["D = accum * in0"]


@pytest.mark.parametrize("name", OPERATORS)
def test_normalized_source_computes_the_shipped_chains(name):
    torch.testing.assert_close(*evaluate_both(OPERATORS[name]), rtol=0, atol=0)


def test_a_value_that_is_used_twice_is_computed_once(import_source):
    """KernelBench's way to write problem 57."""
    module = import_source("@operator()\ndef f(accum):\n    r = relu(accum)\n    return r * clamp((r + 3) / 6, 0, 1)\n")
    assert body(module.f) == ["var0 = relu(accum)", f"D = var0 * minimum(maximum((var0 + 3.0) * {1 / 6}, 0.0), 1.0)"]
    torch.testing.assert_close(*evaluate_both(module.f), rtol=2.0**-51, atol=0)  # its division by 6 is a multiplication


@pytest.mark.parametrize("divisor", [3.0, -7.0, 1e30, 1.1])
def test_a_division_by_a_number_is_a_multiplication_within_two_roundings(import_source, divisor):
    module = import_source(f"LIMIT = {divisor}\n@operator()\ndef f(accum):\n    return accum / LIMIT\n")
    assert body(module.f) == [f"D = accum * {1 / divisor}"]
    torch.testing.assert_close(*evaluate_both(module.f), rtol=2.0**-52, atol=0)


# ---- random chains -----------------------------------------------------------------------------------------------

numbers = st.recursive(
    st.sampled_from(["0.5", "3", "-2", "1e-3", "LIMIT", "s"]),
    lambda n: st.builds("({} {} {})".format, n, st.sampled_from("+-*"), n) | st.builds("(-{})".format, n),
    max_leaves=3,
)
UNARY = sorted(name for name, count in chain.FUNCTIONS.items() if count == 1)


def grow(tensor):
    value = tensor | numbers
    return st.one_of(
        st.builds("({} {} {})".format, tensor, st.sampled_from("+-*"), value),
        # By these numbers a multiplication with the reciprocal is the same division.
        st.builds("({} / {})".format, tensor, tensor | st.sampled_from(["0.5", "-2", "(-4 * 4)", "s"])),
        st.builds("({} {} {})".format, value, st.sampled_from("+-*/"), tensor),
        st.builds("(-{})".format, tensor),
        st.builds("{}({})".format, st.sampled_from(UNARY), tensor),
        st.builds("{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), tensor, value),
        st.builds("chain.clamp({}, {}, max={})".format, tensor, value, value),
    )


tensors = st.recursive(st.sampled_from(["accum", "v"]), grow, max_leaves=8)


@given(first=tensors, second=tensors, third=tensors, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_normalized_source_computes_random_chains(import_source, first, second, third, seed):
    module = import_source(
        f"""
        LIMIT = 1.5
        @operator()
        def f(accum, v: Vector, s: float = 0.75):
            t = {first}
            t = t - {second} * v
            return t + {third} * s + accum
        """
    )
    torch.testing.assert_close(*evaluate_both(module.f, seed), rtol=0, atol=0, equal_nan=True)


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statements", "line", "construct"),
    [
        ("if s > 0:\n        return accum\n    return accum * s", 1, "a statement of kind If"),
        ("for _ in range(3):\n        accum += s\n    return accum", 1, "a statement of kind For"),
        ("while s:\n        accum += s\n    return accum", 1, "a statement of kind While"),
        ("a = b = accum * s\n    return a + b", 1, "a statement of kind Assign"),
        ("a, b = accum, s\n    return a + b", 1, "assignment to (a, b)"),
        ("accum[0] = s\n    return accum", 1, "assignment to accum[0]"),
        ("accum[0] += s\n    return accum", 1, "a statement of kind AugAssign"),
        ("accum += s\n    return accum", 1, "a statement of kind AugAssign"),
        ("a: float\n    return accum * s", 1, "a statement of kind AnnAssign"),
        ("relu(accum)\n    return accum * s", 1, "a statement of kind Expr"),
        ("assert s\n    return accum * s", 1, "a statement of kind Assert"),
        ("a = accum\n    return a ** s", 2, "the operator Pow"),
        ("return accum // s", 1, "the operator FloorDiv"),
        ("return accum @ s", 1, "the operator MatMult"),
        ("return (accum > 0) * s", 1, "an expression of kind Compare: accum > 0"),
        ("return accum if s else accum * s", 1, "an expression of kind IfExp: accum if s else accum * s"),
        ("return accum[0] * s", 1, "an expression of kind Subscript: accum[0]"),
        ("return accum * math.pi * s", 1, "an expression of kind Attribute: math.pi"),
        ("return not accum", 1, "an expression of kind UnaryOp: not accum"),
        ("return (lambda y: y)(accum) * s", 1, "a call of lambda y: y"),
        ("return torch.sin(accum) * s", 1, "a call of torch.sin"),
        ("return sorted(accum) * s", 1, "a call of sorted"),
        ("return accum.tanh() * s", 1, "a call of accum.tanh"),
        ("return tanh(accum, s)", 1, "a call of tanh: too many positional arguments"),
        ("return gelu(accum, approximate='tanh') * s", 1, "a call of gelu: got an unexpected keyword argument 'approximate'"),
        ("return minimum(*[accum, s])", 1, "a call of minimum: missing a required argument: 'b'"),
        ("return accum * s * minimum(1, 2)", 1, "a call of minimum on numbers alone"),
        ("return accum * s + unknown", 1, "the name 'unknown', which is no argument, variable or number"),
        ("return accum * s + TABLE", 1, "TABLE = (1, 2), which is no number"),
        ("return accum * s + True", 1, "True = True, which is no number"),
        ("return accum * s + 'a'", 1, "'a' = 'a', which is no number"),
        ("return accum * s + 2j", 1, "2j = 2j, which is no number"),
        ("return accum * s + 1 / 0", 1, "a division of two numbers by zero"),
        ("return accum", 0, "argument 's' is never used"),
        ("return s", 1, "the result does not depend on `accum`"),
        ("return 1.0", 1, "the result does not depend on `accum`"),
        ("a = accum * s", 1, "expected a final `return expression`"),
        ("return", 1, "expected a final `return expression`"),
        ("'''Only a docstring.'''", 0, "expected a final `return expression`"),
        ("pass", 1, "expected a final `return expression`"),
    ],
)
def test_a_refusal_names_file_line_construct_and_what_is_supported(import_source, statements, line, construct):
    module = import_source(f"TABLE = (1, 2)\n@operator()\ndef f(accum, s=2.0):\n    {statements}\n")
    with pytest.raises(ChainError) as error:
        normalize(module.f)
    first, text, supported = str(error.value.args[0]).splitlines()
    source, start = inspect.getsourcelines(module.f.chain)
    assert first == f"{module.__file__}:{start + 1 + line}: chain 'f' cannot be traced: {construct}"
    assert text == "    " + source[1 + line].strip()
    assert supported == f"Supported are {SUPPORTED}."
    for name in chain.FUNCTIONS:
        assert name in supported


def test_an_accum_whose_value_is_not_part_of_the_result_is_refused(import_source):
    module = import_source("@operator()\ndef f(accum, v: Vector):\n    unused = accum + 1\n    return v * 2\n")
    with pytest.raises(ChainError, match="the result does not depend on `accum`"):
        normalize(module.f)


def test_an_argument_whose_value_is_not_part_of_the_result_is_refused(import_source):
    module = import_source("@operator()\ndef f(accum, v: Vector):\n    unused = accum + v\n    return accum * 2\n")
    with pytest.raises(ChainError, match="argument 'v' is never used"):
        normalize(module.f)


def test_a_chain_without_a_source_file_is_refused():
    from cutlass_ops import operator

    namespace = {}
    exec("def f(accum):\n    return accum + 1\n", namespace)  # noqa: S102
    with pytest.raises(ChainError, match=r"f: expected a chain whose source is in a file, found none .*; put it into a .py file"):
        normalize(operator()(namespace["f"]))


def relu(x):
    """Not the chain's function of this name."""
    return x * 0.5


def test_a_function_is_what_its_name_stands_for_not_what_it_is_called():
    from cutlass_ops.chain import minimum as larger

    @operator()
    def renamed(accum):
        return larger(accum, 1.0)

    @operator()
    def of_the_module(accum):
        return chain.tanh(accum)

    @operator()
    def shadowed(accum):
        return relu(accum)

    @operator()
    def of_another_module(accum):
        return torch.tanh(accum)

    assert body(renamed) == ["D = minimum(accum, 1.0)"]
    assert body(of_the_module) == ["D = tanh(accum)"]
    for spec, call in ((shadowed, "relu"), (of_another_module, "torch.tanh")):
        with pytest.raises(ChainError, match=rf"test_frontend\.py:\d+: chain '{spec.name}' cannot be traced: a call of {call}"):
            normalize(spec)
