"""The wheel: what is in it, that unfit kernels and trees are refused, and that it works alone."""

from __future__ import annotations

import email
import hashlib
import json
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .helpers import COMMIT_TIME, contents, cubin_hashes, git, info, run, write_records

SIZE_LIMIT = 2_000_000  # bytes
RESULT_LIMIT = 1e-5  # largest error of the CPU reference in fp32 against float64
EM_CUDA = 190  # ELF machine of a cubin


def test_the_script_prints_what_it_built(dist: Path, sdist: Path, wheel: Path) -> None:
    expected = "".join(
        f"{path}\n  {path.stat().st_size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in (sdist, wheel)
    )
    assert (dist.parent / "printed").read_text() == expected
    assert sorted(dist.iterdir()) == sorted([sdist, wheel])


def test_name_and_size(wheel: Path) -> None:
    assert re.fullmatch(r"cutlass_ops-\d+\.\d+\.\d+-py3-none-any\.whl", wheel.name)
    assert wheel.stat().st_size <= SIZE_LIMIT


def test_contents(wheel: Path, checkout: Path) -> None:
    """Package, manifest, records and exactly the manifest's cubins, byte for byte (but for provenance); nothing that scripts alone use."""
    package = [p for p in (checkout / "cutlass_ops").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    expected = {str(p.relative_to(checkout)): p.read_bytes() for p in package}
    for left_out in ("sanitizer.py", "soak.py", "benchmark/fit.py", "benchmark/sweep.py"):
        del expected[f"cutlass_ops/{left_out}"]
    kernels = ["gpu_checks.json", *(f"cubins/{name}" for name in cubin_hashes(checkout / "generated"))]
    expected |= {f"cutlass_ops/generated/{name}": (checkout / "generated" / name).read_bytes() for name in kernels}
    found = {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}
    manifest = json.loads(found.pop("cutlass_ops/generated/manifest.json"))
    assert found.keys() == expected.keys()
    assert found == expected
    origin = {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False, "source_date_epoch": COMMIT_TIME}
    tracked = json.loads((checkout / "generated" / "manifest.json").read_text())
    assert manifest == tracked | {"provenance": tracked["provenance"] | origin}


def test_licences_of_all_that_is_compiled_in(wheel: Path, checkout: Path) -> None:
    paths = [checkout / "LICENSE", checkout / "NOTICE", *(checkout / "licenses").iterdir()]
    texts = {f"licenses/{p.relative_to(checkout)}": p.read_bytes() for p in paths}
    assert {name: data for name, data in info(wheel).items() if name.startswith("licenses/")} == texts
    named = set(re.findall(r"licenses/[\w.-]+\.txt", (checkout / "NOTICE").read_text()))
    assert named == {str(p.relative_to(checkout)) for p in (checkout / "licenses").iterdir()}


def test_one_file_serves_hosts_of_every_architecture(wheel: Path) -> None:
    """No code of a host: the ELF files are cubins."""
    assert b"Root-Is-Purelib: true" in info(wheel)["WHEEL"]
    machines = {name: struct.unpack_from("<H", data, 18)[0] for name, data in contents(wheel).items() if data[:4] == b"\x7fELF"}
    assert machines
    assert {name: machine for name, machine in machines.items() if machine != EM_CUDA} == {}
    other_code = (b"MZ", b"!<arch>\n", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")  # PE, static library, Mach-O, its fat form
    assert [name for name, data in contents(wheel).items() if data.startswith(other_code)] == []


def test_dependencies(wheel: Path) -> None:
    metadata = email.message_from_bytes(info(wheel)["METADATA"])
    always = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert {re.split(r"[^\w-]", r)[0] for r in always} == {"torch", "cuda-bindings"}
    assert metadata["Requires-Python"] == ">=3.10"


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


def change_a_file(generated: Path) -> str:
    (generated.parent / "README.md").write_text("changed")
    return r"expected \S* as of commit [0-9a-f]{12}, it has changed or untracked files; commit or stash them"


def add_a_file(generated: Path) -> str:
    (generated.parent / "cutlass_ops" / "new.py").touch()
    return r"expected \S* as of commit [0-9a-f]{12}, it has changed or untracked files; commit or stash them"


def remove_git(generated: Path) -> str:
    shutil.rmtree(generated.parent / ".git")
    return r"expected \S* to be a git checkout or an unpacked sdist, whose commit is known, it is neither"


UNFIT = [remove_cubin, change_cubin, remove_records, fail_one_check, change_a_file, add_a_file, remove_git]


@pytest.mark.parametrize("spoil", UNFIT)
def test_unfit_kernels_and_trees_are_refused(checkout: Path, tmp_path: Path, spoil: Callable[[Path], str]) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy)
    message = spoil(copy / "generated")
    if spoil in (remove_records, fail_one_check):
        git(copy, "commit", "-q", "-a", "-m", "spoilt")
    result = run(sys.executable, copy / "scripts" / "build_wheel.py", "--out", tmp_path / "dist")
    assert result.returncode == 1
    assert re.match(rf"error: {message}[^\n]*\n\Z", result.stderr), result.stderr
    assert not (tmp_path / "dist").exists()


def test_a_changed_tree_may_be_packed_where_that_is_asked_for_and_the_wheel_says_so(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy)
    message = change_a_file(copy / "generated")
    result = run(sys.executable, copy / "scripts" / "build_wheel.py", "--allow-dirty", "--out", tmp_path / "dist")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(rf"not a release: {message}\n", result.stderr)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    provenance = json.loads(contents(wheel)["cutlass_ops/generated/manifest.json"])["provenance"]
    assert (provenance["commit"], provenance["dirty"]) == (git(checkout, "rev-parse", "HEAD"), True)


def test_unfit_kernels_are_refused_all_the_same_in_a_changed_tree(checkout: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy)
    message = fail_one_check(copy / "generated")
    result = run(sys.executable, copy / "scripts" / "build_wheel.py", "--allow-dirty", "--out", tmp_path / "dist")
    assert result.returncode == 1
    assert re.search(rf"^error: {message}$", result.stderr, re.MULTILINE)
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


def test_the_installed_package_tells_where_its_kernels_come_from(installed: Callable[[str], str], checkout: Path) -> None:
    provenance = json.loads(installed("import json\nfrom cutlass_ops.loader import provenance\nprint(json.dumps(provenance()))"))
    assert provenance["commit"] == git(checkout, "rev-parse", "HEAD")
    assert provenance["dirty"] is False
    assert {"cutlass_ops", "cutlass", "nvcc", "emitter", "flags", "architecture"} <= provenance.keys()


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
