"""Ahead-of-time compiled CUTLASS kernels for NVIDIA Hopper: convolution, elementwise chain and pool as one PyTorch operator.

>>> y = cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, weight, bias, subtract1=0.5, subtract2=0.2, pool=2)
"""

from __future__ import annotations

from . import reference
from .errors import BuildError, ChainError, CudaError, CutlassOpsError, InstallationError, NoPlanError, UnsupportedDeviceError
from .modules import FusedConv2d
from .ops import Operator, explain, use_plan
from .selection import DeviceFacts
from .spec import AvgPool2d, MaxPool2d, Spec, Tile, Vector, operator
from .specs import OPERATORS
from .version import __version__

conv2d = Operator(OPERATORS["conv2d"])
conv2d_sub_tanh_sub_avgpool = Operator(OPERATORS["conv2d_sub_tanh_sub_avgpool"])
conv2d_relu_hardswish = Operator(OPERATORS["conv2d_relu_hardswish"])
conv2d_min_add_mul = Operator(OPERATORS["conv2d_min_add_mul"])

__all__ = [
    "OPERATORS",
    "AvgPool2d",
    "BuildError",
    "ChainError",
    "CudaError",
    "CutlassOpsError",
    "DeviceFacts",
    "FusedConv2d",
    "InstallationError",
    "MaxPool2d",
    "NoPlanError",
    "Operator",
    "Spec",
    "Tile",
    "UnsupportedDeviceError",
    "Vector",
    "__version__",
    "conv2d",
    "conv2d_min_add_mul",
    "conv2d_relu_hardswish",
    "conv2d_sub_tanh_sub_avgpool",
    "explain",
    "operator",
    "reference",
    "use_plan",
]
