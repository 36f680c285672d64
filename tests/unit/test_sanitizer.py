"""compute-sanitizer's logs, its running, and the suites: every kernel of the manifest is in them."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

import cutlass_ops
from cutlass_ops import sanitizer
from cutlass_ops.loader import ALLOW_UNVERIFIED, shipped_kernels
from cutlass_ops.manifest import Manifest
from cutlass_ops.sanitizer import find_sanitizer, parse, run, suite
from cutlass_ops.selection import PLAN_NAMES, PYTORCH
from cutlass_ops.work import FusedWork

from .fake_driver import H200

OPERATORS = [getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS]

READ = """\
========= Uninitialized __global__ memory read of size 4 bytes
=========     at {kernel}+0x1b0
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f6e01000000
=========
"""
OUT_OF_BOUNDS = """\
========= Invalid __global__ write of size 16 bytes
=========     at 0x4d0 in convert_f32_f16
=========     by thread (31,0,0) in block (4,0,0)
=========     Address 0x7f6e01000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f6e01000000 of size 512 bytes
=========
"""
RACES = """\
========= Error: Race reported between Write access at pool_avg_f32+0xa70
=========     and Read access at pool_avg_f32+0xb00 [16 hazards]
=========
========= Warning: Race reported between Read access at pack_f32_f16+0x100
=========     and Write access at pack_f32_f16+0x200 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def log(*reports, errors):
    return "========= COMPUTE-SANITIZER\n" + "".join(reports) + f"========= ERROR SUMMARY: {errors} error{'' if errors == 1 else 's'}\n"


def test_a_clean_log_has_no_errors():
    for tool in ("memcheck", "synccheck", "initcheck"):
        found = parse(tool, log(errors=0))
        assert (found.errors, found.excluded, found.examples, found.complete) == (0, {}, (), True)
    found = parse("racecheck", "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n")
    assert (found.errors, found.warnings, found.complete) == (0, 0, True)


def test_errors_are_counted_and_shown():
    found = parse("memcheck", log(OUT_OF_BOUNDS, OUT_OF_BOUNDS, errors=2))
    assert found.errors == 2
    assert found.examples[0] == "Invalid __global__ write of size 16 bytes at 0x4d0 in convert_f32_f16"
    found = parse("racecheck", RACES)
    assert (found.errors, found.warnings, len(found.examples)) == (1, 1, 2)


def test_a_log_without_summary_is_not_complete():
    assert not parse("memcheck", "").complete
    assert not parse("memcheck", "========= COMPUTE-SANITIZER\n" + OUT_OF_BOUNDS).complete


@pytest.mark.parametrize("kernel", ["pool_avg_f32", "pool_max_bf16"])
def test_only_the_known_reports_are_excluded_and_they_are_counted(kernel):
    known = READ.format(kernel=kernel)
    found = parse("initcheck", log(known, known, errors=2))
    assert found.errors == 0
    ((reason, count),) = found.excluded.items()
    assert count == 2
    assert "TMA" in reason


@pytest.mark.parametrize("kernel", ["convert_f32_f16", "conv2d_sub_tanh_sub_avgpool_f16", "at::native::max_pool", "my_pool_avg_f32x"])
def test_uninitialised_reads_of_other_kernels_are_errors(kernel):
    found = parse("initcheck", log(READ.format(kernel="pool_avg_f32"), READ.format(kernel=kernel), errors=2))
    assert found.errors == 1
    assert kernel in found.examples[0]


def test_an_exclusion_holds_for_its_tool_and_kind_only():
    known = READ.format(kernel="pool_avg_f32")
    assert parse("memcheck", log(known, errors=1)).errors == 1
    assert parse("initcheck", log(known.replace("read", "write"), errors=1)).errors == 1


def test_what_was_counted_but_not_printed_is_an_error():
    assert parse("initcheck", log(READ.format(kernel="pool_avg_f32"), errors=5)).errors == 4


# ---- running -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path):
    """A stand-in for compute-sanitizer that writes a given log and then runs the program."""

    def make(text):
        script = tmp_path / "compute-sanitizer"
        script.write_text(
            f"#!{sys.executable}\nimport subprocess, sys\n"
            f"file = sys.argv[sys.argv.index('--log-file') + 1]\nopen(file, 'w').write({text!r})\n"
            "sys.exit(subprocess.run(sys.argv[sys.argv.index('--log-file') + 2:]).returncode)\n"
        )
        script.chmod(0o755)
        return str(script)

    return make


def child(code):
    return [sys.executable, "-c", code]


def test_a_clean_run_passes_with_one_line(tool, tmp_path, capsys):
    assert run(tool(log(errors=0)), "memcheck", child("print('calls')"), tmp_path, 60)
    out = capsys.readouterr().out
    assert out.startswith("memcheck   0 errors, 0 warnings  (")
    assert len(out.splitlines()) == 1
    assert (tmp_path / "memcheck.child.log").read_text() == "calls\n"


def test_exclusions_are_printed(tool, tmp_path, capsys):
    assert run(tool(log(READ.format(kernel="pool_avg_f32"), errors=1)), "initcheck", child(""), tmp_path, 60)
    assert "excluded: 1 reports: pooling kernels read what the implicit GEMM wrote by TMA" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        (log(OUT_OF_BOUNDS, errors=1), "", "Invalid __global__ write of size 16 bytes"),
        (log(errors=0), "print('a traceback'); raise SystemExit(3)", "a traceback"),
        ("", "", "no summary in the log"),
    ],
)
def test_errors_failures_and_missing_summaries_fail(tool, tmp_path, capsys, text, code, shown):
    assert not run(tool(text), "memcheck", child(code), tmp_path, 60)
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert shown in out


def test_a_program_that_does_not_end_fails_and_is_ended(tool, tmp_path, capsys):
    lives = tmp_path / "lives"
    code = f"import pathlib, time; time.sleep(3); pathlib.Path({str(lives)!r}).touch()"
    assert not run(tool(log(errors=0)), "memcheck", child(code), tmp_path, 1)
    assert "none within 1 s" in capsys.readouterr().out
    time.sleep(3)
    assert not lives.exists()


def test_the_tool_is_found_where_cuda_has_it(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "path", [])
    given = tool("")
    assert find_sanitizer(tmp_path / "compute-sanitizer") == given
    assert find_sanitizer(tmp_path / "nothing") is None
    (tmp_path / "bin").mkdir()
    (tmp_path / "compute-sanitizer").rename(tmp_path / "bin" / "compute-sanitizer")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")


# ---- suites ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sanitizer.SUITES)
def test_a_suite_has_every_kernel_and_plan_of_the_tracked_manifest(name, monkeypatch):
    monkeypatch.setenv(ALLOW_UNVERIFIED, "1")
    calls = list(suite(name, OPERATORS, "cpu", H200))
    kernels = {kernel for call in calls for kernel in call.plan.kernels}
    assert kernels >= {kernel.name for kernel in Manifest.load(shipped_kernels() / "manifest.json").kernels}
    assert {call.plan.name for call in calls} == set(PLAN_NAMES) - {PYTORCH}
    assert len({call.name for call in calls}) == len(calls)
    for call in calls:
        if call.op in OPERATORS:  # the unregistered operator with a max pool runs on a GPU only
            assert call.op(*call.tensors, **call.arguments).isfinite().all(), call.name


def test_every_fused_kernel_goes_round_its_ring(monkeypatch):
    """A race of two uses of a slot shows where a CTA reads more slots than the ring has; claims go round a ring of 16 barriers."""
    monkeypatch.setenv(ALLOW_UNVERIFIED, "1")
    records = {kernel.name: kernel for kernel in Manifest.load(shipped_kernels() / "manifest.json").kernels}
    slots = {kernel.name: 0 for kernel in records.values() if kernel.family == "fused"}
    steps = dict.fromkeys(slots, 0)
    for call in suite("small", OPERATORS, "cpu", H200):
        name = call.plan.kernels[-1]
        if name in slots:
            x, weight, *vectors = call.tensors
            problem = call.op.problem(x, weight, call.op.arguments.bind(vectors, call.arguments)[2])
            work = FusedWork.of(problem, records[name], sanitizer.SM_COUNT)
            assert work.teams > 0, call.name
            busiest = work.busiest(x.shape[0], weight.shape[2])
            steps[name], slots[name] = max(steps[name], busiest[0]), max(slots[name], busiest[1])
    assert [name for name, count in slots.items() if count <= records[name].stages] == []
    claiming = [name for name in steps if records[name].claims]
    assert len(claiming) == 3
    assert [name for name in claiming if steps[name] <= 16] == []


def test_a_kernel_that_was_not_launched_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sanitizer, "suite", lambda *_: [])
    monkeypatch.setattr(sanitizer, "torch", SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None)))
    wrong = sanitizer.launch_suite("tiny", OPERATORS, shipped_kernels())
    assert "never launched: pack_f32_f16" in wrong
    assert "0 calls launched 0 of" in capsys.readouterr().out
