"""The shipped operators: `OPERATORS` maps their names to their specs. A user's own file is written the same way."""

from __future__ import annotations

from ..spec import Spec
from . import kernelbench, plain

__all__ = ["OPERATORS"]

OPERATORS: dict[str, Spec] = {
    spec.name: spec for module in (plain, kernelbench) for spec in vars(module).values() if isinstance(spec, Spec)
}
