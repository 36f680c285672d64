"""The wheel of a user's project: what is in it, the same bytes each time, what is refused, and that two of them work side by side.

Its kernels here are those of a shipped operator under another name, which nothing but a GPU could tell apart.
"""

from __future__ import annotations

import base64
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from cutlass_ops import BuildError, InstallationError, __version__
from cutlass_ops.cli.wheel import command
from cutlass_ops.codegen.build import plan_units
from cutlass_ops.codegen.cli import load_specs
from cutlass_ops.manifest import Manifest
from cutlass_ops.project import locate, starter, wheel

ROOT = Path(__file__).parent.parent.parent
LIKE = "conv2d_relu_hardswish"


def make_project(folder: Path, operator: str, *, verified: bool = True) -> Path:
    """A starter project with kernels."""
    root = starter.create(folder, operator)
    kernels = locate(root).kernels
    data = json.loads((ROOT / "generated" / "manifest.json").read_text())
    data["kernels"] = [k for k in data["kernels"] if k.get("operator", "") in ("", LIKE)]
    data = json.loads(json.dumps(data).replace(LIKE, operator))
    data["keys"] = {unit.name: [unit.key, "of a build"] for unit in plan_units(load_specs(root))}
    (kernels / "cubins").mkdir(parents=True)
    (kernels / "manifest.json").write_text(json.dumps(data))
    records = Manifest.load(kernels / "manifest.json").kernels
    for cubin in {r.cubin for r in records}:
        built = ROOT / "generated" / "cubins" / cubin.replace(operator, LIKE)
        if not built.exists():
            pytest.fail(f"expected the built cubin {built}, found none; run scripts/build_kernels.py first")
        shutil.copy(built, kernels / "cubins" / cubin)
    (kernels / f"{operator}_f16.cu").write_text("// no part of a wheel\n")
    (kernels / "gpu_checks.json").write_text(json.dumps({"cubins": {r.sha256: {"passed": verified} for r in records}}))
    return root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "own_ops", "conv2d_own")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def lines_of(result: Result) -> list[str]:
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    return result.stdout.splitlines()


# ---- what is in it -----------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_its_kernels(project: Path) -> None:
    result = run(project)
    path = project / "dist" / "own_ops-0.1.0-py3-none-any.whl"
    data = path.read_bytes()
    assert lines_of(result) == [str(path), f"{len(data)} bytes, operators: conv2d_own", f"sha256 {hashlib.sha256(data).hexdigest()}"]
    assert result.stderr == ""
    package = project / "own_ops"
    expected = {str(p.relative_to(project)): p.read_bytes() for p in package.rglob("*") if p.is_file() and p.suffix != ".cu"}
    with zipfile.ZipFile(path) as archive:
        found = {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}
        info = {n.split(".dist-info/")[1]: archive.read(n) for n in archive.namelist() if ".dist-info/" in n}
    assert found == expected
    assert info["entry_points.txt"].decode() == "[cutlass_ops.operators]\nconv2d_own = own_ops:conv2d_own\n"
    assert info["licenses/NOTICE"] == (project / "NOTICE").read_bytes()
    assert [n for n in info if n.startswith("sboms/")] == ["sboms/own-ops.cdx.json"]
    metadata = email.message_from_bytes(info["METADATA"])
    (needed,) = metadata.get_all("Requires-Dist", [])
    assert needed[:11].replace("-", "_") == "cutlass_ops"
    assert sorted(needed[11:].split(",")) == sorted(starter.requirement(__version__).split(","))


def test_the_wheel_has_a_valid_bill_of_materials_and_records_it(project: Path) -> None:
    path = wheel.build(locate(project), project / "dist").path
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    text = held["own_ops-0.1.0.dist-info/sboms/own-ops.cdx.json"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.decode()) is None
    bill = json.loads(text)
    assert (bill["metadata"]["component"]["name"], bill["metadata"]["component"]["version"]) == ("own_ops", "0.1.0")
    hashes = {c["name"]: c["hashes"][0]["content"] for c in bill["components"] if c["name"].endswith(".cubin")}
    assert hashes == {k.cubin: k.sha256 for k in Manifest.load(locate(project).kernels / "manifest.json").kernels}
    assert {"nvidia-cutlass", "nvidia-cuda-nvcc"} < {c["name"] for c in bill["components"]}
    rows = dict(line.split(",", 1) for line in held["own_ops-0.1.0.dist-info/RECORD"].decode().splitlines())
    for name, data in held.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert rows.pop(name) == ("," if name.endswith("/RECORD") else f"sha256={digest},{len(data)}")
    assert rows == {}


def test_the_same_project_gives_the_same_bytes_anywhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = wheel.build(locate(project), tmp_path / "first").path
    elsewhere = shutil.copytree(project, tmp_path / "elsewhere" / "own_ops", copy_function=shutil.copyfile)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    before = os.umask(0o077)
    try:
        for path in elsewhere.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        second = wheel.build(locate(elsewhere), tmp_path / "second").path
    finally:
        os.umask(before)
    assert second.name == first.name
    assert second.read_bytes() == first.read_bytes()


# ---- what is refused ---------------------------------------------------------------------------------------------


def remove_kernels(root: Path) -> None:
    shutil.rmtree(root / "own_ops" / "kernels")


def damage_cubin(root: Path) -> None:
    path = root / "own_ops" / "kernels" / "cubins" / "pool.cubin"
    path.write_bytes(path.read_bytes() + b"\0")


def remove_cubin(root: Path) -> None:
    (root / "own_ops" / "kernels" / "cubins" / "pool.cubin").unlink()


def remove_records(root: Path) -> None:
    (root / "own_ops" / "kernels" / "gpu_checks.json").unlink()


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / name).read_text()
        assert old in text
        (root / name).write_text(text.replace(old, new))

    return change


def leave_out_cubins(root: Path) -> None:
    text = (root / "pyproject.toml").read_text()
    changed = text.replace(', "/own_ops/kernels/cubins/*.cubin"]', "]").replace("exclude = [", 'exclude = ["*.cubin", ')
    assert changed.count("*.cubin") == text.count("*.cubin")
    (root / "pyproject.toml").write_text(changed)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (remove_kernels, InstallationError, r"expected the kernels' manifest at .*own_ops/kernels/manifest\.json, found none; build"),
        (damage_cubin, InstallationError, r"expected .*pool\.cubin with sha256 \w+, got"),
        (remove_cubin, InstallationError, r"expected the cubin .*pool\.cubin, could not read it"),
        (remove_records, BuildError, r"expected a record .* found none for conv2d_own_bf16\.cubin, .* and \d+ more; run cutlass-ops check"),
        (
            edit("own_ops/specs.py", "+ shift", "- shift"),
            BuildError,
            r"as it is, got others for conv2d_own_bf16, .* more; run",
        ),
        (leave_out_cubins, BuildError, r"expected own_ops/kernels/cubins/.* in the wheel .*none"),
        (
            edit("pyproject.toml", "conv2d_own =", "conv2d_other ="),
            BuildError,
            r"for each operator \(conv2d_own\), got conv2d_other; write",
        ),
        (
            edit("pyproject.toml", "cutlass_ops.operators", "other.operators"),
            BuildError,
            r"for each operator \(conv2d_own\), got none; write",
        ),
        (
            edit("own_ops/__init__.py", "conv2d_own =", "conv2d_other ="),
            BuildError,
            r"to load, got .*AttributeError: .*conv2d_own",
        ),
        (edit("own_ops/__init__.py", "from . import", "import nothing_here\nfrom . import"), BuildError, r"got .*ModuleNotFoundError"),
        (edit("pyproject.toml", 'version = "0.1.0"', "version = 3"), BuildError, r"expected python -m build to make a wheel of .*code 1:"),
    ],
)
def test_an_unfit_project_is_refused(project: Path, spoil: Callable[[Path], None], error: type[Exception], message: str) -> None:
    spoil(project)
    result = run(project)
    assert type(result.exception) is error, result.exception
    assert re.search(message, str(result.exception)), result.exception
    assert not (project / "dist").exists()


def test_a_change_that_no_kernel_depends_on_needs_no_new_build(project: Path) -> None:
    edit("own_ops/specs.py", "import relu", "import relu, tanh")(project)
    lines_of(run(project))


def test_a_file_with_specs_is_no_project(project: Path, tmp_path: Path) -> None:
    result = run(project / "own_ops" / "specs.py", "--out", tmp_path / "dist")
    assert re.search(r"expected a project folder with pyproject\.toml, got .*specs\.py; cutlass-ops new", str(result.exception))


def test_unverified_kernels_are_packed_where_they_are_allowed_and_named(tmp_path: Path) -> None:
    project = make_project(tmp_path / "own_ops", "conv2d_own", verified=False)
    assert isinstance(run(project).exception, BuildError)
    result = run(project, "--allow-unverified", "--out", tmp_path / "dist")
    assert lines_of(result)[0] == str(tmp_path / "dist" / "own_ops-0.1.0-py3-none-any.whl")
    assert re.fullmatch(r"warning: conv2d_own_bf16\.cubin, .* and \d+ more have no record of a passed GPU check: .*=1\n", result.stderr)


# ---- installed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, install: Callable[[Path], Path]) -> Callable[[str], str]:
    """Runs code where two users' wheels are installed; returns what it prints."""
    folder = tmp_path_factory.mktemp("own")
    wheels = [
        wheel.build(locate(make_project(folder / name, operator)), folder / "dist").path
        for name, operator in (("own_ops", "conv2d_own"), ("other_ops", "conv2d_other"))
    ]
    return environment(install(folder / "environment"), *wheels)


def environment(python: Path, *wheels: Path) -> Callable[[str], str]:
    """Install wheels into an environment; returns what runs code there."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, *wheels], check=True)

    def execute(code: str) -> str:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else done.stderr

    return execute


def test_two_wheels_work_side_by_side(python: Callable[[str], str]) -> None:
    printed = python(
        "import sys, torch, cutlass_ops, own_ops, other_ops\n"
        "from pathlib import Path\n"
        "assert Path(cutlass_ops.__file__).is_relative_to(sys.prefix) and Path(own_ops.__file__).is_relative_to(sys.prefix)\n"
        "torch.manual_seed(0)\n"
        "x, weight, bias = torch.rand(2, 5, 17, 15), torch.randn(7, 5, 3, 3) / 8, torch.randn(7)\n"
        "conv = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double())\n"
        "exact = torch.nn.functional.max_pool2d(torch.relu(conv * 2 + 0.1), 2)\n"
        "for op in (own_ops.conv2d_own, other_ops.conv2d_other):\n"
        "    registered = getattr(torch.ops.cutlass_ops, op.spec.name)\n"
        "    flat = [[1, 1], [0, 0], [1, 1], [2, 2], [2, 2], [0, 0], [1, 1], False, True, None, None]\n"
        "    for y in (op(x, weight, bias), registered(x, weight, bias, 2.0, 0.1, *flat)):\n"
        "        assert y.dtype is torch.float32 and (y - exact).abs().max() <= 1e-5\n"
        "    module = cutlass_ops.FusedConv2d(op, 5, 7, 3)\n"
        "    assert module(x).shape == exact.shape\n"
        "    h200 = cutlass_ops.DeviceFacts('NVIDIA H200', (9, 0), 132)\n"
        "    big, filters = torch.empty(8, 64, 56, 56, device='meta'), torch.empty(128, 64, 3, 3, device='meta')\n"
        "    cutlass_ops.explain(op, big, filters, torch.empty(128, device='meta'), device=h200)\n"
        "assert not {'cutlass_cppgen', 'cutlass_library', 'elftools', 'click', 'rich'} & set(sys.modules)\n"
    )
    plans = re.findall(r"plan: two-kernel\S+ \(.* -> (conv2d_\w+)_tf32 -> pool_max_f32\)", printed)
    assert plans == ["conv2d_own", "conv2d_other"], printed


def test_each_is_found_by_its_operators_name(python: Callable[[str], str]) -> None:
    assert python(
        "from cutlass_ops import plugins\n"
        "found = plugins.installed()\n"
        "print(*sorted((name, point.dist.name) for name, point in found.items()))\n"
        "print(*(plugins.load(name).kernels.parent.name for name in sorted(found)))\n"
    ).splitlines() == ["('conv2d_other', 'other_ops') ('conv2d_own', 'own_ops')", "other_ops own_ops"]


def test_wheels_with_one_operators_name_are_an_error_that_names_both(tmp_path: Path, install: Callable[[Path], Path]) -> None:
    wheels = [wheel.build(locate(make_project(tmp_path / name, "conv2d_own")), tmp_path / "dist").path for name in ("own_ops", "other_ops")]
    python = environment(install(tmp_path / "environment"), *wheels)
    assert re.search(
        r"InstallationError: expected every operator's name in one package, got 'conv2d_own' in (own|other)_ops 0\.1\.0 and in "
        r"(own|other)_ops 0\.1\.0; uninstall",
        python("from cutlass_ops import plugins; plugins.installed()"),
    )
    assert re.search(
        r"ValueError: expected a new operator name, got 'conv2d_own' of \w+_ops 0\.1\.0 \(.*other_ops/specs\.py\), which is registered "
        r"already, by \w+_ops 0\.1\.0 \(.*own_ops/specs\.py\)",
        python("import own_ops, other_ops"),
    )
