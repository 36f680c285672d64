"""The sweep without a GPU: shapes, the fit, the file, the command."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch

from cutlass_ops import costs
from cutlass_ops.benchmark import sweep
from cutlass_ops.benchmark.cases import BenchmarkError
from cutlass_ops.benchmark.fit import PRIOR, PRIOR_GEMM, fit, nnls
from cutlass_ops.benchmark.shapes import Shape, sweep_shapes
from cutlass_ops.costs import Coefficients, Costs

from .fake_driver import H200

ROWS = json.loads(costs.PATH.read_text())["rows"]


def test_the_shapes_are_as_wide_as_the_issue_asks():
    shapes = sweep_shapes()
    assert len(shapes) == len(set(shapes)) >= 36
    for field, wanted in {
        "n": {1, 512},
        "c": {3, 8, 16, 32, 64, 128},
        "k": {16, 64, 128, 256},
        "side": {7, 256},
        "size": {1, 3, 5},
        "stride": {1, 2},
        "dtype": {"f32", "f16", "bf16"},
        "channels_last": {True, False},
    }.items():
        assert wanted <= {getattr(s, field) for s in shapes}
    assert {s.problem().pool is None for s in shapes} == {True, False}
    for shape in shapes:
        made = shape.problem()
        p, q = made.conv_size
        assert max(math.prod(made.x_shape), shape.n * shape.k * p * q) * 4 < 4e9
        assert Shape(**json.loads(json.dumps(shape.to_json()))) == shape


# ---- least squares -----------------------------------------------------------------------------------------------


def test_nnls_gives_the_least_squares_where_that_is_positive_and_the_best_face_where_not():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        a = torch.randn(12, 4, dtype=torch.float64, generator=generator)
        b = torch.randn(12, dtype=torch.float64, generator=generator)
        x = nnls(a, b)
        gradient = a.T @ (a @ x - b)  # Karush, Kuhn, Tucker
        assert bool((x >= 0).all())
        assert bool((gradient > -1e-9).all())
        assert float((gradient * x).abs().max()) < 1e-9
    wanted = torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(nnls(a, a @ wanted), wanted)


def synthetic(true, names, count, noise=0.0):
    """Samples of known coefficients, of which now one group is the longest and now another."""
    generator = random.Random(0)  # noqa: S311
    found = []
    for _ in range(count):
        work = {name: 10 ** generator.uniform(0, 3) for name in names} | {"launches": generator.choice((2, 3, 6))}
        found.append((work, Coefficients(true).expected(work) * (1 + noise * generator.uniform(-1, 1))))
    return found


FUSED = {"launches": 7.0, "flops": 0.2, "outputs": 0.05, "staged": 0.4, "moved": 0.2}
GEMM = {"launches": 5.0, "convert": 0.4, "pool": 0.3, "result": 0.8, "flops": 0.1, "outputs": 0.1, "iterations": 0.8, "moved": 0.5}


@pytest.mark.parametrize("true", [FUSED, GEMM], ids=["fused", "two-kernel"])
def test_the_fit_recovers_known_coefficients(true):
    found = fit(synthetic(true, tuple(true), 60))
    for name, value in true.items():
        assert found.coefficients.us[name] == pytest.approx(value, rel=0.05), name
    assert found.summary()["samples"] == 60
    assert found.summary()["error_max"] < 0.01
    noisy = fit(synthetic(true, tuple(true), 60, noise=0.1))
    assert noisy.summary()["error_median"] < 0.1


def test_what_times_leave_open_is_as_expected_of_an_h200():
    work = {"launches": 2, "flops": 100.0, "outputs": 100.0, "moved": 1.0}
    (us,) = (fit([(work, 1000.0)]).coefficients.us,)
    assert us["moved"] == pytest.approx(PRIOR["moved"])
    assert "staged" not in us  # no sample has it
    assert set(PRIOR) == set(PRIOR_GEMM) == set(costs.FEATURES)


def test_a_fit_is_the_same_each_time():
    samples = synthetic(GEMM, tuple(GEMM), 30, noise=0.2)
    assert fit(samples).coefficients == fit(samples).coefficients


# ---- the record --------------------------------------------------------------------------------------------------


def test_the_tracked_costs_are_the_fit_of_the_tracked_rows(tmp_path):
    path = tmp_path / "plan_costs.json"
    path.write_text(costs.PATH.read_text())
    assert sweep.main(tmp_path, ["--fit", "--out", str(path)]) == 0
    again, tracked = Costs.load(path), Costs.load(costs.PATH)
    assert again.provenance == tracked.provenance
    assert set(again.coefficients) == set(tracked.coefficients)
    for key, found in again.coefficients.items():
        assert dict(found.us) == pytest.approx(dict(tracked.coefficients[key].us), rel=1e-2), key
    assert json.loads(path.read_text())["rows"] == ROWS


def test_losses_are_of_the_chosen_plan_against_the_fastest_measured():
    rows = [{"ms": {"a": 1.0, "b": 2.0}}, {"ms": {"a": 1.0, "b": 2.0}}, {"ms": {"a": 1.0}}]
    found = sweep.losses(rows, [{"a": 5.0, "b": 6.0}, {"a": 6.0, "b": 5.0}, {"a": 1.0}])
    assert found == [1.0, 2.0]
    assert sweep.choice_summary([1.0, 1.04, 2.0]) == {"shapes": 3, "fastest": 1, "within_5_percent": 2, "worst": 2.0}


def test_a_row_whose_plan_no_longer_serves_is_an_error():
    row = Shape("conv2d", 1, 64, 16, 64, stride=2).to_json() | {"ms": {"fused-f16": 1.0}}
    with pytest.raises(BenchmarkError, match=r"expected fused-f16 to serve .*; measure again"):
        sweep.work_of(row, 132)


def test_plans_must_agree_before_they_are_timed():
    shape = sweep_shapes()[0]
    y = torch.randn(4, 4)
    sweep.require_agreement(shape, [("a", y), ("b", y + 1e-4)])
    with pytest.raises(BenchmarkError, match="expected b within"):
        sweep.require_agreement(shape, [("a", y), ("b", y + 1.0)])
    for bad in (torch.full((2,), math.nan), torch.full((2,), math.inf)):
        with pytest.raises(BenchmarkError, match="expected"):
            sweep.require_agreement(shape, [("a", bad)])
        with pytest.raises(BenchmarkError, match="expected b within"):
            sweep.require_agreement(shape, [("a", torch.ones(2)), ("b", bad)])


@pytest.mark.parametrize("shape", [s for s in sweep_shapes() if s.n == 1 and s.c == 8], ids=str)
def test_a_shape_is_checked_and_timed_by_every_plan_that_serves_it(monkeypatch, shape):
    """On the CPU, where every plan is the reference."""
    tensors, captured = Shape.tensors, []

    def capture(call):
        captured.append(call())
        return SimpleNamespace(replay=None)

    monkeypatch.setattr(Shape, "tensors", lambda self, device: tensors(self, "cpu"))
    monkeypatch.setattr(sweep.measure, "captured", capture)
    monkeypatch.setattr(sweep.adapter, "device_facts", lambda device: H200)
    monkeypatch.setattr(sweep.adapter, "allow_unverified", lambda: True)
    monkeypatch.setattr(sweep.measure, "interleaved", lambda competitors, trials: [[3.0, 1.0, 2.0] for _ in competitors])
    row = sweep.measure_shape(shape, 3)
    plans = {"f32": ["fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"], "f16": ["fused-f16", "two-kernel-f16"]}
    assert list(row["ms"]) == plans.get(shape.dtype, ["fused-bf16", "two-kernel-bf16"])
    assert set(row["ms"].values()) == {2.0}
    assert len(captured) == len(row["ms"])
    assert sweep.shape_of(row) == shape
    assert set(sweep.work_of(row, 132)) == set(row["ms"])


def test_known_rows_are_kept_where_they_have_the_times_of_every_plan(monkeypatch):
    known, lacking, other = sweep_shapes()[:3]
    monkeypatch.setattr(sweep, "serving", lambda shape: {"a", "b"})
    monkeypatch.setattr(sweep, "measure_shape", lambda shape, trials: shape.to_json() | {"ms": {"a": 3.0, "b": 4.0}})
    rows = [lacking.to_json() | {"ms": {"a": 1.0}}, known.to_json() | {"ms": {"b": 2.0, "a": 1.0}}]
    found = sweep.measured([known, lacking, other], 1, rows)
    assert [sweep.shape_of(row) for row in found] == [known, lacking, other]
    assert [row["ms"]["a"] for row in found] == [1.0, 3.0, 3.0]


def test_the_plans_that_serve_a_shape_are_those_of_its_row(monkeypatch):
    monkeypatch.setattr(sweep.adapter, "device_facts", lambda device: H200)
    monkeypatch.setattr(sweep.adapter, "allow_unverified", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert sweep.serving(Shape("conv2d", 1, 64, 16, 64)) == {"fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"}
    assert sweep.serving(Shape("conv2d", 1, 64, 16, 64, stride=2)) == {"two-kernel-f16-guarded", "two-kernel-tf32"}


# ---- the command -------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_so_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "out.json"
    assert sweep.main(tmp_path, ["--out", str(path)]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("text", [None, "{", '{"schema": 1}'])
def test_a_fit_without_rows_says_so(tmp_path, capsys, text):
    path = tmp_path / "out.json"
    if text is not None:
        path.write_text(text)
    assert sweep.main(tmp_path, ["--fit", "--out", str(path)]) == 1
    assert "expected rows of an earlier sweep" in capsys.readouterr().err


OLD = {"gpu": "NVIDIA H200", "sm_count": 132, "command": "old", "earlier": [{"command": "older"}]}


def missing(monkeypatch, path, measured, gpu="NVIDIA H200"):
    """Exit code of the command with --missing where it measures these rows, and what it wrote."""
    path.write_text(json.dumps({"rows": ROWS[:2], "provenance": OLD}))
    monkeypatch.setattr(sweep, "missing_gpu", lambda: None)
    monkeypatch.setattr(sweep, "device_facts", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("cutlass_ops.environment.environment", lambda root, commit: {"gpu": gpu})
    monkeypatch.setattr(sweep, "measured", lambda shapes, trials, known: measured)
    return sweep.main(path.parent, ["--missing", "--trials", "3", "--out", str(path)]), json.loads(path.read_text())


def test_times_that_were_missing_keep_the_provenance_of_the_others(monkeypatch, tmp_path):
    code, written = missing(monkeypatch, tmp_path / "costs.json", ROWS[:3])
    assert (code, written["rows"]) == (0, ROWS[:3])
    assert written["provenance"]["command"] == "python scripts/sweep.py --trials 3 --missing"
    assert [e["command"] for e in written["provenance"]["earlier"]] == ["older", "old"]
    assert written["provenance"]["earlier"][1] == {k: v for k, v in OLD.items() if k != "earlier"}


def test_where_none_was_missing_the_provenance_stays(monkeypatch, tmp_path):
    code, written = missing(monkeypatch, tmp_path / "costs.json", ROWS[:2])
    assert (code, written["provenance"]) == (0, OLD)


def test_times_of_another_gpu_are_not_added(monkeypatch, tmp_path, capsys):
    code, written = missing(monkeypatch, tmp_path / "costs.json", ROWS[:3], gpu="NVIDIA H100")
    assert (code, written["provenance"]) == (1, OLD)
    assert "to be of a GPU like this, NVIDIA H100, got NVIDIA H200" in capsys.readouterr().err


def test_a_fit_alone_measures_nothing(capsys):
    with pytest.raises(SystemExit):
        sweep.parse(["--fit", "--missing"])
    assert "expected --fit or --missing, got both" in capsys.readouterr().err


def test_no_trials_are_refused(capsys):
    with pytest.raises(SystemExit):
        sweep.parse(["--trials", "0"])
    assert "expected --trials of at least 1, got 0" in capsys.readouterr().err
