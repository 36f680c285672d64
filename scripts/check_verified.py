#!/usr/bin/env python3
"""Fail unless every cubin of the manifest is verified: a record of a passed GPU check for exactly its bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from cutlass_ops.errors import InstallationError
from cutlass_ops.manifest import Manifest, verified_hashes

GENERATED = Path(__file__).resolve().parent.parent / "generated"
REMEDY = "of a passed GPU check for each cubin (scripts/check_gpu.py, on a Hopper GPU, writes it)"


def unverified(folder: Path) -> dict[str, str]:
    """sha256 of every cubin of the folder's manifest without such a record, by its name. Raises InstallationError."""
    verified = verified_hashes(folder / "gpu_checks.json")
    cubins = {k.cubin: k.sha256 for k in Manifest.load(folder / "manifest.json").kernels}
    return {cubin: sha256 for cubin, sha256 in sorted(cubins.items()) if sha256 not in verified}


def main() -> int:
    """Check generated/; returns the exit code."""
    try:
        found = unverified(GENERATED)
    except InstallationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if found:
        lines = "".join(f"  {cubin} {sha256}\n" for cubin, sha256 in found.items())
        print(f"error: expected a record in generated/gpu_checks.json {REMEDY}; these have none:\n{lines}", end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
