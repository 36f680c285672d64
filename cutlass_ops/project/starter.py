"""A starter project: a package with one operator of the user's own, ready to be changed, built, checked and made a wheel."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template
from typing import Optional

from .. import __version__
from ..errors import BuildError, InstallationError
from .names import check_operator, check_package

__all__ = ["create", "requirement"]

_TEMPLATES = Path(__file__).parent / "starter"
#: File of a project -> its template.
_FILES = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "readme.template",
    "{package}/__init__.py": "package.template",
    "{package}/specs.py": "specs.template",
    "tests/test_{package}.py": "test.template",
}


def create(folder: Path, operator: Optional[str] = None) -> Path:
    """Write a starter project into a new folder, whose name is the package's; `operator` names its operator (default: conv2d_NAME).

    Nothing is left behind where it fails. Raises BuildError: a name that is none or that is taken, a folder that exists
    or cannot be written; InstallationError: no licences to hand on, or two packages with an operator of one name.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 (resolve would follow a link that is in the way)
    package = folder.name
    operator = f"conv2d_{package}" if operator is None else operator
    check_package(package, folder)
    check_operator(operator, folder)
    if folder.exists() or folder.is_symlink():
        raise BuildError(f"expected a name that is free, got {folder}, which exists; name another folder")
    values = {"package": package, "operator": operator, "requirement": requirement(__version__)}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{package}-", dir=folder.parent) as temporary:
            aside = Path(temporary) / package
            for name, template in _FILES.items():
                _write(aside / name.format(**values), Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(values))
            _write(aside / "NOTICE", _notice(package))
            shutil.move(aside, folder)
    except OSError as error:
        raise BuildError(f"expected to write the project {folder}, could not ({error}); name a folder in one that is writable") from error
    return folder


def requirement(version: str) -> str:
    """The versions of cutlass_ops that run kernels which this version builds: up to the next major one (0.x: the next minor)."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{f'0.{minor + 1}' if major == 0 else major + 1}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _notice(package: str) -> str:
    """Licence notices for what is compiled into the cubins: kernels of this package, of CUTLASS, and what they are made of."""
    first = f"The cubins in {package}/kernels are compiled from kernels of cutlass_ops and of NVIDIA CUTLASS, whose licences follow.\n"
    rule = f"\n{'-' * 100}\n\n"
    return rule.join([first, *(path.read_text(encoding="utf-8") for path in _licences())])


def _licences() -> list[Path]:
    """The licence files of this package: of the installed distribution, or of a checkout. Raises InstallationError without any."""
    try:
        files = distribution("cutlass_ops").files or []
    except PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if ".dist-info/licenses/" in file.as_posix()]
    checkout = Path(__file__).parents[2]
    found = found or [path for pattern in ("LICENSE", "NOTICE", "licenses/*.txt") for path in checkout.glob(pattern)]
    if not found:
        raise InstallationError("expected the licence files of cutlass_ops beside its metadata, found none; reinstall the wheel")
    return sorted(found)
