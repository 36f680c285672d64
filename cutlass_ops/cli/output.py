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


def show(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: numbers flush right; for a terminal folded into its width, else one plain line a row."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = Console(markup=False, highlight=False, width=_UNLIMITED, no_color=True)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for i, header in enumerate(headers):
        numeric = all(isinstance(row[i], int) for row in rows)
        table.add_column(header, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def step(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield step
