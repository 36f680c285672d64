"""A whole run of scripts/bench.py on the CPU, with made-up times: what is measured, kept, refused and survived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cutlass_ops import environment
from cutlass_ops.benchmark import cold_start, compare, launches, plots, report, run
from cutlass_ops.benchmark.cases import BATCHES, CASES, FEW_TRIALS, MAIN, BenchmarkError, groups
from cutlass_ops.benchmark.cli import main
from cutlass_ops.benchmark.rows import grouped, pick

from .benchmark_record import ENVIRONMENT, run_without_gpu

REPOSITORY = Path(__file__).resolve().parents[2]
COSTS = json.loads((REPOSITORY / "cutlass_ops" / "plan_costs.json").read_text())


@pytest.fixture
def _no_gpu(monkeypatch):
    run_without_gpu(monkeypatch)


def measured(path=None, operators=tuple(CASES), quick=False):
    return run.Run(dict(ENVIRONMENT), 30, 2.5, path).measure(groups(operators, quick=quick), quick=quick)


@pytest.mark.usefixtures("_no_gpu")
def test_a_full_run_measures_all_that_the_document_shows():
    before = dict(os.environ)
    result = measured()
    assert result["failed"] == result["refused"] == result["not_run"] == []
    main_rows = pick(result["rows"], case=MAIN.operator)
    assert {r["shape"][0] for r in pick(main_rows, dtype="float32", layout="contiguous")} == set(BATCHES)
    assert {r["precision"] for r in main_rows} == {"tf32", "ieee", "float16", "bfloat16"}
    ieee = pick(main_rows, precision="ieee")
    assert [(r["what"], r["plan"]) for r in ieee] == [("eager", None), ("torch.compile default", None), ("cutlass_ops", "pytorch")]
    assert all(r["fraction_of_limit"] is None for r in ieee)
    assert all(len(pick(group, default_plan=True)) == 1 for group in map(with_plans, grouped(result["rows"])))
    assert [r["trials"] for r in pick(main_rows, what="eager")] == [30] * 5 + [FEW_TRIALS] * 10
    assert [(g["shape"][0], g["launches"]) for g in result["graphs"]] == [(128, 2), (1, 2)]
    assert {s["case"] for s in result["stages"]} == set(CASES)
    assert [(s["what"], s["cache"], s["processes"]) for s in result["cold_start"]] == [
        ("cutlass_ops", None, 3),
        ("eager", None, 3),
        ("torch.compile default", "empty", 1),
        ("torch.compile default", "filled", 1),
        ("torch.compile max-autotune", "empty", 1),
        ("torch.compile max-autotune", "filled", 1),
    ]
    assert set(plots.figures(result, COSTS)) == {plot.name for plot in plots.PLOTS}
    assert dict(os.environ) == before


def with_plans(group):
    return [row for row in group if row["plan"]]


@pytest.mark.usefixtures("_no_gpu")
def test_a_quick_run_is_one_input():
    result = measured(operators=[MAIN.operator], quick=True)
    assert len(grouped(result["rows"])) == 1
    assert [s["what"] for s in result["cold_start"]] == ["cutlass_ops", "eager"]
    assert {s["processes"] for s in result["cold_start"]} == {1}


def checkout(root: Path) -> Path:
    """What the command writes into, as the repository has it."""
    (root / "docs").mkdir()
    for name in ("docs/performance.md", "README.md"):
        shutil.copy(REPOSITORY / name, root / name)
    return root


@pytest.fixture
def root(tmp_path, monkeypatch, _no_gpu):
    monkeypatch.setattr(environment, "environment", lambda root, commit: dict(ENVIRONMENT))
    return checkout(tmp_path)


def small(root):
    """Arguments of a run of three inputs."""
    return ["--operator", "conv2d_relu_hardswish", "--out", str(root / "docs")]


def test_a_part_that_fails_costs_no_other_and_fails_the_command(root, monkeypatch, capsys):
    compare_all = compare.compare

    def fail_in_half(subject, *rest):
        if subject.x.dtype is torch.float16:
            raise RuntimeError("lost\nhere")
        return compare_all(subject, *rest)

    def no_launches(*_):
        raise BenchmarkError("no launches")

    monkeypatch.setattr(compare, "compare", fail_in_half)
    monkeypatch.setattr(launches, "stage_rows", no_launches)
    monkeypatch.setattr(cold_start, "_process", lambda start: {}["no"])
    assert main(root, small(root)) == 1
    result = report.load(root / "docs" / "performance.json")
    half = [text for text in result["failed"] if "float16" in text]
    assert len(half) == 2
    assert half[0].endswith("float16 contiguous: RuntimeError: lost")
    assert len([text for text in result["failed"] if text.endswith("BenchmarkError: no launches")]) == 1
    assert len(result["failed"]) == 4
    assert {r["dtype"] for r in result["rows"]} == {"float32"}
    assert result["host"]
    page = (root / "docs" / "performance.md").read_text()
    assert f"Failed: {half[0]}" in page
    assert "No plot: the cold start of torch.compile was not measured in these figures." in page
    assert not (root / "docs" / "plots" / "start.svg").exists()
    assert "error: cold start, in fresh processes: KeyError" in capsys.readouterr().err


def test_a_wrong_result_is_not_timed_and_fails_the_command(root, monkeypatch, capsys):
    result_of = compare.result_of
    monkeypatch.setattr(compare, "result_of", lambda competitor, moved: result_of(competitor, moved) + (competitor.plan == "fused-f16"))
    assert main(root, small(root)) == 1
    result = report.load(root / "docs" / "performance.json")
    assert result["failed"] == []
    assert pick(result["rows"], plan="fused-f16") == pick(result["stages"], plan="fused-f16") == []
    assert pick(result["rows"], plan="two-kernel-f16-guarded")
    assert len(result["refused"]) == 3
    assert "error: refused to time cutlass_ops fused-f16 on conv2d_relu_hardswish, x (128, " in capsys.readouterr().err


def test_a_run_that_succeeds_writes_all_documents(root, capsys):
    assert main(root, small(root)) == 0
    assert "error" not in capsys.readouterr().err
    names = {path.name for path in (root / "docs" / "plots").iterdir()}
    assert names == {"roofline.svg", "roofline.png", "start.svg", "start.png"}  # the others are of problem 46
    page = (root / "docs" / "performance.md").read_text()
    assert "| conv2d_relu_hardswish, x (128, 8, 128, 128) float32 NCHW, cutlass_ops fused-f16 (default) |" in page
    assert "![Milliseconds from import to the first result in a fresh process](plots/start.svg)" in page
    assert "`import cutlass_ops` on top of torch: 50 ms (goal: under 100 ms)." in page
    assert not list(root.rglob("*.partial"))


def test_without_matplotlib_a_run_keeps_its_figures_and_says_what_is_missing(root, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(root, ["--quick", "--out", str(root / "docs")]) == 0
    assert report.load(root / "docs" / "performance.json")["rows"]
    said = capsys.readouterr().out
    assert said.count("no matplotlib here: documents are not made; pip install 'cutlass_ops[bench]', then scripts/bench.py --render") == 1
    assert not (root / "docs" / "plots").exists()


def test_what_is_measured_is_kept_as_it_grows(root, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main(root, small(root))
    kept = json.loads((root / "docs" / "performance.json.partial").read_text())
    assert kept["host"]
    assert kept["rows"] == kept["cold_start"] == []
    assert not (root / "docs" / "performance.json").exists()


# ---- cold start ----------------------------------------------------------------------------------------------------------


def start_of(monkeypatch, text):
    """Run another program in place of the process that is measured."""
    monkeypatch.setattr(cold_start, "_PROCESS", text)
    return cold_start.measure(cold_start.Start("a", "default", "empty", processes=3), Path("folder"), once=False)


def test_a_start_is_the_median_of_fresh_processes_with_caches_of_their_own(monkeypatch, tmp_path):
    text = (
        f"import json, os, sys; p = {str(tmp_path / 'n')!r}; n = os.path.exists(p) and os.path.getsize(p); open(p, 'ab').write(b'x')\n"
        "assert sys.argv[1] == 'default' and os.environ['TORCHINDUCTOR_CACHE_DIR'] == 'folder/default'\n"
        "import importlib.util; assert importlib.util.find_spec('cutlass_ops')\n"
        "print('noise'); print(json.dumps({'import_ms': [5.0, 1.0, 3.0][n]}))"
    )
    assert start_of(monkeypatch, text) == {"what": "a", "cache": "empty", "processes": 3, "import_ms": 3.0}


def test_a_start_that_fails_or_hangs_says_so(monkeypatch):
    with pytest.raises(BenchmarkError, match="expected a to start in a fresh process, exit code 1: ValueError: no GPU"):
        start_of(monkeypatch, "raise ValueError('no GPU')")
    monkeypatch.setattr(cold_start, "TIMEOUT_S", 0.2)
    with pytest.raises(BenchmarkError, match=r"expected a to start in 0.2 s in a fresh process, it did not; stopped"):
        start_of(monkeypatch, "import time; time.sleep(60)")


@pytest.mark.parametrize("start", [cold_start.STARTS[0], cold_start.STARTS[2]], ids=lambda s: s.mode)
def test_what_a_process_measures(start, tmp_path):
    """The program itself, on the CPU, with a small input and torch.compile replaced."""
    text = cold_start._PROCESS.replace("128, 64, 128, 128", "1, 64, 8, 8").replace('device="cuda"', 'device="cpu"')
    text = text.replace("torch.cuda.synchronize()", "None")
    text = text.replace("import torch\n", "import torch\ntorch.compile = lambda f, mode: (print('compiled', mode), f)[1]\n", 1)
    done = subprocess.run([sys.executable, "-c", text, start.mode], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    *said, figures = done.stdout.splitlines()
    assert said == ([f"compiled {start.mode}"] if start.cache else [])
    found = json.loads(figures)
    assert set(found) == {"import_torch_ms", "import_ms", "first_call_ms", "second_call_ms"}
    assert (found["import_ms"] > 1) == (start.mode == "cutlass_ops")
    assert 0 < found["first_call_ms"] < found["import_torch_ms"]
