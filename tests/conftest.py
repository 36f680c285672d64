"""Fixtures that all test folders share."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sys
import textwrap
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cutlass_ops

REPOSITORY = Path(__file__).parent.parent

_PREAMBLE = """\
import math
import torch
from cutlass_ops import AvgPool2d, MaxPool2d, Tile, Vector, chain, operator
from cutlass_ops.chain import clamp, exp, gelu, hardswish, maximum, minimum, relu, sigmoid, silu, tanh
"""
_serial = itertools.count()


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def import_source(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Write source text to a file below a line of imports and import it (a chain is traced from its file)."""
    names = []

    def load(source: str) -> ModuleType:
        name = f"chains_{next(_serial)}"
        path = tmp_path / f"{name}.py"
        path.write_text(_PREAMBLE + textwrap.dedent(source))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def install() -> Callable[[Path], Path]:
    """Make a virtual environment with cutlass_ops as its wheel installs it, and what it needs from the environment of the tests.

    The function returns the interpreter. Neither the checkout nor an editable installation of it is found there.
    """

    def install(folder: Path) -> Path:
        venv.create(folder)
        (packages,) = folder.glob("lib/python*/site-packages")
        shutil.copytree(REPOSITORY / "cutlass_ops", packages / "cutlass_ops", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(REPOSITORY / "generated", packages / "cutlass_ops" / "generated", ignore=shutil.ignore_patterns("*.cu"))
        info = packages / f"cutlass_ops-{cutlass_ops.__version__}.dist-info"
        (info / "licenses").mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cutlass_ops\nVersion: {cutlass_ops.__version__}\n")
        for name in ("LICENSE", "NOTICE"):
            shutil.copy(REPOSITORY / name, info / "licenses")
        (info / "RECORD").write_text("".join(f"{p.relative_to(packages)},,\n" for p in info.rglob("*")))
        (packages / "of_the_tests.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        return folder / "bin" / "python"

    return install
