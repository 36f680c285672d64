"""Every command that a document names, and what runs it. A command without an entry fails tests/docs/test_commands.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from cutlass_ops.costs import shipped_costs

NEEDS_GPU = "needs a Hopper GPU"


@dataclass(frozen=True)
class Runs:
    """The test itself runs the command, here and on a machine with a GPU that it hides; it ends with `code` and says `says`.

    `checked_by`: the test that exercises what the command does where that takes a GPU, or more time than a unit test has.
    """

    code: int = 0
    says: str = ""
    checked_by: str = ""


@dataclass(frozen=True)
class Script:
    """A tracked script that CI or a user runs has the command: `line` stands in it."""

    path: str
    line: str


@dataclass(frozen=True)
class ByTest:
    """A test runs the same code with other arguments."""

    node: str


@dataclass(frozen=True)
class Collects:
    """Tests that need a GPU: here they are collected, and the environment variables that the command sets are known to them."""


@dataclass(frozen=True)
class Profiles:
    """A profiler that is no part of the environment runs a command that has an entry of its own: `command`, if any."""

    command: str = ""


@dataclass(frozen=True)
class Plain:
    """A tool with no code of ours: git, sha256sum."""


Proof = Union[Runs, Script, ByTest, Collects, Profiles, Plain]

CHECK = "tests/unit/test_verification.py::test_the_samples_reach_every_fused_kernel_and_implicit_gemm_of_an_operator"
TUTORIAL = "tests/codegen/test_tutorial.py::test_the_tutorial_leads_to_a_wheel_that_works"
SWEEP = "tests/unit/test_sweep.py::test_a_shape_is_checked_and_timed_by_every_plan_that_serves_it"
BENCH = "tests/unit/test_benchmark.py::test_a_wrong_result_is_refused_with_what_was_expected"
KERNEL = "generated/cubins/conv2d_sub_tanh_sub_avgpool_fused_f32_nchw_c64_3x3.cubin"
CUOBJDUMP = ".venv/lib/python3*/site-packages/nvidia/cu13/bin/cuobjdump"
PYTHON = ".venv/bin/python"

COMMANDS: dict[str, Proof] = {
    # ---- the two commands, and parts of them
    "./scripts/test": Script(".ci/run", "scripts/test"),
    "./scripts/test tests/unit -x": Script("scripts/test", '.venv/bin/python -m pytest "${workers[@]}" "$@"'),
    "./scripts/demo": ByTest("tests/docs/test_commands.py::test_the_demos_operator_is_right_on_the_cpu"),
    "PYTHON=python3.12 ./scripts/demo": Script("scripts/_setup.sh", 'candidates=("$PYTHON")'),
    "pip install .demo/dist/cutlass_ops-0.1.0-py3-none-any.whl": Script(
        "scripts/demo", "-m pip install -c scripts/constraints.txt .demo/dist/*.whl"
    ),
    # ---- build
    f"{PYTHON} scripts/build_kernels.py": Script("scripts/test", f"{PYTHON} scripts/build_kernels.py"),
    f"{PYTHON} scripts/build_kernels.py --check": Script("scripts/test", f"{PYTHON} scripts/build_kernels.py --check"),
    f"{PYTHON} scripts/build_wheel.py": ByTest("tests/wheel/test_wheel.py::test_the_script_prints_what_it_built"),
    f"{PYTHON} scripts/check_verified.py": Script("scripts/test", f"{PYTHON} scripts/check_verified.py"),
    "pip install 'cutlass_ops[build]'": Script("scripts/demo", "set_up build"),
    # ---- a user's own operator
    "pip install 'dist/cutlass_ops-0.1.0-py3-none-any.whl[build]'": Script("scripts/demo", "set_up build"),
    "cutlass-ops new my_ops --operator conv2d_scale_relu_maxpool": ByTest(TUTORIAL),
    "cutlass-ops build my_ops": ByTest(TUTORIAL),
    "pip install pytest": Script("pyproject.toml", '"pytest>=8"'),
    "python -m pytest my_ops": ByTest(TUTORIAL),
    "cutlass-ops check my_ops": ByTest(TUTORIAL),
    "cutlass-ops wheel my_ops": ByTest(TUTORIAL),
    "pip install my_ops/dist/my_ops-0.1.0-py3-none-any.whl": ByTest(TUTORIAL),
    # ---- on a Hopper GPU
    f"{PYTHON} scripts/check_gpu.py": Runs(2, NEEDS_GPU, CHECK),
    f"{PYTHON} scripts/sweep.py": Runs(2, NEEDS_GPU, SWEEP),
    "python scripts/sweep.py": Runs(2, NEEDS_GPU, SWEEP),
    # What docs/performance.md says of its figures.
    **{p["command"]: Runs(2, NEEDS_GPU, SWEEP) for p in (shipped_costs().provenance, *shipped_costs().provenance.get("earlier", []))},
    f"{PYTHON} scripts/bench.py": Runs(1, NEEDS_GPU, BENCH),
    "python scripts/bench.py": Runs(1, NEEDS_GPU, BENCH),
    f"{PYTHON} scripts/soak.py": Runs(2, NEEDS_GPU, "tests/unit/test_soak.py::test_a_soak_makes_its_calls_and_reports"),
    f"{PYTHON} scripts/sanitize.py": Runs(
        2, NEEDS_GPU, "tests/unit/test_sanitizer.py::test_a_suite_has_every_kernel_and_plan_of_the_tracked_manifest"
    ),
    "python scripts/bench.py --render": ByTest(
        "tests/unit/test_benchmark_report.py::test_render_makes_documents_and_plots_without_a_gpu_and_again_the_same_bytes"
    ),
    "torchrun --standalone --nproc-per-node=2 scripts/scaling.py": ByTest(
        "tests/two_gpus/test_distributed.py::test_the_throughput_script_runs"
    ),
    f"CUTLASS_OPS_RANDOM_CASES=2000 {PYTHON} -m pytest -q tests/gpu/test_random.py": Collects(),
    f"{PYTHON} -m pytest -q tests/gpu/pytorch": Collects(),
    f"{PYTHON} -m pytest tests/two_gpus": Collects(),
    # ---- the command line
    "pip install '.demo/dist/cutlass_ops-0.1.0-py3-none-any.whl[cli]'": Script("pyproject.toml", "cli = ["),
    "cutlass-ops doctor": Runs(1, "Hopper", "tests/unit/test_cli_doctor.py::test_a_hopper_gpu_and_whole_kernels_are_usable"),
    "cutlass-ops bench --help": Runs(0, "--shape"),
    "cutlass-ops list": Runs(0, "conv2d_relu_hardswish"),
    "cutlass-ops explain conv2d --shape 128,64,128,128 --weight 128,64,3,3": Runs(0, "plan:"),
    "cutlass-ops inspect .demo/dist/cutlass_ops-0.1.0-py3-none-any.whl": ByTest(
        "tests/codegen/test_inspection.py::test_a_wheel_is_as_its_folder"
    ),
    # ---- release
    'git commit -a -m "Release 0.1.0" && git tag v0.1.0': Plain(),
    ".venv/bin/nox -f scripts/noxfile.py": Script("scripts/noxfile.py", "@nox.session"),
    "sha256sum dist/*": Plain(),
    # ---- profiling
    "ncu --set full --clock-control none --kernel-name conv2d_sub_tanh_sub_avgpool_fused_f32_nchw_c64_3x3 --launch-skip 5 "
    f"--launch-count 1 --force-overwrite --export fused {PYTHON} scripts/bench.py --quick": Profiles(f"{PYTHON} scripts/bench.py"),
    "ncu --import fused.ncu-rep --page details": Profiles(),
    f"{CUOBJDUMP} -res-usage {KERNEL}": Runs(0, "REG:168 STACK:0"),
    f"{CUOBJDUMP} -sass {KERNEL}": Runs(0, "HGMMA"),
    # ---- documents and hooks
    f"{PYTHON} scripts/api_reference.py": ByTest("tests/docs/test_api.py::test_a_stale_reference_is_noticed"),
    ".venv/bin/pre-commit install": ByTest("tests/unit/test_repository.py::test_the_hooks_run_what_scripts_test_runs"),
    ".venv/bin/pre-commit run --all-files": ByTest("tests/unit/test_repository.py::test_the_hooks_run_what_scripts_test_runs"),
}
