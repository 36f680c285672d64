"""The manifest: what the builder records of every kernel, and all that the loader knows of it.

Builder and loader meet here and nowhere else. `SCHEMA` changes when a field changes its meaning, or a kernel expects something
else of its launch; a loader reads its own schema only, since a misread offset would be a wrong result (docs/compatibility.md).
Imported without PyTorch by wheel builds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from .errors import InstallationError
from .version import __version__

__all__ = ["FIELDS", "SCHEMA", "KernelRecord", "Manifest", "read_checks", "read_cubin", "require_arguments", "verified_hashes"]

SCHEMA = 1

Family = Literal["implicit_gemm", "fused", "convert", "pack", "pool"]

#: Fields of the parameter that a launch fills, by family: these and no others, so that no kernel is launched with a field that
#: this version does not know. (The parameters of the other families are the ctypes structures of two_kernel.py and fused.py.)
FIELDS: dict[str, frozenset[str]] = {
    "implicit_gemm": frozenset(
        (
            *("activation", "filter", "output", "guard", "guard_value", "m", "k", "c", "r", "s", "p", "q"),
            *("stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w"),
        )
    ),
    "fused": frozenset(
        (
            *("input", "weights", "scales", "x", "output", "counters", "pool_scale", "n", "k", "out_h", "out_w", "steps"),
            *("c", "h", "w", "gathered", "claim_shift", "padding_h", "padding_w", "shift", "strips", "channel_blocks", "box_bytes"),
        )
    ),
}

#: Bytes of the fields that are no number of 4: TMA descriptors, and addresses.
_SIZES: dict[str, dict[str, int]] = {
    "implicit_gemm": {"activation": 128, "filter": 128, "output": 128, "guard": 8},
    "fused": {"input": 128, "weights": 8, "scales": 8, "x": 8, "output": 8, "counters": 8},
}

#: Lengths of variant, tile and epilogue_tile by family: selection and launches index them.
_LENGTHS: dict[str, tuple[int, int, int]] = {"implicit_gemm": (1, 3, 2), "fused": (5, 3, 2)}
_LENGTHS |= {"convert": (2, 0, 0), "pack": (2, 0, 0), "pool": (2, 0, 0)}
#: Families of the kernels that all operators share, which are named by family and variant.
_SHARED = ("convert", "pack", "pool")
#: Times that a CTA of a kernel of this version can claim work, if it claims any: kClaims in fused/tile.hpp.
CLAIMS = 2048
#: Least and largest values of numbers: what a launch on sm_90 can have, and for the rest what an int holds.
_BOUNDS = {"threads": (1, 1024), "shared_memory": (0, 232_448), "params_size": (1, 32_764), "box_columns": (0, 256)}
#: Types that begin a variant: of the tensor cores' operands, of x.
_TYPES = {"implicit_gemm": ("tf32", "f16", "bf16"), "fused": ("f32", "f16", "bf16")}


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
    #: Times that a CTA can claim work; 0: work is shared out in slices (fused).
    claims: int = 0
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
        expected, found = FIELDS.get(self.family, self.fields.keys()), self.fields.keys()
        if found != expected:
            raise ValueError(
                f"{self.name}: expected the fields of this version's launches, got others too: {sorted(found - expected)}, "
                f"and not all: {sorted(expected - found)}"
            )
        self._check_numbers()
        self._check_names()
        self._check_offsets()
        self._check_tiles()

    def _check_numbers(self) -> None:
        """Raise where a number is none that a kernel can have."""
        for field in dataclasses.fields(self):
            least, most = _BOUNDS.get(field.name, (0, 2**31 - 1))
            value = getattr(self, field.name)
            if field.type == "int" and not least <= value <= most:
                raise ValueError(f"{self.name}: expected {field.name} from {least} to {most}, got {value}")
        if self.claims not in (0, CLAIMS):
            raise ValueError(f"{self.name}: expected 0 or {CLAIMS} claims, got {self.claims}")
        if max(self.tile + self.epilogue_tile, default=1) > 1024:
            raise ValueError(f"{self.name}: expected tiles of at most 1024, got {self.tile} and {self.epilogue_tile}")

    def _check_names(self) -> None:
        """Raise where a name is another kernel's, or no file's below cubins/."""
        if not re.fullmatch(r"\w+\.cubin", self.cubin, re.ASCII):
            raise ValueError(f"{self.name}: expected the name of a cubin below cubins/, got {self.cubin!r}")
        shared = self.family in _SHARED or self.name.split("_")[0] in _SHARED
        if shared and not self.operator and self.name != "_".join((self.family, *self.variant)):
            raise ValueError(f"{self.name}: expected a kernel to be named by its family and variant, got {self.family}, {self.variant}")

    def _check_offsets(self) -> None:
        """Raise where what the loader writes leaves the parameter or meets something else in it."""
        sizes = _SIZES.get(self.family, {})
        written = [(offset, sizes.get(name, 4)) for name, offset in self.fields.items()]
        written += [(offset, 8) for offset in self.vectors.values()]  # addresses
        written += [(offset, 4) for offset in (*self.scalars.values(), *(o for o, _ in self.constants))]
        for offset, size in written:
            if type(offset) is not int or not 0 <= offset <= self.params_size - size:
                raise ValueError(f"{self.name}: expected offsets within a parameter of {self.params_size} bytes, got {offset!r}")
        end = 0
        for offset, size in sorted(written):
            if offset < end:
                raise ValueError(
                    f"{self.name}: expected every offset behind the field before it, got {offset} within the one that ends at {end}"
                )
            end = offset + size

    def _check_tiles(self) -> None:
        """Raise where what says which problems a kernel serves is no such thing: selection indexes it and divides by it."""
        if min(self.tile + self.epilogue_tile, default=1) < 1:
            raise ValueError(f"{self.name}: expected tiles of at least 1, got {self.tile} and {self.epilogue_tile}")
        found = (len(self.variant), len(self.tile), len(self.epilogue_tile))
        expected = _LENGTHS.get(self.family, found)  # of a later family nothing is known
        if found != expected:
            raise ValueError(f"{self.name}: expected {expected} entries in variant, tile and epilogue_tile, got {found}")
        if self.family == "fused" and self.tile[0] < self.epilogue_tile[0] * (1 if self.variant[4] == "none" else 2):
            raise ValueError(f"{self.name}: expected a tile of whole rows of its columns, got {self.tile} and {self.epilogue_tile}")
        if self.family in _TYPES and self.variant[0] not in _TYPES[self.family]:
            raise ValueError(f"{self.name}: expected a type among {_TYPES[self.family]}, got {self.variant[0]!r}")


@dataclass(frozen=True)
class Manifest:
    """All kernels of a build, and the versions that made them."""

    kernels: tuple[KernelRecord, ...]
    #: What made the kernels: version of cutlass_ops, sha256 of its emitter (`emitter`), cutlass, nvcc, architecture, flags. In a wheel
    #: or sdist also commit, dirty (whether files differed from it; both null where unknown) and source_date_epoch (in seconds).
    provenance: dict[str, Any]
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
        except (OSError, ValueError, RecursionError) as error:
            raise InstallationError(f"expected a JSON manifest at {path}, could not read it ({error}); reinstall the wheel") from error
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise InstallationError(f"expected manifest schema {SCHEMA} at {path}, got {schema!r}; {_version_remedy(data)}")
        try:
            kernels = tuple(KernelRecord.from_json(k) for k in data["kernels"])
            if len({k.name for k in kernels}) != len(kernels):
                raise ValueError("expected one record a kernel, got two of one name")
            return cls(kernels, dict(data["provenance"]), dict(data["keys"]))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            what = "damaged one" if _builder(data) in (None, __version__) else "damaged one or another version's"
            raise InstallationError(
                f"expected a complete manifest at {path}, got a {what} ({error!r}); reinstall the wheel, or {_version_remedy(data)}"
            ) from error


def _builder(data: Any) -> Optional[str]:
    """Version of cutlass_ops that made the manifest, where that can be told."""
    provenance = data.get("provenance") if isinstance(data, dict) else None
    version = provenance.get("cutlass_ops") if isinstance(provenance, dict) else None
    return version if isinstance(version, str) else None


def _version_remedy(data: Any) -> str:
    """What to do about kernels that this version cannot read."""
    builder = _builder(data)
    if builder in (None, __version__):
        return "build the kernels again with this version of cutlass_ops"
    return f"the kernels are of cutlass_ops {builder}, this is {__version__}: install {builder}, or build them again with {__version__}"


def require_arguments(record: KernelRecord, vectors: Sequence[str], scalars: Sequence[str]) -> None:
    """Raise InstallationError unless a kernel of an operator takes what calls of it pass."""
    found, expected = (sorted(record.vectors), sorted(record.scalars)), (sorted(vectors), sorted(scalars))
    if record.operator and found != expected:
        raise InstallationError(
            f"expected {record.name} to take the operator's vectors and scalars {expected}, its record has {found}; "
            "build the kernels again, or reinstall the wheel"
        )


def read_cubin(folder: Path, record: KernelRecord) -> bytes:
    """The bytes of a record's cubin, below `folder`. Raises InstallationError unless they are exactly those of the record."""
    path = folder / "cubins" / record.cubin
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InstallationError(
            f"expected the cubin {path}, could not read it ({error}); build the kernels or reinstall the wheel"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != record.sha256:
        raise InstallationError(
            f"expected {path} with sha256 {record.sha256}, got {found} ({len(data)} bytes); rebuild it or reinstall the wheel"
        )
    return data


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
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InstallationError(f"expected GPU check records at {path}, could not read them ({error!r}); reinstall the wheel") from error


def verified_hashes(path: Path) -> frozenset[str]:
    """sha256 of every cubin with a record of a passed GPU check."""
    return frozenset(sha for sha, record in read_checks(path).items() if isinstance(record, dict) and record.get("passed") is True)
