"""Command line of scripts/bench.py."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..errors import CutlassOpsError
from .cases import CASES, MAIN, groups
from .report import dumps, load, render, write_aside

#: Milliseconds; beyond a second a full run would take an hour.
IDLE_MS, MAX_IDLE_MS = 0.0, 1000.0
PARTIAL_RUN = "figures not written: a run with --quick, --operator or --trials is no full record; give --out FOLDER to keep it"


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Measure every plan beside PyTorch on a Hopper GPU.")
    parser.add_argument("--operator", nargs="+", choices=sorted(CASES), metavar="NAME", help=f"only these: {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="KernelBench's input in fp32 NCHW alone, without max-autotune (problem 46)")
    parser.add_argument("--trials", type=int, help="timed calls of each competitor (default: 100)")
    parser.add_argument(
        "--idle-ms", type=float, default=IDLE_MS, metavar="T", help=f"time without work before each timed call (default: {IDLE_MS:g})"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where performance.json and .md go (default: docs/, full runs only)")
    parser.add_argument("--render", action="store_true", help="make the documents from FOLDER/performance.json; needs no GPU")
    parser.add_argument("--commit", metavar="ID", help="commit to record where there is no git checkout (ID-dirty: with changes)")
    options = parser.parse_args(arguments)
    if options.trials is not None and options.trials < 1:
        parser.error(f"expected --trials of at least 1, got {options.trials}")
    if not 0 <= options.idle_ms <= MAX_IDLE_MS:
        parser.error(f"expected --idle-ms from 0 to {MAX_IDLE_MS:g}, got {options.idle_ms:g}")
    return options


def command_line(options: argparse.Namespace) -> str:
    """The command as the record has it: what decides the figures, not where they go."""
    words = ["python", "scripts/bench.py"]
    words += ["--quick"] if options.quick else []
    words += ["--operator", *options.operator] if options.operator else []
    words += ["--trials", str(options.trials)] if options.trials else []
    words += ["--idle-ms", f"{options.idle_ms:g}"] if options.idle_ms != IDLE_MS else []
    return shlex.join(words)


def output_folder(options: argparse.Namespace, root: Path) -> Optional[Path]:
    """Where the figures go; None for a partial run that names no folder."""
    if options.out is not None:
        return Path(options.out)
    partial = options.quick or options.operator or options.trials
    return None if partial and not options.render else root / "docs"


def run(options: argparse.Namespace, root: Path) -> int:
    """Measure, print, write; returns the exit code: 1 where a result of ours was refused, or a part failed."""
    from ..environment import environment  # here: --render and --help need no torch machinery
    from .run import Run, require_gpu

    require_gpu()
    out = output_folder(options, root)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    path = None if out is None else out / "performance.json"
    trials = options.trials or 100
    operators = options.operator or ([MAIN.operator] if options.quick else list(CASES))
    how = {"command": command_line(options), "trials": trials, "idle_ms": options.idle_ms}
    measured = Run(environment(root, options.commit) | how, trials, options.idle_ms, path)
    result = measured.measure(groups(operators, quick=options.quick), quick=options.quick)
    if out is None or path is None:
        print(PARTIAL_RUN)
    else:
        write_aside(path, dumps(result))
        print(f"wrote {path}")
    wrong = [f"refused to time {text}" for text in result["refused"]] + result["failed"]
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    if out is not None and importlib.util.find_spec("matplotlib") is None:
        print("no matplotlib here: documents are not made; pip install 'cutlass_ops[bench]', then scripts/bench.py --render")
    elif out is not None:
        show_written(out, root)
    return 1 if wrong else 0


def show_written(out: Path, root: Path) -> None:
    """Make the documents of a folder's figures and print their names."""
    print("\n".join(f"wrote {p}" for p in render(load(out / "performance.json"), out, root)))


def main(root: Path, arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; returns the exit code. `root` is the checkout, whose docs/ and README.md hold the figures."""
    options = parse(arguments)
    try:
        if options.render:
            show_written(output_folder(options, root) or root / "docs", root)
            return 0
        return run(options, root)
    except CutlassOpsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
