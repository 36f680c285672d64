"""What holds for the repository as a whole: short files, and one place where public names are exported."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types

import cutlass_ops
from cutlass_ops import OPERATORS, CutlassOpsError, Operator, errors

MOST_LINES = 400


def sources(root):
    """Every source file that people write (generated/ is emitted)."""
    folders = (root / name for name in ("cutlass_ops", "scripts", "tests"))
    return [root / "hatch_build.py"] + [p for f in folders for p in sorted(f.rglob("*")) if p.suffix in (".py", ".hpp", ".cu")]


def test_no_source_file_has_more_than_400_lines(repository):
    found = sources(repository)
    assert len(found) > 100
    lengths = {str(p.relative_to(repository)): len(p.read_text(encoding="utf-8").splitlines()) for p in found}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_the_packages_public_names_are_those_it_exports():
    public = {name for name, value in vars(cutlass_ops).items() if not name.startswith("_") and not isinstance(value, types.ModuleType)}
    assert set(cutlass_ops.__all__) - {"__version__"} == public - {"annotations"} | {"reference"}
    assert len(cutlass_ops.__all__) == len(set(cutlass_ops.__all__))


def test_every_shipped_operator_is_exported():
    exported = {name: value for name, value in vars(cutlass_ops).items() if isinstance(value, Operator)}
    assert exported.keys() == OPERATORS.keys() <= set(cutlass_ops.__all__)
    assert all(value.spec is OPERATORS[name] for name, value in exported.items())


def test_every_exception_of_the_package_is_exported():
    """errors.py has those that the run time and the builder raise; what is derived from one elsewhere is caught as that one."""
    own = {c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, CutlassOpsError)}
    assert {"NoPlanError", "BuildError"} < {c.__name__ for c in own}
    assert own == {c for c in vars(cutlass_ops).values() if inspect.isclass(c) and issubclass(c, CutlassOpsError)}


def test_modules_export_what_they_list():
    """A name in a module's __all__ exists, and is listed once."""
    for module in pkgutil.walk_packages(cutlass_ops.__path__, "cutlass_ops."):
        if module.name.startswith(("cutlass_ops.codegen", "cutlass_ops.cli", "cutlass_ops.__main__")):
            continue  # they import packages of extras
        loaded = importlib.import_module(module.name)
        names = getattr(loaded, "__all__", [])
        assert len(names) == len(set(names)), module.name
        assert [name for name in names if not hasattr(loaded, name)] == [], module.name


def test_contributing_names_every_module(repository):
    text = (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = text[text.index("## Folders") : text.index("## How data flows")]
    modules = [p.name for p in (repository / "cutlass_ops").glob("*.py")] + [
        p.name for p in (repository / "cutlass_ops" / "codegen").glob("*.py")
    ]
    assert [name for name in modules if name not in folders and name not in ("__init__.py", "cli.py")] == []


def test_the_hooks_run_what_scripts_test_runs(repository):
    hooks = re.findall(r"entry: \.venv/bin/(\w+(?: [a-z]+)?)", (repository / ".pre-commit-config.yaml").read_text())
    assert hooks == ["ruff check", "ruff format", "mypy"]
    script = (repository / "scripts" / "test").read_text()
    assert [hook for hook in hooks if f".venv/bin/{hook}" not in script] == []
