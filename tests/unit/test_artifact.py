"""Damaged wheels, as `cutlass-ops inspect` reads them; needs no compiler. The rest is in tests/codegen/test_inspection.py."""

from __future__ import annotations

import zipfile

import pytest

from cutlass_ops import InstallationError
from cutlass_ops.codegen.artifact import Artifact


@pytest.fixture
def wheel(tmp_path):
    """Writes a wheel of a cubin and a manifest."""

    def write(manifest):
        path = tmp_path / "ops-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("ops/kernels/cubins/op.cubin", b"a cubin " * 1000)
            archive.writestr("ops/kernels/manifest.json", manifest)
        return path

    return write


def test_an_invalid_deflate_block_is_refused(wheel):
    path = wheel("{}")
    data = bytearray(path.read_bytes())
    data[30 + len("ops/kernels/cubins/op.cubin")] |= 0b110  # first byte after the local header: the block's type, here the reserved one
    path.write_bytes(data)
    with pytest.raises(InstallationError, match=r"expected a wheel at .*whl, could not read it \(Error -3 .*invalid block type\); build"):
        Artifact.read(path)


def test_an_unknown_compression_is_refused(wheel):
    path = wheel("{}")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 99
    path.write_bytes(data)
    with pytest.raises(InstallationError, match=r"expected a wheel at .*, could not read it \(.*compression"):
        Artifact.read(path)


def test_a_manifest_nested_too_deeply_is_refused(wheel):
    with pytest.raises(InstallationError, match=r"expected a JSON manifest at .*, could not read it \(.*recursion"):
        Artifact.read(wheel("[" * 100_000))
