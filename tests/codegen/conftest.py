"""The toolchain; where it is missing these tests fail, since nothing else would notice that kernels cannot be built."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

from cutlass_ops.errors import BuildError
from cutlass_ops.manifest import Manifest


@pytest.fixture(scope="session")
def toolchain():
    for package in ("cutlass_library", "elftools", "click", "rich"):
        if importlib.util.find_spec(package) is None:
            pytest.fail(f"expected the package {package} for tests/codegen, found none; pip install 'cutlass_ops[build]'", pytrace=False)
    from cutlass_ops.codegen import toolchain

    try:
        return toolchain.find()
    except BuildError as error:
        pytest.fail(f"tests/codegen needs the build's toolchain: {error}", pytrace=False)


TINY = '''
from cutlass_ops import Tile, Vector, operator

@operator(tile=Tile(64, 8))
def tiny(accum, bias: Vector = None, scale: float = 2.0):
    """Tiny operator."""
    return (accum + bias) * scale
'''


@dataclass(frozen=True)
class Built:
    """One real build of the operator `tiny` with fp16 operands and one fused kernel, which all tests share. Nobody writes into it."""

    spec: Path
    out: Path
    manifest: Manifest


FUSED = "tiny_fused_f16_nhwc_c16_3x3"


@pytest.fixture(scope="package")
def only_f16():
    """Operators have one implicit GEMM instead of three and one fused kernel instead of 24: a compilation takes 20 s of one core.

    No longer than this folder's tests: what others plan is whole.
    """
    from cutlass_ops.codegen import cutlass_api, source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutlass_api, "OPERANDS", {"f16": cutlass_api.OPERANDS["f16"]})
        patch.setattr(source, "FUSED_VARIANTS", tuple(v for v in source.FUSED_VARIANTS if FUSED.endswith(v.name)))
        yield


@pytest.fixture(scope="package")
def built(toolchain, only_f16, tmp_path_factory):
    from cutlass_ops.codegen import build, cli

    folder = tmp_path_factory.mktemp("built")
    (folder / "tiny_specs.py").write_text(TINY)
    report = build.build(cli.load_specs(folder / "tiny_specs.py"), folder / "out", toolchain)
    assert {"tiny_f16", FUSED} <= set(report.built)
    return Built(folder / "tiny_specs.py", folder / "out", Manifest.load(folder / "out" / "manifest.json"))
