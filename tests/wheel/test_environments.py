"""scripts/noxfile.py: which environments it promises, and that none passes without having run."""

from __future__ import annotations

import email
import json
import sys
from pathlib import Path

from .helpers import ROOT, info, run, successful

NOX = (sys.executable, "-m", "nox", "-f", ROOT / "scripts" / "noxfile.py")


def test_the_oldest_and_newest_python_of_the_wheel_with_the_oldest_and_newest_releases(wheel: Path) -> None:
    sessions = {session["session"] for session in json.loads(successful(*NOX, "--list", "--json"))}
    metadata = email.message_from_bytes(info(wheel)["METADATA"])
    pythons = [c.split()[-1] for c in metadata.get_all("Classifier", []) if c.startswith("Programming Language :: Python :: 3.")]
    assert metadata["Requires-Python"] == f">={pythons[0]}"
    assert sessions == {f"wheel({releases}, {python})" for python in (pythons[0], pythons[-1]) for releases in ("oldest", "newest")}


def test_a_python_that_is_not_there_fails_and_is_named(tmp_path: Path) -> None:
    other = "3.13" if sys.version_info < (3, 13) else "3.10"
    result = run(*NOX, "--envdir", tmp_path, "-s", f"wheel(oldest, {other})", PATH=str(tmp_path))
    assert result.returncode != 0
    assert f"Python interpreter {other} not found" in result.stderr
