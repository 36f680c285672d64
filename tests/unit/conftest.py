"""What the unit tests share.

PyTorch on one thread: the tensors of these tests are tiny, and other tests may run beside them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import cutlass_ops
from cutlass_ops import ops

torch.set_num_threads(1)

PACKAGE = """\
from cutlass_ops import Operator, Vector, operator

@operator()
def {operator}(accum, bias: Vector = None):
    return accum + bias

{operator} = Operator({operator})
"""


class Site:
    """A folder on sys.path that packages with an operator of their own can be put into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, package: str, operator: str, source: str = PACKAGE, *, version: str = "1.0") -> None:
        """A package (one module, one entry point) as pip installs it."""
        info = self.folder / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[cutlass_ops.operators]\n{operator} = {package}:{operator}\n")
        (self.folder / f"{package}.py").write_text(source.format(operator=operator))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def only_shipped_operators(monkeypatch):
    """Without the operators that other tests have made in this process; what the test makes is forgotten."""
    monkeypatch.setattr(ops, "_OPERATORS", {name: getattr(cutlass_ops, name) for name in cutlass_ops.OPERATORS})
