"""How commands take a user's own specs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import click


def own_source(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the argument SOURCE, which scripts may also write as --spec SOURCE, as its parameter `source`."""

    @click.argument("source", type=click.Path(path_type=Path), required=False)
    @click.option("--spec", type=click.Path(path_type=Path), metavar="SOURCE", help="The same as SOURCE.")
    @functools.wraps(command)
    def wrapped(source: Optional[Path], spec: Optional[Path], **others: Any) -> None:
        if source is not None and spec is not None:
            raise click.UsageError(f"expected SOURCE once, got {source} and --spec {spec}")
        command(source=source or spec, **others)

    return wrapped
