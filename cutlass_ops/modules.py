"""The operators as torch.nn modules, with the parameters (and state_dict keys) of the KernelBench models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .ops import Operator
from .problem import IntOrPair

__all__ = ["FusedConv2d"]


class FusedConv2d(nn.Module):
    """A convolution with an operator's chain and pool, as a module.

    ``conv`` is an ordinary torch.nn.Conv2d whose weight and bias the operator uses (state_dict keys conv.weight, conv.bias; an
    operator without a vector ``bias`` has none). The operator's other vectors become parameters of shape (out_channels, 1, 1)
    under their own names, drawn from a standard normal distribution.

    Forward pre-hooks of ``conv`` run (those of torch.nn.utils.prune and weight_norm, say); a forward hook there is a RuntimeError.

    Args:
        operator: An `Operator`.
        in_channels: Channels C of the input.
        out_channels: Channels K of the result.
        kernel_size: Height and width of the filter, in pixels.
        stride: As in torch.nn.Conv2d.
        padding: As in torch.nn.Conv2d, but no string.
        dilation: As in torch.nn.Conv2d.
        bias: Whether ``conv`` has a bias.
        device: Where the parameters lie.
        dtype: Their dtype.
        **arguments: The operator's scalars, precision and pool arguments, the same in each call.

    Raises:
        TypeError: `operator` is none, or an argument is one that it does not take.
        ValueError: An argument has a value that the operator does not take.
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
        if conv._forward_pre_hooks or conv._forward_hooks:
            x = _through_hooks(conv, x)
        vectors = {name: _member(self, self._parameters, name) for name in self._own}
        if self._has_bias:
            vectors["bias"] = _member(conv, conv._parameters, "bias")
        return self.operator(x, _member(conv, conv._parameters, "weight"), **vectors, **self.arguments)

    def extra_repr(self) -> str:
        """Operator and arguments, for print."""
        return ", ".join([self.operator.spec.name, *(f"{k}={v}" for k, v in self.arguments.items())])


def _through_hooks(conv: nn.Module, x: Tensor) -> Tensor:
    """Run the hooks that come before ``conv``, as a call of it would; torch.nn.utils' pruning and norms of weights are such hooks."""
    if conv._forward_hooks:
        raise RuntimeError("expected no forward hooks on conv, whose result is not computed by itself; register them on the FusedConv2d")
    for number, hook in conv._forward_pre_hooks.items():
        if number in conv._forward_pre_hooks_with_kwargs:
            result = hook(conv, (x,), {})
            result = None if result is None else result[0]
        else:
            result = hook(conv, (x,))
        if result is not None:
            (x,) = result if isinstance(result, tuple) else (result,)
    return x


def _member(module: nn.Module, members: dict[str, Any], name: str) -> Any:
    """An attribute of a module that is most likely in this one of its dictionaries, else anywhere (a parametrized weight, say).

    nn.Module looks for it elsewhere first, and takes 0.7 us instead of 0.1.
    """
    return members[name] if name in members else getattr(module, name)
