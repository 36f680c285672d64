"""docs/tutorial.md, command by command, with an installed cutlass_ops: from nothing to a wheel that another environment uses.

Three things differ from what a user does: cutlass_ops is installed already; the build compiles one kernel of each family instead
of all, which would take minutes; and where there is no GPU the check must say so, and stand-ins take the place of its records.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cutlass_ops.manifest import Manifest
from cutlass_ops.verification import missing_gpu

PACKAGE = "dist/cutlass_ops-0.1.0-py3-none-any.whl[build]"
KERNELS = Path("my_ops/my_ops/kernels")

FEW_KERNELS = """
from cutlass_ops.codegen import cutlass_api, source
cutlass_api.OPERANDS = {"f16": cutlass_api.OPERANDS["f16"]}
source.FUSED_VARIANTS = tuple(v for v in source.FUSED_VARIANTS if v.name == "fused_f16_nhwc_c16_3x3")
"""
COMMAND = f"""
{FEW_KERNELS}
import sys
from importlib import import_module
import_module("cutlass_ops.cli." + sys.argv.pop(1)).command()
"""
BUILD = f"""
{FEW_KERNELS}
import sys
from pathlib import Path
from cutlass_ops.codegen import build, cli, toolchain
project = Path(sys.argv[1])
build.build(cli.load_specs(project), cli.kernels_folder(project), toolchain.find(), strict=False)
"""
CHECK = """
import sys
from pathlib import Path
from cutlass_ops import verification
sys.exit(verification.missing_gpu() or not verification.check_kernels(Path(sys.argv[1]), None))
"""


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Reader:
    """Follows the tutorial in a folder: builds in one environment, uses the wheel in another."""

    def __init__(self, folder: Path, builder: Path, user: Path) -> None:
        self.folder, self.builder, self.user = folder, builder, user

    def python(self, python: Path, *arguments: str, fails: bool = False) -> str:
        done = subprocess.run([python, *arguments], cwd=self.folder, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) is fails, f"{arguments}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def follow(self, command: str) -> None:
        """Do what a line of the tutorial says."""
        match shlex.split(command):
            case ["pip", "install", package] if package in (PACKAGE, "pytest"):
                pass  # the fixture has
            case ["pip", "install", wheel]:
                self.python(
                    Path(sys.executable), "-m", "pip", "--python", str(self.user), "install", "-q", "--no-deps", "--no-index", wheel
                )
            case ["python", *arguments]:
                self.python(self.builder, *arguments)
            case ["cutlass-ops", "build", project]:
                self.python(self.builder, "-I", "-c", BUILD, project)
            case ["cutlass-ops", "check", project]:
                self.check(project)
            case ["cutlass-ops", name, *arguments]:
                self.python(self.builder, "-I", "-c", COMMAND, name, *arguments)
            case _:
                pytest.fail(f"expected a command that this test knows, got {command!r}; add it")

    def check(self, project: str) -> None:
        refused = self.python(self.builder, "-I", "-c", COMMAND, "wheel", project, fails=True)
        assert "expected a record of a passed GPU check" in refused
        if missing_gpu() is None:
            self.python(self.builder, "-I", "-c", CHECK, project)
            return
        assert "needs a Hopper GPU (compute capability 9.0); found" in self.python(self.builder, "-I", "-c", CHECK, project, fails=True)
        kernels = self.folder / KERNELS
        records = {k.sha256: {"passed": True} for k in Manifest.load(kernels / "manifest.json").kernels}
        (kernels / "gpu_checks.json").write_text(json.dumps({"cubins": records}))


@pytest.mark.usefixtures("toolchain")
def test_the_tutorial_leads_to_a_wheel_that_works(repository, install, tmp_path):
    text = (repository / "docs" / "tutorial.md").read_text()
    reader = Reader(tmp_path, install(tmp_path / "builder"), install(tmp_path / "user"))
    commands = [line for block in blocks(text, "console") for line in block.splitlines()]
    assert [c.split()[1] for c in commands if c.startswith("cutlass-ops ")] == ["new", "build", "check", "wheel"]
    for command in commands:
        reader.follow(command)
    assert (repository / "NOTICE").read_text() in (tmp_path / "my_ops" / "NOTICE").read_text()
    declared, used = blocks(text, "python")
    assert declared.strip() in (tmp_path / KERNELS.parent / "specs.py").read_text()
    printed = reader.python(reader.user, "-I", "-c", used)
    assert printed.startswith("torch.Size([8, 128, 27, 27])\nconv2d_scale_relu_maxpool: x (8, 64, 56, 56) f32")
    built = {k.name for k in Manifest.load(tmp_path / KERNELS / "manifest.json").kernels if k.operator}
    assert built == {"conv2d_scale_relu_maxpool_f16", "conv2d_scale_relu_maxpool_fused_f16_nhwc_c16_3x3"}
