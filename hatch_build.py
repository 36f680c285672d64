"""Build hook of the wheel: the kernels, which lie beside the package in a checkout, travel inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Puts generated/ (manifest, GPU check records, the manifest's cubins) into the wheel as cutlass_ops/generated/."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files. Raises FileNotFoundError where one is missing."""
        if version == "editable":
            return  # the package then reads generated/ of the checkout itself, as it is at the call
        generated = Path(self.root, "generated")
        files = ["manifest.json", "gpu_checks.json"]
        if (generated / "manifest.json").exists():
            kernels = json.loads((generated / "manifest.json").read_text(encoding="utf-8"))["kernels"]
            files += sorted({f"cubins/{kernel['cubin']}" for kernel in kernels})
        missing = [name for name in files if not (generated / name).exists()]
        if missing:
            raise FileNotFoundError(f"expected generated/{missing[0]} for the wheel, found none; run scripts/build_kernels.py first")
        build_data["force_include"] |= {str(generated / name): f"cutlass_ops/generated/{name}" for name in files}
