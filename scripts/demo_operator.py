#!/usr/bin/env python3
"""Run the installed cutlass_ops.conv2d_sub_tanh_sub_avgpool on KernelBench's input (level 2, problem 46) and check it.

On a Hopper GPU: at full size, with the kernels, no less accurate than PyTorch's own TF32 convolution. Elsewhere: on the
CPU reference path, at a smaller batch. The yardstick is PyTorch in float64.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import cutlass_ops
from cutlass_ops.loader import KernelSet, shipped_kernels

HOPPER = (9, 0)
CHUNK = 16  # images at a time in float64, to save memory
CPU_LIMIT = 1e-5  # fp32 arithmetic gives errors of about 1e-6 here
GPU_LIMIT = 1.05  # times the error of PyTorch's TF32 convolution


def check_installation() -> None:
    """Fail unless this is the wheel with intact kernels, in an environment without the builder's packages."""
    package = Path(cutlass_ops.__file__)
    if not package.is_relative_to(sys.prefix):
        sys.exit(f"error: expected the package installed below {sys.prefix}, got {package}")
    builder = {"nvidia-cutlass", "nvidia-cuda-nvcc", "pyelftools"} & {d.metadata["Name"] for d in distributions()}
    if builder:
        sys.exit(f"error: expected an environment without the builder's packages, found {', '.join(sorted(builder))}")
    kernels = KernelSet(shipped_kernels())
    for record in kernels.manifest.kernels:
        kernels.image(record)  # raises unless the cubin has the manifest's sha256
    cubins = {record.cubin for record in kernels.manifest.kernels}
    print(f"  package: {package.parent}, version {cutlass_ops.__version__}, {len(cubins)} cubins intact")


def pytorch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same in PyTorch's own operators, in the tensors' dtype."""
    return functional.avg_pool2d(torch.tanh(functional.conv2d(x, weight, bias) - 0.5) - 0.2, 2)


def largest_error(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> float:
    """Largest absolute difference between y and PyTorch in float64."""
    error = 0.0
    for i in range(0, len(x), CHUNK):
        exact = pytorch(x[i : i + CHUNK].double(), weight.double(), bias.double())
        error = max(error, float((y[i : i + CHUNK].double() - exact).abs().max()))
    return error


def main() -> int:
    """Run and check; returns the exit code."""
    print(f"  Python {sys.version.split()[0]}, PyTorch {torch.__version__}")
    check_installation()
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
    device, batch = ("cuda", 128) if gpu else ("cpu", 4)
    torch.manual_seed(0)
    x = torch.rand(batch, 64, 128, 128, device=device)
    conv = torch.nn.Conv2d(64, 128, 3, device=device)
    weight, bias = (parameter.detach() for parameter in conv.parameters())

    cutlass_ops.explain(cutlass_ops.conv2d_sub_tanh_sub_avgpool, x, weight, bias, precision="tf32")
    start = time.perf_counter()
    y = cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, weight, bias, subtract1=0.5, subtract2=0.2, pool=2, precision="tf32")
    if gpu:
        torch.cuda.synchronize()
    milliseconds = (time.perf_counter() - start) * 1e3
    error = largest_error(y, x, weight, bias)
    limit = CPU_LIMIT
    if gpu:
        torch.backends.cudnn.allow_tf32 = True
        limit = GPU_LIMIT * largest_error(pytorch(x, weight, bias), x, weight, bias)
        where = f"on {torch.cuda.get_device_name()}, with the kernels"
    else:
        where = "on the CPU reference path (PyTorch's own operators); there is no Hopper GPU here, so no kernel ran"
    print(f"  ran {where}")
    print(f"  y {tuple(y.shape)}, first call {milliseconds:.0f} ms, largest error against float64 {error:.2e}, allowed {limit:.2e}")
    if tuple(y.shape) != (batch, 128, 63, 63) or not error <= limit:  # NaN fails
        print("error: the result is wrong", file=sys.stderr)
        return 1
    print("  the result is right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
