"""Every command in every document is known, and what is said to run it does; the examples of README.md run on the CPU."""

from __future__ import annotations

import ast
import collections
import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig

import pytest
import torch

from .commands import COMMANDS, ByTest, Collects, Plain, Profiles, Runs, Script
from .documents import ROOT, documents, has_test

NAMED = {command: document.name for document in documents() for command in document.commands()}
SITE_PACKAGES = ".venv/lib/python3*/site-packages"


def of(kind):
    return [command for command, proof in COMMANDS.items() if isinstance(proof, kind)]


def words_of(command):
    """(variables that it sets, words), with this interpreter and its packages in place of those of .venv."""
    words = shlex.split(command.replace(SITE_PACKAGES, sysconfig.get_paths()["purelib"]))
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    ours = {"python": [sys.executable], ".venv/bin/python": [sys.executable], "cutlass-ops": [sys.executable, "-m", "cutlass_ops"]}
    return variables, [*ours.get(words[0], words[:1]), *words[1:]]


def run(command, **variables):
    """The command in the root, on a machine whose GPUs are hidden from it."""
    own, words = words_of(command)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)} | own | variables
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_every_command_is_known():
    unknown = {command: name for command, name in NAMED.items() if command not in COMMANDS}
    assert unknown == {}, "say in tests/docs/commands.py which test or script runs them"


def test_every_known_command_is_in_a_document():
    assert COMMANDS.keys() - NAMED.keys() == set()


def test_python_blocks_and_shell_blocks_are_all_there_is():
    """Another language would be neither run nor checked."""
    assert {block.language for d in documents() for block in d.blocks} <= {"", "console", "python", "text", "toml"}


@pytest.mark.parametrize("command", of(Runs))
def test_a_command_runs(command):
    proof = COMMANDS[command]
    done = run(command)
    assert done.returncode == proof.code, done.stderr
    assert proof.says in done.stdout + done.stderr
    assert not proof.checked_by or has_test(proof.checked_by)


@pytest.mark.parametrize("command", of(Script))
def test_a_script_has_the_command(command):
    proof = COMMANDS[command]
    assert proof.line in (ROOT / proof.path).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", of(ByTest))
def test_a_test_does_what_the_command_does(command):
    assert has_test(COMMANDS[command].node)
    for word in words_of(command)[1]:
        if word.startswith(("scripts/", "./scripts/")):
            assert os.access(ROOT / word, os.X_OK if word.startswith("./") else os.R_OK), word


@pytest.mark.parametrize("command", of(Collects))
def test_tests_for_a_gpu_are_collected(command):
    variables, _ = words_of(command)
    done = run(f"{command} --collect-only", **dict.fromkeys(variables, "3"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ tests collected", done.stdout)
    for name in variables:
        assert any(name in path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "gpu").glob("*.py")), name


@pytest.mark.parametrize("command", of(Profiles))
def test_what_is_profiled_is_a_known_command(command):
    proof = COMMANDS[command]
    assert not proof.command or (proof.command in command and proof.command in COMMANDS)
    for name in re.findall(r"--kernel-name (\w+)", command):
        assert f'"{name}"' in (ROOT / "generated" / "manifest.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", of(Plain))
def test_a_plain_command_is_a_tools(command):
    assert words_of(command)[1][0] in ("git", "sha256sum")


def test_options_of_commands_that_are_not_run_here_exist():
    """Each script's help has them."""
    wanted = collections.defaultdict(set)
    for command in (c for c, proof in COMMANDS.items() if not isinstance(proof, Runs)):
        for script, options in re.findall(r"(scripts/\w+\.py)(.*)", command):
            wanted[script] |= set(re.findall(r" (--[a-z-]+)", options))
    assert {"scripts/bench.py", "scripts/build_kernels.py"} <= wanted.keys()
    for script, options in wanted.items():
        if options:
            shown = run(f"python {script} --help").stdout
            assert [option for option in options if option not in shown] == [], script


def test_shell_scripts_are_well_formed():
    scripts = [p for p in (ROOT / "scripts").iterdir() if p.is_file() and p.suffix in ("", ".sh")]
    assert len(scripts) >= 3
    for path in [*scripts, ROOT / ".ci" / "run"]:
        subprocess.run(["/bin/bash", "-n", path], check=True)


def test_the_demos_operator_is_right_on_the_cpu(monkeypatch, capsys):
    """What scripts/demo runs in a clean environment; that the environment is clean, tests/wheel/test_wheel.py checks."""
    spec = importlib.util.spec_from_file_location("demo_operator", ROOT / "scripts" / "demo_operator.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "check_installation", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main() == 0
    assert "the result is right" in capsys.readouterr().out


# ---- python examples -----------------------------------------------------------------------------------------------------

#: What differs on the CPU: no GPU, and a batch that it computes quickly.
ON_THE_CPU = {'device="cuda"': 'device="cpu"', "torch.rand(128, ": "torch.rand(2, ", "torch.Size([128, ": "torch.Size([2, "}


def examples(name):
    """The Python blocks of a document: (line, text, file that the text before says they are in)."""
    (document,) = (d for d in documents() if d.name == name)
    for block in document.blocks:
        if block.language == "python":
            text = block.text
            for gpu, cpu in ON_THE_CPU.items():
                text = text.replace(gpu, cpu)
            file = re.search(r"`(\w+\.py)`:$", block.before)
            yield block.line, text, file and file[1]


def test_the_readmes_examples_run(tmp_path, monkeypatch, capsys):
    """In order, in one process, as a reader would; a comment behind a print is what it prints."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for line, text, file in examples("README.md"):
        if file:
            (tmp_path / file).write_text(text)
            continue
        capsys.readouterr()
        exec(compile(text, f"README.md:{line}", "exec"), namespace)  # noqa: S102 (our own document)
        expected = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
        printed = capsys.readouterr().out.splitlines()
        assert [e for e in expected if e not in printed] == []
    assert {"y", "model"} <= namespace.keys()


def test_examples_of_other_documents_compile():
    for document in documents():
        for block in document.blocks:
            if block.language == "python" and document.name != "docs/api.md":  # signatures
                session = doctest.DocTestParser().get_examples(block.text)
                ast.parse("".join(example.source for example in session) or block.text)
