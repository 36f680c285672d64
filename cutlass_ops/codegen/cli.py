"""What `cutlass-ops build` and scripts/build_kernels.py do: specs from a file, then a build or a check of one."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Optional

from ..errors import BuildError
from ..project import locate
from ..spec import Spec
from ..specs import OPERATORS


def load_specs(path: Path) -> list[Spec]:
    """The specs that a user's project folder or Python file defines. Raises BuildError where there is none."""
    path = locate(path).specs
    if not path.is_file():
        raise BuildError(f"expected a Python file with specs at {path}, found none; cutlass-ops new writes a project with one")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise BuildError(f"expected a Python file (.py) with specs, got {path}")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise BuildError(f"expected {path} to import, it raised {type(error).__name__}: {error}") from error
    specs = [value for value in vars(module).values() if isinstance(value, Spec)]
    if not specs:
        raise BuildError(f"expected at least one function under @cutlass_ops.operator(...) in {path}, found none; declare one there")
    _check_names([spec.name for spec in specs], path)
    return specs


def _check_names(names: list[str], path: Path) -> None:
    """Raise BuildError where operators of a file could not be used together, or not beside the shipped ones."""
    for name in names:
        if name in OPERATORS:
            raise BuildError(f"expected {path} to name its operators otherwise than the shipped ones, got {name!r}; rename it")
        if names.count(name) > 1:
            raise BuildError(f"expected every operator of {path} to have a name of its own, got {name!r} twice; rename one")


def kernels_folder(spec: Path) -> Path:
    """Where the kernels of a project folder or Python file go unless another folder is named."""
    return locate(spec).kernels


def shipped_folder() -> Path:
    """The checkout's generated/. Raises BuildError outside a checkout, whose kernels nobody should build by mistake."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file() or not (root / "generated").is_dir():
        raise BuildError(
            "expected your own specs, or a checkout of cutlass_ops to build the shipped operators in, got neither; name a file"
        )
    return root / "generated"


def build_kernels(
    spec: Optional[Path], out: Optional[Path], *, nvcc: Optional[str], jobs: int, check: bool, progress: Callable[[str, int, int], None]
) -> bool:
    """Build the kernels of `spec` (None: the shipped operators), or compare with a fresh build; prints what was done.

    Returns False where a check found a difference. Raises BuildError, ChainError.
    """
    try:
        from . import build, toolchain
    except ModuleNotFoundError as error:
        raise BuildError(f"expected the package {error.name}, found none; pip install 'cutlass_ops[build]'") from error
    started = time.monotonic()
    specs = load_specs(spec) if spec else list(OPERATORS.values())
    out = out or (kernels_folder(spec) if spec else shipped_folder())
    found = toolchain.find(nvcc)
    if check:
        problems = build.check(specs, out, found, jobs=jobs, progress=progress, strict=spec is None)
        for problem in problems:
            print(f"drift: {problem}", file=sys.stderr)
        result = f"{len(problems)} differences; build again without --check" if problems else "no drift"
        print(f"{out}: {result} ({time.monotonic() - started:.1f} s)")
        return not problems
    report = build.build(specs, out, found, jobs=jobs, progress=progress, strict=spec is None)
    for reason in report.left_out.values():
        print(f"left out, a two-kernel plan serves its problems: {reason}")
    print(f"{out}: {len(report.built)} cubins built, {len(report.reused)} up to date ({time.monotonic() - started:.1f} s)")
    return True
