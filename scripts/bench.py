#!/usr/bin/env python3
"""Measure every plan beside PyTorch on a Hopper GPU -> docs/performance.json, docs/performance.md, README.md's figures."""

import sys
from pathlib import Path

from cutlass_ops.benchmark.cli import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
