"""The operators inside PyTorch on a GPU: compiler, graphs, streams, processes. No part of what verifies a cubin."""
