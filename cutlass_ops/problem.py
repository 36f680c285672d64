"""Problem: the facts of one call, checked. Everything that cannot be computed raises here, before any launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .spec import Spec

Pair = tuple[int, int]
IntOrPair = Union[int, Sequence[int]]

_MAX_PARAMETER = 2**31 - 1  # an int32 in the kernels' parameters

#: torch dtype -> name in plans and kernel records.
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


@dataclass(frozen=True)
class PoolArguments:
    """Arguments of the pool, named as torch.nn.functional.avg_pool2d and max_pool2d name them."""

    kind: str  # "avg" or "max"
    kernel_size: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)  # max only
    ceil_mode: bool = False
    count_include_pad: bool = True  # avg only
    divisor_override: Optional[int] = None  # avg only


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of a call beside tensors and scalars. Operators keep one object for equal ones, so identity compares them."""

    stride: Pair
    padding: Pair
    dilation: Pair
    pool: Optional[PoolArguments]
    precision: Optional[str]

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two of them equal."""
        return self.stride, self.padding, self.dilation, self.pool, self.precision

    def flat(self, pooled: bool) -> list[Any]:
        """As an operator's schema lists them."""
        p = self.pool
        pool: list[Any] = []
        if pooled and p is not None:
            pool = [*map(list, (p.kernel_size, p.stride, p.padding, p.dilation)), p.ceil_mode, p.count_include_pad, p.divisor_override]
        return [list(self.stride), list(self.padding), list(self.dilation), *pool, self.precision]


#: No pool: the pooling kernel then only changes the layout.
NO_POOL = PoolArguments("avg", (1, 1), (1, 1))


@dataclass(frozen=True)
class Problem:
    """Shapes, layout, dtype and parameters of one call."""

    operator: str
    dtype: str
    #: "tf32" or "ieee" for fp32 tensors; otherwise the dtype's own name.
    precision: str
    x_shape: tuple[int, int, int, int]
    x_strides: tuple[int, int, int, int]
    weight_shape: tuple[int, int, int, int]
    weight_strides: tuple[int, int, int, int]
    stride: Pair
    padding: Pair
    dilation: Pair
    pool: Optional[PoolArguments]
    #: Memory format of the result (PyTorch's convention for conv2d: channels_last if either input is).
    channels_last: bool
    #: Bytes of which x's base address is a multiple, a power of two; 16, which the tensor memory accelerator needs, stands for more.
    alignment: int = 16
    #: Whether the weight's is a multiple of 16 bytes.
    weight_aligned: bool = True

    @property
    def conv_size(self) -> Pair:
        """Height and width of the convolution's result (P, Q)."""
        return conv_size(self.x_shape, self.weight_shape, self.stride, self.padding, self.dilation)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """Shape of the result."""
        h, w = self.conv_size if self.pool is None else pool_size(self.conv_size, self.pool)
        return self.x_shape[0], self.weight_shape[0], h, w


def pair(name: str, value: IntOrPair) -> Pair:
    """An int or a pair of ints as a pair."""
    one = isinstance(value, (int, torch.SymInt))
    items: list[Any] = [value, value] if one else list(value) if isinstance(value, Sequence) else []
    if len(items) == 1:
        items *= 2
    if len(items) != 2 or any(isinstance(i, bool) or not isinstance(i, (int, torch.SymInt)) for i in items):
        raise TypeError(f"expected {name} to be an int or a pair of ints, got {value!r}")
    return items[0], items[1]


def listed_pair(name: str, values: Sequence[int]) -> Pair:
    """A schema's list of ints as a pair; one int stands for both, as in aten.conv2d."""
    if len(values) not in (1, 2):
        raise ValueError(f"expected {name} as a list of one or two ints, got {list(values)}; give height and width")
    return values[0], values[-1]


def conv_size(x_shape: Sequence[int], weight_shape: Sequence[int], stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    """Height and width of a convolution's result: floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1."""
    h, w = ((x_shape[2 + i] + 2 * padding[i] - dilation[i] * (weight_shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    return h, w


def pool_size(size: Pair, pool: PoolArguments) -> Pair:
    """Height and width of a pool's result, as PyTorch's pooling_output_shape has it."""

    def one(i: int) -> int:
        extent = size[i] + 2 * pool.padding[i] - pool.dilation[i] * (pool.kernel_size[i] - 1) - 1
        result = (extent + (pool.stride[i] - 1 if pool.ceil_mode else 0)) // pool.stride[i] + 1
        if pool.ceil_mode and (result - 1) * pool.stride[i] >= size[i] + pool.padding[i]:
            result -= 1  # the last window must start inside the image or its left padding
        return result

    return one(0), one(1)


def check_parameters(stride: Pair, padding: Pair, dilation: Pair, pool: Optional[PoolArguments]) -> None:
    """Raise ValueError for parameters that no tensor could make right."""
    checks = [("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)]
    if pool is not None:
        checks += [("pool", pool.kernel_size, 1), ("pool_stride", pool.stride, 1)]
        checks += [("pool_padding", pool.padding, 0), ("pool_dilation", pool.dilation, 1)]
    for name, values, least in checks:
        if min(values) < least:
            raise ValueError(f"expected {name} of at least {least}, got {tuple(values)}")
        if max(values) > _MAX_PARAMETER:
            raise ValueError(f"expected {name} of at most {_MAX_PARAMETER}, got {tuple(values)}")
    if pool is None:
        return
    if pool.kind == "avg" and tuple(pool.dilation) != (1, 1):
        raise ValueError(f"expected pool_dilation 1 for an average pool, got {tuple(pool.dilation)}")
    if any(2 * p > k for p, k in zip(pool.padding, pool.kernel_size)):
        raise ValueError(f"expected pool_padding of at most half the pool's kernel size {pool.kernel_size}, got {pool.padding}")
    override = pool.divisor_override
    if override is not None and override == 0:
        raise ValueError("expected a divisor_override other than 0, got 0")
    if override is not None and abs(override) > _MAX_PARAMETER:
        raise ValueError(f"expected a divisor_override of at most {_MAX_PARAMETER}, got {override}")


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has strides: it is not sparse, nested, quantized or in an opaque layout."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def check_tensors(spec: Spec, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]]) -> None:
    """Raise TypeError or ValueError where the tensors do not fit each other."""
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, Tensor):
            raise TypeError(f"expected {name} to be a tensor, got {type(value).__name__}")
        _check_dense(name, value)
        if value.dim() != 4:
            raise ValueError(f"expected {name} with 4 dimensions, got {value.dim()} (shape {tuple(value.shape)})")
    if x.dtype not in DTYPES:
        raise TypeError(f"expected x of dtype float32, float16, bfloat16 or float64, got {x.dtype}; convert it first")
    given = [("weight", weight)]
    for argument, vector in zip(spec.vectors, vectors):
        if vector is None:
            if not argument.optional:
                raise TypeError(f"expected a tensor for {argument.name}, got None")
            continue
        if not isinstance(vector, Tensor):
            raise TypeError(f"expected {argument.name} to be a tensor, got {type(vector).__name__}")
        _check_dense(argument.name, vector)
        if vector.numel() != weight.shape[0] or vector.dim() < 1 or weight.shape[0] not in vector.shape:
            raise ValueError(
                f"expected {argument.name} with {weight.shape[0]} elements, one an output channel, got shape {tuple(vector.shape)}"
            )
        given.append((argument.name, vector))
    for name, value in given:
        if value.dtype != x.dtype:
            raise TypeError(f"expected {name} of x's dtype {x.dtype}, got {value.dtype}; convert one of them")
        if value.device != x.device:
            raise ValueError(f"expected {name} on x's device {x.device}, got {value.device}; move one of them")
    if weight.shape[1] != x.shape[1]:
        hint = "; groups other than 1 are not supported" if weight.shape[1] and x.shape[1] % weight.shape[1] == 0 else ""
        raise ValueError(f"expected weight for x's {x.shape[1]} channels, got weight of shape {tuple(weight.shape)}{hint}")


def _check_dense(name: str, tensor: Tensor) -> None:
    if not is_dense(tensor):
        kind = "a nested" if tensor.is_nested else "a quantized" if tensor.is_quantized else f"a {tensor.layout}"
        raise TypeError(f"expected {name} to be a dense (strided) tensor, got {kind} one; convert it first")


def check_sizes(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, pool: Optional[PoolArguments]) -> None:
    """Raise ValueError where a dimension is empty or a window does not fit (the batch alone may be empty)."""
    if any(decide(size < 1) for size in (*x.shape[1:], *weight.shape)):  # min() would compare them, and torch.compile guard their order
        raise ValueError(f"expected non-empty channels, height, width and filter, got x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    p, q = conv_size(x.shape, weight.shape, stride, padding, dilation)
    if decide(p < 1) or decide(q < 1):
        effective = tuple(dilation[i] * (weight.shape[2 + i] - 1) + 1 for i in (0, 1))
        padded = tuple(x.shape[2 + i] + 2 * padding[i] for i in (0, 1))
        raise ValueError(f"expected a filter no larger than the padded input {padded}, got {effective} (dilation included)")
    if pool is not None and any(decide(size < 1) for size in pool_size((p, q), pool)):
        raise ValueError(
            f"expected a pool no larger than the convolution's result ({p}, {q}), got {pool.kernel_size} with stride {pool.stride}"
        )


def decide(condition: Any, unknown: bool = False) -> bool:
    """Whether a condition on sizes holds. Where they depend on data that a compiler has not got (unbacked sizes): `unknown`."""
    if type(condition) is bool:
        return condition
    from torch.fx.experimental import symbolic_shapes

    guard = getattr(symbolic_shapes, "guard_or_true" if unknown else "guard_or_false", bool)  # PyTorch before 2.7 has none
    try:
        return bool(guard(condition))
    except symbolic_shapes.GuardOnDataDependentSymNode:
        return unknown


def is_channels_last(tensor: Tensor) -> bool:
    """What PyTorch's Tensor::suggest_memory_format says: whether the strides are ordered as channels_last has them.

    The tensor need not be dense. Where sizes of 1 make both formats hold, the strides decide; an empty tensor is contiguous.
    """
    sizes, strides = tensor.shape, tensor.stride()
    if decide(strides[1] == 0):
        return False
    least = 0
    for d in (1, 3, 2, 0):
        if decide(sizes[d] == 0) or decide(strides[d] < least, unknown=True) or (d == 0 and decide(least == strides[1])):
            return False
        least = strides[d] * sizes[d]
    return True


def result_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Memory format of the result, by PyTorch's convention for conv2d: channels_last if an input is.

    But for an empty batch, which no convolution sees, and float64 on CUDA, which cuDNN computes as NCHW.
    """
    if decide(x.shape[0] == 0) or (x.dtype is torch.float64 and x.device.type == "cuda"):
        return False
    return is_channels_last(x) or is_channels_last(weight)


def precision_of(x: Tensor, requested: Optional[str]) -> str:
    """The precision of a call: the one given, else what PyTorch's conv setting says for fp32, else the dtype's own."""
    name = DTYPES[x.dtype]
    if name != "f32":
        if requested is not None and requested != name:
            raise ValueError(f"expected precision None for {x.dtype} tensors (they have one), got {requested!r}")
        return name
    if requested is None:
        return "tf32" if conv_allows_tf32() else "ieee"
    if requested not in ("tf32", "ieee"):
        raise ValueError(f"expected precision 'tf32', 'ieee' or None, got {requested!r}")
    return requested


#: Reads PyTorch's settings torch.backends.cudnn.conv, .cudnn and torch.backends .fp32_precision; through these the lookup takes
#: 2.1 us instead of 0.2, in each call. None on releases before 2.9, which have no such settings.
_setting: Any = getattr(torch._C, "_get_fp32_precision_getter", None)


def conv_allows_tf32() -> bool:
    """PyTorch's setting: torch.backends.cudnn.conv.fp32_precision, or cudnn.allow_tf32 on releases before 2.9."""
    if _setting is None:
        return bool(torch.backends.cudnn.allow_tf32)
    for scope in (("cuda", "conv"), ("cuda", "all"), ("generic", "all")):
        setting = _setting(*scope)
        if setting != "none":
            return bool(setting == "tf32")
    return False  # nobody allowed it
