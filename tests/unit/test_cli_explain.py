"""`cutlass-ops explain`: the plan that cutlass_ops.explain names, for any Hopper GPU, without one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

import cutlass_ops
from cutlass_ops import DeviceFacts, catalogue, cli
from cutlass_ops.loader import ALLOW_UNVERIFIED

from .fake_driver import H200 as FAKE_GPU
from .records import write_folder

pytestmark = pytest.mark.usefixtures("only_shipped_operators")
H200 = DeviceFacts("NVIDIA H200", (9, 0), 132)
MAIN = "conv2d_sub_tanh_sub_avgpool"
SHAPES = ["--shape", "8,64,56,56", "--weight", "128,64,3,3"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(ALLOW_UNVERIFIED, raising=False)


def run(*arguments):
    return CliRunner().invoke(cli.group, ["explain", *map(str, arguments)])


def expected(op, x, weight, gpu=H200, **arguments):
    """What the package's own function says."""
    vectors = {a.name: torch.empty(weight.shape[0], dtype=x.dtype, device="meta") for a in op.spec.vectors}
    return op.explain(x, weight, **vectors, device=gpu, **arguments)


CALLS = {
    "defaults": ([], torch.float32, False, {}),
    "arguments": (["--padding", "1,0", "--stride", "2", "--dilation", "1", "--pool", "2,3"], torch.float32, False, None),
    "half channels_last": (["--dtype", "float16", "--layout", "channels_last", "--padding", "1"], torch.float16, True, {"padding": 1}),
    "ieee": (["--precision", "ieee"], torch.float32, False, {"precision": "ieee"}),
    "float64": (["--dtype", "float64"], torch.float64, False, {}),
    "pool": (
        ["--pool", "3", "--pool-stride", "2", "--pool-padding", "1", "--ceil-mode", "--no-count-include-pad", "--divisor-override", "5"],
        torch.float32,
        False,
        {"pool": 3, "pool_stride": 2, "pool_padding": 1, "ceil_mode": True, "count_include_pad": False, "divisor_override": 5},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_text_is_that_of_the_function(name):
    options, dtype, channels_last, arguments = CALLS[name]
    arguments = {"padding": (1, 0), "stride": 2, "dilation": 1, "pool": (2, 3)} if arguments is None else arguments
    x, weight = (torch.empty(s, dtype=dtype, device="meta") for s in ((8, 64, 56, 56), (128, 64, 3, 3)))
    if channels_last:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    result = run(MAIN, *SHAPES, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected(getattr(cutlass_ops, MAIN), x, weight, **arguments) + "\n"
    assert result.stderr == "no GPU here: this is the plan on an NVIDIA H200; --device names another\n"


def test_an_operator_with_a_vector_that_must_be_given():
    result = run("conv2d_min_add_mul", *SHAPES)
    assert result.exit_code == 0
    assert "plan: fused-f16 (" in result.stdout


def test_json_says_the_same():
    result = run(MAIN, *SHAPES, "--json", "--device", "h20")
    found = json.loads(result.stdout)
    problem, selection = catalogue.plan_call(
        getattr(cutlass_ops, MAIN), DeviceFacts("NVIDIA H20", (9, 0), 78), (8, 64, 56, 56), (128, 64, 3, 3)
    )
    assert found["device"] == {"name": "NVIDIA H20", "capability": [9, 0], "sm_count": 78}
    assert found["plan"]["name"] == selection.plan.name
    assert found["plan"]["kernels"] == list(selection.plan.kernels)
    assert found["plan"]["expected_us"] == selection.plan.expected_us > 0
    assert [p["name"] for p in found["others"]] == [p.name for p in selection.others]
    assert found["rejected"] == [dataclasses.asdict(r) for r in selection.rejected]
    assert found["problem"]["output_shape"] == list(problem.output_shape)
    assert result.stderr == ""


def test_a_smaller_gpu_is_expected_to_take_longer():
    times = [json.loads(run("conv2d", *SHAPES, "--json", "--device", gpu).stdout)["plan"]["expected_us"] for gpu in ("H200", "NVIDIA H20")]
    assert times[0] < times[1]


def test_the_gpu_that_is_here_is_planned_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(catalogue, "device_facts", lambda device: FAKE_GPU)
    result = run("conv2d", *SHAPES)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0].endswith(f" on {FAKE_GPU.name}")
    assert result.stderr == ""


def test_no_plan_is_exit_code_1_with_the_reasons(monkeypatch):
    monkeypatch.setattr(catalogue, "present_gpu", lambda: None)
    monkeypatch.setattr("cutlass_ops.cli.explain.present_gpu", lambda: DeviceFacts("Some GPU", (8, 0), 100))
    result = run("conv2d", *SHAPES)
    assert result.exit_code == 1
    assert "  plan: none\n" in result.stdout
    assert "rejected: fused-f16: expected compute capability 9.0 for sm_90a, got 8.0" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["conv2", *SHAPES], 1, "error: expected an operator, got 'conv2'; did you mean conv2d? There are conv2d, "),
        (["conv2d", *SHAPES, "--device", "A100"], 1, "error: expected a Hopper GPU, got 'A100'; there are NVIDIA H200, NVIDIA H100, "),
        (["conv2d", "--shape", "8,64,56,56"], 2, "Missing option '--weight'"),
        (["conv2d", "--shape", "8,64,56", "--weight", "1,1,1,1"], 2, "expected 4 whole numbers with commas between them, got '8,64,56'"),
        (
            ["conv2d", "--shape", "8x64x56x56", "--weight", "1,1,1,1"],
            2,
            "expected 4 whole numbers with commas between them, got '8x64x56x56'",
        ),
        (["conv2d", *SHAPES, "--padding", "1,1,1"], 2, "expected 1 or 2 whole numbers with commas between them, got '1,1,1'"),
        (["conv2d", *SHAPES, "--dtype", "int8"], 2, "'int8' is not one of"),
        (["conv2d", *SHAPES, "--kernels", "somewhere"], 2, "expected --spec beside --kernels"),
        (
            ["conv2d", "--shape", "8,3,56,56", "--weight", "8,4,3,3"],
            1,
            "error: expected weight for x's 3 channels, got weight of shape (8, 4,",
        ),
        (
            ["conv2d", "--shape", "8,3,2,2", "--weight", "8,3,3,3"],
            1,
            "error: expected a filter no larger than the padded input (2, 2), got (3, 3)",
        ),
        (["conv2d", "--shape", "8,0,2,2", "--weight", "8,0,1,1"], 1, "error: expected non-empty channels, height, width and filter, got x"),
        (["conv2d", "--shape", "8,3,-2,2", "--weight", "8,3,1,1"], 1, "error: expected sizes of at least 0, got x (8, 3, -2, 2) and"),
        (["conv2d", *SHAPES, "--stride", "0"], 1, "error: expected stride of at least 1, got (0, 0)"),
        (
            ["conv2d", *SHAPES, "--pool", "2"],
            1,
            "error: conv2d: got an unexpected keyword argument 'pool'; expected (x, weight, bias=None, ",
        ),
        (["conv2d", *SHAPES, "--dtype", "float16", "--precision", "tf32"], 1, "error: expected precision None for torch.float16 tensors"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code
    assert message in result.stderr.splitlines()[-1]
    assert code == 2 or len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv(ALLOW_UNVERIFIED, "yes")
    result = run("conv2d", *SHAPES)
    assert (result.exit_code, result.stderr) == (1, f"error: expected {ALLOW_UNVERIFIED} to be 0 or 1, got 'yes'\n")


OWN = '''
from cutlass_ops import Vector, operator

@operator()
def unit_cli_explained(accum, bias: Vector = None):
    """A user's own."""
    return accum + bias
'''


def own(folder, name):
    """A file with the operator under this name, since a process registers a name once."""
    path = folder / f"{name}.py"
    path.write_text(OWN.replace("unit_cli_explained", name))
    return path


def test_an_operator_of_ones_own_by_its_file_and_folder(tmp_path):
    write_folder(tmp_path / "kernels", "unit_cli_explained", "none")
    result = run("unit_cli_explained", *SHAPES, "--spec", own(tmp_path, "unit_cli_explained"), "--kernels", tmp_path / "kernels")
    assert result.exit_code == 0, result.output
    assert "plan: fused-f16 (pack_f32_f16 -> unit_cli_explained_fused_f32_nchw_c64_3x3_shifted)" in result.stdout


def test_an_operator_of_ones_own_without_kernels_or_by_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("unit_cli_unbuilt", *SHAPES, "--spec", own(tmp_path, "unit_cli_unbuilt"))
    manifest = "unit_cli_unbuilt_kernels/manifest.json"
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: expected the kernels' manifest at {manifest}, found none; build the kernels")
    result = run("conv2d", *SHAPES, "--spec", own(tmp_path, "unit_cli_renamed"))
    assert (result.exit_code, result.stderr) == (1, "error: expected an operator, got 'conv2d'; there are unit_cli_renamed\n")


@pytest.mark.parametrize(
    ("x", "weight", "name"),
    [
        ("9999999999,64,12800,12800", "128,64,3,3", "x"),
        ("99999999999999999999,64,128,128", "128,64,3,3", "x"),
        ("0,64,99999999999999999999,128", "128,64,3,3", "x"),
        ("8,64,128,128", "9223372036854775807,64,3,3", "weight"),
    ],
)
def test_tensors_beyond_every_memory_are_refused_in_one_line(x, weight, name):
    result = run("conv2d", "--shape", x, "--weight", weight)
    sizes = ", ".join((x if name == "x" else weight).split(","))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: expected {name} of less than 2**63 bytes, got sizes ({sizes}); no tensor is as large\n"
