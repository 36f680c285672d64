"""Random data, memory layouts, poisoned memory, and calls through every plan."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch

import cutlass_ops
from cutlass_ops import DeviceFacts, accuracy, driver, use_plan
from cutlass_ops.accuracy import uniform
from cutlass_ops.loader import ALLOW_UNVERIFIED, shipped_kernels
from cutlass_ops.ops import kernel_set

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SEED_VARIABLE = "CUTLASS_OPS_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or time.time_ns() % 2**31)
#: The plans of our kernels that serve whatever the tensor memory accelerator can walk.
GENERAL_PLANS = {
    torch.float32: {"two-kernel-f16-guarded", "two-kernel-tf32"},
    torch.float16: {"two-kernel-f16"},
    torch.bfloat16: {"two-kernel-bf16"},
}
#: The fused plan of a dtype, and the dtypes of the kinds of `cases.FUSED`.
FUSED_PLANS = {torch.float32: "fused-f16", torch.float16: "fused-f16", torch.bfloat16: "fused-bf16"}
FUSED_DTYPES = {"f32": DTYPES[:1], "half": DTYPES[1:]} | {"f32 channels_last": DTYPES[:1], "half channels_last": DTYPES[1:]}


def name_of(value):
    """Test id of a dtype, an operator or a case; None leaves it to pytest."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__name__", None)


def kernels():
    """The kernels under test."""
    return kernel_set(shipped_kernels())


def generator(*key):
    """Random numbers that depend on the session's seed and on what they are for, not on which tests ran before."""
    return torch.Generator(DEVICE).manual_seed(SEED ^ zlib.crc32(repr(key).encode()))


def integers(shape, low, high, random):
    """Random integers from low to high as float32."""
    return torch.randint(low, high + 1, tuple(shape), generator=random, device=random.device).float()


def activation(shape, dtype, random):
    """x as KernelBench has it: uniform in [0, 1)."""
    return uniform(shape, 0, 1, dtype, random)


def filters(shape, dtype, random):
    """A weight as torch.nn.Conv2d initialises it."""
    reach = 1 / math.sqrt(math.prod(shape[1:]))
    return uniform(shape, -reach, reach, dtype, random)


def vectors(op, k, dtype, random):
    """The operator's per-channel vectors."""
    return [uniform((k,), -1, 1, dtype, random) for _ in op.spec.vectors]


def reference64(op, x, weight, *args, **kwargs):
    """The call in PyTorch's own operators on float64 copies."""
    given, scalars, parameters = op.arguments.bind(args, kwargs)
    return op._reference(x.double(), weight.double(), [v if v is None else v.double() for v in given], scalars, parameters)


def errors(y, reference):
    """Largest and mean absolute difference; infinite where only one of them is NaN or infinite."""
    apart = accuracy.difference(y, reference)
    return apart.max().item(), apart.mean().item()


def serving(op, x, weight, *args, **kwargs):
    """Names of the plans with kernels that serve a call."""
    device = None if x.is_cuda else DeviceFacts("a Hopper GPU", (9, 0), 132)
    return [plan.name for plan in accuracy.serving(op, x, weight, *args, device=device, **kwargs)]


@contextlib.contextmanager
def poisoned():
    """Fresh tensors hold NaN, or 0xFF bytes, so that what a kernel fails to write is noticed: result and workspace."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


def call(plan, op, *args, **kwargs):
    """The operator by one plan, in poisoned memory."""
    with use_plan(plan), poisoned():
        return op(*args, **kwargs)


def assert_same_bits(actual, expected):
    """Equal shapes, dtypes and bits; any NaN equals any other, 0 is not -0."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    integer = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    actual, expected = actual.contiguous(), expected.contiguous()
    same = (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())
    where = (~same).nonzero()
    assert same.all(), (
        f"{len(where)} of {same.numel()} differ, the first at {where[0].tolist()}: {actual[~same][0]} for {expected[~same][0]}"
    )


# ---- calls in PyTorch's own operators ----------------------------------------------------------------------------


def tensors(op, key, dtype=torch.float32, n=4, c=24, size=(20, 24), k=40):
    """x, weight and vectors."""
    random = generator(op.spec.name, key)
    return [activation((n, c, *size), dtype, random), filters((k, c, 3, 3), dtype, random), *vectors(op, k, dtype, random)]


def in_pytorch(op, **arguments):
    """The operator in PyTorch's own operators, with autograd."""

    def compute(x, weight, *args):
        given, scalars, parameters = op.arguments.bind(args, arguments)
        return op._reference(x, weight, given, scalars, parameters)

    return compute


def gradients(function, given):
    leaves = [t.detach().clone().requires_grad_() for t in given]
    y = function(*leaves)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view(y.shape))
    return [leaf.grad for leaf in leaves]


# ---- other processes ---------------------------------------------------------------------------------------------


def run_script(source, *arguments, **variables):
    """The last line that a fresh process prints; unverified kernels are allowed. Raises AssertionError with all of it if it fails.

    `variables` are of its environment.
    """
    package = str(Path(cutlass_ops.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, ALLOW_UNVERIFIED: "1"} | variables
    command = [sys.executable, "-c", source, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}\n{run.stderr}"
    return run.stdout.strip().splitlines()[-1]


ON_EVERY_DEVICE = """
import hashlib, torch, cutlass_ops
torch.manual_seed(0)
x, weight = torch.rand(4, 24, 20, 24), torch.rand(40, 24, 3, 3)
found = []
for i in range(torch.cuda.device_count()):
    with cutlass_ops.use_plan("fused-f16"):
        y = cutlass_ops.conv2d_sub_tanh_sub_avgpool(x.to(i), weight.to(i))
    assert y.device == torch.device("cuda", i)
    found += [str(torch.cuda.get_device_properties(i).uuid), hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest()]
print(*found)
"""


def assert_devices_are_those_that_are_visible(*numbers):
    """A process that sees these of this one's GPUs, in this order, computes the same bits on each, as many as there are."""
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in numbers]
    found = run_script(ON_EVERY_DEVICE, CUDA_VISIBLE_DEVICES=",".join(f"GPU-{uuid}" for uuid in uuids)).split()
    assert found[::2] == uuids
    assert len(set(found[1::2])) == 1


# ---- layouts -----------------------------------------------------------------------------------------------------


def _inside(values, before, after, channels_last=False):
    """The values as a window into a tensor that is NaN elsewhere: `before` and `after` elements around in each dimension."""
    sizes = [b + s + a for b, s, a in zip(before, values.shape, after)]
    around = torch.full(sizes, math.nan, dtype=values.dtype, device=values.device)
    if channels_last:
        around = around.contiguous(memory_format=torch.channels_last)
    window = around[tuple(slice(b, b + s) for b, s in zip(before, values.shape))]
    window.copy_(values)
    return window


def _unaligned(values, channels_last=False):
    """Dense, one element behind a 16-byte boundary."""
    dense = values.permute(0, 2, 3, 1) if channels_last else values
    flat = torch.full((values.numel() + 1,), math.nan, dtype=values.dtype, device=values.device)[1:]
    shifted = flat.view(dense.shape).copy_(dense)
    return shifted.permute(0, 3, 1, 2) if channels_last else shifted


#: Name -> the same values laid out in that way.
LAYOUTS = {
    "contiguous": lambda v: v.contiguous(),
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "sliced_pixels": lambda v: _inside(v, (0, 0, 1, 2), (0, 0, 1, 1)),
    "sliced_channels": lambda v: _inside(v, (0, 2, 0, 0), (0, 1, 0, 0)),
    "sliced_channels_last": lambda v: _inside(v, (1, 4, 0, 0), (0, 4, 0, 0), channels_last=True),
    "transposed": lambda v: v.transpose(2, 3).contiguous().transpose(2, 3),
    "batch_inside": lambda v: v.transpose(0, 1).contiguous().transpose(0, 1),
    "unaligned": _unaligned,
    "unaligned_channels_last": lambda v: _unaligned(v, channels_last=True),
    "expanded": lambda v: v[:1].expand_as(v),
}


def lay_out(values, layout):
    """The same values in another memory layout. Raises AssertionError where it cannot have them (`expandable` first)."""
    result = LAYOUTS[layout](values)
    assert torch.equal(result, values), f"layout {layout} has other values"
    return result


def expandable(values, layout):
    """Values that the layout can have: the first image everywhere for `expanded`."""
    return values[:1].expand_as(values).contiguous() if layout == "expanded" else values


# ---- kernels launched directly -----------------------------------------------------------------------------------

EDGE = 128  # elements before and after a target that nobody may write; a multiple of 16 bytes


def launch(name, params, grid):
    """Launch a kernel on the current stream."""
    index = torch.cuda.current_device()
    driver.make_context_current(index)
    kernel = kernels().get(name, index)
    kernel.launch(grid, params)(driver.current_stream(index))


class Target:
    """Memory for a kernel's result, NaN inside and around."""

    def __init__(self, shape, dtype):
        self._all = torch.full((math.prod(shape) + 2 * EDGE,), math.nan, dtype=dtype, device=DEVICE)
        self._inside = self._all[EDGE:-EDGE].view(shape)
        self.address = self._inside.data_ptr()

    def read(self):
        """The result. Raises AssertionError where a kernel wrote beside it."""
        assert self._all[:EDGE].isnan().all()
        assert self._all[-EDGE:].isnan().all()
        return self._inside
