"""The benchmark's pure parts: what is run, statistics, ratios, the check against float64, tables, documents, command line."""

from __future__ import annotations

import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cutlass_ops import FusedConv2d
from cutlass_ops.benchmark import accuracy, adapter, launches, measure, rows
from cutlass_ops.benchmark.cases import (
    CASES,
    CUDA_GRAPHS,
    MAIN,
    MAX_AUTOTUNE,
    Group,
    groups,
    make_input,
    make_model,
    operator_arguments,
)
from cutlass_ops.benchmark.cli import command_line, main, output_folder, parse
from cutlass_ops.benchmark.compare import why_refused
from cutlass_ops.benchmark.run import OPERATORS, subject_of

from .benchmark_record import BYTES, FLOPS, LIMITS, row

# ---- cases ---------------------------------------------------------------------------------------------------------------


def problem_of(group):
    with torch.device("meta"):
        return subject_of(group, "meta").problem


def test_problem_46_moves_and_computes_what_the_facts_say():
    group = Group(MAIN, 128)
    problem = problem_of(group)
    assert group.shape == (128, 64, 128, 128)
    assert round(adapter.flops(problem) / 1e9, 1) == 299.6
    assert round(adapter.minimum_bytes(problem) / 1e6) == 797
    assert adapter.minimum_bytes(problem_of(Group(MAIN, 128, torch.float16))) * 2 == adapter.minimum_bytes(problem)
    assert str(group) == "conv2d_sub_tanh_sub_avgpool, x (128, 64, 128, 128) float32 contiguous"
    assert str(Group(MAIN, 1, precision="ieee")).endswith(" float32 contiguous ieee")


def test_a_full_run_starts_with_the_main_input_and_covers_batches_dtypes_layouts_and_precisions():
    found = groups(list(CASES), quick=False)
    assert found[0] == Group(MAIN, 128, modes=("default", MAX_AUTOTUNE, CUDA_GRAPHS), launches=True, graph=True)
    assert {g.batch for g in found if g.case is MAIN} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512}
    half = {(torch.float16, False), (torch.float16, True)}
    for case in CASES.values():
        own = [g for g in found if g.case is case and g.batch == case.batch and g.precision == "tf32"]
        kinds = {(g.dtype, g.channels_last) for g in own}
        more = {(torch.bfloat16, True), (torch.float32, True)} if case is MAIN else set()
        assert kinds == {(torch.float32, False)} | half | more
        assert [MAX_AUTOTUNE in g.modes for g in own] == [g.dtype is torch.float32 and not g.channels_last for g in own]
    assert [g.case.problem for g in found[: len(CASES)]] == [46, 57, 31]  # KernelBench's inputs come first
    assert [g.case.problem for g in found if g.case is not MAIN] == [57, 31, 57, 57, 31, 31]
    assert [g.batch for g in found if g.graph] == [128, 1]
    assert len([g for g in found if g.precision == "ieee"]) == 1
    assert len({str(g) for g in found}) == len(found)


def test_a_quick_run_never_autotunes():
    assert groups([MAIN.operator], quick=True) == [Group(MAIN, 128, modes=("default",), launches=True)]


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("channels_last", [False, True])
def test_models_compute_what_the_operators_do(name, channels_last):
    case = CASES[name]
    group = Group(case, 2, torch.float64, channels_last)
    model, x = make_model(group, "cpu"), make_input(group, "cpu")[..., :12, :10]
    operator = OPERATORS[name]
    y = operator(x, model.conv.weight, **operator_arguments(case, model))
    torch.testing.assert_close(y, model(x), rtol=0, atol=1e-12)
    assert x.min() >= 0
    assert x.max() < 1
    assert not any(p.requires_grad for p in model.parameters())


def test_sizes_are_those_of_the_models():
    for case in CASES.values():
        group = Group(case, 3)
        with torch.device("meta"):
            y = make_model(group, "meta")(make_input(group, "meta"))
        assert problem_of(group).output_shape == y.shape


def test_the_module_loads_the_models_state():
    module = FusedConv2d(OPERATORS[MAIN.operator], 8, 8, 3)
    module.load_state_dict(MAIN.model(8, 8).state_dict())


# ---- protocol and figures ------------------------------------------------------------------------------------------------


def test_summary():
    found = measure.summary([1.0, 2.0, 6.0])
    assert (found["ms_mean"], found["ms_median"], found["ms_min"]) == (3.0, 2.0, 1.0)
    assert found["ms_std"] == pytest.approx(math.sqrt(14 / 3))


def test_competitors_take_turns_and_the_first_trial_of_a_turn_does_not_count(monkeypatch):
    seen = []
    monkeypatch.setattr(measure, "one_trial", lambda competitor, idle_ms: seen.append(competitor.what) or float(len(seen)))
    competitors = [measure.Competitor(what, lambda: None) for what in "abc"]
    trials = 2 * measure.BLOCK + 4
    times = measure.interleaved(competitors, trials)
    assert [len(t) for t in times] == [trials] * 3
    turns = [(what, len(list(group))) for what, group in itertools.groupby(seen[3 * measure.WARM_UP :])]
    whole, rest = measure.BLOCK + 1, 5
    assert turns == [*((w, whole) for w in "abc"), ("b", whole), ("c", whole), ("a", whole), ("c", rest), ("a", rest), ("b", rest)]
    counted = {number for t in times for number in t}
    begins = [3 * measure.WARM_UP + 1 + sum(n for _, n in turns[:i]) for i in range(len(turns))]
    assert counted.isdisjoint(begins)
    assert len(counted) == 3 * trials


def test_every_trial_of_every_competitor_waits_as_long_before_it(monkeypatch):
    """What happens in a trial, in order, without a GPU."""
    events, log = iter(range(100)), []

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = next(events)

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("drain"))
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: log.append(seconds))
    monkeypatch.setattr(measure, "_flush_buffer", lambda: SimpleNamespace(fill_=lambda value: log.append("flush")))
    competitors = [measure.Competitor(what, functools.partial(log.append, what)) for what in "ab"]
    assert measure.interleaved(competitors, 1, 4.0) == [[1.0], [1.0]]
    trials = [log[i : i + 5] for i in range(0, len(log), 5)]
    assert len(trials) == 2 * (measure.WARM_UP + 2)
    assert {tuple(t) for t in trials} == {("drain", 0.004, "flush", what, "drain") for what in "ab"}
    log.clear()
    measure.one_trial(competitors[0])
    assert log == ["drain", "flush", "a", "drain"]


def test_the_launches_before_one_run_ahead_of_each_of_its_trials():
    log = []
    record = SimpleNamespace(name="kernel")
    stages = [adapter.Stage(record, False, functools.partial(log.append, what)) for what in "abc"]
    for competitor in launches.alone(stages):
        for _ in range(2):
            with competitor.scope():
                log.append("flush")
                competitor.call()
    assert "".join(log).replace("flush", "-") == "-a-a" + 2 * "a-b" + 2 * "ab-c"


class Memory:
    """torch.cuda's counters: a call allocates so many bytes beyond what lay there; a graph's pool has so many."""

    def __init__(self, monkeypatch, peak, pools=()):
        segments = [{"total_size": size, "segment_pool_id": pool} for pool, size in pools]
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + peak)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)


def test_memory_of_a_call_is_its_peak_without_inputs_and_result(monkeypatch):
    Memory(monkeypatch, peak=700)
    assert measure.peak_extra_bytes(measure.Competitor("a", lambda: torch.zeros(100))) == 300


def test_memory_of_a_cuda_graph_is_its_pool_without_the_result(monkeypatch):
    graph = measure.Competitor("a", lambda: torch.zeros(100), owns_memory=True)
    Memory(monkeypatch, peak=0, pools=[((0, 0), 10_000), ((0, 3), 600), ((0, 3), 500)])
    assert measure.peak_extra_bytes(graph) == 700
    Memory(monkeypatch, peak=0, pools=[((0, 0), 10_000)])
    assert measure.peak_extra_bytes(graph) is None


def test_rates_ratios_and_the_fraction_of_the_limit():
    eager, compiled, ours = rows.complete(
        [row("eager", 5.0), row("torch.compile default", 2.0), row("cutlass_ops", 1.0, "p")], FLOPS, BYTES, LIMITS
    )
    assert ours["tflops"] == pytest.approx(400)
    assert ours["gbps"] == pytest.approx(1000)
    assert (ours["ratio_compile"], ours["ratio_eager"]) == (2.0, 5.0)
    assert (compiled["ratio_compile"], eager["ratio_compile"]) == (1.0, 0.4)
    assert ours["ratio_compile_to"] == "torch.compile default"
    assert ours["fraction_of_limit"] == pytest.approx(0.5)  # 400 GFLOP at 800 TFLOP/s; 1 GB at 4 TB/s takes half as long
    assert rows.limit_ms(1, BYTES, LIMITS) == pytest.approx(0.25)


def test_ratios_to_what_was_not_run_are_absent():
    (only,) = rows.complete([row("cutlass_ops", 1.0, "p")], FLOPS, BYTES, LIMITS)
    assert only["ratio_compile"] is only["ratio_eager"] is only["ratio_compile_to"] is None


def test_a_stage_is_held_to_the_limit_of_its_own_operands():
    assert rows.stage_figures("implicit_gemm", "tf32", 1.0, FLOPS, BYTES, LIMITS)["fraction_of_limit"] == pytest.approx(1.0)
    assert rows.stage_figures("implicit_gemm", "f16", 1.0, FLOPS, BYTES, LIMITS)["fraction_of_limit"] == pytest.approx(0.5)
    assert rows.stage_figures("pool", "avg", 0.5, FLOPS, BYTES, LIMITS) == {"tflops": None, "gbps": 2000.0, "fraction_of_limit": 0.5}
    assert rows.stage_figures("pack", "f32", 0.5, FLOPS, 0, LIMITS)["gbps"] is None


def test_products_of_fp32_operands_have_no_limit():
    (only,) = rows.complete([row("eager", 5.0, precision="ieee")], FLOPS, BYTES, LIMITS)
    assert only["fraction_of_limit"] is None
    assert only["tflops"] == pytest.approx(80)


def test_rounded_keeps_six_digits_and_all_else():
    assert rows.rounded({"a": [1.23456789, 3], "b": None, "c": True, "d": "x"}) == {"a": [1.23457, 3], "b": None, "c": True, "d": "x"}


# ---- accuracy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "expected"), [(1, [0]), (3, [0, 1, 2]), (5, [0, 1, 2, 3, 4]), (128, [0, 1, 2, 3, 126, 127])])
def test_checked_images(batch, expected):
    assert accuracy.checked_images(batch) == expected


def test_round_to_tf32_is_to_nearest_with_10_bits_and_ties_away_from_zero():
    ulp = 2.0**-10
    values = torch.tensor([1.0, 1 + ulp, 1 + 0.49 * ulp, 1 + 0.51 * ulp, 1 + 0.5 * ulp, 1 + 1.5 * ulp, -1 - 0.51 * ulp, 0.0])
    expected = torch.tensor([1.0, 1 + ulp, 1.0, 1 + ulp, 1 + ulp, 1 + 2 * ulp, -1 - ulp, 0.0])
    assert torch.equal(accuracy.round_to_tf32(values), expected.double())


def test_errors_against_float64():
    group = Group(MAIN, 7)
    model, x = make_model(group, "cpu"), make_input(group, "cpu")[..., :16, :16]
    expected = accuracy.float64_result(model, x)
    exact = accuracy.error_of(model(x), expected)
    tf32 = accuracy.tf32_error(model, x, expected)
    assert exact.mean < exact.max < 1e-5 < tf32.mean < tf32.max < 1e-3
    assert model.conv.weight.dtype is torch.float32  # the model is left as it was

    y = model(x)
    y[6, 0, 0, 0] += 1
    assert accuracy.error_of(y, expected).max == pytest.approx(1, abs=1e-4)
    y[0, 0, 0, 0] = math.nan
    assert not accuracy.within(accuracy.error_of(y, expected), accuracy.Error(2.0, 2.0))


def allowed(eager, tf32=None, dtype=torch.float32, magnitude=0.0):
    return accuracy.allowed_error(accuracy.Error(*eager), tf32 and accuracy.Error(*tf32), torch.full((2, 2), magnitude), dtype)


def test_allowed_error_is_that_of_eager_unless_eager_did_not_use_tf32():
    tf32 = 3e-4, 4e-5
    assert allowed((1e-3, 1e-4)).max == pytest.approx(1.05e-3)
    assert allowed((2.9e-4, 3.9e-5), tf32).max == pytest.approx(1.05 * 2.9e-4)
    assert allowed((6e-7, 5e-8), tf32) == accuracy.Error(1.05 * 3e-4, 1.05 * 4e-5)


def test_what_rounding_makes_unavoidable_is_allowed():
    assert allowed((3e-7, 5e-8), magnitude=1.0) == accuracy.Error(1.05 * 3e-7 + 2**-22, 1.05 * 5e-8 + 2**-22)
    assert allowed((1e-9, 1e-9), dtype=torch.float16, magnitude=1.0) == accuracy.Error(2**-11, 2**-11)
    assert allowed((1e-9, 1e-9), dtype=torch.bfloat16, magnitude=1.0) == accuracy.Error(2**-8, 2**-8)
    assert allowed((1e-3, 1e-3), dtype=torch.float16, magnitude=1.0) == accuracy.Error(1.05 * 1e-3, 1.05 * 1e-3)


def test_a_wrong_result_is_refused_with_what_was_expected():
    ours, peer = measure.Competitor("cutlass_ops", lambda: None, "p"), measure.Competitor("torch.compile default", lambda: None)
    allowed = accuracy.Error(1e-3, 1e-4)
    assert why_refused(ours, allowed, allowed) is None
    assert "expected at most max 1.000e-03" in why_refused(ours, accuracy.Error(1.1e-3, 1e-5), allowed)
    assert why_refused(ours, accuracy.Error(1e-4, 1.1e-4), allowed)
    assert why_refused(peer, accuracy.Error(1.0, 1.0), allowed) is None
    assert "finite" in why_refused(peer, accuracy.Error(math.nan, math.nan), allowed)


# ---- command line --------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_so_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(tmp_path, []) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: needs a Hopper GPU (compute capability 9.0); found none that PyTorch can use; run it on")
    assert message.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_full_run_goes_to_docs_and_a_partial_one_only_where_it_is_told(tmp_path):
    assert output_folder(parse([]), tmp_path) == tmp_path / "docs"
    for partial in (["--quick"], ["--trials", "5"], ["--operator", MAIN.operator]):
        assert output_folder(parse(partial), tmp_path) is None
        assert output_folder(parse([*partial, "--out", "here"]), tmp_path) == Path("here")


def test_the_recorded_command_names_no_folder():
    options = parse(["--quick", "--operator", MAIN.operator, "--trials", "7", "--idle-ms", "20", "--out", "/some/where", "--commit", "abc"])
    assert command_line(options) == f"python scripts/bench.py --quick --operator {MAIN.operator} --trials 7 --idle-ms 20"


@pytest.mark.parametrize("arguments", [["--operator", "no_such"], ["--trials", "0"], ["--idle-ms", "-1"], ["--idle-ms", "nan"], ["--what"]])
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(arguments)
    assert exit_info.value.code == 2
    assert "error: " in capsys.readouterr().err
