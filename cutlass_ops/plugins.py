"""Operators of other installed packages, which announce them as entry points of the group `cutlass_ops.operators`.

The name of an entry point is the operator's, its value the `Operator` object (``my_ops:conv2d_scale_relu``). All operators share
the namespace torch.ops.cutlass_ops, so a name belongs to one package.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Optional

from .errors import InstallationError
from .ops import Operator
from .spec import Spec
from .specs import OPERATORS

__all__ = ["GROUP", "distribution_of", "installed", "load", "owner"]

GROUP = "cutlass_ops.operators"


def installed() -> dict[str, EntryPoint]:
    """Entry point of every operator that an installed package offers, by the operator's name. Imports none of them.

    Raises InstallationError where two packages offer one name, or a package that of a shipped operator; it names both.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.get(point.name)
        if other is not None or point.name in OPERATORS:
            raise InstallationError(
                f"expected every operator's name in one package, got {point.name!r} in {distribution_of(other)} and in "
                f"{distribution_of(point)}; uninstall one of them, or rename the operator there"
            )
        found[point.name] = point
    return found


def load(name: str) -> Operator:
    """The operator of this name: a shipped one, or one that an installed package offers (the package is imported).

    Raises ValueError for an unknown name, InstallationError for a name clash and for a package that does not keep its word.
    """
    if name in OPERATORS:
        import cutlass_ops

        shipped: Operator = getattr(cutlass_ops, name)
        return shipped
    offered = installed()
    if name not in offered:
        raise ValueError(f"expected an operator among {', '.join([*OPERATORS, *sorted(offered)])}, got {name!r}")
    point = offered[name]
    try:
        found = point.load()
    except (Exception, SystemExit) as error:
        raise InstallationError(
            f"expected the operator {name} at {point.value} of {distribution_of(point)}, got {type(error).__name__}: {error}; "
            "mend or uninstall the package"
        ) from error
    if not isinstance(found, Operator) or found.spec.name != name:
        raise InstallationError(
            f"expected the cutlass_ops.Operator {name} at {point.value} of {distribution_of(point)}, got {found!r}; correct the "
            f'package\'s entry point in the group "{GROUP}"'
        )
    return found


def owner(spec: Spec) -> str:
    """Where a spec comes from, for messages: its package with the version, if it is an installed one's, and its file."""
    top = spec.chain.__module__.partition(".")[0]
    file = spec.chain.__code__.co_filename
    if top == __package__:
        return f"{distribution_of(None)} ({file})"
    point = next((p for p in entry_points(group=GROUP) if p.value.partition(":")[0].partition(".")[0] == top), None)
    return f"{distribution_of(point)} ({file})" if point else file


def distribution_of(point: Optional[EntryPoint]) -> str:
    """Name and version of the distribution that an entry point belongs to; without one, of this package."""
    if point is None:
        from . import __version__

        return f"cutlass_ops {__version__}"
    return f"{point.dist.name} {point.dist.version}" if point.dist else f"an unnamed package ({point.value})"
