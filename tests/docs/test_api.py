"""docs/api.md is what the docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys

import cutlass_ops

from .documents import ROOT, Document

SCRIPT = ROOT / "scripts" / "api_reference.py"


def check(script):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, script, "--check"], env=environment, capture_output=True, text=True, check=False)


def test_the_reference_is_current():
    done = check(SCRIPT)
    assert done.returncode == 0, done.stderr


def test_a_stale_reference_is_noticed(tmp_path):
    """The script itself, beside a copy of the reference that says something else."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "scripts" / SCRIPT.name).write_text(SCRIPT.read_text())
    (tmp_path / "docs" / "api.md").write_text((ROOT / "docs" / "api.md").read_text())
    (tmp_path / "cutlass_ops").symlink_to(ROOT / "cutlass_ops")
    (tmp_path / "docs" / "api.md").write_text((ROOT / "docs" / "api.md").read_text().replace("(N, C, H, W)", "(N, H, W, C)"))
    done = check(tmp_path / "scripts" / SCRIPT.name)
    assert (done.returncode, done.stderr) == (1, "error: docs/api.md is not what the docstrings say; run scripts/api_reference.py\n")


def test_every_public_name_has_an_entry():
    headings = Document(ROOT / "docs" / "api.md").anchors
    names = {name.lower() for name in cutlass_ops.__all__ if not name.startswith("_")}
    assert names - headings == {"operators", "reference"}  # a dictionary, and a module
