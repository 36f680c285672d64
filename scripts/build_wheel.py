#!/usr/bin/env python3
"""Build sdist and wheel into dist/: of verified kernels, of a commit, the same bytes each time."""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cutlass_ops.codegen.shipping import complaints

ROOT = Path(__file__).resolve().parent.parent


def build(out: Path) -> list[Path]:
    """Build into `out` with the tools of scripts/constraints.txt; returns sdist and wheel. Raises CalledProcessError."""
    constraint = {"PIP_CONSTRAINT": (ROOT / "scripts" / "constraints.txt").as_uri()}  # a path with spaces would be two
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".build-") as aside:
        command = [sys.executable, "-m", "build", "--outdir", aside, str(ROOT)]
        subprocess.run(command, capture_output=True, text=True, check=True, env=constraint | dict(os.environ))
        return [path.replace(out / path.name) for path in sorted(Path(aside).iterdir(), key=lambda path: path.suffix)]


def main() -> int:
    """Build; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for sdist and wheel (default: dist/)")
    parser.add_argument("--allow-dirty", action="store_true", help="also from a changed tree, or one of no known commit: not for others")
    options = parser.parse_args()
    wrong = complaints(ROOT, ROOT / "generated")
    if options.allow_dirty and (problem := wrong.pop("origin", None)):
        print(f"not a release: {problem}", file=sys.stderr)
    if wrong:
        print(*(f"error: {problem}" for problem in wrong.values()), sep="\n", file=sys.stderr)
        return 1
    try:
        made = build(options.out)
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout}{error.stderr}error: python -m build failed (exit code {error.returncode})", file=sys.stderr)
        return 1
    for path in made:
        data = path.read_bytes()
        print(f"{path}\n  {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
