"""A user's project: what `cutlass-ops new` writes and refuses, and where the other commands find things in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from cutlass_ops import BuildError, InstallationError, Spec
from cutlass_ops.cli import new, wheel
from cutlass_ops.codegen.cli import kernels_folder, load_specs
from cutlass_ops.project import Source, locate, names, starter

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A starter project in the current folder, with the default operator."""
    monkeypatch.chdir(tmp_path)
    return starter.create(Path("my_ops"))


def run(folder, *arguments):
    """A module of Python in a folder, with this package importable."""
    command = [sys.executable, "-m", *arguments]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


# ---- new ---------------------------------------------------------------------------------------------------------


FILES = {"NOTICE", "README.md", "pyproject.toml", "my_ops/__init__.py", "my_ops/specs.py", "tests/test_my_ops.py"}


def test_new_writes_a_project_and_says_what_comes_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(new.command, ["my_ops", "--operator", "conv2d_scale"])
    assert result.exit_code == 0, result.output
    assert set(result.output.splitlines()[:-1]) == {f"my_ops/{name}" for name in FILES}
    assert result.output.splitlines()[-1] == "Say what it computes in my_ops/my_ops/specs.py, then: cutlass-ops build my_ops"
    assert {p.name for p in tmp_path.iterdir()} == {"my_ops"}
    written = {str(p.relative_to("my_ops")): p.read_text() for p in Path("my_ops").rglob("*") if p.is_file()}
    assert set(written) == FILES
    assert not [name for name, text in written.items() if "$" in text]
    assert [s.name for s in load_specs(Path("my_ops"))] == ["conv2d_scale"]
    assert 'conv2d_scale = "my_ops:conv2d_scale"' in written["pyproject.toml"]
    for name in ("LICENSE", "NOTICE"):
        assert (REPOSITORY / name).read_text() in written["NOTICE"]


@pytest.mark.parametrize("command", [new.command, wheel.command])
def test_the_help_shows_each_example_on_a_line_of_its_own(command):
    lines = CliRunner().invoke(command, ["--help"], terminal_width=80).output.splitlines()
    examples = [line for line in lines if line.strip().startswith(f"cutlass-ops {command.callback.__module__.rpartition('.')[2]} my_ops")]
    assert len(examples) == 2


def test_the_operators_name_follows_the_packages(project):
    (spec,) = load_specs(project)
    assert isinstance(spec, Spec)
    assert spec.name == "conv2d_my_ops"
    assert spec.doc


def test_the_starter_passes_its_own_test(project):
    result = run(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_the_starters_test_fails_where_the_operator_computes_something_else(project):
    specs = project / "my_ops" / "specs.py"
    specs.write_text(specs.read_text().replace("return relu(", "return -relu("))
    result = run(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 failed" in result.stdout


def test_the_starter_is_clean(project):
    for arguments in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy", "--strict", "my_ops", "tests"]):
        result = run(project, *arguments)
        assert result.returncode == 0, f"{arguments}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-ops", "expected a Python name for the package .*, got 'my-ops'"),
        ("o" * 201, "expected a name of at most 200 characters for the package, got 201"),
        ("2ops", "expected a Python name for the package .*, got '2ops'"),
        ("lambda", "expected a Python name for the package .*, got 'lambda'"),
        ("öps", "expected a Python name for the package .*, got 'öps'"),
        ("conv2d_relu_hardswish", "expected package and shipped operator to have different names, got 'conv2d_relu_hardswish'"),
        ("json", "got 'json', which Python's standard library has"),
        ("torch", "got 'torch', which torch has"),
        ("cutlass_ops", "expected a package name that is free, got 'cutlass_ops'"),
        ("tests", "expected a package name that is free, got 'tests'"),
        ("NOTICE", "expected a package name that is free, got 'NOTICE', which a file or folder beside the package has"),
        ("dist", "expected a package name that is free, got 'dist', which a file or folder beside the package has"),
        ("my_ops_", "expected a package name that begins and ends with a letter or digit, as a wheel's must, got 'my_ops_'"),
        ("_my", "expected a package name that begins and ends with a letter or digit, as a wheel's must, got '_my'"),
        ("Cutlass_Ops", "got 'Cutlass_Ops', which cutlass_ops has"),
        ("cutlass__ops", "got 'cutlass__ops', which cutlass_ops has"),
        ("Torch", "got 'Torch', which torch has"),
        ("cuda_bindings", "got 'cuda_bindings', which cuda-bindings has"),
    ],
)
def test_a_bad_package_name_is_refused_and_nothing_is_written(tmp_path, name, message):
    with pytest.raises(BuildError, match=message):
        starter.create(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["not_here", "Not_Here", "not__here"])
def test_the_name_of_a_requirement_that_is_not_installed_is_refused(tmp_path, monkeypatch, name):
    lines = ["torch>=2.6", "not-here[more]<14,>=13.0; extra == 'build'"]
    monkeypatch.setattr(names, "distribution", lambda _: SimpleNamespace(requires=lines))
    with pytest.raises(BuildError, match=rf"got '{name}', which not-here, a requirement of cutlass_ops, has; choose another"):
        starter.create(tmp_path / name)


@pytest.mark.parametrize("place", ["my_ops", "my_ops/dist/my_ops-1.0-py3-none-any.whl", "other"])
def test_an_installed_projects_name_is_free_in_its_own_folder_only(tmp_path, site, place):
    site.add("my_ops", "conv2d_my_ops")
    url = (tmp_path / place).as_uri()
    (site.folder / "my_ops-1.0.dist-info" / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {}}))
    if place != "other":
        assert starter.create(tmp_path / "my_ops").is_dir()
        return
    with pytest.raises(BuildError, match="got 'my_ops', which my_ops has"):
        starter.create(tmp_path / "my_ops")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("conv-2d", "expected a Python name for the operator .*, got 'conv-2d'"),
        ("", "expected a Python name for the operator .*, got ''"),
        ("class", "expected a Python name for the operator .*, got 'class'"),
        ("conv2d", "expected operator and shipped operator to have different names, got 'conv2d'"),
        ("relu", "expected an operator name that the project's files do not use otherwise, got 'relu'"),
        ("name", "got 'name', which torch.ops.cutlass_ops has"),
        *((name, f"begins with a letter, got '{name}'") for name in ("__init__", "__name__", "_dir", "__class__", "__all__")),
        ("taken_op", "got 'taken_op', which taken 1.0 has"),
    ],
)
def test_a_bad_operator_name_is_refused_and_nothing_is_written(tmp_path, site, name, message):
    site.add("taken", "taken_op")
    with pytest.raises(BuildError, match=message):
        starter.create(tmp_path / "my_ops", name)
    assert [p.name for p in tmp_path.iterdir()] == ["site"]


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_exists_is_left_alone(tmp_path, kind):
    path = tmp_path / "my_ops"
    {"folder": path.mkdir, "file": path.touch, "dangling link": lambda: path.symlink_to("nowhere")}[kind]()
    with pytest.raises(BuildError, match=r"expected a name that is free, got .*my_ops, which exists"):
        starter.create(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"expected to write the project .*file/my_ops, could not \(.*\); name"):
        starter.create(tmp_path / "file" / "my_ops")


@pytest.mark.parametrize(("version", "expected"), [("0.1.0", ">=0.1,<0.2"), ("0.12.3", ">=0.12,<0.13"), ("1.4.0", ">=1.4,<2")])
def test_a_project_asks_for_versions_that_can_run_its_kernels(version, expected):
    assert starter.requirement(version) == expected


def test_licences_that_are_missing_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(starter, "distribution", lambda name: SimpleNamespace(files=None))
    monkeypatch.setattr(starter, "__file__", str(tmp_path / "lib" / "cutlass_ops" / "project" / "starter.py"))
    with pytest.raises(InstallationError, match="expected the licence files of cutlass_ops beside its metadata, found none; reinstall"):
        starter.create(tmp_path / "my_ops")
    assert list(tmp_path.iterdir()) == []


def test_the_licences_of_an_installed_package_are_those_beside_its_metadata(tmp_path, monkeypatch):
    licences = tmp_path / "cutlass_ops-1.dist-info" / "licenses"
    licences.mkdir(parents=True)
    (licences / "LICENSE").write_text("may be used")
    file = SimpleNamespace(locate=lambda: licences / "LICENSE", as_posix=lambda: "cutlass_ops-1.dist-info/licenses/LICENSE")
    monkeypatch.setattr(starter, "distribution", lambda name: SimpleNamespace(files=[file]))
    assert (starter.create(tmp_path / "my_ops") / "NOTICE").read_text().endswith("\n\nmay be used")


# ---- locate ------------------------------------------------------------------------------------------------------


def test_a_file_has_its_kernels_in_the_current_folder():
    assert locate(Path("a/ops.py")) == Source(Path("a/ops.py"), Path("ops_kernels"))


@pytest.mark.parametrize("layout", ["flat", "src"])
def test_a_projects_specs_and_kernels_are_in_its_package(project, layout):
    root = Path("my_ops")
    package = root / "my_ops"
    if layout == "src":
        (root / "src").mkdir()
        package = package.rename(root / "src" / "my_ops")
    assert locate(root) == Source(package / "specs.py", package / "kernels", root)
    assert kernels_folder(root) == package / "kernels"


def test_a_folder_that_is_no_project_is_refused(tmp_path):
    with pytest.raises(BuildError, match=r"expected a Python file or a project folder with pyproject\.toml, got "):
        locate(tmp_path)


def test_a_project_without_specs_or_with_two_is_refused(project):
    (project / "other").mkdir()
    (project / "other" / "specs.py").touch()
    with pytest.raises(BuildError, match=r"expected one package with specs\.py in .*, found .*my_ops/my_ops/specs.py, .*other/specs.py"):
        locate(project)
    for name in ("my_ops", "other"):
        (project / name / "specs.py").unlink()
    with pytest.raises(BuildError, match=r"expected one package with specs\.py in .*my_ops, found none"):
        locate(project)
