"""The only module that imports cutlass_*: emits the CUDA C++ of an implicit-GEMM kernel's collectives.

Importing cutlass_cppgen opens a database in the current folder, wants a CUDA folder and sets process-wide state, so it
happens in a process of its own, in a private working directory that is thrown away: `emit` is the way in, and what
runs there is this file itself, with JSON in and out.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Operand type -> (CUTLASS name, channels of a tile: 128 bytes, the widest swizzle).
OPERANDS = {"f16": ("f16", 64), "bf16": ("bf16", 64), "tf32": ("tf32", 32)}


@dataclass(frozen=True)
class Request:
    """One kernel to emit: its traced chain, tile and operand type."""

    name: str
    chain_source: str
    inputs: tuple[tuple[str, str], ...]  # (name in the traced source, "vector" or "scalar")
    operand: str
    tile_m: int
    tile_n: int


@dataclass(frozen=True)
class Emission:
    """What CUTLASS's Python API gives: type declarations, the names of the collectives, where the inputs lie."""

    visitor_tree: str
    root: str  # name of the tree's type
    epilogue: str  # declaration of the type `epilogue_name`
    mainloop: str  # declaration of `mainloop_name`; its shared memory is what `Epilogue` leaves
    epilogue_name: str
    mainloop_name: str
    tile: tuple[int, int, int]
    inputs: dict[str, str]  # name in the traced source -> member path from the tree's Params
    constants: tuple[tuple[str, float], ...]  # (member path, value)


def cutlass_version() -> str:
    """Version of the installed nvidia-cutlass package."""
    from importlib.metadata import version

    return version("nvidia-cutlass")


def include_directories() -> list[Path]:
    """CUTLASS's header folders inside the nvidia-cutlass package (found without importing it)."""
    from importlib.util import find_spec

    found = find_spec("cutlass_library")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("expected the package nvidia-cutlass, found none; pip install 'cutlass_ops[build]'")
    source = Path(found.origin).parent / "source"
    return [source / "include", source / "tools" / "util" / "include"]


def emit(requests: Sequence[Request], cuda_home: Path) -> list[Emission]:
    """Emit all kernels in one child process. Raises RuntimeError with the child's last words where it fails."""
    with tempfile.TemporaryDirectory(prefix="cutlass_ops_emit_") as work:
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve())],
            input=json.dumps([asdict(r) for r in requests]),
            capture_output=True,
            text=True,
            cwd=work,
            env=os.environ | {"CUDA_INSTALL_PATH": str(cuda_home), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"},
            check=False,
        )
    if child.returncode:
        raise RuntimeError(f"emission by the CUTLASS Python API failed (exit code {child.returncode}):\n{child.stderr[-2000:]}")
    answers = json.loads(child.stdout.splitlines()[-1])
    return [Emission(**a | {"tile": tuple(a["tile"]), "constants": tuple((p, v) for p, v in a["constants"])}) for a in answers]


# ---- what follows runs in the child ------------------------------------------------------------------------------


def _trace(request: Request) -> tuple[Any, dict[str, float]]:
    """Trace the chain into CUTLASS's DAG IR, with example tensors that need no GPU; also the constants it meets."""
    from cutlass_cppgen.backend.evt.frontend import PythonASTFrontend
    from cutlass_cppgen.backend.evt.ir import LoadNode
    from cutlass_cppgen.backend.evt.ir.tensor import Tensor
    from cutlass_cppgen.backend.evt.passes import PassDAG2Tree
    from cutlass_library import DataType, LayoutType

    constants: dict[str, float] = {}

    def tensor(*shape: int) -> Any:
        return Tensor(element=DataType.f32, shape=shape, layout_tag=LayoutType.RowMajor)

    class Frontend(PythonASTFrontend):  # type: ignore[misc]
        def parse(self, example_inputs: dict[str, Any]) -> None:
            self.example_inputs = example_inputs
            self.visit(ast.parse(request.chain_source))

        def visit_UnaryOp(self, node: ast.UnaryOp) -> str:  # noqa: N802
            # A negative number: the one unary operation that is left.
            return self.add_imm(ast.literal_eval(node))

        def add_imm(self, value: float) -> str:  # the original makes names of values: 1e+20 is no C++ identifier
            name = f"constant{len(constants)}"
            constants[name] = float(value)
            node = LoadNode(name)
            node.tensor = {"tensor": float(value), "is_constant": True}
            self.add_node(node)
            return name

    m, n = request.tile_m, request.tile_n
    examples: dict[str, Any] = {"accum": tensor(1, m, n), "D": tensor(1, m, n)}
    for name, kind in request.inputs:
        examples[name] = tensor(1, 1, n) if kind == "vector" else 0.5
    frontend = Frontend(cc=90)
    frontend.pass_manager.nodes[PassDAG2Tree.__name__]["callable"] = _whole_graph_pass()(frontend.dag_ir)
    frontend.trace(examples)
    return frontend.dag_ir, constants


def _whole_graph_pass() -> type:
    """A pass in place of CUTLASS 4.2's PassDAG2Tree: a chain that is no tree becomes one topological visitor as a whole.

    PassDAG2Tree makes a graph of the part around each shared value alone, and drops an operand where a value is used both
    inside and behind such a part.
    """
    from copy import deepcopy

    from cutlass_cppgen.backend.evt.ir import DAGIR, ComputeNode, TopoVisitorNode
    from cutlass_cppgen.backend.evt.passes import PassDAG2Tree

    class PassWholeGraph(PassDAG2Tree):  # type: ignore[misc]
        def call(self) -> None:
            ir = self.dag_ir
            if all(ir.out_degree(node) <= 1 for node in ir.nodes):
                return
            (result,) = ir.get_all_inputs("D")
            order = ir.nodes_topological_order()
            fused = [node for node in order if isinstance(ir.get_node_meta(node), ComputeNode)]
            subgraph = DAGIR(ir.cc)
            for node in order:
                meta = deepcopy(ir.get_node_meta(node))
                meta.disabled = node not in fused
                subgraph.add_node(meta)
            for source, target in ir.edges:
                subgraph.add_edge(source, target, ir.get_edge_weight(source, target))
            graph = TopoVisitorNode(name=f"dag_{result}", subgraph=subgraph, output_node=ir.get_node_meta(result))
            ir.add_node(graph)
            loads = [node for node in order if node not in fused and node != "D"]
            for index, node in enumerate(loads):
                ir.add_edge(node, graph.name, weight=index)
            ir.replace_all_uses_with(result, graph.name)
            for node in fused:
                if ir.has_node(node):
                    ir.remove_node(node)

    return PassWholeGraph


def _visitor_tree(dag_ir: Any) -> tuple[str, str]:
    """Declarations of the epilogue visitor tree, and the name of its root."""
    from cutlass_cppgen.backend.evt.backend.emitter_base import FusionCallbacks

    declarations, root = FusionCallbacks(dag_ir, cc=90, emit_CD=False).emit()
    declarations = re.sub(r",\s*>", "\n>", declarations)  # 4.2 ends a DAG's edge list with a comma, which C++ refuses
    # PyTorch's minimum, maximum and clamp keep NaN; CUTLASS's default functors drop it.
    declarations = re.sub(r"cutlass::(maximum|minimum)\b", r"cutlass::\1_with_nan_propagation", declarations)
    return declarations, root


def _member_paths(declarations: str, root: str) -> dict[str, str]:
    """Member path of every leaf in the root's Params.

    CUTLASS stores a visitor's operands as op_0..op_3, and five or more as a cute::tuple (first_, rest_.first_, ...). A tree
    visitor keeps its node after its children.
    """
    bodies = {m[1]: m[2] for m in re.finditer(r"using (\w+) = ([^;]+);", declarations)}

    def operands(name: str) -> list[str]:
        body = bodies[name]
        if "Sm90EVT<" in body:
            node, *children = re.findall(r"\w+", body.split("Sm90EVT<", 1)[1])
            return [*children, node]
        if "Sm90TopologicalVisitor<" in body:
            return re.findall(r"\w+", body.rsplit(">,", 1)[1])
        return []

    paths: dict[str, str] = {}

    def walk(name: str, path: str) -> None:
        children = operands(name)
        for i, child in enumerate(children):
            step = f".op_{i}" if len(children) <= 4 else f"{'.rest_' * i}.first_"
            walk(child, path + step)
        if not children:
            paths[name] = path

    walk(root, "")
    return paths


def _check_operands(declarations: str) -> None:
    """Raise RuntimeError where a node lost an operand in CUTLASS's passes."""
    bodies = {m[1]: m[2] for m in re.finditer(r"using (\w+) = ([^;]+);", declarations)}
    binary = "plus|minus|multiplies|divides|maximum_with_nan_propagation|minimum_with_nan_propagation"

    def check(node: str, operands: int) -> None:
        if "Sm90Compute<" in bodies[node]:
            expected = 2 if re.search(rf"cutlass::({binary})\b", bodies[node]) else 1
            if operands != expected:
                raise RuntimeError(f"CUTLASS's passes left {node} with {operands} operands instead of {expected}: {bodies[node]}")

    for body in bodies.values():
        if "Sm90EVT<" in body:
            node, *children = re.findall(r"\w+", body.split("Sm90EVT<", 1)[1])
            check(node, len(children))
        if "Sm90TopologicalVisitor<" in body:
            edges = re.findall(r"cute::seq<([^>]*)>", body)
            for node, edge in zip(re.findall(r"\w+", body.rsplit(">,", 1)[1]), edges):
                check(node, len(re.findall(r"\d+", edge)))


def _operation(request: Request) -> Any:
    """cutlass_library's description of the SM90 conv2d fprop: NHWC activation, KRSC filter, fp32 accumulator and output."""
    from cutlass_library import (
        ConvKind,
        DataType,
        EpilogueScheduleType,
        KernelScheduleType,
        LayoutType,
        MathInstruction,
        MathOperation,
        OpcodeClass,
        TensorDescription,
        TileDescription,
        TileSchedulerType,
    )
    from cutlass_library.generator import ConvOperation3x

    name, tile_k = OPERANDS[request.operand]
    operand = DataType[name]
    k_instruction = 8 if request.operand == "tf32" else 16
    math = MathInstruction(
        [64, request.tile_n, k_instruction], operand, operand, DataType.f32, OpcodeClass.TensorOp, MathOperation.multiply_add
    )
    tile = TileDescription([request.tile_m, request.tile_n, tile_k], 0, [1, 1, 1], math, 90, 90, [1, 1, 1])
    nhwc = TensorDescription(operand, LayoutType.TensorNHWC, tile_k // 8)
    operation = ConvOperation3x(
        ConvKind.Fprop,
        tile,
        nhwc,
        nhwc,
        TensorDescription(DataType.void, LayoutType.TensorNHWC, 4),
        element_compute=DataType.f32,
        D=TensorDescription(DataType.f32, LayoutType.RowMajor, 4),
        kernel_schedule=KernelScheduleType.ImplicitTmaWarpSpecializedSm90,
        epilogue_schedule=EpilogueScheduleType.TmaWarpSpecialized,
        tile_scheduler=TileSchedulerType.Default,
    )
    # The output is dense, so its N x P x Q pixels are one mode and a plain matrix store serves (no im2col store).
    operation.C.layout = LayoutType.RowMajor
    return operation


def _collectives(request: Request, root: str) -> dict[str, str]:
    """Epilogue and mainloop as EmitConv3xInstance emits them, with the tree spliced in."""
    from cutlass_library.conv3x_emitter import EmitConv3xInstance

    operation = _operation(request)
    name = operation.procedural_name()
    text = EmitConv3xInstance().emit(operation)
    text, spliced = re.subn(r"\n\s*// , class FusionOpOrCallbacks = [^\n]*\n", f",\n    {root}\n", text)
    # The persistent kernel layer replaces ConvUniversal, and needs a little shared memory for its own barriers.
    text, cut = re.subn(r"using \w+_problem_shape = .*", "", text, flags=re.DOTALL)
    carveout = "StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage)) + 1024>"
    text, carved = re.subn(r"StageCountAutoCarveout<sizeof\([^)]*\)>", carveout, text)
    # Void has no size: the emitter's alignment of C is that of D.
    text = text.replace("128 / cute::sizeof_bits_v<void>", "4")
    epilogue, found, mainloop = text.partition(f"using {name}_mainloop =")
    if (spliced, cut, carved, bool(found)) != (1, 1, 1, True):
        raise RuntimeError(f"EmitConv3xInstance's text is not the one of CUTLASS 4.2: {spliced=} {cut=} {carved=} {found=}\n{text}")
    return {
        "epilogue": epilogue.strip() + "\n",
        "mainloop": found + mainloop.rstrip() + "\n",
        "epilogue_name": f"{name}_epilogue",
        "mainloop_name": f"{name}_mainloop",
    }


def _emit_one(request: Request) -> Emission:
    dag_ir, constants = _trace(request)
    declarations, root = _visitor_tree(dag_ir)
    _check_operands(declarations)
    paths = _member_paths(declarations, root)

    def path(node: str) -> str:  # a node's C++ type is its name in camel case
        return paths[node.capitalize()]

    return Emission(
        visitor_tree=declarations.strip() + "\n",
        root=root,
        **_collectives(request, root),
        tile=(request.tile_m, request.tile_n, OPERANDS[request.operand][1]),
        inputs={node: path(node) + (".ptr_row" if kind == "vector" else ".scalars") for node, kind in request.inputs},
        constants=tuple((path(node) + ".scalars", value) for node, value in constants.items()),
    )


def _child() -> None:
    sys.path.pop(0)  # this file's folder, which Python put there, must not shadow anything
    requests = [Request(**r | {"inputs": tuple(tuple(i) for i in r["inputs"])}) for r in json.load(sys.stdin)]
    print(json.dumps([asdict(_emit_one(r)) for r in requests]))


if __name__ == "__main__":
    _child()
