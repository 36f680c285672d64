"""Our parameters against CUTLASS's own: a host program lets CUTLASS fill a generated kernel's parameters, and prints them."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest
import torch
from unit.fake_driver import FakeDriver, install

import cutlass_ops
from cutlass_ops import use_plan
from cutlass_ops.codegen import cutlass_api
from cutlass_ops.loader import KernelSet, shipped_kernels

OPERATOR = cutlass_ops.conv2d_sub_tanh_sub_avgpool
KERNEL = "conv2d_sub_tanh_sub_avgpool_f16"
ELEMENT_BYTES = {1: 2, 6: 2, 7: 4}  # CUtensorMapDataType: UINT16 (CUTLASS's name for any 16 bits), FLOAT16, FLOAT32

#: N, H, W, C, K, R, S, stride, padding, dilation
PROBLEMS = [
    (2, 11, 13, 16, 24, 3, 3, (1, 1), (0, 0), (1, 1)),
    (2, 11, 13, 16, 24, 3, 2, (2, 1), (1, 0), (1, 3)),
    (1, 40, 9, 64, 130, 1, 5, (3, 8), (0, 4), (1, 2)),
    (3, 7, 7, 8, 8, 7, 7, (1, 2), (3, 3), (1, 1)),
]


@pytest.fixture(scope="module")
def program(toolchain, tmp_path_factory):
    """The host program of the tracked kernel."""
    folder = tmp_path_factory.mktemp("golden")
    types, found, _ = (Path(__file__).parents[2] / "generated" / f"{KERNEL}.cu").read_text().partition('extern "C" __global__')
    assert found
    source = folder / "golden.cu"
    source.write_text(types + (Path(__file__).parent / "print_arguments.cu").read_text())
    includes = [*cutlass_api.include_directories(), Path(cutlass_api.__file__).parent / "include"]
    command = [toolchain.nvcc, "-std=c++17", "-O0", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a"]
    command += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1", *(f"-I{i}" for i in includes), f"-L{toolchain.home / 'lib'}"]
    result = subprocess.run([*command, source, "-o", folder / "golden"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "golden"


@pytest.fixture
def record():
    return KernelSet(shipped_kernels()).records[KERNEL]


def ask_cutlass(program, problem):
    """CUTLASS's calls of the driver (activation, filter, result), and the offsets where it put what, by name."""
    *sizes, stride, padding, dilation = problem
    arguments = [str(i) for i in (*sizes, *stride, *padding, *dilation)]
    lines = subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    fields = {a["field"]: a for a in answers if "field" in a}
    assert all(a["count"] == 1 for a in fields.values())
    return [a for a in answers if "call" in a], {name: a["offset"] for name, a in fields.items()}


def ask_ourselves(monkeypatch, record, problem):
    """The descriptors of the same problem as our launch has them, in the same words, by field."""
    n, h, w, c, k, r, s, stride, padding, dilation = problem
    kernels = KernelSet(shipped_kernels())
    fake = FakeDriver({name: found.params_size for name, found in kernels.records.items()})
    install(monkeypatch, fake)
    monkeypatch.setattr(KernelSet, "image", lambda self, record: b"")
    x = torch.empty(n, c, h, w, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    weight = torch.empty(k, c, r, s, dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    pairs = [list(p) for p in (stride, padding, dilation)]
    with use_plan("two-kernel-f16"):
        OPERATOR._cuda(x, weight, None, 0.5, 0.25, *pairs, [1, 1], [1, 1], [0, 0], [1, 1], False, True, None, None)
    (gemm,) = (launched for launched in fake.work if launched.kernel == KERNEL)
    types = {"CU_TENSOR_MAP_DATA_TYPE_FLOAT16": 6, "CU_TENSOR_MAP_DATA_TYPE_FLOAT32": 7}
    maps = {}
    for name in ("activation", "filter", "output"):
        call, kind, rank, _, extents, strides, *rest = fake.maps[gemm.params[record.fields[name] :][:128]]
        assert rest[-4:-2] == ["CU_TENSOR_MAP_INTERLEAVE_NONE", "CU_TENSOR_MAP_SWIZZLE_128B"]
        assert rest[-1] == "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE"
        keys = ("lower", "upper", "channels", "pixels", "steps") if call == "im2col" else ("box", "steps")
        maps[name] = {"call": call, "type": types[kind], "rank": rank, "extents": extents, "strides": strides, **dict(zip(keys, rest))}
    return maps


@pytest.fixture
def both(program, monkeypatch, record, request):
    theirs, _ = ask_cutlass(program, request.param)
    for answer in theirs:
        assert (answer["interleave"], answer["swizzle"], answer["fill"]) == (0, 3, 0)  # none, 128 bytes, zeros
    return dict(zip(("activation", "filter", "output"), theirs)), ask_ourselves(monkeypatch, record, request.param)


each_problem = pytest.mark.parametrize("both", PROBLEMS, indirect=True, ids=str)


@each_problem
def test_the_activations_descriptor_is_cutlasss(both):
    theirs, ours = (maps["activation"] for maps in both)
    assert ELEMENT_BYTES[theirs["type"]] == ELEMENT_BYTES[ours["type"]]
    for key in ("call", "rank", "extents", "strides", "lower", "upper", "channels", "pixels", "steps"):
        assert ours[key] == theirs[key], key


@each_problem
def test_the_results_descriptor_is_cutlasss(both):
    theirs, ours = (maps["output"] for maps in both)
    for key in ("call", "type", "rank", "extents", "box", "steps"):
        assert ours[key] == theirs[key], key
    assert ours["strides"][0] == theirs["strides"][0]  # the other is of a dimension of one element


@each_problem
def test_the_filters_descriptor_reaches_the_same_elements_as_cutlasss(both):
    theirs, ours = (maps["filter"] for maps in both)
    assert ELEMENT_BYTES[theirs["type"]] == ELEMENT_BYTES[ours["type"]]
    c, k, s, r = theirs["extents"]
    assert ours["extents"] == [c, r * s, k]
    assert (ours["box"][0], ours["box"][2]) == tuple(theirs["box"][:2])
    assert ours["box"][1:2] == theirs["box"][2:3] == theirs["box"][3:4] == [1]
    for i_k, i_s, i_r in itertools.product(range(k), range(s), range(r)):
        their_address = sum(i * stride for i, stride in zip((i_k, i_s, i_r), theirs["strides"]))
        our_address = sum(i * stride for i, stride in zip((i_r * s + i_s, i_k), ours["strides"]))
        assert our_address == their_address


def test_the_manifests_offsets_are_where_cutlass_puts_what(program, record):
    _, offsets = ask_cutlass(program, PROBLEMS[0])
    assert offsets == {
        "bias": record.vectors["bias"],
        "subtract1": record.scalars["subtract1"],
        "subtract2": record.scalars["subtract2"],
        "output": record.fields["output"],
        "size": record.params_size,
    }
