#!/usr/bin/env python3
"""Build sdist and wheel into dist/, of verified kernels only, the same bytes each time."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from check_verified import GENERATED, REMEDY, unverified

from cutlass_ops.errors import InstallationError
from cutlass_ops.loader import KernelSet

ROOT = GENERATED.parent


def complaint(folder: Path) -> str | None:
    """Why the kernels of a folder cannot be shipped: missing, other than the manifest says, unverified; None where they can."""
    try:
        kernels = KernelSet(folder)
        for record in kernels.manifest.kernels:
            kernels.image(record)
        found = unverified(folder)
    except InstallationError as error:
        return str(error)
    return f"expected a record in {folder / 'gpu_checks.json'} {REMEDY}; {', '.join(found)} have none" if found else None


def commit_time() -> str | None:
    """Time of the last commit, in seconds since the epoch; None without git (hatchling then has a fixed time)."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return None
    result = subprocess.run([git, "-C", str(ROOT), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def main() -> int:
    """Build; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for sdist and wheel (default: dist/)")
    options = parser.parse_args()
    problem = complaint(GENERATED)
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    environment = dict(os.environ)
    if "SOURCE_DATE_EPOCH" not in environment and (time := commit_time()):
        environment["SOURCE_DATE_EPOCH"] = time
    command = [sys.executable, "-m", "build", "--outdir", str(options.out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        print(f"{result.stdout}{result.stderr}error: python -m build failed (exit code {result.returncode})", file=sys.stderr)
        return 1
    wheel = max(options.out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    data = wheel.read_bytes()
    print(f"{wheel}\n{len(data)} bytes\nsha256 {hashlib.sha256(data).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
