#!/usr/bin/env python3
"""Build the kernels: specs -> generated/*.cu, generated/cubins/, generated/manifest.json. The same as `cutlass-ops build`."""

import sys

from cutlass_ops.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["build", *sys.argv[1:]]))
