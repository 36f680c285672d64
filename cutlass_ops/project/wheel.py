"""The wheel of a user's project: made by its own build backend, and refused unless its kernels are what the manifest says.

A bill of materials is added to what the backend made. The same project gives the same bytes: the backend's work is reproducible
(hatchling: SOURCE_DATE_EPOCH, or a fixed time).
"""

from __future__ import annotations

import base64
import calendar
import copy
import dataclasses
import email
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path

from ..codegen import shipping
from ..errors import BuildError
from ..loader import KernelSet
from ..manifest import Manifest
from ..plugins import GROUP
from . import Source

__all__ = ["Built", "build", "some"]

#: Loads each operator from an unpacked wheel, as a user of it would.
_LOAD = "import sys; sys.path.insert(0, sys.argv[1]); from cutlass_ops import plugins; [plugins.load(name) for name in sys.argv[2:]]"


@dataclass(frozen=True)
class Built:
    """A wheel, its operators, and those of its cubins without a record of a passed GPU check."""

    path: Path
    operators: tuple[str, ...]
    unverified: tuple[str, ...]


def build(source: Source, out: Path, *, allow_unverified: bool = False) -> Built:
    """Build the wheel of a project into `out`.

    Nothing is written to `out` where it fails. Raises BuildError: no project, missing tools, a failed backend, kernels that are
    unverified (unless allowed), not of the specs as they are, left out of the wheel or not loaded by it; InstallationError:
    kernels that are missing or damaged.
    """
    if source.root is None:
        raise BuildError(f"expected a project folder with pyproject.toml, got {source.specs}; cutlass-ops new makes a project")
    kernels = KernelSet(source.kernels)
    for record in kernels.manifest.kernels:
        kernels.image(record)
    unverified = tuple(shipping.unverified(source.kernels))
    if unverified and not allow_unverified:
        raise BuildError(
            f"expected a record of a passed GPU check in {source.kernels / 'gpu_checks.json'} for each cubin, found none for "
            f"{some(unverified)}; run cutlass-ops check {source.root} on a Hopper GPU, or pack them unverified with --allow-unverified"
        )
    _check_current(source, kernels.manifest)
    operators = tuple(sorted({k.operator for k in kernels.manifest.kernels} - {""}))
    with tempfile.TemporaryDirectory(prefix="cutlass_ops_wheel_") as temporary:
        wheel = _backend(source.root, Path(temporary))
        _check_kernels(wheel, source.kernels, ["manifest.json", *sorted({f"cubins/{k.cubin}" for k in kernels.manifest.kernels})])
        _check_entry_points(wheel, operators, source.kernels.parent.name)
        _check_loads(wheel, operators, Path(temporary, "unpacked"))
        _add_bill(wheel, kernels.manifest)
        return Built(_place(wheel, out), operators, unverified)


def some(names: Sequence[str]) -> str:
    """Names for a message: a few, and how many more there are."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _check_current(source: Source, manifest: Manifest) -> None:
    """Raise unless the kernels are those of the specs as they are now: else GPU and CPU would compute different things."""
    from ..codegen.cli import load_specs

    try:
        from ..codegen.build import plan_units

        units = plan_units(load_specs(source.specs))
    except ModuleNotFoundError as error:
        raise BuildError(f"expected the package {error.name}, found none; pip install 'cutlass_ops[build]'") from error
    keys = {name: key for name, (key, *_) in manifest.keys.items()}
    changed = sorted({unit.name for unit in units if keys.get(unit.name) != unit.key} | (keys.keys() - {unit.name for unit in units}))
    if changed:
        raise BuildError(
            f"expected the kernels in {source.kernels} to be built from {source.specs} as it is, got others for {some(changed)}; "
            f"run cutlass-ops build {source.root}, then cutlass-ops check"
        )


def _backend(root: Path, out: Path) -> Path:
    """Have the project's backend build the wheel, in this environment: an isolated one would have to install PyTorch."""
    if importlib.util.find_spec("build") is None:
        raise BuildError("expected the package build, found none; pip install 'cutlass_ops[build]'")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(root)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(out.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        last = "\n".join((result.stdout + result.stderr).strip().splitlines()[-15:])
        raise BuildError(f"expected python -m build to make a wheel of {root}, it ended with code {result.returncode}:\n{last}")
    return wheels[0]


def _check_kernels(wheel: Path, kernels: Path, names: list[str]) -> None:
    """Raise unless the wheel has these files of the kernels' folder, byte for byte, and its GPU check records, if any."""
    names = names + ["gpu_checks.json"] * (kernels / "gpu_checks.json").exists()
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        for name in names:
            inside = f"{kernels.parent.name}/{kernels.name}/{name}"
            if inside not in held or archive.read(inside) != (kernels / name).read_bytes():
                raise BuildError(
                    f"expected {inside} in the wheel as it is in {kernels}, got {'another' if inside in held else 'none'}; "
                    "have pyproject.toml put the kernels into the wheel, as that of a project of cutlass-ops new does"
                )


def _check_entry_points(wheel: Path, operators: tuple[str, ...], package: str) -> None:
    """Raise unless the wheel announces exactly the operators that it has kernels of."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = PathDistribution(zipfile.Path(archive, metadata.removesuffix("METADATA"))).entry_points.select(group=GROUP)
        names = sorted(point.name for point in found)
    if names != list(operators):
        lines = "".join(f'\n    {name} = "{package}:{name}"' for name in operators)
        raise BuildError(
            f"expected an entry point for each operator ({', '.join(operators)}), got {', '.join(names) or 'none'}; "
            f'write into pyproject.toml\n    [project.entry-points."{GROUP}"]{lines}'
        )


def _check_loads(wheel: Path, operators: tuple[str, ...], unpacked: Path) -> None:
    """Raise unless every operator can be loaded from the wheel, which is unpacked for that."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    # -I: neither the current folder nor PYTHONPATH is searched; this package is found where it is here.
    here = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {here!r}); {_LOAD}"
    result = subprocess.run([sys.executable, "-I", "-c", code, str(unpacked), *operators], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"expected the wheel's operators to load, got {(result.stderr.strip().splitlines() or ['no message'])[-1]}")


def _add_bill(wheel: Path, manifest: Manifest) -> None:
    """Put a bill of materials into the wheel's .dist-info/sboms/ (PEP 770), whatever backend made it."""
    from ..codegen.bom import bill_of_materials

    with zipfile.ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    (about, metadata) = next(e for e in entries if e[0].filename.endswith(".dist-info/METADATA"))
    (record, recorded) = next(e for e in entries if e[0].filename.endswith(".dist-info/RECORD"))
    fields = email.message_from_bytes(metadata)
    time = calendar.timegm((*about.date_time, 0, 0, 0))
    dated = dataclasses.replace(manifest, provenance=manifest.provenance | {"source_date_epoch": time})
    name, licence = fields["Name"], fields["License-Expression"]
    text = bill_of_materials(name, fields["Version"], licence, fields.get_all("Requires-Dist", []), dated).encode()
    bill = copy.copy(about)
    bill.filename = f"{about.filename.removesuffix('METADATA')}sboms/{name.lower().replace('_', '-')}.cdx.json"
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    line = f"{bill.filename},sha256={digest},{len(text)}\n".encode()
    others = [entry for entry in entries if entry[0] is not record]
    with zipfile.ZipFile(wheel, "w") as archive:
        for info, data in (*others, (bill, text), (record, line + recorded)):
            archive.writestr(info, data)


def _place(wheel: Path, out: Path) -> Path:
    """Put the finished wheel into the folder, at once."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        aside = out / f".{wheel.name}.{os.getpid()}"
        aside.write_bytes(wheel.read_bytes())
        return aside.replace(out / wheel.name)
    except OSError as error:
        raise BuildError(f"expected to write into {out}, could not ({error}); name a writable folder with --out") from error
