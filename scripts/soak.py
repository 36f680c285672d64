#!/usr/bin/env python3
"""Call the operators very often on a Hopper GPU, over changing shapes, streams and weights: memory flat, caches bounded, results the same.

Exit code 0: all well. 1: something grew, changed or failed. 2: there is no Hopper GPU here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed


def main() -> int:
    """Soak; returns the exit code."""
    import cutlass_ops
    from cutlass_ops import soak, verification

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000, metavar="N", help="calls to make (default: 200000)")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after this time even if fewer calls were made")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the problems and their data (default: 0)")
    options = parser.parse_args()
    if options.calls < 20:
        parser.error(f"expected --calls of at least 20, got {options.calls}")
    missing = verification.missing_gpu()
    if missing:
        print(f"not run: {missing}", file=sys.stderr)
        return 2
    operators = [getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS]
    try:
        wrong = soak.soak(operators, options.calls, options.seconds, seed=options.seed, report=lambda line: print(line, flush=True))
    except (cutlass_ops.CutlassOpsError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in wrong:
        print(f"FAILED: {line}")
    print("not passed" if wrong else "passed: memory flat, caches bounded, last results bit for bit the first ones")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
