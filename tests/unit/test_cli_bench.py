"""`cutlass-ops bench`, on the CPU with made-up times."""

from __future__ import annotations

import functools
import json
import re
import shlex

import pytest
import torch
from click.testing import CliRunner

import cutlass_ops
from cutlass_ops import cli
from cutlass_ops.benchmark import adapter, calls, compare, measure
from cutlass_ops.benchmark.rows import pick
from cutlass_ops.cli import bench

from .benchmark_record import ENVIRONMENT, Kernels, run_without_gpu
from .fake_driver import H200
from .records import all_records

MAIN = "conv2d_sub_tanh_sub_avgpool"
SHAPES = ["--shape", "2,8,16,16", "--weight", "8,8,3,3"]
DECORATION = re.compile(r"\x1b|[─-╿]")


def run(*arguments):
    return CliRunner().invoke(cli.group, ["bench", *map(str, arguments)], prog_name="cutlass-ops")


@pytest.fixture
def gpu(monkeypatch):
    """The CPU in place of an H200."""
    run_without_gpu(monkeypatch)
    monkeypatch.setattr(bench, "require_gpu", lambda otherwise: None)
    monkeypatch.setattr(bench, "device_facts", lambda device: H200)
    monkeypatch.setattr(bench, "call_subject", lambda *call, device, **form: calls.call_subject(*call, device="cpu", **form))
    monkeypatch.setattr(bench, "environment", lambda root: dict(ENVIRONMENT))
    monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", "1")


@pytest.mark.usefixtures("gpu")
def test_a_call_is_timed_by_every_competitor_and_recorded(tmp_path):
    arguments = [MAIN, *SHAPES, "--padding", "1", "--pool", "2,2", "--ceil-mode", "--no-count-include-pad", "--precision", "tf32"]
    result = run(*arguments, "--trials", "7", "--idle-ms", "3", "--json", tmp_path / "a.json", "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert not DECORATION.search(result.stdout)
    title, header, *lines, where = result.stdout.splitlines()
    assert title == (
        f"{MAIN}, x (2, 8, 16, 16), weight (8, 8, 3, 3), float32 NCHW, padding 1, pool (2, 2), ceil_mode True, "
        "count_include_pad False, 7 trials"
    )
    assert header.split() == ["ms", "mean", "min", "TFLOP/s", "x", "compile", "x", "eager", "of", "limit", "error", "max", "extra", "MB"]
    who = [
        "eager",
        "torch.compile default",
        "cutlass_ops fused-f16 (default)",
        "cutlass_ops two-kernel-f16-guarded",
        "cutlass_ops two-kernel-tf32",
    ]
    assert [re.split(r"\s{2,}", line)[0] for line in lines] == who
    assert len({len(line) for line in lines}) == 1  # numbers end below each other
    command = [*arguments[:5], "--dtype", "float32", "--layout", "nchw", *arguments[5:]]
    assert f"`{shlex.join(['cutlass-ops', 'bench', *command])}`" in where
    assert f"cutlass_ops {cutlass_ops.__version__}" in where
    found = json.loads((tmp_path / "a.json").read_text())
    assert {row["trials"] for row in found["rows"]} == {7}
    assert [row["plan"] for row in pick(found["rows"], what="cutlass_ops")] == ["fused-f16", "two-kernel-f16-guarded", "two-kernel-tf32"]
    assert found["environment"]["idle_ms"] == 3
    assert found["environment"]["commit"] is None
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


@pytest.mark.usefixtures("gpu")
def test_the_recorded_command_gives_the_same_record(tmp_path):
    first = run(
        "conv2d",
        *SHAPES,
        "--dtype",
        "float16",
        "--layout",
        "channels_last",
        "--stride",
        "1,2",
        "--max-autotune",
        "--json",
        tmp_path / "a.json",
    )
    assert first.exit_code == 0, first.output
    record = json.loads((tmp_path / "a.json").read_text())
    assert "torch.compile max-autotune-no-cudagraphs" in {row["what"] for row in record["rows"]}
    words = shlex.split(record["environment"]["command"])
    assert words[:2] == ["cutlass-ops", "bench"]
    assert run(*words[2:], "--json", tmp_path / "b.json").exit_code == 0
    again = json.loads((tmp_path / "b.json").read_text())
    assert again["environment"] == record["environment"]
    assert [row["error_max"] for row in again["rows"]] == [row["error_max"] for row in record["rows"]]


@pytest.mark.usefixtures("gpu")
def test_ieee_is_a_setting_for_all():
    seen = []
    check = compare._check

    def watched(*rest):
        seen.append(cutlass_ops.problem.conv_allows_tf32())
        return check(*rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_check", watched)
        result = run(MAIN, *SHAPES, "--precision", "ieee")
    assert result.exit_code == 0, result.output
    assert seen == [False]
    assert "cutlass_ops pytorch (default)" in result.stdout
    assert "TF32 forbidden" in result.stdout
    assert cutlass_ops.problem.conv_allows_tf32()


def test_a_wrong_result_ends_the_command_but_the_others_are_recorded(gpu, monkeypatch, tmp_path):
    result_of = compare.result_of
    monkeypatch.setattr(compare, "result_of", lambda competitor, moved: result_of(competitor, moved) + (competitor.plan == "fused-f16"))
    result = run(MAIN, *SHAPES, "--json", tmp_path / "a.json")
    assert result.exit_code == 1
    assert "error: refused to time cutlass_ops fused-f16 on conv2d_sub_tanh_sub_avgpool, x (2, 8, 16, 16)" in result.stderr
    assert "fused-f16 " not in result.stdout
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == 4


def test_what_torch_compile_cannot_do_is_said(gpu, monkeypatch):
    def broken():
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compare, "compiled", lambda model, x, mode: measure.Competitor(f"torch.compile {mode}", broken))
    result = run(MAIN, *SHAPES)
    assert result.exit_code == 0
    assert re.search(r"not timed: torch.compile default on .*: RuntimeError: no compiler", result.stderr)


def test_an_operator_of_ones_own(gpu, monkeypatch, tmp_path):
    name = "benched_in_a_test"
    spec = tmp_path / "own.py"
    spec.write_text(
        "from cutlass_ops import Vector, operator\n"
        f"@operator()\ndef {name}(accum, scale: Vector, bias: Vector = None, shift: float = 0.5):\n"
        "    return (accum + bias) * scale + shift\n"
    )
    for record in all_records(name, "none"):
        monkeypatch.setitem(Kernels.records, record.name, record)
    monkeypatch.setattr(bench, "plan_call", lambda *call, **form: None)  # reads the folder of kernels
    monkeypatch.setattr(adapter, "allow_unverified", lambda: True)
    result = run(name, "--spec", spec, "--kernels", tmp_path, *SHAPES)
    assert result.exit_code == 0, result.output
    assert "cutlass_ops fused-f16 (default)" in result.stdout


# ---- errors --------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_error_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(MAIN, *SHAPES)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: needs a Hopper GPU (compute capability 9.0); found none that PyTorch can use; run it on an H100, H200, H800, H20 or "
        "GH200; cutlass-ops explain says, without a GPU, which plan a call takes\n"
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["conv2", *SHAPES], 1, "did you mean conv2d?"),
        (["conv2d", "--shape", "2,8,16", "--weight", "8,8,3,3"], 2, "expected 4 whole numbers"),
        (["conv2d", "--shape", "2,8,16,16", "--weight", "8,9,3,3"], 1, "expected"),
        (["conv2d", "--shape", "0,8,16,16", "--weight", "8,8,3,3"], 1, "expected sizes of at least 1"),
        (["conv2d", *SHAPES, "--pool", "2"], 1, "pool"),
        (["conv2d", *SHAPES, "--dtype", "float16", "--precision", "tf32"], 1, "precision"),
        (["conv2d", *SHAPES, "--dtype", "float64"], 2, "no kernel computes float64"),
        (["conv2d", *SHAPES, "--trials", "0"], 2, "--trials"),
        (["conv2d", *SHAPES, "--idle-ms", "-1"], 2, "--idle-ms"),
        (["conv2d", *SHAPES, "--plot", "a.bmp"], 2, "expected a name that ends in .svg, .png, .pdf, got a.bmp"),
        (["conv2d", *SHAPES, "--json", "no/such/a.json"], 2, "expected a file in a folder that exists, got no/such/a.json"),
        (["conv2d", *SHAPES, "--kernels", "a"], 2, "expected --spec beside --kernels"),
    ],
)
def test_wrong_arguments(arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "limits", None)  # would fail
    find = bench.importlib.util.find_spec
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    result = run("conv2d", *SHAPES, "--plot", tmp_path / "a.png")
    assert result.exit_code == 1
    assert result.stderr == "error: expected the package matplotlib for --plot, found none; pip install 'cutlass_ops[bench]'\n"


# ---- any call as a subject -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["conv2d", MAIN, "conv2d_min_add_mul", "conv2d_relu_hardswish"])
def test_the_model_computes_what_the_operator_does(name, dtype):
    operator = getattr(cutlass_ops, name)
    arguments = {"stride": (1, 2), "padding": 1, **({"pool": 3, "pool_padding": 1} if operator.spec.pool else {})}
    make = functools.partial(calls.call_subject, operator, (3, 5, 11, 13), (7, 5, 3, 3), dtype, channels_last=True, arguments=arguments)
    subject = make(device="cpu")
    assert torch.equal(subject.model(subject.x), operator(subject.x, subject.weight, **subject.arguments))
    assert {*subject.arguments} == {a.name for a in operator.spec.vectors} | {*arguments}
    assert subject.x.is_contiguous(memory_format=torch.channels_last)
    assert float(subject.weight.abs().max()) <= 45**-0.5 * 1.01
    again = make(device="cpu")
    assert torch.equal(subject.x, again.x)
    assert torch.equal(subject.weight, again.weight)


def test_torch_compile_traces_the_model_whole():
    subject = calls.call_subject(
        getattr(cutlass_ops, MAIN), (2, 8, 8, 8), (8, 8, 3, 3), torch.float32, channels_last=False, device="cpu", arguments={}
    )
    with subject.settings():
        compiled = torch.compile(subject.model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(subject.x), subject.model(subject.x), rtol=0, atol=0)


def test_an_idle_time_that_is_no_number_is_wrong_usage():
    result = run(MAIN, *SHAPES, "--idle-ms", "nan")
    assert result.exit_code == 2
    assert "expected milliseconds from 0 to 1000, got nan" in result.stderr
