"""The operators inside PyTorch on a GPU: streams, graphs, threads, layouts, autograd, torch.compile, modules, errors."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_ops
from cutlass_ops import FusedConv2d, InstallationError, NoPlanError, accuracy, reference
from cutlass_ops.loader import ALLOW_UNVERIFIED, KernelSet
from cutlass_ops.ops import kernel_set

from .helpers import DEVICE, DTYPES, call, gradients, in_pytorch, name_of, poisoned, reference64, serving, tensors

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool
OPERATORS = [cutlass_ops.conv2d, POOLED, cutlass_ops.conv2d_relu_hardswish, cutlass_ops.conv2d_min_add_mul]
each_operator = pytest.mark.parametrize("op", OPERATORS, ids=name_of)


def plans_of(op, given, **arguments):
    return serving(op, *given, precision="tf32", **arguments)


# ---- streams, graphs, threads ------------------------------------------------------------------------------------


def test_work_goes_to_the_current_stream():
    given = tensors(POOLED, "stream")
    expected = POOLED(*given)
    late = torch.zeros_like(given[0])
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: on another stream the operator would read zeros
        late.copy_(given[0])
        y = POOLED(late, *given[1:])
    side.synchronize()
    assert torch.equal(y, expected)


@each_operator
def test_a_graph_replays_with_new_data_weights_and_ranges(op):
    for plan in plans_of(op, tensors(op, "graph")):
        given = tensors(op, "graph")
        static = [t.clone() for t in given]
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            call(plan, op, *static, precision="tf32")
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), cutlass_ops.use_plan(plan):
            y = op(*static, precision="tf32")
        for factor in (1.0, 1e6, 0.5):  # in range, out of range, in range again
            fresh = tensors(op, ("graph", factor))
            fresh[0] = fresh[0] * factor
            for old, new in zip(static, fresh):
                old.copy_(new)
            graph.replay()
            assert torch.equal(y, call(plan, op, *fresh, precision="tf32")), (plan, factor)


@each_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_results_are_the_same_bits_each_time(op, dtype):
    given = tensors(op, "repeat", dtype, n=16, size=(64, 64), k=130)
    for plan in serving(op, *given):
        first = call(plan, op, *given)
        with cutlass_ops.use_plan(plan):
            assert all(torch.equal(op(*given), first) for _ in range(50)), plan


@pytest.mark.parametrize("own_streams", [False, True])
def test_eight_threads_compute_different_problems_at_once(own_streams):
    work = []
    for i in range(8):
        op = OPERATORS[i % len(OPERATORS)]
        given = tensors(op, ("thread", i), n=2 + i, c=8 * i + 3, size=(20 + i, 24), k=16 * i + 5)
        plans = plans_of(op, given)
        plan = plans[i // len(OPERATORS) % len(plans)]
        work.append((op, given, plan, call(plan, op, *given, precision="tf32")))
    torch.cuda.synchronize()
    start = threading.Barrier(len(work))

    def compute(problem):
        op, given, plan, expected = problem
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        start.wait()
        with torch.cuda.stream(stream), cutlass_ops.use_plan(plan):
            results = [op(*given, precision="tf32") for _ in range(30)]
        stream.synchronize()
        return all(torch.equal(y, expected) for y in results)

    with ThreadPoolExecutor(len(work)) as pool:
        assert all(pool.map(compute, work))


@each_operator
def test_inputs_stay_as_they_are_and_results_are_new(op):
    given = tensors(op, "alias")
    before = [t.clone() for t in given]
    for plan in plans_of(op, given):
        first, second = (call(plan, op, *given, precision="tf32") for _ in range(2))
        kept = first.clone()
        second.fill_(7)
        assert torch.equal(first, kept)
        storages = {t.untyped_storage().data_ptr() for t in (*given, first, second)}
        assert len(storages) == len(given) + 2
    assert all(torch.equal(t, b) for t, b in zip(given, before))


# ---- shapes and layouts of results -------------------------------------------------------------------------------

FORMATS = [torch.contiguous_format, torch.channels_last]


def fake_strides(op, given, **arguments):
    with FakeTensorMode() as mode:
        y = op(*[mode.from_tensor(t) for t in given], **arguments)
    return y.shape, y.stride(), y.dtype


@each_operator
@pytest.mark.parametrize("x_format", FORMATS)
@pytest.mark.parametrize("weight_format", FORMATS)
def test_results_are_laid_out_as_fake_ones(op, x_format, weight_format):
    for dtype in DTYPES:
        for sizes in ({}, {"n": 0}, {"n": 1, "c": 1, "k": 1}, {"c": 16, "size": (3, 9)}, {"k": 130, "size": (4, 4)}):
            x, weight, *rest = tensors(op, ("fake", str(sizes)), dtype, **sizes)
            given = [x.contiguous(memory_format=x_format), weight.contiguous(memory_format=weight_format), *rest]
            arguments = {"pool": 1} if op.spec.pool else {}
            y = op(*given, **arguments)
            assert (y.shape, y.stride(), y.dtype) == fake_strides(op, given, **arguments)
            channels_last = torch.channels_last in (x_format, weight_format) and x.numel() > 0  # PyTorch: an empty tensor is contiguous
            assert y.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
            # Not bit for bit: another layout may take another plan, whose operands are rounded and added otherwise.
            tolerance = {torch.float32: 2e-3, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            torch.testing.assert_close(y, op(x, weight, *rest, **arguments), atol=tolerance, rtol=tolerance)


@each_operator
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_an_empty_batch_gives_an_empty_result(op, dtype):
    y = op(*tensors(op, "empty", dtype, n=0))
    assert y.shape[0] == 0
    assert y.shape[1:] == reference64(op, *tensors(op, "empty", dtype, n=1)).shape[1:]


# ---- autograd and torch.compile ----------------------------------------------------------------------------------


@each_operator
def test_gradients_are_those_of_pytorch(op):
    """Both are TF32 convolutions of the same tensors; cuDNN may add them up in another order."""
    given = tensors(op, "gradient")
    with reference.convolutions("tf32"):
        expected = gradients(in_pytorch(op), given)
        found = gradients(op, given)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@each_operator
def test_compiled_without_graph_breaks_it_gives_the_same_bits(op):
    torch._dynamo.reset()
    given = tensors(op, "compile")
    compiled = torch.compile(lambda *t: op(*t), fullgraph=True)
    assert torch.equal(compiled(*given), op(*given))


def test_compiled_between_other_work_and_with_dynamic_shapes_it_gives_the_same_bits():
    torch._dynamo.reset()

    def function(x, weight, bias):
        return torch.relu(POOLED(x * 2, weight, bias, padding=1)) + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for n, size in ((2, (20, 24)), (3, (17, 31)), (5, (64, 10))):
        given = tensors(POOLED, "dynamic", n=n, size=size)
        assert torch.equal(compiled(*given), function(*given)), (n, size)


# ---- modules, errors, unverified kernels ------------------------------------------------------------------------


class KernelBenchModel(nn.Module):
    """Level 2 problem 46 as KernelBench writes it."""

    def __init__(self, in_channels, out_channels, kernel_size, subtract1, subtract2, pool):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.subtract1, self.subtract2 = subtract1, subtract2
        self.avgpool = nn.AvgPool2d(pool)

    def forward(self, x):
        return self.avgpool(torch.tanh(self.conv(x) - self.subtract1) - self.subtract2)


def test_a_module_takes_the_state_of_kernelbenchs_model():
    torch.manual_seed(0)
    model = KernelBenchModel(24, 40, 3, 0.5, 0.2, 2).to(DEVICE)
    module = FusedConv2d(POOLED, 24, 40, 3, subtract1=0.5, subtract2=0.2, pool=2, device=DEVICE)
    assert set(module.state_dict()) == set(model.state_dict()) == {"conv.weight", "conv.bias"}
    module.load_state_dict(model.state_dict())
    x = tensors(POOLED, "module")[0]
    with torch.no_grad(), poisoned():
        y = module(x)
    arguments = {"subtract1": 0.5, "subtract2": 0.2, "pool": 2, "precision": "tf32"}
    assert accuracy.Criterion(POOLED, x, model.conv.weight.detach(), model.conv.bias.detach(), **arguments).judge(y).passed


@each_operator
def test_an_error_comes_before_any_launch_and_leaves_nothing_behind(op):
    given = tensors(op, "error", size=(22, 28))  # not prepared by any other test
    *first, last = given
    with pytest.raises(ValueError, match=r"on x's device cuda:0, got cpu"):
        op(*first, last.cpu())
    with pytest.raises(TypeError, match=r"of x's dtype torch.float32, got torch.float16"):
        op(*first, last.half())
    with pytest.raises(ValueError, match=r"on x's device cuda:0, got cpu"):
        op(given[0], given[1].cpu(), *given[2:])
    torch.cuda.synchronize()
    criterion = accuracy.Criterion(op, *given)
    assert criterion.judge(op(*given)).passed


def test_unverified_kernels_are_refused(monkeypatch):
    kernels = kernel_set(POOLED.kernels)
    monkeypatch.setattr(kernels, "verified", frozenset())
    monkeypatch.setenv(ALLOW_UNVERIFIED, "0")
    with pytest.raises(NoPlanError, match="cutlass-ops check"):
        POOLED(*tensors(POOLED, "unverified", size=(26, 20)))  # not prepared by any other test
    fresh = KernelSet(kernels.folder)
    monkeypatch.setattr(fresh, "verified", frozenset())
    with pytest.raises(InstallationError, match="cutlass-ops check"):
        fresh.get("convert_f32_tf32", torch.cuda.current_device())
    monkeypatch.setenv(ALLOW_UNVERIFIED, "1")
    assert POOLED(*tensors(POOLED, "unverified", size=(26, 20))).isfinite().all()
