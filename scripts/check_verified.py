#!/usr/bin/env python3
"""Fail unless every cubin of the manifest is verified: a record of a passed GPU check for exactly its bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from cutlass_ops.codegen.shipping import RECORD, unverified
from cutlass_ops.errors import InstallationError

GENERATED = Path(__file__).resolve().parent.parent / "generated"


def main() -> int:
    """Check generated/; returns the exit code."""
    try:
        found = unverified(GENERATED)
    except InstallationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if found:
        lines = "".join(f"  {cubin} {sha256}\n" for cubin, sha256 in found.items())
        print(f"error: expected a record in generated/gpu_checks.json {RECORD}; these have none:\n{lines}", end="", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
