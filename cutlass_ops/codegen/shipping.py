"""What a wheel or sdist with kernels must hold, and whether it may be shipped. Imported without PyTorch by the build of a wheel.

A build hook calls `origin` and `stage`; a command that makes wheels asks `complaints` first.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from ..environment import commit_of, commit_time
from ..errors import InstallationError
from ..manifest import Manifest, read_cubin, verified_hashes

__all__ = ["complaints", "origin", "stage", "unverified"]

RECORD = "of a passed GPU check for each cubin (scripts/check_gpu.py, on a Hopper GPU, writes it)"
_ORIGIN = ("commit", "dirty", "source_date_epoch")
_UNKNOWN_TIME = 1580601600  # hatchling's: 2020-02-02


def unverified(kernels: Path) -> dict[str, str]:
    """sha256 of every cubin of a folder's manifest without a record of a passed GPU check, by its name. Raises InstallationError."""
    verified = verified_hashes(kernels / "gpu_checks.json")
    cubins = {k.cubin: k.sha256 for k in Manifest.load(kernels / "manifest.json").kernels}
    return {cubin: sha256 for cubin, sha256 in sorted(cubins.items()) if sha256 not in verified}


def origin(root: Path, kernels: Path) -> dict[str, Any]:
    """Where a source tree comes from: commit, dirty (both None where unknown), source_date_epoch. Raises InstallationError.

    From git in a checkout (untracked files count as changes: they would be packed); elsewhere, as in an unpacked sdist, what the
    manifest below `kernels` carries. SOURCE_DATE_EPOCH in the environment overrules the commit's time.
    """
    if (root / ".git").exists():  # a folder inside another project's checkout has none
        commit, dirty = commit_of(root, untracked="normal")
        found: dict[str, Any] = {"commit": commit, "dirty": dirty, "source_date_epoch": commit_time(root)}
    else:
        carried = Manifest.load(kernels / "manifest.json").provenance
        found = {key: carried.get(key) for key in _ORIGIN}
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        if not given.isdecimal():
            raise InstallationError(f"expected SOURCE_DATE_EPOCH in seconds since 1970, got {given!r}; set it to a number or unset it")
        found["source_date_epoch"] = int(given)
    if found["source_date_epoch"] is None:
        found["source_date_epoch"] = _UNKNOWN_TIME
    return found


def complaints(root: Path, kernels: Path) -> dict[str, str]:
    """Why the kernels of a folder in a source tree may not be shipped, with the remedy: by what is wrong. Empty where they may.

    "kernels": a file is missing or other than the manifest says; "unverified": a cubin has no record of a passed GPU check;
    "origin": the tree is changed, or its commit unknown.
    """
    try:
        for record in Manifest.load(kernels / "manifest.json").kernels:
            read_cubin(kernels, record)
        missing = unverified(kernels)
        found = origin(root, kernels)
    except InstallationError as error:
        return {"kernels": str(error)}
    wrong = {}
    if missing:
        wrong["unverified"] = f"expected a record in {kernels / 'gpu_checks.json'} {RECORD}; {', '.join(missing)} have none"
    if found["commit"] is None:
        wrong["origin"] = f"expected {root} to be a git checkout or an unpacked sdist, whose commit is known, it is neither"
    elif found["dirty"] is not False:
        wrong["origin"] = f"expected {root} as of commit {found['commit'][:12]}, it has changed or untracked files; commit or stash them"
    return wrong


def stage(kernels: Path, found: dict[str, Any], out: Path) -> tuple[Manifest, dict[str, str]]:
    """Make the kernels' files ready to be packed.

    Writes the manifest, with `found` (see `origin`) in its provenance, into the folder `out`. Returns it, and the files of the
    kernels: path -> name below the folder that the loader reads. Raises InstallationError for a cubin that is missing or other
    than the manifest says.
    """
    manifest = Manifest.load(kernels / "manifest.json")
    manifest = dataclasses.replace(manifest, provenance=manifest.provenance | found)
    for record in manifest.kernels:
        read_cubin(kernels, record)
    (out / "manifest.json").write_text(manifest.dumps(), encoding="utf-8", newline="\n")
    files = {str(out / "manifest.json"): "manifest.json"}
    if (kernels / "gpu_checks.json").exists():
        files[str(kernels / "gpu_checks.json")] = "gpu_checks.json"
    files |= {str(kernels / "cubins" / name): f"cubins/{name}" for name in sorted({k.cubin for k in manifest.kernels})}
    return manifest, files
