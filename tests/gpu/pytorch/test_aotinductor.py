"""AOTInductor packages on a GPU: made here, loaded here and in a process that knows only the package and `cutlass_ops`."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import torch

import cutlass_ops
from cutlass_ops import FusedConv2d

from ..helpers import DEVICE, generator, name_of, run_script

POOLED = cutlass_ops.conv2d_sub_tanh_sub_avgpool

LOAD = """
import sys, torch, cutlass_ops
package, data = sys.argv[1:]
loaded = torch._inductor.aoti_load_package(package)
for x, expected in torch.load(data):
    found = loaded(x.cuda())
    assert found.stride() == expected.stride(), (found.stride(), expected.stride())
    assert torch.equal(found.cpu(), expected)
print("ok")
"""


class BetweenPermutes(torch.nn.Module):
    """NHWC in and out, with work before and after, of one call that pools and one that does not."""

    def __init__(self, dtype):
        super().__init__()
        self.first = FusedConv2d(cutlass_ops.conv2d_relu_hardswish, 16, 32, 3, padding=1, device=DEVICE, dtype=dtype)
        self.second = FusedConv2d(POOLED, 32, 24, 3, device=DEVICE, dtype=dtype, subtract1=0.5, subtract2=0.2, pool=2)

    def forward(self, x):
        return torch.relu(self.second(self.first(x.permute(0, 3, 1, 2) * 2)).permute(0, 2, 3, 1)) + 1


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A C++ compiler whose shared objects take libstdc++ from the process.

    Where $CXX links it into the object, a package has a second libstdc++ and ends with a segmentation fault in
    std::regex, which PyTorch 2.11's loader uses to read the device's name: of any model, ours or not (H200, 2026-11-30).
    """
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "object.cpp").write_text("#include <string>\nstd::string f(std::string s) { return s + s; }\n")
    tried = [c for c in map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "c++")) if c]
    for found in tried:
        made = subprocess.run([found, "-shared", "-fPIC", "object.cpp", "-o", "object.so"], cwd=folder, capture_output=True)
        if made.returncode == 0 and b"libstdc++.so" in (folder / "object.so").read_bytes():
            return found
    pytest.fail(f"AOTInductor needs a C++ compiler that links libstdc++ as a shared library, found {tried}; install g++")


@pytest.fixture(scope="module", params=[torch.float32, torch.float16], ids=name_of)
def packaged(request, compiler, tmp_path_factory):
    """A module and its package, for any number of images and any height."""
    folder = tmp_path_factory.mktemp("package")
    module = BetweenPermutes(request.param).eval()
    shapes = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        program = torch.export.export(module, (images(module, 2, 20),), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "module.pt2"), inductor_configs={"cpp.cxx": (None, compiler)}
        )
    return module, package


def images(module, n, height):
    """x of a package's module, from the session's seed."""
    random = generator("aotinductor", n, height)
    return torch.randn(n, height, 24, 16, device=DEVICE, dtype=next(module.parameters()).dtype, generator=random)


@torch.no_grad()
def test_a_package_computes_the_same_with_sizes_of_its_own(packaged):
    module, package = packaged
    loaded = torch._inductor.aoti_load_package(package)
    stream = torch.cuda.Stream()
    for n, height in ((2, 20), (5, 15), (1, 64)):
        x = images(module, n, height)
        expected = module(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = loaded(x)
        stream.synchronize()
        assert found.stride() == expected.stride()
        assert torch.equal(found, expected)


@torch.no_grad()
def test_a_package_is_captured_and_replayed_with_new_data(packaged):
    """Without `run_single_threaded` PyTorch's loader asks for an event's state, which ends any capture, of any model."""
    module, package = packaged
    loaded = torch._inductor.aoti_load_package(package, run_single_threaded=True)
    x = images(module, 3, 18)
    loaded(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = loaded(x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(found, module(x))


@torch.no_grad()
def test_a_package_is_loaded_by_another_process(packaged, tmp_path):
    module, package = packaged
    given = [images(module, n, height) for n, height in ((2, 20), (4, 33))]
    torch.save([(x.cpu(), module(x).cpu()) for x in given], tmp_path / "data.pt")
    assert run_script(LOAD, package, tmp_path / "data.pt") == "ok"
