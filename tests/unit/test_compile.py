"""The operators inside torch.compile, torch.export and AOTInductor."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import cutlass_ops
from cutlass_ops import FusedConv2d

from .test_integration import LAYOUTS, each_operator, fresh_dynamo, tensors

__all__ = ["fresh_dynamo"]


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
def test_a_compiled_gradient_keeps_the_precision_of_its_call(op, fresh_dynamo):
    """The setting that eager mode changes around PyTorch's convolutions is not in a graph, so an operator of ours must be."""
    graphs = []

    def backward(graph, _):
        graphs.append({str(n.target) for n in graph.graph.nodes if n.op == "call_function"})
        return make_boxed_func(graph.forward)

    given, twins = ([t.float().detach().requires_grad_() for t in tensors(op)] for _ in range(2))
    for precision in ("ieee", None):
        graphs.clear()
        backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=backward)
        compiled = torch.compile(lambda *t, p=precision: op(*t, padding=1, precision=p), fullgraph=True, backend=backend, dynamic=True)
        compiled(*given).square().sum().backward()
        convolutions = {name for name in graphs[0] if "conv" in name}
        name = "cutlass_ops._conv2d_ieee" if precision else "aten.convolution"
        # A chain's derivative needs the convolution again, conv2d's own does not.
        assert convolutions == {f"{name}_backward.default"} | ({f"{name}.default"} if op is not cutlass_ops.conv2d else set())
        op(*twins, padding=1, precision=precision).square().sum().backward()
    for mine, theirs in zip(given, twins):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_the_traced_gradients_convolution(wanted, layout):
    x, weight = (LAYOUTS[layout](torch.randn(s)) for s in ((2, 3, 7, 8), (4, 3, 3, 2)))
    parameters = [2, 1], [1, 0], [1, 1]
    gradient = torch.randn_like(torch.nn.functional.conv2d(x, weight, None, *parameters))
    forward, backward = torch.ops.cutlass_ops._conv2d_ieee.default, torch.ops.cutlass_ops._conv2d_ieee_backward.default
    torch.library.opcheck(backward, (gradient, x, weight, *parameters, list(wanted)))
    torch.library.opcheck(forward, (x.requires_grad_(wanted[0]), weight.requires_grad_(wanted[1]), *parameters))


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


@each_operator
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dimensions", [(0,), (0, 2, 3)])
def test_compile_takes_sizes_that_depend_on_data(op, memory_format, dimensions, fresh_dynamo):
    from torch._dynamo.decorators import mark_unbacked

    if len(dimensions) > 1 and torch.__version__ < (2, 7):
        pytest.skip("PyTorch 2.6 does not compile even its own conv2d of a height and width that depend on data")
    x, *rest = tensors(op, torch.float32)
    x = x.contiguous(memory_format=memory_format)
    for dimension in dimensions:
        mark_unbacked(x, dimension)
    y = torch.compile(lambda x: op(x, *rest), fullgraph=True, backend="aot_eager")(x)
    expected = op(x, *rest)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)


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


# ---- Inductor: permutes before and after, layouts, packages -------------------------------------------------------


@pytest.fixture
def inductor(monkeypatch, tmp_path, fresh_dynamo):
    """Inductor in this process alone, with a cache of its own."""
    from torch._inductor import config, cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(compile_threads=1):
        yield


class BetweenPermutes(torch.nn.Module):
    """NHWC in and out, as data and other libraries often are, with work before and after."""

    def __init__(self):
        super().__init__()
        self.fused = FusedConv2d(cutlass_ops.conv2d_sub_tanh_sub_avgpool, 3, 4, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.fused(x.permute(0, 3, 1, 2) * 2).permute(0, 2, 3, 1)) + 1


def assert_same_layout(found, expected):
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_keeps_layouts_with_permutes_before_and_after(dynamic, inductor):
    module = BetweenPermutes()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic)
    for n, h, w in ((2, 12, 10), (5, 15, 11)) if dynamic else ((2, 12, 10),):
        x = torch.randn(n, h, w, 3)
        assert_same_layout(compiled(x), module(x))
        assert_same_layout(compiled(x.transpose(1, 2)), module(x.transpose(1, 2)))


@torch.no_grad()
def test_inductor_passes_the_strides_that_the_result_follows(inductor):
    """Inductor may lay out intermediate tensors as it likes; what comes out must be as in eager mode."""
    op = cutlass_ops.conv2d
    _, weight, bias = tensors(op, torch.float32)

    def f(x, weight, bias):
        return op(x + 1, weight * 2, bias)

    for layout in LAYOUTS.values():
        for channels in (1, 3):
            given = layout(torch.randn(2, channels, 7, 8)), weight[:, :channels], bias
            assert_same_layout(torch.compile(f, fullgraph=True, dynamic=False)(*given), f(*given))


@torch.no_grad()
def test_an_aotinductor_package_computes_the_same_with_sizes_of_its_own(inductor, tmp_path):
    module = BetweenPermutes()
    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(module, (torch.randn(2, 12, 10, 3),), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "module.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for n, h in ((2, 12), (5, 15)):
        x = torch.randn(n, h, 10, 3)
        assert_same_layout(loaded(x), module(x))


def test_an_exported_program_is_saved_and_loaded(tmp_path, fresh_dynamo):
    module, x = BetweenPermutes(), torch.randn(2, 12, 10, 3)
    torch.export.save(torch.export.export(module, (x,)), tmp_path / "module.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "module.pt2").module()(x), module(x))
