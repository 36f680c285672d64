"""The command line (extra `cli`): a click group. Each command is a module of this package, imported when it is used.

Exit codes of every command, unless its own help says otherwise: 0 done, 1 an error (one line on stderr), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, Optional

import click

from .. import __version__
from ..errors import CutlassOpsError

__all__ = ["COMMANDS", "Failure", "group", "main"]

#: Command -> what it does. The module of the same name has the click command, as `command`.
COMMANDS = {
    "list": "Show operators and kernels, and on which GPU they were verified.",
    "explain": "Show which plan a call takes, its expected time, and why not the others.",
    "doctor": "Check the installation: do the kernels run here, and what would have to change?",
    "new": "Start a package with an operator of your own.",
    "build": "Build kernels from specs; needs no GPU.",
    "check": "Check kernels on a Hopper GPU and record which passed.",
    "wheel": "Pack an operator of your own and its verified kernels into a wheel.",
    "bench": "Time an operator against eager PyTorch and torch.compile.",
    "inspect": "Show instruction mix, resources and origin of compiled kernels; compare two builds.",
}

#: What writing into a full disk, beyond a quota or a limit, or to a failing device gives.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Failure(click.ClickException):
    """An error that ends the command with one line and exit code 1."""

    def show(self, file: Any = None) -> None:
        """Print it as the scripts do."""
        click.echo(f"error: {self.message}", file=file, err=file is None)


class Commands(click.Group):
    """A group that imports a command when it is used, and turns the package's errors into one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return [name for name in COMMANDS if importlib.util.find_spec(f"{__name__}.{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """The command of a name; None where there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{cmd_name}").command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Optional[str], Optional[click.Command], list[str]]:
        """The command that the arguments begin with. An unknown one is an error with what it may have meant."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], known, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            ctx.fail(f"expected a command, got {args[0]!r}; {meant}There are {', '.join(known)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table, without an import of the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted; what was finished is kept", err=True)
            raise click.exceptions.Exit(130) from None
        except CutlassOpsError as error:
            if ctx.params["debug"]:
                raise
            raise Failure(str(error.args[0] if error.args else error)) from error
        except OSError as error:  # of a path; output that cannot be written has none, and is main()'s
            if error.filename is None or ctx.params["debug"]:
                raise
            raise Failure(f"expected to use {error.filename}, could not ({error.strerror}); name another path") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cutlass_ops")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def group(debug: bool) -> None:
    """Convolution, elementwise chain and pool as one PyTorch operator on NVIDIA Hopper GPUs.

    \b
    Examples:
      cutlass-ops doctor
      cutlass-ops list conv2d_sub_tanh_sub_avgpool
      cutlass-ops explain conv2d --shape 128,64,128,128 --weight 128,64,3,3
      cutlass-ops COMMAND --help
    """


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_FULL):
            raise
        _drop_output()
        if error.errno != errno.EPIPE:
            click.echo(f"error: expected to write all output, could not ({error.strerror}); free space, or send it elsewhere", err=True)
        return 1


def _run(arguments: Sequence[str]) -> int:
    try:
        group(args=[*arguments], prog_name="cutlass-ops")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _drop_output() -> None:
    """What could not be written would be tried again, with a traceback, when the process ends."""
    with contextlib.suppress(OSError, ValueError):  # where stdout is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
