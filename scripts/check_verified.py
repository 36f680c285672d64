#!/usr/bin/env python3
"""Fail unless every cubin of the manifest is verified: a record of a passed GPU check for exactly its bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from cutlass_ops.errors import InstallationError
from cutlass_ops.manifest import Manifest, verified_hashes

GENERATED = Path(__file__).resolve().parent.parent / "generated"


def unverified(folder: Path) -> list[str]:
    """One sentence for each cubin of the folder's manifest without such a record. Raises InstallationError."""
    verified = verified_hashes(folder / "gpu_checks.json")
    cubins = {k.cubin: k.sha256 for k in Manifest.load(folder / "manifest.json").kernels}
    return [
        f"expected a record of a passed GPU check in {folder / 'gpu_checks.json'} for {cubin} (sha256 {sha256}), found none; "
        "run scripts/check_gpu.py on a Hopper GPU"
        for cubin, sha256 in sorted(cubins.items())
        if sha256 not in verified
    ]


def main() -> int:
    """Check generated/; returns the exit code."""
    try:
        problems = unverified(GENERATED)
    except InstallationError as error:
        problems = [str(error)]
    for problem in problems:
        print(f"unverified: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
