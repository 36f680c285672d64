"""A user's operators outside this repository: a Python file, or a project folder that becomes a package of its own.

A project (`starter.create` writes one) holds pyproject.toml and one package, which has specs.py and, once built, kernels/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ..errors import BuildError

__all__ = ["Source", "locate"]


@dataclass(frozen=True)
class Source:
    """Where a user's operators are declared, and the folder that their kernels are built into."""

    specs: Path
    kernels: Path
    #: Folder of pyproject.toml; None for a Python file alone.
    root: Optional[Path] = None


def locate(path: Path) -> Source:
    """The specs and the kernels' folder of a project folder or of a Python file (kernels: NAME_kernels/ in the current folder).

    Raises BuildError where the path is neither, or a project does not have exactly one package with specs.py.
    """
    if not path.is_dir():
        return Source(path, Path(f"{path.stem}_kernels"))
    if not (path / "pyproject.toml").is_file():
        raise BuildError(f"expected a Python file or a project folder with pyproject.toml, got {path}; cutlass-ops new makes a project")
    found = sorted([*path.glob("*/specs.py"), *path.glob("src/*/specs.py")])
    if len(found) != 1:
        got = ", ".join(map(str, found)) or "none"
        raise BuildError(f"expected one package with specs.py in {path}, found {got}; a project has one (cutlass-ops new)")
    return Source(found[0], found[0].parent / "kernels", path)
