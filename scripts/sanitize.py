#!/usr/bin/env python3
"""Run compute-sanitizer's memcheck, racecheck, synccheck and initcheck over small problems that launch every kernel and plan.

Prints a line a tool, and every kind of report that is excluded with its reason. Logs go to --out.
Exit code 0: no errors. 1: errors, or a tool that did not finish. 2: there is no Hopper GPU or no compute-sanitizer here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed


def _options(tools: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=tools, default=tools, metavar="TOOL", help=f"of {', '.join(tools)} (default: all)")
    parser.add_argument("--compute-sanitizer", type=Path, metavar="FILE", help="default: on PATH, in a CUDA toolkit or package")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where logs go (default: a new folder for temporary files)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds that one tool may take (default: 1800)")
    parser.add_argument("--child", metavar="SUITE", help=argparse.SUPPRESS)  # what runs below a tool
    return parser.parse_args()


def main() -> int:
    """Sanitize; returns the exit code."""
    import cutlass_ops
    from cutlass_ops import sanitizer, verification
    from cutlass_ops.loader import shipped_kernels

    options = _options(list(sanitizer.TOOLS))
    if options.child:
        operators = [getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS]
        wrong = sanitizer.launch_suite(options.child, operators, shipped_kernels())
        print(*wrong, sep="\n")
        return 1 if wrong else 0
    missing = verification.missing_gpu()
    if missing:
        print(f"not run: {missing}", file=sys.stderr)
        return 2
    program = sanitizer.find_sanitizer(options.compute_sanitizer)
    if program is None:
        place = options.compute_sanitizer or "PATH, CUDA_HOME, /usr/local/cuda* or a package of NVIDIA's"
        print(f"not run: expected compute-sanitizer in {place}, found none; name it with --compute-sanitizer", file=sys.stderr)
        return 2
    out = options.out or Path(tempfile.mkdtemp(prefix="cutlass_ops-sanitizer-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"{program}; {sanitizer.NOT_REPORTED}", flush=True)
    passed = True
    for tool in options.tools:
        child = [sys.executable, str(Path(__file__).resolve()), "--child", sanitizer.TOOLS[tool]]
        passed &= sanitizer.run(program, tool, child, out.resolve(), options.timeout)
        sys.stdout.flush()
    print("passed" if passed else "not passed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
