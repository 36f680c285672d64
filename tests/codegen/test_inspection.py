"""`cutlass-ops inspect` on real cubins (see conftest.py): what it counts is what nvcc and the manifest say."""

from __future__ import annotations

import json
import re
import shutil
import zipfile

import pytest
from click.testing import CliRunner

from cutlass_ops import cli
from cutlass_ops.codegen import inspection
from cutlass_ops.codegen.artifact import Artifact
from cutlass_ops.errors import BuildError, InstallationError

from .conftest import FUSED


def inspect(*arguments):
    return CliRunner().invoke(cli.group, ["inspect", *map(str, arguments)])


def read(path):
    """Kernels of an artifact by name."""
    steps = []
    found = inspection.kernels(Artifact.read(path), inspection.disassembler(), step=lambda *step: steps.append(step))
    assert [done for _, done, _ in steps] == list(range(1, len(steps) + 1))
    return {kernel.name: kernel for kernel in found}


@pytest.fixture(scope="module")
def folder(built, tmp_path_factory):
    """The build of `tiny`, with records of a passed GPU check for all of its cubins but pool.cubin."""
    copy = tmp_path_factory.mktemp("inspected") / "out"
    shutil.copytree(built.out, copy)
    check = {"passed": True, "gpu": "NVIDIA H200", "date": "2026-01-02 10:00 UTC", "errors": {}}
    checks = {k.sha256: check | {"passed": k.cubin != "pool.cubin"} for k in built.manifest.kernels}
    (copy / "gpu_checks.json").write_text(json.dumps({"cubins": checks}))
    return copy


@pytest.fixture(scope="module")
def kernels(folder):
    return read(folder)


def test_every_kernel_of_the_manifest_is_found_with_its_record(kernels, built):
    assert set(kernels) == {k.name for k in built.manifest.kernels}
    for record in built.manifest.kernels:
        kernel = kernels[record.name]
        assert (kernel.record, kernel.sha256) == (record, record.sha256)
        assert kernel.registers == record.registers
        assert kernel.mix["wgmma"] == record.hgmma
        assert (kernel.local_memory, kernel.mix["local"]) == (0, 0)
        assert (kernel.figures["dynamic shared"], kernel.figures["threads"]) == (record.shared_memory, record.threads)
        assert (kernel.check is None) == (record.cubin == "pool.cubin")


def test_instructions_are_those_of_the_disassembly(kernels, folder, toolchain):
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/ +(.*?) *;", toolchain.sass(folder / "cubins" / f"{FUSED}.cubin"), re.MULTILINE)
    kernel = kernels[FUSED]
    assert sum(kernel.instructions.values()) == len(lines) > 100
    for opcode in ("FFMA", "STS", "UTMALDG", "EXIT"):
        assert kernel.instructions[opcode] == sum(bool(re.match(rf"(@!?U?P\w+ )?{opcode}\b", line)) for line in lines)
    assert kernel.mix["TMA"] > 0
    assert kernels["pool_avg_f32"].mix["TMA"] == 0


def test_shared_memory_and_barriers_are_the_kernels_own(kernels):
    assert kernels["pool_avg_f32"].static_shared_memory > 1024
    assert kernels["pool_avg_f32"].barriers == 1
    assert kernels[FUSED].barriers >= 1


def test_a_cubin_finds_the_manifest_of_its_folder(folder, kernels):
    found = read(folder / "cubins" / "tiny_f16.cubin")
    assert found == {"tiny_f16": kernels["tiny_f16"].__class__(**vars(kernels["tiny_f16"]) | {"cubin": "tiny_f16.cubin"})}
    assert {name: k.record for name, k in read(folder / "cubins").items()} == {name: k.record for name, k in kernels.items()}


def test_a_cubin_alone_has_no_origin(folder, tmp_path):
    shutil.copy(folder / "cubins" / "pool.cubin", tmp_path)
    assert all(k.record is None and k.check is None for k in read(tmp_path / "pool.cubin").values())
    result = inspect(tmp_path / "pool.cubin")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path / 'pool.cubin'}: 1 cubin, 0 verified; no manifest beside them\n")


def wheel(path, folder, package="some_ops/kernels"):
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*.*"):
            if file.suffix != ".cu":
                archive.write(file, f"{package}/{file.relative_to(folder)}")
        archive.writestr("some_ops/__init__.py", "raise SystemExit")
    return path


def test_a_wheel_is_as_its_folder(folder, kernels, tmp_path):
    found = read(wheel(tmp_path / "some_ops-1-py3-none-any.whl", folder))
    assert {name: (k.code, k.record, k.check) for name, k in found.items()} == {
        name: (k.code, k.record, k.check) for name, k in kernels.items()
    }
    assert found["tiny_f16"].cubin == "some_ops/kernels/cubins/tiny_f16.cubin"


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_tables_have_a_row_for_each_kernel(folder, kernels):
    result = inspect(folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{folder}: 5 cubins, 4 verified; nvcc 13.0.")
    for title in ("Resources", "Instructions", "Origin"):
        start = lines.index(title) + 2
        assert [line.split()[0] for line in lines[start : start + len(kernels)]] == sorted(kernels)
    (row,) = [line for line in lines[lines.index("Origin") :] if line.startswith("tiny_f16 ")]
    assert row.split()[1:] == ["tiny_f16.cubin", kernels["tiny_f16"].sha256, "yes", "NVIDIA", "H200", "2026-01-02"]
    assert [line.split()[-1] for line in lines[lines.index("Origin") :] if line.startswith("pool_avg_f32 ")] == ["no"]


def test_json_counts_every_opcode(folder, kernels):
    found = json.loads(inspect(folder / "cubins" / f"{FUSED}.cubin", "--json").stdout)
    (kernel,) = found["kernels"]
    assert kernel["instructions"] == dict(kernels[FUSED].instructions)
    assert kernel["figures"] == kernels[FUSED].figures
    assert kernel["record"]["name"] == FUSED
    assert kernel["verified"]["gpu"] == "NVIDIA H200"
    assert found["provenance"]["architecture"] == "sm_90a"


@pytest.fixture(scope="module")
def other(folder, toolchain, tmp_path_factory):
    """`folder` with another convert.cubin of the same kernels, without pack.cubin, and with a cubin of a new kernel."""
    copy = tmp_path_factory.mktemp("other") / "out"
    shutil.copytree(folder, copy)
    (copy / "cubins" / "pack.cubin").unlink()
    work = copy.parent
    (work / "new.cu").write_text('extern "C" __global__ void fresh(float *p) { p[threadIdx.x] *= 2.0f; }\n')
    names = [f"convert_{a}_{b}" for a, b in (("f32", "f16"), ("f32", "tf32"), ("f16", "f16"), ("bf16", "bf16"))]
    spoilt = "".join(f'extern "C" __global__ void {name}(float *p) {{ p[threadIdx.x] += 1.0f; }}\n' for name in names)
    (work / "convert.cu").write_text(spoilt)
    for name in ("new", "convert"):
        command = [
            toolchain.nvcc,
            "-cubin",
            "-gencode=arch=compute_90a,code=sm_90a",
            work / f"{name}.cu",
            "-o",
            copy / "cubins" / f"{name}.cubin",
        ]
        inspection.subprocess.run(command, check=True, capture_output=True)
    return copy


def test_two_builds_are_compared(folder, other, kernels):
    result = inspect(folder, other)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"before: {folder}: 5 cubins, 4 verified; ")
    assert lines[1].startswith(f"after:  {other}: 5 cubins, 2 verified; ")
    assert lines[2] == "3 cubins equal; of the kernels in others: 1 added, 3 removed, 4 changed, 0 the same"
    assert [line.split()[0] for line in lines[lines.index("Added") + 2 : lines.index("Removed")]] == ["fresh"]
    removed = lines[lines.index("Removed") + 2 : lines.index("Changed")]
    assert [line.split()[0] for line in removed] == ["pack_bf16_bf16", "pack_f16_f16", "pack_f32_f16"]
    changed = [line.split() for line in lines[lines.index("Changed") + 2 :]]
    before = kernels["convert_f32_f16"].registers
    (registers,) = [row for row in changed if row[:2] == ["convert_f32_f16", "registers"]]
    assert registers[2] == str(before)
    assert int(registers[3]) - before == int(registers[4]) < 0
    assert ["convert_f32_f16", "verified", "NVIDIA", "H200", "2026-01-02", "no", "-"] in changed


def test_a_comparison_as_json(folder, other):
    found = json.loads(inspect(folder, other, "--json").stdout)
    assert (found["equal_cubins"], found["same"], [k["name"] for k in found["added"]]) == (3, [], ["fresh"])
    assert (found["before"]["verified_cubins"], found["after"]["verified_cubins"]) == (4, 2)
    change = next(c for c in found["changed"] if c["name"] == "convert_f32_f16")
    assert change["before"]["code"] != change["after"]["code"]
    assert change["after"]["record"] is None


def test_equal_builds_have_no_difference(folder):
    lines = inspect(folder, folder).stdout.splitlines()
    assert lines[2:] == ["5 cubins equal; of the kernels in others: 0 added, 0 removed, 0 changed, 0 the same"]


def test_a_cubin_that_differs_in_no_instruction_is_the_same(folder, tmp_path):
    data = (folder / "cubins" / "pool.cubin").read_bytes()
    (tmp_path / "pool.cubin").write_bytes(data + b"\0")
    lines = inspect(folder / "cubins" / "pool.cubin", tmp_path / "pool.cubin").stdout.splitlines()
    assert lines[2] == "0 cubins equal; of the kernels in others: 0 added, 0 removed, 0 changed, 6 the same"


# ---- what cannot be read -----------------------------------------------------------------------------------------


def test_what_is_no_artifact_is_named(tmp_path):
    (tmp_path / "text.cubin").write_text("nothing")
    (tmp_path / "broken.whl").write_text("nothing")
    (tmp_path / "empty").mkdir()
    zipfile.ZipFile(tmp_path / "none.whl", "w").close()
    messages = {
        "nowhere": "expected a cubin, a wheel or a folder of cubins at {path}, found none; name another path",
        "empty": "expected cubins in {path}, found none; build the kernels or name another path",
        "none.whl": "expected cubins in {path}, found none; build the kernels or name another path",
        "broken.whl": "expected a wheel at {path}, could not read it (File is not a zip file); build or fetch it again",
        "text.cubin": "expected a cubin at text.cubin, cuobjdump could not read it (",
    }
    for name, message in messages.items():
        result = inspect(tmp_path / name)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("error: " + message.format(path=tmp_path / name))
        assert len(result.stderr.splitlines()) == 1


def test_a_truncated_cubin_is_refused(folder, tmp_path):
    (tmp_path / "half.cubin").write_bytes((folder / "cubins" / "pool.cubin").read_bytes()[:5000])
    with pytest.raises(BuildError, match=r"half\.cubin"):
        read(tmp_path / "half.cubin")


def test_a_damaged_manifest_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text("{")
    with pytest.raises(InstallationError, match="expected a JSON manifest"):
        Artifact.read(tmp_path / "out")


def test_a_missing_disassembler_names_the_extra(monkeypatch, folder):
    monkeypatch.setattr(inspection, "_nvidia", list)
    monkeypatch.setattr(inspection.shutil, "which", lambda tool: None)
    result = inspect(folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: expected cuobjdump and nvdisasm, found none; pip install 'cutlass_ops[build]' brings them\n"


def test_a_disassembler_on_the_path_will_do(monkeypatch, toolchain):
    monkeypatch.setattr(inspection, "_nvidia", list)
    monkeypatch.setattr(inspection.shutil, "which", lambda tool: str(toolchain.home / "bin" / tool))
    assert inspection.disassembler() == (toolchain.home / "bin" / "cuobjdump").resolve()
