"""The GPU check (`cutlass-ops check`, scripts/check_gpu.py): tests, accuracy of every operator and plan, the record for each cubin.

Needs a Hopper GPU; using the operators needs nothing of it. `accuracy.Criterion` says what "accurate" means.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional
from unittest import mock

import torch

from . import driver, ops
from .accuracy import Accuracy, Criterion, serving, uniform
from .environment import environment
from .errors import InstallationError
from .loader import ALLOW_UNVERIFIED, KernelSet, LoadedKernel, shipped_kernels
from .manifest import KernelRecord, Manifest, read_checks
from .ops import Operator, use_plan
from .problem import DTYPES

__all__ = ["check", "check_kernels", "check_own", "missing_gpu"]

#: The tests of the shipped kernels; a checkout has them, an installation has not.
TESTS = Path(__file__).parent.parent / "tests" / "gpu"
DTYPES_WITH_KERNELS = (torch.float32, torch.float16, torch.bfloat16)


def missing_gpu() -> Optional[str]:
    """Why this machine cannot run the check, or None."""
    if not torch.cuda.is_available():
        found = "none that PyTorch can use"
    elif torch.cuda.get_device_capability() != (9, 0):
        found = "{} with {}.{}".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())
    else:
        return None
    return f"needs a Hopper GPU (compute capability 9.0); found {found}"


def check_kernels(spec: Optional[Path], kernels: Optional[Path], *, tests: bool = True, commit: Optional[str] = None) -> bool:
    """Check the kernels of a user's project folder or Python file (`kernels`: the folder they are in) or, with None, the shipped ones.

    Without `tests` it prints the accuracy table and writes nothing. Returns whether all passed. Raises InstallationError, BuildError.
    """
    from .codegen.cli import kernels_folder, load_specs

    if spec:
        folder = kernels or kernels_folder(spec)
        return check_own([Operator(s, folder) for s in load_specs(spec)], folder, commit, write=tests)
    folder = shipped_kernels()
    found = sorted(TESTS.glob("test_*.py")) if tests else []  # not pytorch/, which says nothing of a cubin
    if tests and not found:
        raise InstallationError(f"expected the GPU tests in {TESTS}, found none; run the check in a checkout, or without tests")
    return check([op for op in ops._OPERATORS.values() if op.kernels == folder], folder, found, commit)


# ---- the table of every operator and plan ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A problem of the table: N, C, H, W; K, R, S; further arguments; how x and weight lie in memory."""

    name: str
    x: tuple[int, int, int, int]
    weight: tuple[int, int, int]
    layout: str = "contiguous"
    pool: Optional[int] = None  # in place of the operator's own
    arguments: tuple[tuple[str, Any], ...] = ()

    def inputs(self, op: Operator, dtype: torch.dtype, generator: torch.Generator) -> tuple[list[Any], dict[str, Any]]:
        """Random x, weight and vectors for an operator, and the keyword arguments of the call."""
        k, r, s = self.weight
        n, c, h, w = self.x
        reach = 1 / math.sqrt(c * r * s)  # torch.nn.Conv2d's initialisation
        if self.layout == "sliced":
            x = uniform((n, c + 1, h + 2, w + 3), 0, 1, dtype, generator)[:, 1:, 1:-1, 2:-1]
            weight = uniform((k, c + 3, r, s), -reach, reach, dtype, generator)[:, :c]
        else:
            x, weight = uniform(self.x, 0, 1, dtype, generator), uniform((k, c, r, s), -reach, reach, dtype, generator)
        # Dense, an element behind a 16-byte boundary, and before two more: ptxas writes a copy of the first 2 of 4 bytes as one of 4 at the
        # address behind them (LDGSTS.ZFILL), and memcheck reports it where an allocation ends there.
        if self.layout == "beside":
            x = x.new_full((x.numel() + 3,), math.nan)[1:-2].view(self.x).copy_(x)
        if self.layout == "channels_last":
            x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
        vectors = [uniform((k,), -1, 1, dtype, generator) for _ in op.spec.vectors]
        arguments = dict(self.arguments) | ({"precision": "tf32"} if dtype is torch.float32 else {})
        return [x, weight, *vectors], arguments | ({"pool": self.pool} if op.spec.pool and self.pool else {})


#: All but the last two are such that a fused kernel serves them; between them they reach every one.
SAMPLES = (
    Sample("aligned", (8, 64, 56, 56), (128, 3, 3), pool=2),
    Sample("padded", (4, 32, 40, 48), (96, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("few channels", (4, 8, 56, 136), (72, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1", (4, 64, 40, 56), (136, 1, 1), pool=2),
    Sample("wide", (9, 64, 37, 104), (144, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, wide", (16, 64, 40, 104), (136, 1, 1), pool=2),
    Sample("in strips", (3, 64, 21, 144), (144, 3, 3), pool=2),
    Sample("whole lines", (7, 40, 20, 128), (80, 3, 3), pool=2, arguments=(("padding", 1),)),
    # Rows that TMA cannot read.
    Sample("gathered", (8, 64, 56, 58), (128, 3, 3), pool=2),
    Sample("padded, gathered", (4, 32, 40, 46), (96, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("few channels, gathered", (4, 8, 56, 134), (72, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, gathered", (4, 64, 40, 54), (136, 1, 1), pool=2),
    Sample("wide, gathered", (9, 64, 37, 102), (144, 3, 3), pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, wide, gathered", (16, 64, 40, 102), (136, 1, 1), pool=2),
    Sample("odd rows", (5, 40, 23, 61), (72, 3, 3), pool=2),
    Sample("odd rows, few channels", (5, 5, 33, 131), (40, 3, 3), pool=2),
    Sample("narrow", (2, 1, 33, 31), (7, 1, 1), pool=2),
    Sample("wide, at odd elements", (9, 64, 37, 104), (144, 3, 3), "beside", pool=2, arguments=(("padding", 1),)),
    Sample("1 x 1, wide, at odd elements", (16, 64, 40, 104), (136, 1, 1), "beside", pool=2),
    Sample("1 x 1, at odd elements", (4, 64, 40, 56), (136, 1, 1), "beside", pool=2),
    Sample("channels_last", (4, 32, 40, 44), (96, 3, 3), "channels_last", pool=2, arguments=(("padding", 1),)),
    Sample("few channels_last", (4, 8, 37, 45), (72, 3, 3), "channels_last", pool=2),
    Sample("1 x 1 channels_last", (4, 64, 33, 31), (70, 1, 1), "channels_last", pool=2),
    Sample("odd", (3, 13, 37, 45), (70, 5, 2), arguments=(("padding", (2, 1)), ("dilation", (1, 2)))),
    Sample("strided", (5, 130, 61, 63), (7, 3, 4), "sliced", arguments=(("stride", (2, 1)), ("padding", (0, 1)))),
)


@dataclass(frozen=True)
class Row:
    """A line of the table: operator, dtype, plan and sample; accuracy; sha256 of the cubins that took part."""

    case: str
    accuracy: Accuracy
    cubins: frozenset[str]

    def __str__(self) -> str:
        a = self.accuracy
        numbers = f"{a.max:>10.2e}{a.mean:>10.2e}{a.eager_max:>11.2e}{a.eager_mean:>11.2e}{a.allowed_max:>11.2e}{a.allowed_mean:>9.1e}"
        return f"{self.case:<72}{numbers}{'' if a.passed else '  FAILED'}"


def measure(op: Operator, manifest: Manifest) -> Iterator[Row]:
    """Accuracy of an operator: each sample, dtype and plan that serves it. Raises InstallationError where none does."""
    hashes = {k.name: k.sha256 for k in manifest.kernels}
    generator = torch.Generator("cuda").manual_seed(0)
    for sample in SAMPLES:
        for dtype in DTYPES_WITH_KERNELS:
            tensors, arguments = sample.inputs(op, dtype, generator)
            plans = serving(op, *tensors, **arguments)
            if not plans:
                raise InstallationError(f"expected a plan that serves {dtype}, found none; {op.explain(*tensors, **arguments)}")
            criterion = Criterion(op, *tensors, **arguments)
            for plan in plans:
                with use_plan(plan.name):
                    accuracy = criterion.judge(op(*tensors, **arguments))
                case = f"{op.spec.name} {DTYPES[dtype]} {plan.name} {sample.name}"
                yield Row(case, accuracy, frozenset(hashes[name] for name in plan.kernels))


@contextlib.contextmanager
def launches() -> Iterator[set[str]]:
    """The names of all kernels launched within the block, filled as they are."""
    launched: set[str] = set()
    names: dict[int, str] = {}
    get, call = KernelSet.get, driver.Launch.__call__

    def watched_get(self: KernelSet, name: str, device: int) -> LoadedKernel:
        kernel = get(self, name, device)
        names[int(kernel.function)] = name
        return kernel

    def watched_call(self: driver.Launch, stream: int) -> None:
        call(self, stream)
        launched.add(names.get(int(self._function), ""))

    with mock.patch.object(KernelSet, "get", watched_get), mock.patch.object(driver.Launch, "__call__", watched_call):
        yield launched


# ---- tests and record --------------------------------------------------------------------------------------------


class _Counter:
    """pytest plugin that counts tests."""

    def __init__(self) -> None:
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of a test: what fails or skips in any phase counts, what passes in its own."""
        if report.skipped and "large" in report.keywords:  # an H100 with 80 GB may verify kernels; its record says so
            self.counts["too large"] = self.counts.get("too large", 0) + 1
        elif report.when == "call" or not report.passed:
            self.counts[report.outcome] += 1

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be collected is a failure."""
        if not report.passed:
            self.counts[report.outcome] += 1


def run_tests(tests: Sequence[Path]) -> tuple[dict[str, int], bool]:
    """Run tests in this process; returns their counts and whether all passed (one at least)."""
    import pytest

    counter = _Counter()
    code = pytest.main([*map(str, tests), "-q", "-p", "no:cacheprovider"], plugins=[counter])
    return counter.counts, code == 0 and counter.counts["passed"] > 0 and not counter.counts["failed"] + counter.counts["skipped"]


def check(operators: Sequence[Operator], kernels: Path, tests: Sequence[Path], commit: Optional[str] = None) -> bool:
    """Check every cubin of the shipped operators' folder and write its gpu_checks.json; returns whether all passed.

    `operators` are those of the folder's manifest. A cubin passes where no test fails or is skipped (but for those too large
    for the GPU's memory), its kernels have all been launched, and every result that it took part in is accurate. Without
    `tests` nothing is written. `commit` is what to record outside a git checkout.
    """
    manifest, facts = _prepare(operators, kernels, commit)
    with mock.patch.dict(os.environ, {ALLOW_UNVERIFIED: "1"}), launches() as launched:
        rows = _table(operators, manifest)
        if not tests:
            return all(row.accuracy.passed for row in rows)
        counts, tests_passed = run_tests(tests)
    records = {}
    for cubin in _cubins(manifest):
        reasons = [] if tests_passed else [f"tests: {counts}"]
        reasons += cubin.objections(rows, launched)
        records[cubin.sha256] = cubin.record(reasons, rows, facts | {"tests": counts})
    return _write(kernels, records)


def check_own(operators: Sequence[Operator], kernels: Path, commit: Optional[str] = None, *, write: bool = True) -> bool:
    """Check every cubin of a user's folder and write its gpu_checks.json (if `write`); returns whether all passed.

    As `check`, without a test: an operator's cubin passes where its kernels have all been launched and every result is accurate.
    Those that all operators share passed their tests when they were shipped: each must be byte for byte the shipped one, whose
    record is taken over. Raises InstallationError where one is not.
    """
    from . import __version__

    manifest, facts = _prepare(operators, kernels, commit)
    shipped = read_checks(shipped_kernels() / "gpu_checks.json")
    for cubin in _cubins(manifest):
        if cubin.shared and shipped.get(cubin.sha256, {}).get("passed") is not True:
            raise InstallationError(
                f"expected {kernels / 'cubins' / cubin.file} to be as cutlass_ops ships it, with a record of a passed GPU check, got other "
                "bytes; build again with the compiler and the CUTLASS of cutlass_ops[build] of this version"
            )
    with mock.patch.dict(os.environ, {ALLOW_UNVERIFIED: "1"}), launches() as launched:
        rows = _table(operators, manifest)
    records = {}
    for cubin in _cubins(manifest):
        # Of the shared kernels an operator needs those of its pool alone.
        reasons = cubin.objections(rows, launched | (cubin.kernels if cubin.shared else set()))
        of_now = cubin.record(reasons, rows, facts | {"cutlass_ops": __version__})
        records[cubin.sha256] = shipped[cubin.sha256] if cubin.shared and not reasons else of_now
    return _write(kernels, records) if write else all(record["passed"] for record in records.values())


@dataclass(frozen=True)
class _Cubin:
    """A cubin of a manifest, and the kernels in it."""

    file: str
    sha256: str
    kernels: frozenset[str]
    #: Whether all operators share it.
    shared: bool

    def objections(self, rows: Sequence[Row], launched: set[str]) -> list[str]:
        """What the table and the launches have against it."""
        idle = sorted(self.kernels - launched)
        reasons = [f"not accurate: {row.case}" for row in rows if self.sha256 in row.cubins and not row.accuracy.passed]
        return reasons + ([f"never launched: {', '.join(idle)}"] if idle else [])

    def record(self, reasons: Sequence[str], rows: Sequence[Row], facts: dict[str, Any]) -> dict[str, Any]:
        """Its GPU check record; the outcome is printed."""
        print(f"{self.file}: {'; '.join(reasons) or 'passed'}")
        errors = {row.case: row.accuracy.to_json() for row in rows if self.sha256 in row.cubins}
        return {"cubin": self.file, "passed": not reasons, **facts, "errors": errors}


def _cubins(manifest: Manifest) -> list[_Cubin]:
    files: dict[str, list[KernelRecord]] = {}
    for kernel in sorted(manifest.kernels, key=lambda k: k.cubin):
        files.setdefault(kernel.cubin, []).append(kernel)
    return [_Cubin(file, ks[0].sha256, frozenset(k.name for k in ks), not ks[0].operator) for file, ks in files.items()]


def _prepare(operators: Sequence[Operator], kernels: Path, commit: Optional[str]) -> tuple[Manifest, dict[str, Any]]:
    """The folder's manifest, which must be of these operators, and the facts that every record holds, printed too."""
    manifest = Manifest.load(kernels / "manifest.json")
    wanted, given = {k.operator for k in manifest.kernels} - {""}, {op.spec.name for op in operators}
    if wanted != given:
        raise InstallationError(f"expected the operators {sorted(given)} in {kernels / 'manifest.json'}, got {sorted(wanted)}; build again")
    facts = environment(kernels, commit)
    print(*(f"{name}: {value}" for name, value in facts.items()), sep="\n")
    return manifest, facts


def _table(operators: Sequence[Operator], manifest: Manifest) -> list[Row]:
    """The accuracy of every operator, printed row by row."""
    print(f"{'absolute error against float64':<72}{'max':>10}{'mean':>10}{'eager max':>11}{'eager mean':>11}{'allowed max, mean':>20}")
    rows = []
    for row in (row for op in operators for row in measure(op, manifest)):
        print(row)
        rows.append(row)
    return rows


def _write(kernels: Path, records: dict[str, dict[str, Any]]) -> bool:
    """Write the records aside and rename; returns whether all passed."""
    path = kernels / "gpu_checks.json"
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"schema": 1, "cubins": records}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    aside.replace(path)
    return all(record["passed"] for record in records.values())
