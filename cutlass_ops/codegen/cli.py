"""Command line of the build (scripts/build_kernels.py)."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ..errors import BuildError, ChainError
from ..project import locate
from ..spec import Spec
from ..specs import OPERATORS


def load_specs(path: Path) -> list[Spec]:
    """The specs that a user's project folder or Python file defines. Raises BuildError where there is none."""
    path = locate(path).specs
    if not path.is_file():
        raise BuildError(f"expected a Python file with specs at {path}, found none")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise BuildError(f"expected a Python file (.py) with specs, got {path}")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise BuildError(f"expected {path} to import, it raised {type(error).__name__}: {error}") from error
    specs = [value for value in vars(module).values() if isinstance(value, Spec)]
    if not specs:
        raise BuildError(f"expected at least one function under @cutlass_ops.operator(...) in {path}, found none")
    return specs


def kernels_folder(spec: Optional[Path]) -> Path:
    """Where the kernels of a project folder or Python file go (None: of the shipped operators) unless another folder is named."""
    return locate(spec).kernels if spec else Path("generated")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Build the kernels ahead of time; needs no GPU.")
    parser.add_argument("--spec", type=Path, help="your own project folder, or a Python file with specs (default: the shipped operators)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: generated/; a project's: in its package)")
    parser.add_argument("--nvcc", help="another nvcc 13.0 than the one from PyPI")
    parser.add_argument("--jobs", type=int, default=0, help="compilations at a time (default: one a core)")
    parser.add_argument("--check", action="store_true", help="change nothing; rebuild elsewhere and fail where anything differs")
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Build or check; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from . import build, toolchain
    except ModuleNotFoundError as error:
        print(f"error: expected the package {error.name}, found none; pip install 'cutlass_ops[build]'", file=sys.stderr)
        return 1
    started = time.monotonic()
    try:
        specs = load_specs(options.spec) if options.spec else list(OPERATORS.values())
        out = options.out or kernels_folder(options.spec)
        found = toolchain.find(options.nvcc)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task("nvcc", total=None)

            def progress(name: str, done: int, total: int) -> None:
                bar.update(task, description=name, completed=done, total=total)

            if options.check:
                problems = build.check(specs, out, found, jobs=options.jobs, progress=progress, strict=options.spec is None)
            else:
                report = build.build(specs, out, found, jobs=options.jobs, progress=progress, strict=options.spec is None)
    except (BuildError, ChainError) as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run again to continue", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    if options.check:
        for problem in problems:
            print(f"drift: {problem}", file=sys.stderr)
        print(f"{out}: {'no drift' if not problems else f'{len(problems)} differences; run scripts/build_kernels.py'} ({seconds:.1f} s)")
        return 1 if problems else 0
    for reason in report.left_out.values():
        print(f"left out, a two-kernel plan serves its problems: {reason}")
    print(f"{out}: {len(report.built)} cubins built, {len(report.reused)} up to date ({seconds:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
