"""Operators of KernelBench level 2 (https://github.com/ScalingIntelligence/KernelBench), named by what they compute.

Chains are data for the tracer, so their arguments carry only the annotations that `operator` reads.
"""
# mypy: disable-error-code="no-untyped-def, assignment, operator"

from __future__ import annotations

from ..chain import hardswish, minimum, relu, tanh
from ..spec import AvgPool2d, Tile, Vector, operator


@operator(pool=AvgPool2d(2))
def conv2d_sub_tanh_sub_avgpool(accum, bias: Vector = None, subtract1: float = 0.5, subtract2: float = 0.2):
    """KernelBench level 2 problem 46: ``avg_pool2d(tanh(conv2d(x, weight, bias) - subtract1) - subtract2, pool)``."""
    return tanh(accum + bias - subtract1) - subtract2


@operator(tile=Tile(n=64))
def conv2d_relu_hardswish(accum, bias: Vector = None):
    """KernelBench level 2 problem 57: ``hardswish(relu(conv2d(x, weight, bias)))``."""
    return hardswish(relu(accum + bias))


@operator()
def conv2d_min_add_mul(accum, v: Vector, bias: Vector = None, constant: float = 0.5, scale: float = 2.0):
    """KernelBench level 2 problem 31: ``(minimum(conv2d(x, weight, bias), constant) + v) * scale``."""
    return (minimum(accum + bias, constant) + v) * scale
