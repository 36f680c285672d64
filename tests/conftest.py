"""Fixtures that all test folders share."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

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
