"""The build: reproducible, incremental, safe to kill, and able to tell that its results were tampered with.

What needs a real compiler is compiled once more; the other tests use an nvcc that hands out the cubins of that one real
build (renamed where an operator has another name), so that they test the build's logic in seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cutlass_ops import AvgPool2d
from cutlass_ops.__main__ import main
from cutlass_ops.codegen import build, cli, source
from cutlass_ops.codegen.toolchain import Toolchain
from cutlass_ops.errors import BuildError
from cutlass_ops.manifest import Manifest

from .conftest import FUSED, TINY

pytestmark = pytest.mark.usefixtures("only_f16")

FAKE_NVCC = """\
#!{python}
import json, pathlib, sys
built = pathlib.Path({built!r})
name = sys.argv[-1].removesuffix(".cubin")
calls = pathlib.Path({calls!r})
calls.write_text(calls.read_text() + name + "\\n")
real = name if (built / "cubins" / (name + ".cubin")).exists() else name.replace("tinb", "tiny")
spilled = 8 if name in pathlib.Path({spills!r}).read_text().split() else 0
data = (built / "cubins" / (real + ".cubin")).read_bytes().replace(real.encode(), name.encode())
pathlib.Path(name + ".cubin").write_bytes(data)
for kernel in json.loads((built / "manifest.json").read_text())["kernels"]:
    if kernel["cubin"] == real + ".cubin":
        print("Compiling entry function '" + kernel["name"].replace(real, name) + "' for 'sm_90a'")
        print(spilled, "bytes stack frame,", spilled, "bytes spill stores,", spilled, "bytes spill loads")
        print("Used", kernel["registers"], "registers")
"""


@dataclass
class Fake:
    """A toolchain whose nvcc copies; `calls` are the kernels that it was asked to compile, `spills` holds those that spill."""

    toolchain: Toolchain
    log: Path
    spills: Path

    def take_calls(self):
        calls = self.log.read_text().split()
        self.log.write_text("")
        return sorted(calls)


@pytest.fixture
def fake(built, toolchain, tmp_path):
    home, log, spills = (tmp_path / name for name in ("toolkit", "calls", "spills"))
    (home / "bin").mkdir(parents=True)
    text = FAKE_NVCC.format(python=sys.executable, built=str(built.out), calls=str(log), spills=str(spills))
    (home / "bin" / "nvcc").write_text(text)
    (home / "bin" / "nvcc").chmod(0o755)
    (home / "bin" / "cuobjdump").symlink_to(toolchain.home / "bin" / "cuobjdump")
    log.touch()
    spills.touch()
    return Fake(Toolchain(home, toolchain.version), log, spills)


def run(fake, spec, out, strict=True):
    return build.build(cli.load_specs(spec), out, fake.toolchain, jobs=1, strict=strict)


@pytest.fixture
def ready(built, tmp_path):
    """A folder that is up to date and may be written to."""
    return Path(shutil.copytree(built.out, tmp_path / "out"))


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def hashes(folder):
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents(folder).items()}


# ---- real compilations -------------------------------------------------------------------------------------------


def test_a_build_gives_sealed_sources_cubins_and_a_manifest(built):
    names = {"tiny_f16", FUSED, *build.SHARED_KERNELS}
    assert set(contents(built.out)) == {"manifest.json", "tiny_f16.cu", f"{FUSED}.cu", *(f"cubins/{n}.cubin" for n in names)}
    records = {k.name: k for k in built.manifest.kernels}
    gemm, fused = records["tiny_f16"], records[FUSED]
    assert (gemm.family, gemm.variant, gemm.tile) == ("implicit_gemm", ("f16",), (64, 8, 64))
    assert (fused.family, fused.variant, fused.tile) == ("fused", ("f16", "nhwc", "3x3", "aligned", "none"), (256, 64, 16))
    assert (fused.epilogue_tile, fused.box_columns) == ((128, 64), 130)
    for record in (gemm, fused):
        assert source.is_sealed((built.out / f"{record.name}.cu").read_text())
        assert record.operator == "tiny"
        assert set(record.vectors) == {"bias"}
        assert set(record.scalars) == {"scale"}
        assert record.hgmma > 0
    assert {"pack_f32_f16", "pack_f16_f16", "pack_bf16_bf16"} <= set(records)
    for kernel in built.manifest.kernels:
        assert kernel.sha256 == hashlib.sha256((built.out / "cubins" / kernel.cubin).read_bytes()).hexdigest()


KILLABLE = """
import sys
from cutlass_ops.__main__ import main
from cutlass_ops.codegen import cutlass_api, source
cutlass_api.OPERANDS = {"f16": cutlass_api.OPERANDS["f16"]}
source.FUSED_VARIANTS = tuple(v for v in source.FUSED_VARIANTS if v.name == "fused_f16_nhwc_c16_3x3")
sys.exit(main(["build", *sys.argv[1:]]))
"""


def test_a_killed_build_is_completed_and_equals_one_in_another_folder(built, repository, tmp_path):
    out, temporary = tmp_path / "elsewhere" / "out", tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", KILLABLE, "--spec", built.spec, "--out", out, "--jobs", "4"]
    environment = os.environ | {"PYTHONPATH": str(repository), "TMPDIR": str(temporary)}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (out / "cubins" / "pool.cubin").exists():
        assert process.poll() is None, "the build ended before its first cubin"
        assert time.monotonic() < deadline, "no cubin after two minutes"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # the build and its compilers
    process.wait()
    assert not (out / "manifest.json").exists()
    expected = contents(built.out)
    for name, data in contents(out).items():  # whole files, or leftovers under a name that nothing reads
        assert expected.get(name, data) == data
        assert name in expected or Path(name).name.startswith(".")
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert hashes(out) == hashes(built.out)


# ---- the build's logic -------------------------------------------------------------------------------------------


def test_the_fake_compilers_build_is_the_real_one(fake, built, tmp_path):
    run(fake, built.spec, tmp_path / "new")
    assert fake.take_calls() == sorted(["tiny_f16", FUSED, *build.SHARED_KERNELS])
    assert hashes(tmp_path / "new") == hashes(built.out)


def test_a_second_build_does_nothing(ready, fake, built):
    before = {p: p.stat().st_mtime_ns for p in ready.rglob("*") if p.is_file()}
    report = run(fake, built.spec, ready)
    assert report.built == ()
    assert set(report.reused) == {"tiny_f16", FUSED, *build.SHARED_KERNELS}
    assert fake.take_calls() == []
    assert {p: p.stat().st_mtime_ns for p in ready.rglob("*") if p.is_file()} == before


TWO = TINY + TINY.split("\n\n", 1)[1].replace("def tiny(", "def tinb(")


def test_a_changed_spec_rebuilds_only_itself(ready, fake, tmp_path):
    specs = tmp_path / "two.py"
    other = FUSED.replace("tiny", "tinb")
    specs.write_text(TWO)
    assert run(fake, specs, ready).built == ("tinb_f16", other)
    assert fake.take_calls() == sorted(["tinb_f16", other])
    specs.write_text(TWO.replace("(accum + bias) * scale", "(accum - bias) * scale", 1))
    assert run(fake, specs, ready).built == ("tiny_f16", FUSED)
    assert fake.take_calls() == sorted(["tiny_f16", FUSED])
    assert "cutlass::minus" in (ready / "tiny_f16.cu").read_text()
    assert "cutlass::minus" not in (ready / "tinb_f16.cu").read_text()


@pytest.mark.parametrize("change", [("Tile(64, 8)", "Tile(64, 16)"), ("scale: float", "factor: float"), ("* scale", "* 3 * scale")])
def test_tile_names_and_chain_are_part_of_a_kernels_key(built, tmp_path, change):
    specs = tmp_path / "changed.py"
    text = TINY.replace(*change).replace("* scale", "* factor") if "factor" in change[1] else TINY.replace(*change)
    specs.write_text(text)
    keys = [{u.name: u.key for u in build.plan_units(cli.load_specs(s))} for s in (built.spec, specs)]
    # A fused kernel has a tile of its own.
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"tiny_f16", *([] if "Tile" in change[0] else [FUSED])}


def test_another_compiler_builds_everything_again(ready, fake, built):
    other = Toolchain(fake.toolchain.home, "13.0.1")
    report = build.build(cli.load_specs(built.spec), ready, other, jobs=1)
    assert (set(report.built), report.reused) == ({p.stem for p in (ready / "cubins").iterdir()}, ())


def test_a_source_that_comes_out_as_before_is_not_compiled_again(ready, fake, built):
    manifest = json.loads((ready / "manifest.json").read_text())
    manifest["keys"] = {name: ["of an older emitter", key] for name, (_, key) in manifest["keys"].items()}
    (ready / "manifest.json").write_text(json.dumps(manifest))
    assert run(fake, built.spec, ready).built == ()
    assert hashes(ready) == hashes(built.out)


def test_a_removed_operator_is_swept(ready, fake, built, tmp_path):
    specs = tmp_path / "two.py"
    specs.write_text(TWO)
    run(fake, specs, ready)
    assert (ready / "tinb_f16.cu").exists()
    run(fake, built.spec, ready)
    assert hashes(ready) == hashes(built.out)


def test_a_build_leaves_a_users_files_alone_and_removes_its_own_leftovers(ready, fake, built):
    ours = [".tiny_f16.cu.123", "cubins/.tiny_f16.cubin.123", ".manifest.json.9", ".writable-7"]
    theirs = ["mine.cu", "cubins/mine.cubin", ".notes.2024", ".mine.cu.5", "cubins/.keep.1", ".cache.1/x"]
    for name in (*ours, *theirs):
        (ready / name).parent.mkdir(exist_ok=True)
        (ready / name).write_text("// mine\n")
    run(fake, built.spec, ready)
    assert not any((ready / name).exists() for name in ours)
    assert all((ready / name).read_text() == "// mine\n" for name in theirs)


@pytest.mark.parametrize(
    ("name", "message"),
    [("pool_avg", "got 'pool_avg'"), ("tiny_fused", "got tiny_fused_f16.cubin for two of them"), ("tiny", "got 'tiny' twice")],
)
def test_names_that_meet_are_refused(built, monkeypatch, name, message):
    (tiny,) = cli.load_specs(built.spec)
    monkeypatch.setattr(source.FusedVariant, "name", "fused_f16")  # as short as an implicit GEMM's
    with pytest.raises(BuildError, match=message):
        build.plan_units([tiny, dataclasses.replace(tiny, name=name)])


def test_every_operator_gets_every_fused_variant_and_its_pool_is_part_of_the_key(built, monkeypatch):
    (tiny,) = cli.load_specs(built.spec)
    monkeypatch.setattr(source, "FUSED_VARIANTS", source._variants())
    plain, pooled = ({u.name: u for u in build.plan_units([s])} for s in (tiny, dataclasses.replace(tiny, pool=AvgPool2d(2))))
    fused = [name for name, unit in plain.items() if unit.family == "fused"]
    wide = [name for name in fused if name.endswith("_wide")]
    assert (len(fused), len(wide)) == (24, 6)
    assert FUSED in fused
    others = [name for name in fused if name not in wide]
    assert not pooled.keys() & set(wide)
    assert all(plain[name].key != pooled[name].key for name in others)
    assert {(plain[name].pool, pooled[name].pool) for name in others} == {("none", "avg")}


@pytest.mark.parametrize("name", ["tiny_f16.cu", "cubins/tiny_f16.cubin", "cubins/pool.cubin"])
@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_a_damaged_file_is_built_again(ready, fake, built, name, damage):
    path = ready / name
    path.write_bytes(path.read_bytes() + b" ") if damage == "changed" else path.unlink()
    assert run(fake, built.spec, ready).built == (() if path.suffix == ".cu" else (path.stem,))  # its cubin is still right
    assert hashes(ready) == hashes(built.out)


@pytest.mark.parametrize("text", ["", "{}", None])
def test_a_damaged_manifest_is_built_again(ready, fake, built, text):
    (ready / "manifest.json").unlink() if text is None else (ready / "manifest.json").write_text(text)
    run(fake, built.spec, ready)
    assert hashes(ready) == hashes(built.out)


def test_a_kernel_without_tensor_core_instructions_is_refused(fake, built, tmp_path):
    tool = fake.toolchain.home / "bin" / "cuobjdump"
    tool.unlink()
    tool.write_text("#!/bin/sh\necho FFMA\n")
    tool.chmod(0o755)
    with pytest.raises(BuildError, match=r"tiny_f16: expected wgmma instructions \(HGMMA\) in the SASS, found none"):
        run(fake, built.spec, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert not (tmp_path / "out" / "tiny_f16.cu").exists()


# ---- kernels that do not fit their registers ---------------------------------------------------------------------


SPILL = f"{FUSED}: {FUSED} uses local memory \\(8 bytes stack frame"


def test_a_fused_kernel_that_spills_is_left_out_and_named_until_it_changes(ready, fake, built, capsys, monkeypatch):
    before = hashes(ready)
    changed = built.spec.parent / f"{ready.parent.name}.py"
    changed.write_text(TINY.replace("accum + bias", "accum - bias"))
    fake.spills.write_text(FUSED)
    report = run(fake, changed, ready, strict=False)
    assert report.built == ("tiny_f16",)
    assert list(report.left_out) == [FUSED]
    assert re.match(SPILL, report.left_out[FUSED])
    assert not (ready / "cubins" / f"{FUSED}.cubin").exists()
    names = {k.name for k in Manifest.load(ready / "manifest.json").kernels}
    assert "tiny_f16" in names
    assert FUSED not in names
    fake.take_calls()
    again = run(fake, changed, ready, strict=False)
    assert (again.built, again.left_out, fake.take_calls()) == ((), report.left_out, [])
    assert FUSED not in again.reused
    assert build.check(cli.load_specs(changed), ready, fake.toolchain, strict=False) == []
    monkeypatch.setattr("cutlass_ops.codegen.toolchain.find", lambda nvcc: fake.toolchain)
    assert main(["build", "--spec", str(changed), "--out", str(ready)]) == 0
    assert f"left out, a two-kernel plan serves its problems: {report.left_out[FUSED]}" in capsys.readouterr().out
    fake.spills.write_text("")
    assert run(fake, built.spec, ready, strict=False).left_out == {}
    assert hashes(ready) == before


def test_a_kernel_that_spills_fails_a_strict_build_also_after_one_that_left_it_out(fake, built, tmp_path):
    fake.spills.write_text(FUSED)
    with pytest.raises(BuildError, match=SPILL):
        run(fake, built.spec, tmp_path / "out")
    assert run(fake, built.spec, tmp_path / "out", strict=False).left_out
    with pytest.raises(BuildError, match=SPILL):
        run(fake, built.spec, tmp_path / "out")


@pytest.mark.parametrize("name", ["tiny_f16", "pool"])
def test_what_every_plan_needs_is_never_left_out(fake, built, tmp_path, name):
    fake.spills.write_text(name)
    with pytest.raises(BuildError, match=f"{name}: .* uses local memory"):
        run(fake, built.spec, tmp_path / "out", strict=False)


def test_the_shipped_operators_are_built_strictly_and_a_users_are_not(fake, built, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("cutlass_ops.codegen.toolchain.find", lambda nvcc: fake.toolchain)
    monkeypatch.setattr(build, "build", lambda *_, strict, **__: asked.append(strict) or build.Report((), (), {}))
    monkeypatch.setattr(build, "check", lambda *_, strict, **__: asked.append(strict) or [])
    for own in ([], ["--spec", str(built.spec)]):
        for mode in ([], ["--check"]):
            assert main(["build", *own, *mode, "--out", str(tmp_path)]) == 0
    assert asked == [True, True, False, False]


# ---- drift -------------------------------------------------------------------------------------------------------


def test_check_finds_no_drift_in_a_fresh_build_and_changes_nothing(ready, fake, built):
    before = contents(ready)
    assert build.check(cli.load_specs(built.spec), ready, fake.toolchain) == []
    assert contents(ready) == before


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_check_names_every_difference(ready, fake, built):
    flip(ready / "tiny_f16.cu")
    flip(ready / "cubins" / "tiny_f16.cubin")
    (ready / "manifest.json").write_text("{}")
    (ready / "cubins" / "pool.cubin").unlink()
    (ready / "stray.cu").touch()
    before = contents(ready)
    assert sorted(build.check(cli.load_specs(built.spec), ready, fake.toolchain)) == [
        f"{ready}/cubins/pool.cubin is missing",
        f"{ready}/cubins/tiny_f16.cubin differs from a fresh build",
        f"{ready}/manifest.json differs from a fresh build",
        f"{ready}/stray.cu belongs to no operator",
        f"{ready}/tiny_f16.cu differs from a fresh build",
    ]
    assert contents(ready) == before


def test_check_names_a_stray_cubin(ready, fake, built):
    (ready / "cubins" / "stray.cubin").touch()
    (problem,) = build.check(cli.load_specs(built.spec), ready, fake.toolchain)
    assert problem == f"{ready}/cubins/stray.cubin belongs to no operator"


def test_the_command_line_prints_drift_and_ends_with_code_1(ready, fake, built, capsys, monkeypatch):
    monkeypatch.setattr("cutlass_ops.codegen.toolchain.find", lambda nvcc: fake.toolchain)
    arguments = ["build", "--spec", str(built.spec), "--out", str(ready), "--check"]
    assert main(arguments) == 0
    assert f"{ready}: no drift (" in capsys.readouterr().out
    flip(ready / "tiny_f16.cu")
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err == f"drift: {ready}/tiny_f16.cu differs from a fresh build\n"
    assert f"{ready}: 1 differences; build again without --check (" in captured.out


def test_the_tracked_sources_are_sealed_and_belong_to_the_tracked_manifest(repository):
    generated = repository / "generated"
    sources = {p.stem: p.read_text() for p in generated.glob("*.cu")}
    assert all(source.is_sealed(text) for text in sources.values())
    operators = {k.name for k in Manifest.load(generated / "manifest.json").kernels if k.operator}
    assert set(sources) == operators
