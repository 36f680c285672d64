#!/usr/bin/env python3
"""Build the kernels: specs -> generated/*.cu, generated/cubins/, generated/manifest.json. Needs no GPU."""

import sys

from cutlass_ops.codegen.cli import main

if __name__ == "__main__":
    sys.exit(main())
