#!/usr/bin/env python3
"""Check the kernels on a Hopper GPU and record which cubins passed (gpu_checks.json beside the manifest).

The same as `cutlass-ops check`, without the packages that a command line needs: a machine with a GPU may have none of them.
Exit code 0: everything passed. 1: something failed. 2: there is no Hopper GPU here; nothing was written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cutlass_ops import CutlassOpsError, verification


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", type=Path, help="your own project folder, or a Python file with specs (default: the shipped operators)")
    parser.add_argument("--kernels", type=Path, help="with --spec: the folder they were built into")
    parser.add_argument("--skip-tests", action="store_true", help="print the accuracy table only; write nothing")
    parser.add_argument("--commit", metavar="ID", help="commit to record where there is no git checkout (ID-dirty: with changes)")
    options = parser.parse_args()
    if options.kernels and not options.spec:
        parser.error("expected --spec beside --kernels: which operators the folder holds")
    return options


def main() -> int:
    """Check; returns the exit code."""
    options = _options()
    missing = verification.missing_gpu()
    if missing:
        print(f"not checked: {missing}", file=sys.stderr)
        return 2
    try:
        passed = verification.check_kernels(options.spec, options.kernels, tests=not options.skip_tests, commit=options.commit)
    except (CutlassOpsError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("all passed" if passed else "not passed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
