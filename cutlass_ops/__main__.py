"""The command `cutlass-ops`, also `python -m cutlass_ops`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Optional


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command line (default: this process's); returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    missing = [package for package in ("click", "rich") if importlib.util.find_spec(package) is None]
    if not missing:
        from .cli import main as run

        return run(arguments)
    if arguments in (["doctor"], ["doctor", "--json"]):  # what says that something is missing must not need it
        from .doctor import main as doctor

        return doctor(as_json="--json" in arguments)
    print(f"error: expected the package {missing[0]}, found none; pip install 'cutlass_ops[cli]'", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
