"""Names that a new project may have: of its package, which is also its distribution's, and of its operator."""

from __future__ import annotations

import json
import keyword
import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions, packages_distributions
from pathlib import Path
from typing import Optional
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch

from .. import plugins
from ..errors import BuildError
from ..spec import LONGEST_NAME
from ..specs import OPERATORS

__all__ = ["check_operator", "check_package"]

#: What stands beside the package in a project's folder: what the starter writes, and the folder of its wheels.
_BESIDE = frozenset({"NOTICE", "dist", "tests"})
#: What the templates import, which an operator of the same name would hide.
_TEMPLATE_NAMES = frozenset({"MaxPool2d", "Operator", "Path", "Vector", "operator", "relu", "specs"})


def check_package(name: str, folder: Path) -> None:
    """Raise BuildError for a name that a package of the project in this folder cannot have, or that is taken."""
    _check_name("package", name)
    if name.startswith("_") or name.endswith("_"):
        raise BuildError(
            f"expected a package name that begins and ends with a letter or digit, as a wheel's must, got {name!r}; choose another"
        )
    owner = _owner(name, folder)
    if owner is not None:
        raise BuildError(f"expected a package name that is free, got {name!r}, which {owner} has; choose another")


def check_operator(name: str, folder: Path) -> None:
    """Raise BuildError for a name that an operator of the project in this folder cannot have, or that is taken."""
    _check_name("operator", name)
    if name.startswith("_"):
        raise BuildError(f"expected an operator name that begins with a letter, got {name!r}; choose another")
    if name in _TEMPLATE_NAMES:
        raise BuildError(f"expected an operator name that the project's files do not use otherwise, got {name!r}; choose another")
    taken = plugins.installed().get(name)
    owner = None
    if taken is not None:
        owner = None if taken.dist and _is_of(taken.dist, folder) else plugins.distribution_of(taken)
    elif hasattr(torch.ops.cutlass_ops, name):
        owner = "torch.ops.cutlass_ops"
    if owner is not None:
        raise BuildError(f"expected an operator name that is free, got {name!r}, which {owner} has; choose another")


def _check_name(what: str, name: str) -> None:
    if len(name) > LONGEST_NAME:
        raise BuildError(f"expected a name of at most {LONGEST_NAME} characters for the {what}, got {len(name)}; choose another")
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise BuildError(f"expected a Python name for the {what} (letters, digits, _; no keyword), got {name!r}; choose another")
    if name in OPERATORS:
        raise BuildError(f"expected {what} and shipped operator to have different names, got {name!r} of cutlass_ops; choose another")


def _owner(name: str, folder: Path) -> Optional[str]:
    """Who has a package's name already, to import or to install; None: it is free."""
    if name in sys.stdlib_module_names:
        return "Python's standard library"
    if name in _BESIDE:
        return "a file or folder beside the package"
    ours = _normalised("cutlass_ops")
    if _normalised(name) == ours:
        return "cutlass_ops"
    installed = {_normalised(d.metadata["Name"]): d for d in distributions() if "Name" in d.metadata}
    found = installed.get(_normalised(name))
    if found is not None and not _is_of(found, folder):
        return found.metadata["Name"]
    for other in packages_distributions().get(name, []):
        same = installed.get(_normalised(other))
        if same is None or not _is_of(same, folder):
            return other
    required = next((r for r in _requirements() if _normalised(r) == _normalised(name)), None)
    return f"{required}, a requirement of cutlass_ops," if required else None


def _normalised(name: str) -> str:
    """A distribution's name as installers compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements() -> list[str]:
    """Names of what cutlass_ops and its extras require, those to build with among them; none in a checkout that is not installed."""
    try:
        lines = distribution("cutlass_ops").requires or []
    except PackageNotFoundError:
        return []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]


def _is_of(installed: Distribution, folder: Path) -> bool:
    """Whether a distribution was installed from this folder: as a project, or a wheel of it."""
    url = urlsplit(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    return url.scheme == "file" and Path(url2pathname(url.path)).resolve().is_relative_to(folder.resolve())
