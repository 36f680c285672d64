"""The wheel's software bill of materials: valid CycloneDX, and true."""

from __future__ import annotations

import email
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from .helpers import COMMIT_TIME, contents, info

NAME = "sboms/cutlass-ops.cdx.json"


@pytest.fixture(scope="module")
def text(wheel: Path) -> str:
    assert [name for name in info(wheel) if name.startswith("sboms/")] == [NAME]
    return info(wheel)[NAME].decode()


@pytest.fixture(scope="module")
def bill(text: str) -> dict[str, Any]:
    return json.loads(text)


@pytest.fixture(scope="module")
def manifest(wheel: Path) -> dict[str, Any]:
    return json.loads(contents(wheel)["cutlass_ops/generated/manifest.json"])


def of_name(bill: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (c for c in bill["components"] if c["name"] == name)
    return found


def properties(component: dict[str, Any]) -> dict[str, str]:
    return {p["name"].removeprefix("cutlass_ops:"): p["value"] for p in component.get("properties", ())}


def test_it_is_valid_by_the_schema(text: str) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"bomFormat": "CycloneDX"', '"bomFormat": "other"')) is not None


def test_it_names_the_package_its_commit_and_time(bill: dict[str, Any], wheel: Path, manifest: dict[str, Any]) -> None:
    metadata = email.message_from_bytes(info(wheel)["METADATA"])
    package = bill["metadata"]["component"]
    assert (package["name"], package["version"]) == (metadata["Name"], metadata["Version"])
    assert package["licenses"] == [{"expression": metadata["License-Expression"]}]
    assert package["purl"] == f"pkg:pypi/cutlass-ops@{metadata['Version']}"
    assert properties(bill["metadata"]) == {name: str(value) for name, value in manifest["provenance"].items()}
    assert manifest["provenance"]["source_date_epoch"] == COMMIT_TIME
    assert bill["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"


def test_it_lists_each_cubin_with_the_sha256_of_its_bytes_and_its_kernels(
    bill: dict[str, Any], wheel: Path, manifest: dict[str, Any]
) -> None:
    listed = {c["name"]: c for c in bill["components"] if c["type"] == "file"}
    prefix = "cutlass_ops/generated/cubins/"
    cubins = {name.removeprefix(prefix): data for name, data in contents(wheel).items() if name.startswith(prefix)}
    assert {n: c["hashes"] for n, c in listed.items()} == {
        n: [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}] for n, data in cubins.items()
    }
    entry_points = {(c["name"], p["value"]) for c in listed.values() for p in c["properties"] if p["name"] == "cutlass_ops:kernel"}
    assert entry_points == {(k["cubin"], k["name"]) for k in manifest["kernels"]}


def test_it_lists_what_is_compiled_in_and_the_compiler(bill: dict[str, Any], manifest: dict[str, Any]) -> None:
    cutlass, compiler = of_name(bill, "nvidia-cutlass"), of_name(bill, "nvidia-cuda-nvcc")
    assert (cutlass["version"], cutlass["licenses"]) == (manifest["provenance"]["cutlass"], [{"expression": "BSD-3-Clause"}])
    assert (compiler["version"], compiler["scope"]) == (manifest["provenance"]["nvcc"], "excluded")
    used_by = {d["ref"]: set(d.get("dependsOn", ())) for d in bill["dependencies"]}
    for component in bill["components"]:
        if component["type"] == "file":
            names = ("nvidia-cutlass", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
            assert used_by[component["bom-ref"]] == {of_name(bill, name)["bom-ref"] for name in names}


def test_it_lists_what_the_package_needs_at_run_time(bill: dict[str, Any], wheel: Path) -> None:
    metadata = email.message_from_bytes(info(wheel)["METADATA"])
    always = sorted(r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r)
    listed = sorted(properties(c)["requirement"] for c in bill["components"] if "requirement" in properties(c))
    assert listed == always
    (package,) = (d for d in bill["dependencies"] if d["ref"] == bill["metadata"]["component"]["bom-ref"])
    assert {of_name(bill, name)["bom-ref"] for name in ("torch", "cuda-bindings")} <= set(package["dependsOn"])
