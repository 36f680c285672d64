"""The wheel in clean environments: the oldest and the newest Python, PyTorch and cuda-bindings that it promises to work with.

    .venv/bin/nox -f scripts/noxfile.py                       # all four; gigabytes of PyTorch each
    .venv/bin/nox -f scripts/noxfile.py -s "wheel(oldest, 3.10)"

Takes the wheel from dist/ (scripts/build_wheel.py). A session whose Python is not installed fails, and says so.
"""

from __future__ import annotations

import email
import zipfile
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
#: Tests of what needs a checkout, or the extras cli, bench and build.
NOT_OF_WHEEL = ("test_cli*", "test_benchmark*", "test_project*", "test_repository*")
PYTHONS = ("3.10", "3.13")  # the oldest and the newest of pyproject.toml's classifiers

nox.options.error_on_missing_interpreters = True
nox.options.default_venv_backend = "venv"
nox.options.envdir = str(ROOT / ".nox")


def lower_bounds(wheel: Path) -> list[str]:
    """The oldest release of each run-time dependency that the wheel promises to work with, as pip's requirements."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [f"{r.name}=={bound.version}" for r in needed for bound in r.specifier if bound.operator == ">="]


@nox.session
@nox.parametrize("python", [nox.param(version, id=version) for version in PYTHONS])
@nox.parametrize("releases", [nox.param(name, id=name) for name in ("oldest", "newest")])
def wheel(session: nox.Session, releases: str) -> None:
    """Install the wheel, run the operator as scripts/demo does, then the run time's unit tests (arguments after -- go to pytest)."""
    found = sorted((ROOT / "dist").glob("*.whl"))
    if len(found) != 1:
        session.error(f"expected one wheel in dist/, found {len(found)}; empty it and run scripts/build_wheel.py")
    session.install("--upgrade", str(found[0]), *(lower_bounds(found[0]) if releases == "oldest" else ()))
    session.run("python", "-m", "pip", "freeze")
    session.run("python", "-I", "-W", "ignore:Failed to initialize NumPy", str(ROOT / "scripts" / "demo_operator.py"))
    session.install("pytest>=8", "hypothesis>=6.100", "numpy>=1.26")
    session.chdir(session.create_tmp())  # so that the package is the installed one, not the checkout's
    unit = ROOT / "tests" / "unit"
    session.run(
        "python",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        str(unit),
        *(f"--ignore-glob={unit / n}" for n in NOT_OF_WHEEL),
        *session.posargs,
    )
