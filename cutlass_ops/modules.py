"""The operators as torch.nn modules, with the parameters (and state_dict keys) of the KernelBench models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .ops import Operator
from .problem import IntOrPair

__all__ = ["FusedConv2d"]


class FusedConv2d(nn.Module):
    """A convolution with an operator's chain and pool.

    ``conv`` is an ordinary torch.nn.Conv2d whose weight and bias the operator uses (state_dict keys conv.weight, conv.bias; an
    operator without a vector ``bias`` has none); the operator's other vectors become parameters under their own names. Further
    keyword arguments are the operator's (scalars, pool, precision, ...). Raises TypeError or ValueError for arguments that the
    operator would not take.
    """

    def __init__(
        self,
        operator: Operator,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrPair,
        *,
        stride: IntOrPair = 1,
        padding: IntOrPair = 0,
        dilation: IntOrPair = 1,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if not isinstance(operator, Operator):
            raise TypeError(f"expected an operator of cutlass_ops, got {operator!r}")
        vectors = [v.name for v in operator.spec.vectors]
        for name in vectors:
            if name in arguments:
                raise TypeError(f"expected no argument {name}: it is a parameter of the module; set it afterwards")
        self.operator = operator
        self._has_bias = "bias" in vectors
        bias = bias and self._has_bias
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, dilation, bias=bias, device=device, dtype=dtype)  # type: ignore[arg-type]
        self.arguments = {"stride": self.conv.stride, "padding": self.conv.padding, "dilation": self.conv.dilation} | arguments
        operator.arguments.bind((), dict.fromkeys(vectors) | self.arguments)
        self._own = tuple(name for name in vectors if name != "bias")
        for name in self._own:
            self.register_parameter(name, nn.Parameter(torch.randn(out_channels, 1, 1, device=device, dtype=dtype)))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the operator to x (N, C, H, W)."""
        conv: nn.Module = _member(self, self._modules, "conv")
        vectors = {name: _member(self, self._parameters, name) for name in self._own}
        if self._has_bias:
            vectors["bias"] = _member(conv, conv._parameters, "bias")
        return self.operator(x, _member(conv, conv._parameters, "weight"), **vectors, **self.arguments)

    def extra_repr(self) -> str:
        """Operator and arguments, for print."""
        return ", ".join([self.operator.spec.name, *(f"{k}={v}" for k, v in self.arguments.items())])


def _member(module: nn.Module, members: dict[str, Any], name: str) -> Any:
    """An attribute of a module that is most likely in this one of its dictionaries, else anywhere (a parametrized weight, say).

    nn.Module looks for it elsewhere first, and takes 0.7 us instead of 0.1.
    """
    return members[name] if name in members else getattr(module, name)
