"""`cutlass-ops list`: operators and kernels of folders, as manifest and GPU check records have them."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from cutlass_ops import OPERATORS, catalogue, cli, doctor
from cutlass_ops.loader import shipped_kernels
from cutlass_ops.manifest import Manifest

from .conftest import PACKAGE
from .records import write_folder

pytestmark = pytest.mark.usefixtures("only_shipped_operators")


@pytest.fixture
def listed():
    """What the command prints on stdout, line by line."""

    def run(*arguments):
        result = CliRunner().invoke(cli.group, ["list", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    return run


@pytest.fixture
def folder(tmp_path):
    """Kernels of one operator, of which one cubin has no record; the others were verified on two days."""
    records = write_folder(tmp_path, "some_operator")
    checks = {}
    for i, record in enumerate(r for r in records if r.name != "some_operator_bf16"):
        checks[record.sha256] = {"passed": True, "gpu": "NVIDIA H200", "date": f"2026-01-0{1 + i % 2} 10:00 UTC", "errors": {"x": 1}}
    (tmp_path / "gpu_checks.json").write_text(json.dumps({"cubins": checks}))
    return tmp_path


def test_every_shipped_operator_has_a_line(listed):
    title, header, *rows = listed()
    assert title == f"Operators of {shipped_kernels()}"
    assert header.split() == ["operator", "types", "kernels", "verified", "computes"]
    assert sorted(row.split()[0] for row in rows) == sorted(OPERATORS)
    assert all(row.split()[1:4] == ["f32", "f16", "bf16"] for row in rows)


def test_an_operators_kernels_are_those_of_the_manifest(listed):
    wanted = [k for k in Manifest.load(shipped_kernels() / "manifest.json").kernels if k.operator == "conv2d"]
    rows = {line.split()[0]: line for line in listed("conv2d")[2:]}
    assert rows.keys() == {k.name for k in wanted}
    for kernel in wanted:
        numbers = ["x".join(map(str, kernel.tile)), str(kernel.threads), str(kernel.registers), str(kernel.shared_memory)]
        assert " ".join(numbers) in " ".join(rows[kernel.name].split())


def test_all_shows_the_kernels_that_operators_share_too(listed):
    names = {line.split()[0] for line in listed("--all")[2:]}
    assert names == {k.name for k in Manifest.load(shipped_kernels() / "manifest.json").kernels}
    assert "pool_avg_f32" in names


def test_a_folder_of_ones_own(listed, folder):
    _, _, row = listed("--kernels", folder)
    assert row.split()[:5] == ["some_operator", "f32", "f16", "bf16", "22"]
    assert "21 of 22: NVIDIA H200 2026-01-01 to 2026-01-02" in row
    rows = {line.split()[0]: line for line in listed("some_operator", "--kernels", folder)[2:]}
    assert rows["some_operator_bf16"].endswith("  no")
    assert rows["some_operator_f16"].endswith("  NVIDIA H200 2026-01-01")


def test_json_has_every_field_and_where_a_kernel_was_verified(listed, folder):
    (found,) = json.loads("\n".join(listed("--json", "--kernels", folder)))["folders"]
    assert found["path"] == str(folder)
    kernels = {k["name"]: k for k in found["kernels"]}
    assert kernels["some_operator_bf16"]["verified"] is None
    assert kernels["some_operator_f16"]["verified"]["gpu"] == "NVIDIA H200"
    assert "errors" not in kernels["some_operator_f16"]["verified"]
    assert kernels["some_operator_f16"]["tile"] == [192, 128, 64]
    (operator,) = found["operators"]
    assert operator["name"] == "some_operator"
    assert set(operator["kernels"]) == {name for name, kernel in kernels.items() if kernel["operator"]}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["conv2d_sub_tanh"], 1, "error: expected an operator, got 'conv2d_sub_tanh'; did you mean conv2d_sub_tanh_sub_avgpool? There are"),
        (["conv2d", "--kernels", "{folder}"], 2, "expected kernels of conv2d in {folder}, found none"),
        (
            ["--kernels", "{folder}/nowhere"],
            1,
            "error: expected the kernels' manifest at {folder}/nowhere/manifest.json, found none; build",
        ),
        (["--kernels"], 2, "Option '--kernels' requires an argument"),
    ],
)
def test_what_is_not_there_is_named(folder, arguments, code, message):
    result = CliRunner().invoke(cli.group, ["list", *(a.format(folder=folder) for a in arguments)])
    assert result.exit_code == code
    assert message.format(folder=folder) in result.stderr
    assert result.stdout == ""


def test_a_damaged_manifest_is_one_line(folder):
    (folder / "manifest.json").write_text("{")
    result = CliRunner().invoke(cli.group, ["list", "--kernels", str(folder)])
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.startswith(f"error: expected a JSON manifest at {folder / 'manifest.json'}, could not read it")


def test_operators_of_installed_packages_are_found(site):
    site.add("unit_cli_packaged", "unit_cli_packaged_op")
    assert "unit_cli_packaged_op" in catalogue.operators()
    result = CliRunner().invoke(cli.group, ["list", "unit_cli_packaged"])
    assert "did you mean unit_cli_packaged_op? There are conv2d, " in result.stderr


def test_a_package_that_does_not_load_keeps_nobody_from_other_operators(site, listed):
    site.add("unit_cli_broken", "unit_cli_broken_op", "raise RuntimeError('no')\n")
    assert listed("conv2d")
    result = CliRunner().invoke(cli.group, ["list"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.startswith(
        "error: expected the operator unit_cli_broken_op at unit_cli_broken:unit_cli_broken_op of unit_cli_broken 1.0"
    )
    (finding,) = [f for f in doctor.examine().findings if f.subject == "packages"]
    assert (finding.status, finding.remedy) == ("FAIL", "mend or uninstall the package")
    site.add("unit_cli_faulty", "unit_cli_faulty_op", "raise SystemExit\n")
    assert [f.status for f in doctor.examine().findings if f.subject == "packages"] == ["FAIL", "FAIL"]  # every one of them


def test_a_package_without_kernels_or_that_fails_keeps_nobody_from_the_others(site, tmp_path):
    here = "Operator({{operator}}, __import__('pathlib').Path(__file__).parent / 'nowhere')"
    site.add("plug_list_bare", "plug_list_bare_op", PACKAGE.replace("Operator({operator})\n", here.format() + "\n"))
    site.add("plug_list_broken", "plug_list_broken_op", "raise OSError('no such luck')\n")
    for options in ([], ["--all"], ["--json"]):
        result = CliRunner().invoke(cli.group, ["list", *options])
        assert result.exit_code == 1
        assert all(name in result.stdout for name in OPERATORS)
        assert re.search(r"^error: expected the operator plug_list_broken_op at .*no such luck", result.stderr, re.MULTILINE)
        assert re.search(r"^error: expected the kernels' manifest at .*nowhere", result.stderr, re.MULTILINE)


def test_a_name_clash_keeps_nobody_from_the_shipped_operators(site):
    site.add("plug_list_left", "plug_list_same")
    site.add("plug_list_right", "plug_list_same")
    result = CliRunner().invoke(cli.group, ["list"])
    assert result.exit_code == 1
    assert all(name in result.stdout for name in OPERATORS)
    assert "error: expected every operator's name in one package, got 'plug_list_same' in " in result.stderr
