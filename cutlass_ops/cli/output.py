"""What commands print: tables and progress bars for terminals, plain lines where the output goes into a file or a pipe."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

#: Told after each step: what was finished, how many steps are done, how many there are.
Step = Callable[[str, int, int], None]

_UNLIMITED = 100_000  # columns: a line of a pipe is one row, which grep finds whole
_LEAST = 30  # columns of the last, folded one


def show(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: numbers flush right. On a terminal wide enough the last column is folded; elsewhere a row is one plain line."""
    columns = [[header, *(str(row[i]) for row in rows)] for i, header in enumerate(headers)]
    widths = [max(map(len, column)) for column in columns]
    console = Console(markup=False, highlight=False)
    pretty = console.is_terminal and console.width >= sum(widths[:-1]) + min(widths[-1], _LEAST) + 3 * len(widths)
    if not pretty:
        console = Console(markup=False, highlight=False, width=_UNLIMITED, no_color=True, force_terminal=False)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD if pretty else None, pad_edge=False)
    for i, header in enumerate(headers):
        numeric = all(isinstance(row[i], int) for row in rows)
        fixed = None if i + 1 == len(headers) else widths[i]
        table.add_column(header, justify="right" if numeric else "left", overflow="fold", min_width=fixed)
    for row in rows:
        table.add_row(*map(str, row))
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def show_json(data: Any) -> None:
    """Print data as JSON."""
    click.echo(json.dumps(data, indent=1))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Step]:
    """A progress bar on stderr while the block runs; nothing where stderr is no terminal. Yields what to call after each step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def step(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield step
