"""What the builder reads out of ptxas's report and a cubin, and which of them it refuses."""

from __future__ import annotations

import pytest

from cutlass_ops.codegen import cubin
from cutlass_ops.codegen.cubin import Resources
from cutlass_ops.errors import BuildError

REPORT = """\
ptxas info    : 0 bytes gmem, 132 bytes cmem[3]
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 18432 bytes smem
"""
CLEAN = REPORT.format(stack=0, stores=0, loads=0)


def test_a_clean_report_gives_every_entry_points_resources():
    assert cubin.ptxas_report("k", CLEAN) == {"first": Resources(168, 0), "second": Resources(40, 18432)}


@pytest.mark.parametrize("numbers", [{"stack": 8}, {"stores": 4}, {"loads": 4}, {"stack": 8, "stores": 4, "loads": 12}])
def test_spills_and_local_memory_are_refused(numbers):
    text = REPORT.format(**{"stack": 0, "stores": 0, "loads": 0} | numbers)
    with pytest.raises(BuildError, match=r"k: first uses local memory \(.* bytes spill loads\); it must fit its registers"):
        cubin.ptxas_report("k", text)


@pytest.mark.parametrize("code", ["C7510", "C7508", "C7514"])
def test_serialised_wgmmas_are_refused(code):
    warning = f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in 'first'\n"
    with pytest.raises(BuildError, match=rf"k: ptxas gave up on asynchronous wgmmas: \({code}\) Potential Performance Loss"):
        cubin.ptxas_report("k", CLEAN + warning)


@pytest.mark.parametrize("text", ["", "ptxas info    : 0 bytes gmem\n"])
def test_a_missing_report_is_refused(text):
    with pytest.raises(BuildError, match="k: expected a ptxas report, got: "):
        cubin.ptxas_report("k", text)


@pytest.mark.parametrize("line", ["stack frame", "Used 168"])
def test_an_incomplete_report_is_refused(line):
    text = "\n".join(part for part in CLEAN.splitlines() if line not in part)
    with pytest.raises(BuildError, match="k: expected ptxas to report stack frame and registers of first"):
        cubin.ptxas_report("k", text)


def test_hgmma_instructions_are_counted():
    sass = "/*0010*/ HGMMA.64x128x16.F32 R24, gdesc[UR4] ;\n/*0020*/ HGMMA.64x128x16.F32 R24 ;\n/*0030*/ FADD R1, R2 ; // NOHGMMAX\n"
    assert cubin.count_hgmma(sass) == 2
    assert cubin.count_hgmma("/*0010*/ HMMA.16816.F32 R4 ;") == 0


def test_the_canonical_form_hides_the_path_hash_only():
    data = b"\x00_INTERNAL_1a2b3c4d_8_kernel_cu\x00_GLOBAL__N__00ff00ff_9_x\x00_INTERNAL_short_\x00rest"
    expected = b"\x00_INTERNAL_00000000_8_kernel_cu\x00_GLOBAL__N__00000000_9_x\x00_INTERNAL_short_\x00rest"
    assert cubin.canonical(data) == expected
    assert cubin.canonical(expected) == expected


# ---- a real cubin (see conftest.py) ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(built):
    return (built.out / "cubins" / "pool.cubin").read_bytes()


def test_a_cubin_of_the_architecture_is_accepted(data):
    cubin.check_architecture("pool", data, "sm_90a")


@pytest.mark.parametrize("architecture", ["sm_90", "sm_80", "sm_100a"])
def test_a_cubin_of_another_architecture_is_refused(data, architecture):
    with pytest.raises(BuildError, match=f"pool: expected an ELF for {architecture}, got machine .*, sm_90, without the note of"):
        cubin.check_architecture("pool", data, architecture)


def test_a_host_elf_is_refused(toolchain):
    with pytest.raises(BuildError, match="nvcc: expected an ELF for sm_90a, got machine EM_"):
        cubin.check_architecture("nvcc", toolchain.nvcc.read_bytes(), "sm_90a")


def test_the_layout_table_is_read_from_the_cubin(data, built):
    words = cubin.read_words("pool", data, "pool_layout")
    record = next(k for k in built.manifest.kernels if k.name == "pool_avg_f32")
    assert words == (record.params_size, record.threads)


def test_a_missing_table_is_named(data):
    with pytest.raises(BuildError, match="pool: expected the constant nowhere_layout in the cubin, found none"):
        cubin.read_words("pool", data, "nowhere_layout")
