"""Build hook of sdist and wheel.

The manifest says of which commit they are; the kernels, which lie beside the package in a checkout, travel inside the wheel, with
a bill of materials.
"""

from __future__ import annotations

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _without_pytorch(root: Path) -> None:
    """Let modules of the package be imported whose `__init__` imports PyTorch, which the build of a wheel does not need."""
    package = ModuleType("cutlass_ops")
    package.__path__ = [str(root / "cutlass_ops")]
    sys.modules["cutlass_ops"] = package


def _deflate_again(wheel: Path) -> None:
    """Compress as far as deflate goes: hatchling takes zlib's default, which leaves 1.6 % more."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w") as new:
        for entry in old.infolist():
            new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED, compresslevel=9)
    smaller.replace(wheel)


class KernelHook(BuildHookInterface):
    """Puts generated/ (manifest, GPU check records, the manifest's cubins) into the wheel as cutlass_ops/generated/.

    Without SOURCE_DATE_EPOCH the archives carry the commit's time.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files. Raises InstallationError where one is missing or other than the manifest says."""
        if version == "editable":
            return  # the package then reads generated/ of the checkout itself, as it is at the call
        root = Path(self.root)
        _without_pytorch(root)
        from cutlass_ops.codegen.bom import bill_of_materials
        from cutlass_ops.codegen.shipping import origin, stage

        self._made = tempfile.TemporaryDirectory()
        made = Path(self._made.name)
        found = origin(root, root / "generated")
        manifest, files = stage(root / "generated", found, made)
        os.environ["SOURCE_DATE_EPOCH"] = str(found["source_date_epoch"])  # hatchling reads it
        if self.target_name == "sdist":
            build_data["force_include"][str(made / "manifest.json")] = "generated/manifest.json"
            return
        build_data["force_include"] |= {path: f"cutlass_ops/generated/{name}" for path, name in files.items()}
        core = self.metadata.core
        bill = made / f"{core.name}.cdx.json"
        text = bill_of_materials(core.raw_name, self.metadata.version, core.license_expression, core.dependencies, manifest)
        bill.write_text(text, encoding="utf-8", newline="\n")
        build_data["sbom_files"].append(str(bill))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made for the archive."""
        if version == "editable":
            return
        self._made.cleanup()
        if self.target_name == "wheel":
            _deflate_again(Path(artifact_path))
