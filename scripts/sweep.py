#!/usr/bin/env python3
"""Measure every plan over many shapes on a Hopper GPU, and fit the costs by which selection chooses -> cutlass_ops/plan_costs.json.

Exit code 0: written. 1: plans disagree, or one cannot be launched; nothing was written. 2: there is no Hopper GPU here.
"""

import sys
from pathlib import Path

from cutlass_ops.benchmark.sweep import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
