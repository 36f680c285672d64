"""The loader: exactly the bytes of the record or none, and a refusal before the driver sees anything else."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json

import pytest

from cutlass_ops import CudaError, DeviceFacts, InstallationError, UnsupportedDeviceError, driver, loader
from cutlass_ops.loader import KernelSet, allow_unverified
from cutlass_ops.manifest import Manifest

from .fake_driver import H200, FakeDriver
from .records import gemm_record, record

IMAGES = {"gemm.cubin": b"\x7fELF gemm" + bytes(range(256)), "pool.cubin": b"\x7fELF pool" + bytes(256)}
SHA = {name: hashlib.sha256(data).hexdigest() for name, data in IMAGES.items()}
RECORDS = (
    gemm_record("op", "f16", cubin="gemm.cubin", sha256=SHA["gemm.cubin"]),
    record("pool_avg_f32", "pool", ("avg", "f32"), cubin="pool.cubin", sha256=SHA["pool.cubin"]),
    record("pool_max_f32", "pool", ("max", "f32"), cubin="pool.cubin", sha256=SHA["pool.cubin"]),
)


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver({r.name: r.params_size for r in RECORDS})
    monkeypatch.setattr(driver, "api", lambda: fake)
    monkeypatch.setattr(loader, "device_facts", lambda device: H200)
    monkeypatch.delenv("CUTLASS_OPS_ALLOW_UNVERIFIED", raising=False)
    return fake


@pytest.fixture
def folder(tmp_path):
    """Manifest, check records and cubins of RECORDS."""
    (tmp_path / "cubins").mkdir()
    for name, data in IMAGES.items():
        (tmp_path / "cubins" / name).write_bytes(data)
    (tmp_path / "manifest.json").write_text(Manifest(RECORDS, {}).dumps())
    (tmp_path / "gpu_checks.json").write_text(json.dumps({"cubins": {sha: {"passed": True} for sha in SHA.values()}}))
    return tmp_path


def test_a_kernel_is_loaded_once_with_its_shared_memory_allowed(fake, folder):
    kernels = KernelSet(folder)
    kernel = kernels.get("op_f16", 0)
    assert (kernel.record, kernel.function, kernel.blocks_per_sm) == (RECORDS[0], "op_f16", 2)
    assert kernels.get("op_f16", 0) is kernel
    assert fake.loaded == [SHA["gemm.cubin"]]
    assert fake.limits == {"op_f16": 200_000}


@pytest.mark.parametrize("capturing", [False, True])
def test_loading_is_allowed_within_a_capture_and_a_failure_says_what_to_call_before(fake, folder, monkeypatch, capturing):
    monkeypatch.setattr(driver, "is_capturing", lambda: capturing)
    KernelSet(folder).get("op_f16", 0)
    assert fake.capture_mode == "CU_STREAM_CAPTURE_MODE_GLOBAL"  # as it was
    fake.failures["cuLibraryLoadData"] = 719
    with pytest.raises(CudaError, match=r"cuLibraryLoadData failed: CUDA_ERROR_LAUNCH_FAILED") as caught:
        KernelSet(folder).get("op_f16", 0)
    assert ("call the operator once with tensors of this shape before" in str(caught.value)) == capturing
    assert fake.capture_mode == "CU_STREAM_CAPTURE_MODE_GLOBAL"


def test_kernels_of_one_cubin_share_its_library(fake, folder):
    kernels = KernelSet(folder)
    assert kernels.get("pool_avg_f32", 0).function == "pool_avg_f32"
    assert kernels.get("pool_max_f32", 0).function == "pool_max_f32"
    assert fake.loaded == [SHA["pool.cubin"]]
    assert fake.limits == {}  # no dynamic shared memory


def test_nothing_is_loaded_before_it_is_needed(fake, folder):
    KernelSet(folder)
    assert fake.loaded == []


def flip_one_bit(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        flip_one_bit,
        lambda path: path.write_bytes(IMAGES["pool.cubin"]),
    ],
    ids=["truncated", "empty", "longer", "one bit flipped", "swapped"],
)
def test_other_bytes_than_the_records_are_never_loaded(fake, folder, damage):
    path = folder / "cubins" / "gemm.cubin"
    damage(path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(
        InstallationError, match=rf"expected .*gemm.cubin with sha256 {SHA['gemm.cubin']}, got {found} \(\d+ bytes\); rebuild"
    ):
        KernelSet(folder).get("op_f16", 0)
    assert fake.loaded == []


def test_a_missing_cubin_is_named_with_the_remedy(fake, folder):
    (folder / "cubins" / "gemm.cubin").unlink()
    with pytest.raises(InstallationError, match=r"expected the cubin .*gemm.cubin, could not read it .*; build the kernels or reinstall"):
        KernelSet(folder).get("op_f16", 0)
    assert fake.loaded == []


def test_a_repaired_cubin_is_loaded_by_the_next_call(fake, folder):
    kernels, path = KernelSet(folder), folder / "cubins" / "gemm.cubin"
    path.unlink()
    with pytest.raises(InstallationError):
        kernels.get("op_f16", 0)
    path.write_bytes(IMAGES["gemm.cubin"])
    assert kernels.get("op_f16", 0).function == "op_f16"


def test_another_parameter_size_than_the_records_is_refused(fake, folder):
    fake.params_sizes["op_f16"] = 640
    with pytest.raises(
        InstallationError, match="expected op_f16 to take 512 bytes of parameters, the cubin takes 640; reinstall the wheel"
    ):
        KernelSet(folder).get("op_f16", 0)


def test_parameters_of_another_size_than_the_kernels_are_refused(fake, folder):
    """Those of a kernel that another version of the package built, which fits its record."""
    with pytest.raises(
        InstallationError,
        match="expected pool_avg_f32 to take 96 bytes of parameters, the manifest says 128; build the kernels again, or reinstall",
    ):
        KernelSet(folder).get("pool_avg_f32", 0).launch(1, ctypes.create_string_buffer(96))


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction"])
def test_a_driver_error_names_call_error_and_description(fake, folder, call):
    fake.failures[call] = 719
    with pytest.raises(CudaError, match=rf"^{call}.* failed: CUDA_ERROR_LAUNCH_FAILED \(unspecified launch failure\)$"):
        KernelSet(folder).get("op_f16", 0)


def test_a_cubin_that_the_driver_is_too_old_for_says_so(fake, folder):
    fake.failures["cuLibraryLoadData"], fake.version = 209, 12080
    with pytest.raises(
        CudaError, match=r"NO_BINARY_FOR_GPU .*; expected a driver for CUDA 13.0 \(580\) .*, got one for CUDA 12.8, and a GPU .*; reinstall"
    ):
        KernelSet(folder).get("op_f16", 0)


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 0)])
def test_another_device_is_refused_before_anything_is_loaded(fake, folder, monkeypatch, capability):
    monkeypatch.setattr(loader, "device_facts", lambda device: DeviceFacts("Some GPU", capability, 100))
    major, minor = capability
    with pytest.raises(
        UnsupportedDeviceError, match=rf"expected compute capability 9.0 .*, got {major}.{minor} \(Some GPU\); use cutlass_ops"
    ):
        KernelSet(folder).get("op_f16", 0)
    assert fake.loaded == []


# ---- verified kernels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checks", [None, {}, {SHA["gemm.cubin"]: {"passed": False}}, {SHA["pool.cubin"]: {"passed": True}}])
def test_an_unverified_kernel_is_refused(fake, folder, checks):
    path = folder / "gpu_checks.json"
    path.unlink() if checks is None else path.write_text(json.dumps({"cubins": checks}))
    with pytest.raises(
        InstallationError, match=r"expected a record of a passed GPU check for gemm.cubin, found none; run cutlass-ops check"
    ):
        KernelSet(folder).get("op_f16", 0)
    assert fake.loaded == []


def test_a_check_of_other_bytes_does_not_count(fake, folder):
    (folder / "cubins" / "gemm.cubin").write_bytes(b"rebuilt")
    changed = dataclasses.replace(RECORDS[0], sha256=hashlib.sha256(b"rebuilt").hexdigest())
    (folder / "manifest.json").write_text(Manifest((changed,), {}).dumps())
    with pytest.raises(InstallationError, match="expected a record of a passed GPU check for gemm"):
        KernelSet(folder).get("op_f16", 0)


def test_an_unverified_kernel_is_loaded_where_that_is_allowed(fake, folder, monkeypatch):
    (folder / "gpu_checks.json").unlink()
    monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", "1")
    assert KernelSet(folder).get("op_f16", 0).function == "op_f16"


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True)])
def test_the_environment_allows_unverified_kernels(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("CUTLASS_OPS_ALLOW_UNVERIFIED", raising=False)
    else:
        monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", value)
    assert allow_unverified() is expected


@pytest.mark.parametrize("value", ["", "true", "yes", "2", " 1", "01"])
def test_any_other_value_is_an_error(monkeypatch, value):
    monkeypatch.setenv("CUTLASS_OPS_ALLOW_UNVERIFIED", value)
    with pytest.raises(ValueError, match=f"expected CUTLASS_OPS_ALLOW_UNVERIFIED to be 0 or 1, got {value!r}"):
        allow_unverified()
