"""Importing the package: quick, without the builder, without CUDA, without a trace on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SCRIPT = """
import gc, json, sys, time
import torch
gc.disable()  # a collection of PyTorch's objects takes 0.06 s with Python 3.13 and may fall into this time
before = set(sys.modules)
start = time.process_time()
import cutlass_ops
seconds = time.process_time() - start
with open("/proc/self/maps") as maps:
    libraries = maps.read()
print(json.dumps({
    "seconds": seconds,
    "modules": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
    "libcuda": "libcuda.so" in libraries,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Working directory, home and folder for temporary files of the processes below, all empty."""
    folder = tmp_path_factory.mktemp("import")
    for name in ("cwd", "home", "temp"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """What three fresh processes that import the package say."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    kept |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "temp"), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", SCRIPT]
    results = [subprocess.run(command, cwd=folder / "cwd", env=kept, capture_output=True, text=True, check=True) for _ in range(3)]
    return [json.loads(result.stdout) for result in results]


def test_the_builder_and_its_packages_are_not_imported(runs):
    roots = {m.partition(".")[0] for m in runs[0]["modules"]}
    assert "cutlass_ops" in roots
    assert roots.isdisjoint({"cutlass", "cutlass_cppgen", "cutlass_library", "elftools", "click", "rich", "hatchling", "matplotlib"})
    builders = tuple(f"cutlass_ops.{name}" for name in ("codegen", "benchmark", "project", "plugins", "cli", "doctor", "catalogue"))
    assert not any(m.startswith(builders) for m in runs[0]["modules"])


def test_the_compiler_and_dtensor_are_not_imported(runs):
    assert not any(m.startswith(("torch.distributed.tensor", "torch._inductor", "torch._functorch")) for m in runs[0]["modules"])


def test_cuda_is_neither_initialised_nor_loaded(runs):
    assert not runs[0]["cuda"]
    assert not runs[0]["libcuda"]
    assert not any(m.startswith("cuda.") for m in runs[0]["modules"])


def test_nothing_is_written(runs, folder):
    assert [p for p in folder.rglob("*") if not p.is_dir()] == []


def test_the_import_adds_less_than_a_tenth_of_a_second(runs):
    assert min(run["seconds"] for run in runs) < 0.1
