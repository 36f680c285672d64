"""The command line as a whole: its commands, its errors, and what it prints where."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cutlass_ops import BuildError, InstallationError, __version__, cli
from cutlass_ops.__main__ import main
from cutlass_ops.cli import output

REPOSITORY = Path(__file__).parents[2]
#: What tells a terminal's output from a plain one: escape sequences, and the characters of boxes.
DECORATION = re.compile(r"\x1b|[\u2500-\u257f]")


def start(*arguments, code=None, **variables):
    """A real process: python -m cutlass_ops, or code, with these variables."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "cutlass_ops"]), *map(str, arguments)]
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    environment = kept | {"PYTHONPATH": str(REPOSITORY)} | variables
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)


def on_terminal(columns, *arguments):
    """What a process prints on a terminal of so many columns."""
    mine, its = pty.openpty()
    command = [sys.executable, "-m", "cutlass_ops", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": str(columns), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdin=its, stdout=its, stderr=its)
    os.close(its)
    printed = b""
    while True:
        try:
            part = os.read(mine, 65536)
        except OSError:  # the process ended, and with it the terminal
            break
        if not part:
            break
        printed += part
    os.close(mine)
    assert process.wait(60) == 0
    return printed.decode()


@pytest.fixture
def invoke():
    """Runs the group in this process."""
    return lambda *arguments: CliRunner().invoke(cli.group, [str(a) for a in arguments], prog_name="cutlass-ops")


# ---- the group ---------------------------------------------------------------------------------------------------


def test_help_lists_every_command_without_importing_it():
    result = start(
        code="import sys; from cutlass_ops.__main__ import main; code = main(['--help']); print(sorted(sys.modules)); sys.exit(code)"
    )
    assert result.returncode == 0
    shown = result.stdout.rpartition("[")[0]
    for name in ("list", "explain", "doctor", "build", "check", "inspect"):
        assert re.search(rf"^  {name}\s+{re.escape(cli.COMMANDS[name][:20])}", shown, re.MULTILINE)
        assert f"'cutlass_ops.cli.{name}'" not in result.stdout
    assert "Examples:\n    cutlass-ops doctor\n" in shown


def test_a_command_whose_module_is_absent_is_neither_listed_nor_found(invoke, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "absent", "Not there.")
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert "absent" not in shown.output
    assert invoke("absent").exit_code == 2


@pytest.mark.parametrize("name", ["list", "explain", "doctor", "build", "check", "inspect"])
def test_every_command_has_help_with_examples_that_name_it(invoke, name):
    result = invoke(name, "--help")
    assert result.exit_code == 0
    examples = result.output.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    assert examples
    assert all(line.strip().startswith(f"cutlass-ops {name}") for line in examples)


def test_an_unknown_command_is_wrong_usage_and_names_the_one_that_was_meant(invoke):
    result = invoke("lst")
    assert result.exit_code == 2
    assert "expected a command, got 'lst'; did you mean list? There are list, explain, doctor, " in result.stderr
    result = invoke("zzz")
    assert result.exit_code == 2
    assert "got 'zzz'; There are list" in result.stderr


def test_the_version_is_the_packages(invoke):
    assert invoke("--version").output == f"cutlass_ops, version {__version__}\n"


@pytest.fixture
def failing(monkeypatch):
    """Makes the command `list` raise."""

    def fail(error):
        @click.command()
        def command():
            raise error

        monkeypatch.setattr("cutlass_ops.cli.list.command", command)

    import cutlass_ops.cli.list  # noqa: F401 (to be patched)

    return fail


@pytest.mark.parametrize("error", [InstallationError("expected this, got that; do so"), BuildError("expected this, got that; do so")])
def test_an_error_of_the_package_is_one_line_and_exit_code_1(invoke, failing, error):
    failing(error)
    result = invoke("list")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: expected this, got that; do so\n")
    assert invoke("--debug", "list").exception is error


def test_an_error_that_is_not_the_packages_is_not_hidden(invoke, failing):
    failing(ZeroDivisionError("a fault"))
    assert isinstance(invoke("list").exception, ZeroDivisionError)


def test_an_interrupted_command_ends_with_130(invoke, failing):
    failing(KeyboardInterrupt())
    result = invoke("list")
    assert (result.exit_code, result.stderr) == (130, "interrupted; what was finished is kept\n")


# ---- without click or rich ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["click", "rich"])
def test_a_missing_package_is_one_line_that_names_the_extra(package):
    code = f"import sys; sys.modules[{package!r}] = None; from cutlass_ops.__main__ import main; sys.exit(main(sys.argv[1:]))"
    result = start("list", code=code)
    message = f"error: expected the package {package}, found none; pip install 'cutlass_ops[cli]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", message)


def test_doctor_needs_neither_and_says_so():
    code = "import sys; sys.modules.update(click=None, rich=None); from cutlass_ops.__main__ import main; sys.exit(main(sys.argv[1:]))"
    result = start("doctor", code=code)
    assert result.returncode in (0, 1)
    assert re.search(r"^note  extra cli +no click, rich$", result.stdout, re.MULTILINE)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--kernels", "nowhere"], ["--json", "more"]])
def test_doctor_with_arguments_that_it_would_ignore_names_the_extra(arguments, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor", *arguments]) == 1
    assert capsys.readouterr().err == "error: expected the package click, found none; pip install 'cutlass_ops[cli]'\n"


# ---- where the output goes ---------------------------------------------------------------------------------------


def test_piped_output_is_plain_and_a_row_is_a_line_whatever_the_width():
    wide, narrow = start("list", "conv2d"), start("list", "conv2d", COLUMNS="20", NO_COLOR="1")
    assert wide.returncode == narrow.returncode == 0
    assert wide.stdout == narrow.stdout
    assert not DECORATION.search(wide.stdout + wide.stderr)
    (row,) = (line for line in wide.stdout.splitlines() if line.startswith("conv2d_fused_f32_nchw_c64_1x1 "))
    assert row.split()[1:9] == ["fused", "f32", "nchw", "1x1", "aligned", "none", "128x128x64", "384"]
    assert all(line == line.rstrip() for line in wide.stdout.splitlines())


def test_a_terminal_gets_a_table_within_its_width():
    printed = on_terminal(120, "list")
    assert DECORATION.search(printed)
    lines = [line.rstrip("\r") for line in re.sub(r"\x1b\[[0-9;]*m", "", printed).split("\n")]
    assert max(map(len, lines)) <= 120
    (start_of_last,) = {line.index("computes") for line in lines if "computes" in line}
    folded = " ".join(" ".join(line[start_of_last:] for line in lines).split())
    assert "KernelBench level 2 problem 31: ``(minimum(conv2d(x, weight, bias), constant) + v) * scale``." in folded
    assert "Convolution with bias, as torch.nn.functional" in folded


def test_a_terminal_too_narrow_for_the_columns_gets_whole_lines():
    lines = on_terminal(60, "list", "conv2d").split("\r\n")
    piped = start("list", "conv2d").stdout.splitlines()
    assert [line for line in lines if line] == piped


def test_a_terminal_without_colours_gets_none(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", on_terminal(100, "list"))


def test_a_reader_that_stops_early_ends_the_command_without_a_traceback():
    command = [sys.executable, "-m", "cutlass_ops", "list", "--all"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(10) == b"Kernels of"
    process.stdout.close()
    assert b"Traceback" not in process.communicate(timeout=60)[1]


@pytest.mark.parametrize("arguments", [["list", "--json"], ["doctor"], ["--help"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(arguments):
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "cutlass_ops", *arguments]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        result = subprocess.run(command, env=environment, cwd=REPOSITORY, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    (line,) = [line for line in result.stderr.splitlines() if "cutlass-ops list OPERATOR" not in line]
    assert line == "error: expected to write all output, could not (No space left on device); free space, or send it elsewhere"
    assert result.returncode == 1


@pytest.mark.parametrize("command", ["new", "build", "wheel", "inspect"])
def test_a_path_that_the_system_refuses_is_one_line(command, capsys):
    path = "a" * 300 + "/ops"
    assert main([command, path]) == 1
    shown = Path.cwd() / path if command == "new" else path
    assert capsys.readouterr().err == f"error: expected to use {shown}, could not (File name too long); name another path\n"


def test_text_in_brackets_is_no_markup(capsys):
    output.show("a [title]", ("name", "number"), [("[bold]x[/bold]", 7), ("pip install 'a[b]'", 10)])
    lines = ["a [title]", "name                number", "[bold]x[/bold]           7", "pip install 'a[b]'      10"]
    assert capsys.readouterr().out.splitlines() == lines


def test_progress_prints_nothing_into_a_pipe(capsys):
    with output.progress("work") as step:
        step("one", 1, 2)
        step("two", 2, 2)
    assert capsys.readouterr() == ("", "")


def test_main_gives_the_exit_code(capsys):
    assert main(["--version"]) == 0
    assert main(["list", "--no-such-option"]) == 2
    assert main(["list", "conv3d"]) == 1
    assert "error: expected an operator, got 'conv3d'; did you mean conv2d? " in capsys.readouterr().err


def test_every_listed_command_has_its_module():
    assert set(cli.group.list_commands(click.Context(cli.group))) == set(cli.COMMANDS)
