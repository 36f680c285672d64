"""The manifest: what the builder records of every kernel, and all that the loader knows of it.

Builder and loader meet here and nowhere else. `SCHEMA` changes when a field changes its meaning; a loader reads its own
schema only, since a misread offset would be a wrong result.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import InstallationError

__all__ = ["SCHEMA", "KernelRecord", "Manifest", "read_checks", "verified_hashes"]

SCHEMA = 1

Family = Literal["implicit_gemm", "fused", "convert", "pack", "pool"]


@dataclass(frozen=True)
class KernelRecord:
    """One compiled entry point."""

    #: Name, also the entry point's symbol in the cubin.
    name: str
    family: Family
    #: Operator it belongs to; empty for the kernels that all operators share.
    operator: str
    #: File below cubins/, and the sha256 of its bytes.
    cubin: str
    sha256: str
    architecture: str
    #: Operand type of the tensor cores (implicit_gemm); type of x, layout, filter, aligned or shifted, pool (fused); source and
    #: target types (convert, pack); kind and target type (pool).
    variant: tuple[str, ...]
    threads: int
    #: Dynamic shared memory in bytes.
    shared_memory: int
    #: Size in bytes of the kernel's one by-value parameter.
    params_size: int
    registers: int
    #: Number of HGMMA (wgmma) instructions in the SASS.
    hgmma: int
    #: Tile in pixels x output channels x input channels, pipeline stages, tile of the epilogue (fused: columns of the result x channels).
    tile: tuple[int, ...] = ()
    stages: int = 0
    epilogue_tile: tuple[int, ...] = ()
    #: Columns of a TMA load (fused).
    box_columns: int = 0
    #: Byte offsets of the parameter's fields by name.
    fields: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Byte offsets of the chain's vectors (pointers) and scalars (fp32) by argument name.
    vectors: dict[str, int] = dataclasses.field(default_factory=dict)
    scalars: dict[str, int] = dataclasses.field(default_factory=dict)
    #: Byte offsets and values of the chain's constants (fp32).
    constants: tuple[tuple[int, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, without fields at their defaults."""
        data = dataclasses.asdict(self)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return {k: v for k, v in data.items() if v not in ({}, ()) and v != defaults[k]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KernelRecord:
        """Inverse of `to_json`. Raises TypeError or ValueError for unknown, missing and impossible fields."""
        values = dict(data)
        for key in ("variant", "tile", "epilogue_tile"):
            values[key] = tuple(values.get(key, ()))
        values["constants"] = tuple((int(o), float(v)) for o, v in values.get("constants", ()))
        record = cls(**values)
        record._check()
        return record

    def _check(self) -> None:
        """Raise where a field has another type, or an offset lies outside the parameter (the loader writes there)."""
        kinds = {"str": str, "int": int, "Family": str}
        for field in dataclasses.fields(self):
            kind, value = kinds.get(str(field.type)), getattr(self, field.name)
            if kind is not None and type(value) is not kind:
                raise TypeError(f"{self.name}: expected {field.name} to be {kind.__name__}, got {value!r}")
        if not all(type(v) is str for v in self.variant) or not all(type(v) is int for v in self.tile + self.epilogue_tile):
            raise TypeError(f"{self.name}: expected names as variant and numbers as tiles, got {self.variant}, {self.tile}")
        offsets = [o for named in (self.fields, self.vectors, self.scalars) for o in named.values()]
        for offset in offsets + [o for o, _ in self.constants]:
            if type(offset) is not int or not 0 <= offset <= self.params_size - 4:
                raise ValueError(f"{self.name}: expected offsets within a parameter of {self.params_size} bytes, got {offset!r}")
        if self.threads < 1 or self.shared_memory < 0:
            raise ValueError(f"{self.name}: expected threads and shared memory, got {self.threads} and {self.shared_memory}")


@dataclass(frozen=True)
class Manifest:
    """All kernels of a build, and the versions that made them."""

    kernels: tuple[KernelRecord, ...]
    provenance: dict[str, str]
    #: Emission key of each cubin (sha256 of what its source comes from) and build key (of what its bytes come from); why a fused
    #: kernel was left out, if it was.
    keys: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def dumps(self) -> str:
        """The manifest as JSON text: sorted, so that equal builds give equal bytes."""
        kernels = [k.to_json() for k in sorted(self.kernels, key=lambda k: k.name)]
        data = {"schema": SCHEMA, "provenance": self.provenance, "keys": self.keys, "kernels": kernels}
        return json.dumps(data, indent=1, sort_keys=True) + "\n"

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read and check a manifest. Raises InstallationError: missing, unreadable, another schema, damaged."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InstallationError(
                f"expected the kernels' manifest at {path}, found none; build the kernels or reinstall the wheel"
            ) from None
        except (OSError, ValueError) as error:
            raise InstallationError(f"expected a JSON manifest at {path}, could not read it ({error}); reinstall the wheel") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise InstallationError(
                f"expected manifest schema {SCHEMA} at {path}, got {schema!r}; kernels and package must come from the same version"
            )
        try:
            kernels = tuple(KernelRecord.from_json(k) for k in data["kernels"])
            if len({k.name for k in kernels}) != len(kernels):
                raise ValueError("expected one record a kernel, got two of one name")
            return cls(kernels, dict(data["provenance"]), dict(data["keys"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InstallationError(
                f"expected a complete manifest at {path}, got a damaged one ({error!r}); reinstall the wheel"
            ) from error


def read_checks(path: Path) -> dict[str, Any]:
    """The GPU check records (gpu_checks.json) by cubin sha256; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        checks = dict(data["cubins"])
        if not all(isinstance(check, dict) for check in checks.values()):
            raise TypeError("expected an object for every cubin")
        return checks
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InstallationError(f"expected GPU check records at {path}, could not read them ({error!r}); reinstall the wheel") from error


def verified_hashes(path: Path) -> frozenset[str]:
    """sha256 of every cubin with a record of a passed GPU check."""
    return frozenset(sha for sha, record in read_checks(path).items() if isinstance(record, dict) and record.get("passed") is True)
