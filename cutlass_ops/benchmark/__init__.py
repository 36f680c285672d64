"""The benchmark: every plan beside PyTorch in one process, by KernelBench's protocol. `scripts/bench.py` runs it."""
