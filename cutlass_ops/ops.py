"""Operators as PyTorch sees them: torch.library registration (CUDA, CPU; the rest in dispatch.py) and the functional API."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

from . import dispatch, ieee, reference
from .arguments import Arguments
from .costs import Costs, shipped_costs
from .errors import NoPlanError
from .launch import PreparedCall
from .layout import as_vector, in_format, presentable
from .loader import KernelSet, allow_unverified, device_facts, require_hopper, shipped_kernels
from .problem import (
    DTYPES,
    Parameters,
    Problem,
    check_parameters,
    check_sizes,
    check_tensors,
    conv_allows_tf32,
    conv_size,
    is_dense,
    pool_size,
    precision_of,
    result_channels_last,
)
from .selection import PLAN_NAMES, PYTORCH, DeviceFacts, Selection, describe, headline, select
from .spec import Spec
from .torch_state import autocast, in_precision, is_plain, is_transformed, without_autocast

__all__ = ["Operator", "explain", "use_plan"]

_LIBRARY: Any = torch.library.Library("cutlass_ops", "FRAGMENT")  # type: ignore[no-untyped-call]
_CACHED_CALLS = 256  # prepared calls a thread and operator keeps; beyond, all are dropped


class _Thread(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        #: Name of the plan that calls must take (see use_plan).
        self.plan: Optional[str] = None
        #: Operator -> key of a call -> the call made ready (None: PyTorch's own operators).
        self.calls: defaultdict[str, dict[Any, Optional[PreparedCall]]] = defaultdict(dict)


_thread = _Thread()


_kernel_sets = functools.cache(KernelSet)
_kernel_sets_lock = threading.Lock()  # threads whose first calls meet must share one, or each would load the kernels


def kernel_set(folder: Path) -> KernelSet:
    """The kernels of a folder, read once a process."""
    with _kernel_sets_lock:
        return _kernel_sets(folder)


@contextlib.contextmanager
def use_plan(name: str) -> Iterator[None]:
    """Within the block, calls of this thread take one plan or raise (for benchmarks and tests).

    Args:
        name: Among "fused-f16", "fused-bf16", "two-kernel-f16-guarded", "two-kernel-tf32", "two-kernel-f16", "two-kernel-bf16"
            and "pytorch"; docs/how-it-works.md describes them.

    Raises:
        ValueError: There is no plan of this name.
        NoPlanError: Of a call within the block that the plan cannot serve, with the reason.
    """
    if name not in PLAN_NAMES:
        raise ValueError(f"expected a plan among {', '.join(PLAN_NAMES)}, got {name!r}")
    before = _thread.plan
    _thread.plan = name
    try:
        yield
    finally:
        _thread.plan = before


_OPERATORS: dict[str, Operator] = {}


def _registered(name: str) -> Operator:
    """The operator of this name (what a pickled operator becomes); one of an installed package is loaded."""
    if name not in _OPERATORS:
        from . import plugins  # only here: it reads what is installed

        if name not in plugins.installed():
            raise ValueError(f"expected an operator {name} in this process, found none; create it before loading what uses it")
        plugins.load(name)
    return _OPERATORS[name]


class Operator:
    """``pool(chain(conv2d(x, weight), *vectors, *scalars))``, callable as a function and as ``torch.ops.cutlass_ops.<name>``.

    A call is ``op(x, weight, *vectors, *scalars, stride=1, padding=0, dilation=1, precision=None)``, vectors and scalars in the
    order and by the names of the operator's signature:

    - x: tensor (N, C, H, W) of float32, float16, bfloat16 or float64 with any strides. The batch may be empty.
    - weight: tensor (K, C, R, S) of x's dtype, on x's device.
    - vectors: tensors of x's dtype and device with K elements, one an output channel, such as (K,) or (K, 1, 1). One with the
      default None may be left out and then is zero.
    - scalars: numbers, rounded to float32.
    - stride, padding, dilation: an int or a pair (height, width), in pixels.
    - precision: for float32 "tf32", "ieee" or None (what PyTorch's setting allows for convolutions); docs/numerics.md says what
      each promises. For other dtypes None, or their own name ("f16", "bf16", "f64").

    An operator with a pool takes also, by name and with the meaning of torch.nn.functional.avg_pool2d and max_pool2d:
    pool (kernel size), pool_stride (None: the kernel size), pool_padding, ceil_mode, and count_include_pad and
    divisor_override (average), or pool_dilation (max).

    The result is a new tensor (N, K, P, Q) of x's dtype, in the memory format that PyTorch's conv2d would choose. On CPU tensors
    PyTorch's own operators compute it. Under autocast the tensors take autocast's dtype as conv2d's do, unless precision is
    given. Gradients, forward-mode derivatives and torch.func transforms are those of PyTorch's own operators.

    A call raises TypeError or ValueError for arguments that do not fit, before anything is launched; `NoPlanError` where no plan
    serves it; `UnsupportedDeviceError` on a GPU that is no Hopper one; `InstallationError` for kernels that are missing or
    damaged; `CudaError` where the driver refuses.

    Args:
        spec: What to compute, made by the `operator` decorator.
        kernels: Folder with its kernels (manifest.json, gpu_checks.json, cubins/), as the build leaves it; None: those of the
            installed package. It is read at the first call on a GPU.

    Raises:
        ValueError: An operator of this name is registered in this process already.
    """

    def __init__(self, spec: Spec, kernels: Optional[Path] = None) -> None:
        self.spec = spec
        self.kernels = Path(kernels) if kernels else shipped_kernels()
        self.__name__ = spec.name
        of_a_call = inspect.cleandoc(Operator.__doc__ or "").partition("\n\nArgs:")[0]
        self.__doc__ = f"{spec.doc}\n\n{of_a_call}"
        self.arguments = Arguments(spec)
        self.__signature__ = self.arguments.signature  # for help()
        self._vectors, self._scalars = self.arguments.vectors, self.arguments.scalars
        self._register()
        self._op = getattr(torch.ops.cutlass_ops, spec.name).default
        _OPERATORS[spec.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (self.spec.name,)  # one object a process: copies and pickles are names

    def __repr__(self) -> str:
        return f"<cutlass_ops operator {self.spec.name}{inspect.signature(self)}>"

    def __call__(self, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute; see the class."""
        vectors, scalars, parameters = self.arguments.bind(args, kwargs)
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
            check_tensors(self.spec, x, weight, vectors)
        x, weight, vectors = autocast(x, weight, vectors, parameters.precision)
        if not torch.compiler.is_compiling():
            if is_transformed():
                return self._transformed(x, weight, vectors, scalars, parameters)
            # The dispatcher costs 55 us a call (docs/performance.md), more than the launches: skip it where it has nothing to do.
            if is_plain(x, weight, vectors):
                try:
                    return self._run(x, weight, vectors, scalars, parameters)
                except RuntimeError:  # of PyTorch, where a tensor has no strides: asked only now, for the sake of other calls' time
                    check_tensors(self.spec, x, weight, vectors)
                    raise
        if not all(t is None or (isinstance(t, Tensor) and is_dense(t)) for t in (x, weight, *vectors)):
            check_tensors(self.spec, x, weight, vectors)
        result: Tensor = self._op(x, weight, *vectors, *scalars, *parameters.flat(self.spec.pool is not None))
        return result

    # ---- registration --------------------------------------------------------------------------------------------

    def _schema(self) -> str:
        arguments = ["Tensor x", "Tensor weight"]
        arguments += [f"Tensor{'?' if a.optional else ''} {a.name}" for a in self.spec.vectors]
        arguments += [f"float {n}" for n in self._scalars]
        arguments += ["int[2] stride", "int[2] padding", "int[2] dilation"]
        if self.spec.pool:
            arguments += ["int[2] pool", "int[2] pool_stride", "int[2] pool_padding", "int[2] pool_dilation"]
            arguments += ["bool ceil_mode", "bool count_include_pad", "int? divisor_override"]
        return f"{self.spec.name}({', '.join(arguments)}, str? precision) -> Tensor"

    def _register(self) -> None:
        if hasattr(torch.ops.cutlass_ops, self.spec.name):
            from .plugins import owner  # only here: it reads what is installed

            before = _OPERATORS.get(self.spec.name)
            raise ValueError(
                f"expected a new operator name, got {self.spec.name!r} of {owner(self.spec)}, which is registered already, by "
                f"{owner(before.spec) if before else 'another library'}; rename one of the two, or import only one"
            )
        # The result's layout follows the inputs' strides, so Inductor must pass those that it traced.
        strides = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
        _LIBRARY.define(self._schema(), tags=(torch.Tag.pt2_compliant_tag, strides))
        _LIBRARY.impl(self.spec.name, self._cuda, "CUDA")
        _LIBRARY.impl(self.spec.name, self._cpu, "CPU")
        dispatch.register(_LIBRARY, self)

    def _check(self, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], parameters: Parameters) -> None:
        """Raise TypeError or ValueError unless a call can be computed."""
        p = parameters
        check_parameters(p.stride, p.padding, p.dilation, p.pool)
        check_tensors(self.spec, x, weight, vectors)
        check_sizes(x, weight, p.stride, p.padding, p.dilation, p.pool)

    def _reference(
        self,
        x: Tensor,
        weight: Tensor,
        vectors: Sequence[Optional[Tensor]],
        scalars: Sequence[float],
        parameters: Parameters,
        convolution: Callable[..., Tensor] = torch.nn.functional.conv2d,
    ) -> Tensor:
        """PyTorch's own operators, in the tensors' dtype."""
        inputs = dict(zip(self._vectors, vectors)) | dict(zip(self._scalars, scalars))
        p = parameters
        given: dict[str, Any] = {"stride": p.stride, "padding": p.padding, "dilation": p.dilation, "pool": p.pool}
        with without_autocast(x.device.type):
            return reference.compute(self.spec, x, weight, inputs, **given, convolution=convolution)

    def _transformed(
        self, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], scalars: Sequence[float], parameters: Parameters
    ) -> Tensor:
        """Under forward-mode AD or a torch.func transform: PyTorch's own operators, which know how to be transformed."""
        forced = _thread.plan
        if forced not in (None, PYTORCH):
            raise NoPlanError(f"expected plan {forced!r}, but forward-mode AD and torch.func transforms use PyTorch's own operators")
        self._check(x, weight, vectors, parameters)
        if parameters.precision == "ieee" and ieee.is_traced() and x.device.type == "cuda" and conv_allows_tf32():
            raise NotImplementedError(
                "expected no precision='ieee' in a torch.func transform or forward-mode AD inside torch.compile, where PyTorch allows "
                "TF32; set torch.backends.cudnn.allow_tf32 = False, or do not compile it"
            )
        with in_precision(precision_of(x, parameters.precision) if x.dtype is torch.float32 else None):
            return self._reference(x, weight, vectors, scalars, parameters)

    def _cpu(self, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        """The CPU implementation is the reference: PyTorch's own operators."""
        vectors, scalars, parameters = self.arguments.split(rest)
        self._check(x, weight, vectors, parameters)
        precision_of(x, parameters.precision)
        return in_format(self._reference(x, weight, vectors, scalars, parameters), result_channels_last(x, weight))

    def _fake(self, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        vectors, _, p = self.arguments.split(rest)
        self._check(x, weight, vectors, p)
        precision_of(x, p.precision)
        size = conv_size(x.shape, weight.shape, p.stride, p.padding, p.dilation)
        size = size if p.pool is None else pool_size(size, p.pool)
        memory_format = torch.channels_last if result_channels_last(x, weight) else torch.contiguous_format
        return torch.empty((x.shape[0], weight.shape[0], *size), dtype=x.dtype, device=x.device, memory_format=memory_format)

    def _cuda(self, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        vectors, scalars, parameters = self.arguments.split(rest)
        return self._run(x, weight, vectors, scalars, self.arguments.intern(parameters))

    # ---- CUDA ----------------------------------------------------------------------------------------------------

    def _run(
        self, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], scalars: Sequence[float], parameters: Parameters
    ) -> Tensor:
        """Compute on a GPU. What depends on shapes, dtypes, strides and parameters alone is done once and kept."""
        device, dtype = x.device, x.dtype
        if x.is_cuda and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(x, weight, vectors, scalars, parameters)
        forced = _thread.plan
        precision = parameters.precision
        if precision is None and dtype is torch.float32:
            precision = "tf32" if conv_allows_tf32() else "ieee"
        beyond_16 = x.data_ptr() & 15  # bytes, of which the lowest bit that is set says what x's address is a multiple of
        key: tuple[Any, ...] = (x.shape, x.stride(), dtype, device, weight.shape, weight.stride(), weight.dtype, weight.device)
        key += (parameters, precision, beyond_16 & -beyond_16, weight.data_ptr() & 15 == 0, forced)
        for v in vectors:
            key += (None,) if v is None else (v.shape, v.dtype, v.device, v.is_contiguous())
        calls = _thread.calls[self.__name__]
        try:
            call = calls[key]
        except KeyError:
            call = self._prepare(x, weight, vectors, parameters, forced)
            if len(calls) >= _CACHED_CALLS:
                calls.clear()
            calls[key] = call
        if call is None:  # the plan that calls PyTorch's own operators
            with in_precision(precision):
                return in_format(self._reference(x, weight, vectors, scalars, parameters), result_channels_last(x, weight))
        if call.copies:
            x, weight = presentable(x), presentable(weight)
        if call.copies_vectors:
            vectors = [as_vector(v) for v in vectors]
        return call(x, weight, vectors, scalars)

    def _prepare(
        self, x: Tensor, weight: Tensor, vectors: Sequence[Optional[Tensor]], parameters: Parameters, forced: Optional[str]
    ) -> Optional[PreparedCall]:
        """Check a new combination of arguments, choose its plan, make it ready (None: PyTorch's own operators)."""
        self._check(x, weight, vectors, parameters)
        problem = self.problem(x, weight, parameters)
        device = x.device.index
        selection = self._select(problem, device_facts(device), forced)
        if selection.plan is None:
            require_hopper(device_facts(device))
            raise NoPlanError(describe(problem, selection))
        if not selection.plan.kernels:
            return None
        call = PreparedCall(problem, selection.plan, kernel_set(self.kernels), device, self._vectors, self._scalars)
        call.copies = presentable(x) is not x or presentable(weight) is not weight
        call.copies_vectors = any(as_vector(v) is not v for v in vectors)
        return call

    def problem(self, x: Tensor, weight: Tensor, parameters: Parameters) -> Problem:
        """The facts of a call whose arguments have been checked."""
        px, pw = presentable(x), presentable(weight)
        # Of the given tensors, as in a prepared call's key: how a copy is aligned must not depend on which call came first.
        # A tensor elsewhere stands for one on a GPU, whose storage would begin at whole 16 bytes.
        place, weight_place = (t.data_ptr() if t.is_cuda else t.storage_offset() * t.element_size() for t in (x, weight))
        return Problem(
            operator=self.spec.name,
            dtype=DTYPES[x.dtype],
            precision=precision_of(x, parameters.precision),
            x_shape=tuple(px.shape),  # type: ignore[arg-type]
            x_strides=tuple(px.stride()),  # type: ignore[arg-type]
            weight_shape=tuple(pw.shape),  # type: ignore[arg-type]
            weight_strides=tuple(pw.stride()),  # type: ignore[arg-type]
            stride=parameters.stride,
            padding=parameters.padding,
            dilation=parameters.dilation,
            pool=parameters.pool,
            channels_last=result_channels_last(x, weight),
            alignment=math.gcd(16, place),
            weight_aligned=weight_place % 16 == 0,
        )

    def _select(self, problem: Problem, device: DeviceFacts, forced: Optional[str]) -> Selection:
        kernels, allowed = kernel_set(self.kernels), allow_unverified()
        costs = shipped_costs() if forced is None else Costs()  # nothing to choose: the sweep that measures costs needs none
        return select(problem, device, kernels.records.values(), kernels.verified, allow_unverified=allowed, force=forced, costs=costs)

    # ---- explanation ---------------------------------------------------------------------------------------------

    def explain(self, x: Tensor, weight: Tensor, *args: Any, device: Optional[DeviceFacts] = None, **kwargs: Any) -> str:
        """Which plan a call would take and why the others would not; see `cutlass_ops.explain`."""
        vectors, _, parameters = self.arguments.bind(args, kwargs)
        if device is not None and not isinstance(device, DeviceFacts):
            raise TypeError(f"expected device to be a cutlass_ops.DeviceFacts or None, got {device!r}")
        if isinstance(x, Tensor) and isinstance(weight, Tensor):
            x, weight, vectors = autocast(x, weight, vectors, parameters.precision)
        self._check(x, weight, vectors, parameters)
        problem = self.problem(x, weight, parameters)
        if device is None and x.device.type != "cuda":
            return f"{headline(problem)}\n  plan: {x.device.type} reference (PyTorch's own operators; the kernels need a Hopper GPU)"
        facts = device or device_facts(x.device.index)
        return describe(problem, self._select(problem, facts, _thread.plan), facts)


def explain(operator: Callable[..., Tensor], *args: Any, device: Optional[DeviceFacts] = None, **kwargs: Any) -> str:
    """Print and return which plan a call ``operator(*args, **kwargs)`` takes, and why it does not take the others.

    Args:
        operator: An `Operator`.
        *args: The call's positional arguments. Tensors may lie on the CPU or the meta device.
        device: The GPU to plan for; None: the tensors' own.
        **kwargs: The call's keyword arguments.

    Returns:
        The printed text: a line with the problem; the plan, its kernels and its expected microseconds; the plans that could
        serve the call too, from fast to slow; every other plan with the reason against it.

    Raises:
        TypeError: `operator` is none, or the arguments are such that the call raises it.
        ValueError: The arguments are such that the call raises it.
        InstallationError: The kernels' manifest is missing or damaged.
    """
    if not isinstance(operator, Operator):
        raise TypeError(f"expected an operator of cutlass_ops, got {operator!r}")
    text = operator.explain(*args, device=device, **kwargs)
    print(text)
    return text
