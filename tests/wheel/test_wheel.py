"""The wheel: what is in it, that it is the same each time, that unfit kernels are refused, and that it works alone."""

from __future__ import annotations

import email
import hashlib
import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SIZE_LIMIT = 2_000_000  # bytes
LEFT_OUT = ("__pycache__", "build", "dist")
RESULT_LIMIT = 1e-5  # largest error of the CPU reference in fp32 against float64

Records = dict[str, dict[str, bool]]


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)


def successful(*command: object) -> str:
    result = run(*command)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def cubin_hashes(generated: Path) -> dict[str, str]:
    kernels = json.loads((generated / "manifest.json").read_text())["kernels"]
    return {k["cubin"]: k["sha256"] for k in kernels}


def write_records(generated: Path, records: Records) -> None:
    (generated / "gpu_checks.json").write_text(json.dumps({"cubins": records}))


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with its built cubins, and GPU check records for them.

    Where the real records do not cover the cubins (scripts/check_verified.py fails then), stand-ins take their place in
    the copy, so that packaging is tested all the same.
    """
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    shutil.copytree(ROOT, copy, ignore=lambda _, names: [n for n in names if n in LEFT_OUT or (n.startswith(".") and n != ".gitignore")])
    generated = copy / "generated"
    cubins = cubin_hashes(generated)
    missing = [name for name in cubins if not (generated / "cubins" / name).exists()]
    if missing:
        pytest.fail(f"expected the built cubin generated/cubins/{missing[0]}, found none; run scripts/build_kernels.py first")
    checks = generated / "gpu_checks.json"
    known: Records = json.loads(checks.read_text())["cubins"] if checks.exists() else {}
    if not all(known.get(sha256, {}).get("passed") is True for sha256 in cubins.values()):
        write_records(generated, {sha256: {"passed": True} for sha256 in cubins.values()})
    return copy


@pytest.fixture(scope="session")
def wheel(checkout: Path) -> Path:
    """The wheel that scripts/build_wheel.py makes: checkout -> sdist -> wheel."""
    out = checkout.parent / "dist"
    lines = successful(sys.executable, checkout / "scripts" / "build_wheel.py", "--out", out).splitlines()
    path = Path(lines[0])
    data = path.read_bytes()
    assert lines[1:] == [f"{len(data)} bytes", f"sha256 {hashlib.sha256(data).hexdigest()}"]
    assert len(list(out.iterdir())) == 2, "expected an sdist and a wheel"
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Callable[[str], str]:
    """Runs Python code in a clean environment that holds the wheel and what it asks for; returns what it prints."""
    folder = wheel.parent.parent / "clean"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    successful(python, "-m", "pip", "install", "-q", "-c", ROOT / "scripts" / "constraints.txt", wheel)
    return lambda code: successful(python, "-I", "-c", code)


def test_name_and_size(wheel: Path) -> None:
    assert re.fullmatch(r"cutlass_ops-\d+\.\d+\.\d+-py3-none-any\.whl", wheel.name)
    assert wheel.stat().st_size <= SIZE_LIMIT


def test_contents(wheel: Path, checkout: Path) -> None:
    """The package, manifest, records and exactly the manifest's cubins, byte for byte; nothing else."""
    package = [p for p in (checkout / "cutlass_ops").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    expected = {str(p.relative_to(checkout)): p.read_bytes() for p in package}
    kernels = ["manifest.json", "gpu_checks.json", *(f"cubins/{name}" for name in cubin_hashes(checkout / "generated"))]
    expected |= {f"cutlass_ops/generated/{name}": (checkout / "generated" / name).read_bytes() for name in kernels}
    with zipfile.ZipFile(wheel) as archive:
        found = {n: archive.read(n) for n in archive.namelist() if ".dist-info/" not in n}
        info = {n.split(".dist-info/")[1]: archive.read(n) for n in archive.namelist() if ".dist-info/" in n}
    assert found.keys() == expected.keys()
    assert found == expected
    for name in ("LICENSE", "NOTICE"):
        assert info[f"licenses/{name}"] == (checkout / name).read_bytes()


def test_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    always = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {re.split(r"[^\w-]", r)[0] for r in always} == {"torch", "cuda-bindings"}
    assert metadata["Requires-Python"] == ">=3.10"


def test_sdist_and_checkout_give_the_same_wheel(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    successful(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, checkout)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def remove_cubin(generated: Path) -> str:
    name = min(cubin_hashes(generated))
    (generated / "cubins" / name).unlink()
    return rf"expected the cubin \S*{name}"


def change_cubin(generated: Path) -> str:
    name, sha256 = min(cubin_hashes(generated).items())
    path = generated / "cubins" / name
    path.write_bytes(path.read_bytes() + b"\0")
    return rf"expected \S*{name} with sha256 {sha256}, got"


def remove_records(generated: Path) -> str:
    (generated / "gpu_checks.json").unlink()
    return r"expected a record in \S*gpu_checks.json of a passed GPU check"


def fail_one_check(generated: Path) -> str:
    cubins = cubin_hashes(generated)
    write_records(generated, {sha256: {"passed": name != min(cubins)} for name, sha256 in cubins.items()})
    return rf"expected a record in .*; {min(cubins)} have none"


@pytest.mark.parametrize("spoil", [remove_cubin, change_cubin, remove_records, fail_one_check])
def test_unfit_kernels_are_refused(checkout: Path, tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy)
    message = spoil(copy / "generated")
    result = run(sys.executable, copy / "scripts" / "build_wheel.py", "--out", tmp_path / "dist")
    assert result.returncode == 1
    assert re.match(rf"error: {message}[^\n]*\n\Z", result.stderr), result.stderr
    assert not (tmp_path / "dist").exists()


def test_clean_environment_has_no_builder(installed: Callable[[str], str]) -> None:
    names = installed("from importlib.metadata import distributions\nprint(*(d.metadata['Name'].lower() for d in distributions()))").split()
    assert {"cutlass_ops", "torch", "cuda-bindings"} <= set(names)
    assert not {"nvidia-cutlass", "nvidia-cuda-nvcc", "pyelftools", "rich"} & set(names)


def test_installed_kernels_are_those_of_the_manifest(installed: Callable[[str], str], checkout: Path) -> None:
    printed = installed(
        "import sys\n"
        "from cutlass_ops.loader import KernelSet, shipped_kernels\n"
        "assert shipped_kernels().is_relative_to(sys.prefix), shipped_kernels()\n"
        "kernels = KernelSet(shipped_kernels())\n"
        "for record in kernels.manifest.kernels:\n"
        "    kernels.image(record)\n"
        "    assert record.sha256 in kernels.verified, record.cubin\n"
        "print(len({record.cubin for record in kernels.manifest.kernels}))\n"
    )
    assert int(printed) == len(cubin_hashes(checkout / "generated"))


def test_installed_operator_on_the_cpu(installed: Callable[[str], str]) -> None:
    printed = installed(
        "import torch, cutlass_ops\n"
        "torch.manual_seed(0)\n"
        "x, weight, bias = torch.rand(2, 5, 17, 15), torch.randn(7, 5, 3, 3) / 8, torch.randn(7)\n"
        "y = cutlass_ops.conv2d_sub_tanh_sub_avgpool(x, weight, bias, subtract1=0.5, subtract2=0.2, pool=2)\n"
        "conv = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double())\n"
        "exact = torch.nn.functional.avg_pool2d(torch.tanh(conv - 0.5) - 0.2, 2)\n"
        "assert y.shape == exact.shape and y.dtype is torch.float32\n"
        "print((y - exact).abs().max().item())\n"
    )
    assert float(printed) <= RESULT_LIMIT


def test_installed_builder_names_the_missing_package(installed: Callable[[str], str]) -> None:
    printed = installed(
        "import contextlib, io\n"
        "from cutlass_ops.__main__ import main\n"
        "from cutlass_ops.codegen.cli import build_kernels\n"
        "from cutlass_ops.errors import BuildError\n"
        "with contextlib.redirect_stderr(io.StringIO()) as errors:\n"
        "    assert main(['build']) == 1\n"
        "print(errors.getvalue())\n"
        "try:\n"
        "    build_kernels(None, None, nvcc=None, jobs=1, check=False, progress=print)\n"
        "except BuildError as error:\n"
        "    print(error)\n"
    )
    assert re.match(r"error: expected the package click, found none; pip install 'cutlass_ops\[cli\]'\n", printed)
    assert re.search(r"^expected the package \w+, found none; pip install 'cutlass_ops\[build\]'$", printed, re.MULTILINE)


def test_installed_doctor_finds_the_kernels_without_click(installed: Callable[[str], str]) -> None:
    printed = installed("from cutlass_ops.__main__ import main\nprint(main(['doctor', '--json']))\n")
    report = json.loads(printed.rpartition("}")[0] + "}")
    found = {finding["subject"]: finding for finding in report["findings"]}
    assert all(found[subject]["status"] == "ok" for subject in ("kernels", "cubins", "verified", "costs of plans"))
    assert found["extra cli"]["remedy"] == "pip install 'cutlass_ops[cli]'"
