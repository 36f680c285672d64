"""What CUTLASS's Python API gives for a chain: the shape of the tree, where the inputs lie, and no traces left behind."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import pytest

from cutlass_ops import OPERATORS
from cutlass_ops.codegen import source
from cutlass_ops.codegen.cutlass_api import OPERANDS, Request, emit
from cutlass_ops.codegen.frontend import normalize


def request(name, body, inputs=(), operand="f16", tile=(128, 64)):
    arguments = ", ".join(["accum", *(i for i, _ in inputs)])
    text = f"def chain({arguments}):\n" + "".join(f"    {line}\n" for line in body) + "    return D\n"
    return Request(name, text, tuple(inputs), operand, *tile)


def shipped(name, operand):
    spec, traced = OPERATORS[name], normalize(OPERATORS[name])
    return Request(name, traced.source, tuple((i.internal, i.kind) for i in traced.inputs), operand, spec.tile.m, spec.tile.n)


V, W, S = ("in0", "vector"), ("in1", "vector"), ("in2", "scalar")
REQUESTS = [
    *(shipped(name, operand) for name in OPERATORS for operand in OPERANDS),
    request("accum_alone", ["D = accum"]),
    request("constants", ["D = (accum + 2.0) * 2.0 - 1e+20"]),
    request("maximum_of_minimum", ["D = maximum(minimum(accum, 1.0), 0.5)"]),
    request("dag", ["D = (accum + in0) * in0"], [V]),
    request("reused_value", ["var0 = tanh(accum)", "D = var0 + var0"]),
    request("twice_accum", ["D = accum * accum"]),
    request("five_nodes", ["var0 = accum + in0", "var1 = var0 * in1", "D = var1 + var0 * in2"], [V, W, S]),
    # KernelBench's way to write problem 57
    request("relu_clamp", ["var0 = relu(accum + in0)", f"D = var0 * minimum(maximum((var0 + 3.0) * {1 / 6}, 0.0), 1.0)"], [V]),
    request("inside_and_outside", ["var0 = accum + in0", "var1 = tanh(var0)", "D = var1 * var0 - var1"], [V]),
]


@pytest.fixture(scope="module")
def emissions(toolchain):
    """Every request's emission by name (and operand), all from one child process."""
    found = emit(REQUESTS, toolchain.home)
    return {(r.name, r.operand): e for r, e in zip(REQUESTS, found)}


def tree(emission):
    """The visitor tree as nested tuples (node, *operands) or names of leaves; a DAG as its list of (node, operand indices)."""
    bodies = dict(re.findall(r"using (\w+) = ([^;]+);", emission.visitor_tree))
    epilogue = re.search(r"TmaWarpSpecialized,\s+(\w+)\s+>::CollectiveOp", emission.epilogue)

    def walk(name):
        body = bodies[name]
        if "Sm90EVT<" in body:
            node, *operands = re.findall(r"\w+", body.split("Sm90EVT<", 1)[1])
            return (walk(node), *map(walk, operands))
        if "Sm90TopologicalVisitor<" in body:
            edges = [tuple(map(int, re.findall(r"\d+", e))) for e in re.findall(r"seq<([^>]*)>", body)]
            return [(walk(n), e) for n, e in zip(re.findall(r"\w+", body.rsplit(">,", 1)[1]), edges)]
        if "Sm90Compute<" in body:
            return re.search(r"Sm90Compute<\s*([\w:]+)", body)[1].rsplit("::", 1)[1]
        return name

    return walk(epilogue[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conv2d", ("plus", "Accum", "In0")),
        ("conv2d_relu_hardswish", ("HardSwish", ("ReLu", ("plus", "Accum", "In0")))),
        ("conv2d_sub_tanh_sub_avgpool", ("minus", ("Tanh", ("minus", ("plus", "Accum", "In0"), "In1")), "In2")),
        (
            "conv2d_min_add_mul",
            ("multiplies", ("plus", ("minimum_with_nan_propagation", ("plus", "Accum", "In1"), "In2"), "In0"), "In3"),
        ),
    ],
)
@pytest.mark.parametrize("operand", OPERANDS)
def test_shipped_trees(emissions, name, operand, expected):
    assert tree(emissions[name, operand]) == expected


def test_a_value_used_twice_gives_a_dag(emissions):
    nodes = tree(emissions["relu_clamp", "f16"])
    assert isinstance(nodes, list)
    assert nodes[-1][0] == "multiplies"
    assert "ReLu" in str(nodes)


def test_accum_alone_is_a_tree_of_one_leaf(emissions):
    emission = emissions["accum_alone", "f16"]
    assert tree(emission) == "Accum"
    assert (emission.inputs, emission.constants) == ({}, ())


def test_equal_constants_have_a_place_each(emissions):
    constants = emissions["constants", "f16"].constants
    assert [value for _, value in constants] == [2.0, 2.0, 1e20]
    assert len({path for path, _ in constants}) == 3


@pytest.mark.parametrize("expression", ["accum * -1.0", "maximum(accum, -0.5)", "-3.0 - accum"])
def test_a_negative_constant_is_a_constant(toolchain, expression):
    (emission,) = emit([request("negative", [f"D = {expression}"])], toolchain.home)
    assert [f"{value}" for _, value in emission.constants] == re.findall(r"-\d\.\d", expression)


def test_minimum_and_maximum_keep_nan(emissions):
    found = str(tree(emissions["maximum_of_minimum", "f16"]))
    assert "minimum_with_nan_propagation" in found
    assert "maximum_with_nan_propagation" in found


def test_a_vector_used_twice_is_loaded_once(emissions):
    emission = emissions["dag", "f16"]
    assert tree(emission) == [("Accum", ()), ("In0", ()), ("plus", (0, 1)), ("multiplies", (2, 1))]
    assert emission.inputs == {"in0": ".op_1.ptr_row"}


@pytest.mark.parametrize("name", ["reused_value", "twice_accum"])
def test_a_value_used_twice_by_one_operation_keeps_both_uses(emissions, name):
    node, operands = tree(emissions[name, "f16"])[-1]
    assert node in ("plus", "multiplies")
    assert len(operands) == 2


def test_more_than_four_nodes_lie_in_a_cute_tuple(emissions):
    emission = emissions["five_nodes", "f16"]
    nodes = [name for name, _ in tree(emission)]
    assert len(nodes) >= 5
    for name, member in (("in0", ".ptr_row"), ("in1", ".ptr_row"), ("in2", ".scalars")):
        assert emission.inputs[name].endswith("first_" + member) or ".op_" in emission.inputs[name]
    rest = {name: emission.inputs[name].count(".rest_") for name in ("in1", "in2")}
    assert rest == {name: nodes.index(name.capitalize()) for name in rest}


ARITY = {"plus": 2, "minus": 2, "multiplies": 2, "divides": 2, "Tanh": 1, "Identity": 1, "ReLu": 1, "HardSwish": 1}
ARITY |= {"minimum_with_nan_propagation": 2, "maximum_with_nan_propagation": 2}


def arities(node):
    """(operation, number of operands) of every operation in a tree."""
    if isinstance(node, list):
        for operation, operands in node:
            if operation in ARITY:
                yield operation, len(operands)
            else:
                yield from arities(operation)
    elif isinstance(node, tuple):
        operation, *operands = node
        if isinstance(operation, str):
            yield operation, len(operands)
        for operand in operands:
            yield from arities(operand)


@pytest.mark.parametrize("number", range(len(REQUESTS)), ids=lambda i: f"{REQUESTS[i].name}-{REQUESTS[i].operand}")
def test_every_operation_has_all_its_operands(emissions, number):
    emission = emissions[REQUESTS[number].name, REQUESTS[number].operand]
    for operation, count in arities(tree(emission)):
        assert count == ARITY[operation], (operation, emission.visitor_tree)


@pytest.mark.parametrize("number", range(len(REQUESTS)), ids=lambda i: f"{REQUESTS[i].name}-{REQUESTS[i].operand}")
def test_every_input_and_constant_has_a_place_of_its_own(emissions, number):
    wanted, emission = REQUESTS[number], emissions[REQUESTS[number].name, REQUESTS[number].operand]
    assert set(emission.inputs) == {name for name, _ in wanted.inputs}
    for name, kind in wanted.inputs:
        assert emission.inputs[name].endswith(".ptr_row" if kind == "vector" else ".scalars")
    places = [*emission.inputs.values(), *(path for path, _ in emission.constants)]
    assert len(set(places)) == len(places)


def test_the_tile_is_the_one_asked_for(emissions):
    assert emissions["conv2d", "f16"].tile == (192, 128, 64)
    assert emissions["conv2d", "tf32"].tile == (192, 128, 32)
    assert "cute::Shape<cute::_128, cute::_64, cute::Shape<cute::_64>>" in emissions["dag", "f16"].mainloop


# ---- no traces ---------------------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, sys
from pathlib import Path
from cutlass_ops.codegen.cutlass_api import Request, emit
request = Request("r", "def chain(accum, in0):\\n    D = (accum + in0) * in0 - 1.0\\n    return D\\n", (("in0", "vector"),), "f16", 128, 64)
print(hashlib.sha256(repr(emit([request], Path(sys.argv[1]))).encode()).hexdigest())
print([m for m in sys.modules if m.partition(".")[0] in ("cutlass_cppgen", "cutlass_library", "cutlass")])
"""


def run_emission(toolchain, folder, repository, seed):
    for name in ("cwd", "temp"):
        (folder / name).mkdir(parents=True)
    environment = os.environ | {"PYTHONHASHSEED": seed, "TMPDIR": str(folder / "temp"), "PYTHONPATH": str(repository)}
    command = [sys.executable, "-c", SCRIPT, str(toolchain.home)]
    result = subprocess.run(command, cwd=folder / "cwd", env=environment, capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_emission_is_reproducible_silent_and_in_a_process_of_its_own(toolchain, repository, tmp_path):
    first = run_emission(toolchain, tmp_path / "a", repository, "1")
    second = run_emission(toolchain, tmp_path / "b", repository, "2")
    assert first == second
    assert first[1] == "[]"  # nothing of CUTLASS in the parent
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []
    assert list((tmp_path / "a" / "temp").iterdir()) == []


def test_a_failing_emission_says_why(toolchain):
    with pytest.raises(RuntimeError, match=r"emission by the CUTLASS Python API failed \(exit code 1\):(.|\n)*nothing_known"):
        emit([request("broken", ["D = nothing_known(accum)"])], toolchain.home)


# ---- the source file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda t: t + " ", lambda t: t.replace("plus", "minus"), lambda t: t.partition("\n")[2], lambda t: ""])
def test_a_changed_source_is_no_longer_sealed(change):
    text = source.seal("// plus\n\nint a;\n")
    assert source.is_sealed(text)
    assert not source.is_sealed(change(text))


def test_a_different_request_gives_a_different_text(emissions):
    texts = {dataclasses.astuple(e)[0] + e.mainloop for (name, _), e in emissions.items() if name == "conv2d"}
    assert len(texts) == len(OPERANDS)
