"""The `operator` decorator: what it records, and every signature that it refuses."""

from __future__ import annotations

import functools

import pytest

from cutlass_ops import OPERATORS, AvgPool2d, MaxPool2d, Spec, Tile, Vector, operator
from cutlass_ops.spec import RESERVED, Argument, Pool


def test_a_spec_records_name_arguments_pool_tile_and_doc():
    def my_chain(accum, v: Vector, bias: Vector = None, scale: float = 2, shift=0.5):
        """First line.

        Second.
        """
        return (accum + bias) * v * scale + shift

    spec = operator(pool=MaxPool2d(3), tile=Tile(128, 64))(my_chain)
    assert spec == Spec(
        "my_chain",
        my_chain,
        (
            Argument("v", "vector"),
            Argument("bias", "vector", optional=True),
            Argument("scale", "scalar", default=2.0),
            Argument("shift", "scalar", default=0.5),
        ),
        Pool("max", 3),
        Tile(128, 64),
        "First line.\n\nSecond.",
    )
    assert [a.name for a in spec.vectors] == ["v", "bias"]
    assert [a.name for a in spec.scalars] == ["scale", "shift"]


def test_pool_tile_and_doc_have_defaults():
    def plain(accum):
        return accum + 1

    spec = operator()(plain)
    assert (spec.pool, spec.tile, spec.doc, spec.arguments) == (None, Tile(192, 128), "", ())


def test_an_integer_default_becomes_a_float():
    def chain(accum, scale=3):
        return accum * scale

    (argument,) = operator()(chain).arguments
    assert isinstance(argument.default, float)
    assert argument.default == 3.0


def test_pools_are_named_by_kind():
    assert AvgPool2d(2) == Pool("avg", 2)
    assert MaxPool2d(4) == Pool("max", 4)


def test_specs_are_frozen_and_hashable():
    spec = OPERATORS["conv2d"]
    assert hash(spec) == hash(OPERATORS["conv2d"])
    with pytest.raises(AttributeError):
        spec.name = "other"


def test_the_shipped_operators_are_found_by_name():
    assert {name: spec.name for name, spec in OPERATORS.items()} == {
        name: name for name in ("conv2d", "conv2d_sub_tanh_sub_avgpool", "conv2d_relu_hardswish", "conv2d_min_add_mul")
    }


def chain_without_arguments():
    return 1


def chain_with_another_first_argument(x, accum):
    return accum


def chain_with_an_undeclared_argument(accum, scale):
    return accum * scale


def chain_with_a_bool(accum, flag=True):
    return accum * flag


def chain_with_a_string(accum, scale="2"):
    return accum * scale


def chain_with_a_number_for_a_vector(accum, bias: Vector = 0.0):
    return accum + bias


def chain_with_varargs(accum, *vectors):
    return accum


def chain_with_keyword_only(accum, *, scale=1.0):
    return accum * scale


def chain_with_kwargs(accum, **scales):
    return accum


@pytest.mark.parametrize(
    ("chain", "error", "message"),
    [
        (functools.partial(chain_with_a_bool), TypeError, r"expected a Python function as the chain, got partial; declare it with def"),
        (lambda accum: accum, ValueError, r"expected a chain declared with def \(its name names the operator\), got '<lambda>'"),
        (chain_without_arguments, ValueError, r"chain_without_arguments: expected `accum` .* first argument, got no argument"),
        (chain_with_another_first_argument, ValueError, r"expected `accum` .* as the chain's first argument, got x"),
        (chain_with_an_undeclared_argument, TypeError, r"argument 'scale': expected the annotation Vector or a number as default"),
        (chain_with_a_bool, TypeError, r"argument 'flag': expected the annotation Vector or a number as default"),
        (chain_with_a_string, TypeError, r"argument 'scale': expected the annotation Vector or a number as default"),
        (chain_with_a_number_for_a_vector, TypeError, r"argument 'bias': expected default None .* for a Vector, got 0.0"),
        (chain_with_varargs, TypeError, r"argument 'vectors': expected an ordinary argument, got a variadic positional one"),
        (chain_with_keyword_only, TypeError, r"argument 'scale': expected an ordinary argument, got a keyword-only one"),
        (chain_with_kwargs, TypeError, r"argument 'scales': expected an ordinary argument, got a variadic keyword one"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_signature_that_does_not_say_what_its_arguments_are_is_refused(chain, error, message):
    with pytest.raises(error, match=message):
        operator()(chain)


def test_a_name_that_no_file_can_have_is_refused(import_source):
    name = "o" * 201
    with pytest.raises(ValueError, match="expected a name of at most 200 characters for the chain, got 201"):
        import_source(f"@operator()\ndef {name}(accum):\n    return accum\n")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_that_every_operator_uses_are_refused(import_source, name):
    with pytest.raises(
        ValueError, match=rf"chain: argument '{name}' has a name that every operator already uses \(.*{name}.*\); rename it"
    ):
        import_source(f"@operator()\ndef chain(accum, {name}=1.0):\n    return accum * {name}\n")


@pytest.mark.parametrize("tile", [Tile(0, 128), Tile(100, 128), Tile(320, 128), Tile(128, 0), Tile(128, 12), Tile(128, 264)])
def test_tiles_that_the_tensor_cores_do_not_have_are_refused(tile):
    def chain(accum):
        return accum + 1

    with pytest.raises(ValueError, match=f"chain: expected a tile of 64 to 256 .*, got {tile.m} x {tile.n}"):
        operator(tile=tile)(chain)


def test_an_empty_pool_is_refused():
    def chain(accum):
        return accum + 1

    with pytest.raises(ValueError, match="chain: expected a pool kernel_size of at least 1, got 0"):
        operator(pool=AvgPool2d(0))(chain)


@pytest.mark.parametrize("pool", [3, "max", (2, 2), MaxPool2d((2, 2)), AvgPool2d(2.0), MaxPool2d(True), MaxPool2d(None)], ids=repr)
def test_what_is_no_pool_is_refused(pool):
    def chain(accum):
        return accum + 1

    with pytest.raises(TypeError, match="chain: expected pool to be AvgPool2d or MaxPool2d of an int, or None, got "):
        operator(pool=pool)(chain)


def test_what_is_no_tile_is_refused():
    def chain(accum):
        return accum + 1

    with pytest.raises(TypeError, match=r"chain: expected tile to be a Tile, got \(128, 128\)"):
        operator(tile=(128, 128))(chain)
