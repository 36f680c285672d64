"""A damaged installation, no driver, no device: one of the package's exceptions, nothing unverified loaded, and the process goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import cutlass_ops
from cutlass_ops import (
    AvgPool2d,
    CudaError,
    CutlassOpsError,
    DeviceFacts,
    InstallationError,
    NoPlanError,
    Operator,
    UnsupportedDeviceError,
    Vector,
    accuracy,
    driver,
    loader,
    operator,
    ops,
    use_plan,
)

from .fake_driver import H200, FakeDriver, Launched, install_whole
from .records import write_folder

PLAN = "two-kernel-tf32"
_serial = itertools.count()
X, WEIGHT, BIAS = torch.randn(2, 3, 9, 8), torch.randn(4, 3, 3, 2), torch.randn(4)


@operator(pool=AvgPool2d(2))
def chain(accum, bias: Vector = None, v: Vector = None, scale: float = 2.0):
    return (accum + bias) * scale


class Installation(SimpleNamespace):
    """Two operators with a folder of kernels each, on a GPU whose driver only records. `hurt` is the one to damage."""

    def run(self, op):
        """A call by the GPU's path; returns the names of the kernels that were launched."""
        self.driver.work.clear()
        with use_plan(PLAN):
            y = op(X, WEIGHT, BIAS, precision="tf32")
        assert y.shape == (2, 4, 3, 3)
        return [w.kernel for w in self.driver.work if isinstance(w, Launched)]

    def works(self, op):
        launched = self.run(op)
        (plan,) = (p for p in accuracy.serving(op, X, WEIGHT, BIAS, precision="tf32", device=H200) if p.name == PLAN)
        return launched == list(plan.kernels)

    def forget(self):
        """What a new process has forgotten."""
        ops._kernel_sets.cache_clear()
        ops._thread.calls.clear()

    def fails(self, error, message):
        """A call of `hurt` raises, twice the same, launches nothing and loads nothing but verified cubins; other calls work."""
        for _ in range(2):
            self.driver.work.clear()
            with use_plan(PLAN), pytest.raises(CutlassOpsError, match=message) as caught:
                self.hurt(X, WEIGHT, BIAS, precision="tf32")
            assert caught.type is error
            assert self.driver.work == []
        assert set(self.driver.loaded) <= self.verified
        with pytest.MonkeyPatch.context() as patch:  # the CPU's path needs no kernels
            patch.setattr(ops, "is_plain", lambda *_: False)
            torch.testing.assert_close(self.hurt(X, WEIGHT, BIAS), functional.avg_pool2d(functional.conv2d(X, WEIGHT, BIAS) * 2, 2))


@pytest.fixture
def installation(monkeypatch, tmp_path):
    names = [f"unit_damage_{next(_serial)}" for _ in range(2)]
    operators = [Operator(dataclasses.replace(chain, name=name), tmp_path / name) for name in names]
    records = [r for name in names for r in write_folder(tmp_path / name, name)]
    fake = FakeDriver({r.name: r.params_size for r in records})
    install_whole(monkeypatch, fake)
    monkeypatch.setenv(loader.ALLOW_UNVERIFIED, "0")
    installed = Installation(driver=fake, hurt=operators[0], whole=operators[1], folder=tmp_path / names[0])
    installed.verified = {r.sha256 for r in records}
    installed.gemm = f"{names[0]}_tf32"
    yield installed
    installed.forget()


def test_a_whole_installation_works(installation):
    assert installation.works(installation.hurt)
    assert installation.works(installation.whole)


# ---- files -------------------------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_gemm(change):
    """A change of the record of the implicit GEMM with TF32 operands in the manifest."""

    def damage(folder):
        (name,) = (p.stem for p in (folder / "cubins").glob("*_tf32.cubin"))
        edit(folder / "manifest.json", lambda data: change(next(k for k in data["kernels"] if k["name"] == name)))

    return damage


def of_gemm(change):
    def damage(folder):
        (path,) = (folder / "cubins").glob("*_tf32.cubin")
        change(path)

    return damage


def of_manifest(change):
    return lambda folder: change(folder / "manifest.json")


def swap(path):
    path.write_bytes((path.parent / "pool.cubin").read_bytes())


def duplicate(data):
    data["kernels"].append(data["kernels"][0])


FILES = {
    "cubin missing": (
        of_gemm(lambda p: p.unlink()),
        InstallationError,
        r"expected the cubin .*, could not read it .*; build .*",
    ),
    "cubin empty": (
        of_gemm(lambda p: p.write_bytes(b"")),
        InstallationError,
        r"with sha256 .*, got .* \(0 bytes\); rebuild it",
    ),
    "cubin truncated": (of_gemm(lambda p: p.write_bytes(p.read_bytes()[:-1])), InstallationError, r"with sha256 .*, got .*; rebuild it"),
    "cubin flipped": (of_gemm(flip), InstallationError, r"with sha256 .*, got .*; rebuild it or reinstall the wheel"),
    "cubin swapped": (of_gemm(swap), InstallationError, r"with sha256 .*, got .*; rebuild it or reinstall the wheel"),
    "cubin a folder": (of_gemm(lambda p: (p.unlink(), p.mkdir())), InstallationError, r"expected the cubin .*, could not read it"),
    "manifest missing": (of_manifest(lambda p: p.unlink()), InstallationError, r"expected the kernels' manifest at .*, found none; build"),
    "manifest no JSON": (of_manifest(lambda p: p.write_text("{")), InstallationError, r"expected a JSON manifest .*; reinstall the wheel"),
    "manifest newer": (
        of_manifest(lambda p: edit(p, lambda d: d.update(schema=99))),
        InstallationError,
        r"expected manifest schema \d+ at .*, got 99; build the kernels again with this version of cutlass_ops",
    ),
    "manifest with a kernel twice": (of_manifest(lambda p: edit(p, duplicate)), InstallationError, r"two of one name"),
    "manifest without a kernel": (
        of_manifest(lambda p: edit(p, lambda d: d.update(kernels=[k for k in d["kernels"] if not k["name"].endswith("tf32")]))),
        NoPlanError,
        r"expected the kernel \w+ in the manifest, found none",
    ),
    "record of another architecture": (
        edit_gemm(lambda k: k.update(architecture="sm_80")),
        NoPlanError,
        r"expected compute capability 9.0 for sm_80",
    ),
    "record with another sha256": (
        edit_gemm(lambda k: k.update(sha256=hashlib.sha256(b"pool.cubin").hexdigest())),
        InstallationError,
        r"with sha256 .*, got .*; rebuild it or reinstall the wheel",
    ),
    "record with an unverified sha256": (
        edit_gemm(lambda k: k.update(sha256="0" * 64)),
        NoPlanError,
        r"expected a record of a passed GPU check for \w+, found none; run cutlass-ops check",
    ),
    "record with another parameter size": (
        edit_gemm(lambda k: k.update(params_size=520)),
        InstallationError,
        r"to take 520 bytes of parameters, the cubin takes 512; reinstall the wheel",
    ),
    "record with a size that is no number": (
        edit_gemm(lambda k: k.update(params_size="512")),
        InstallationError,
        r"got a damaged one .*expected params_size to be int, got '512'.*; reinstall the wheel",
    ),
    "record with an offset outside the parameter": (
        edit_gemm(lambda k: k["fields"].update(guard=4096)),
        InstallationError,
        r"got a damaged one .*expected offsets within a parameter of 512 bytes, got 4096",
    ),
    "record with a negative offset": (
        edit_gemm(lambda k: k["vectors"].update(bias=-8)),
        InstallationError,
        r"got a damaged one .*expected offsets within a parameter of 512 bytes, got -8",
    ),
    "record without a vector of the operator": (
        edit_gemm(lambda k: k["vectors"].pop("bias")),
        InstallationError,
        r"expected \w+ to take the operator's vectors and scalars .*'bias'.*, its record has .*; build the kernels again, or reinstall",
    ),
    "record without threads": (edit_gemm(lambda k: k.update(threads=0)), InstallationError, r"got a damaged one .*expected threads"),
    "check records no JSON": (
        lambda folder: (folder / "gpu_checks.json").write_text("{"),
        InstallationError,
        r"expected GPU check records at .*, could not read them .*; reinstall the wheel",
    ),
    "check records missing": (lambda folder: (folder / "gpu_checks.json").unlink(), NoPlanError, r"record of a passed GPU check for"),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_and_other_calls_work(installation, name):
    damage, error, message = FILES[name]
    kept = {p: p.read_bytes() for p in installation.folder.rglob("*.*") if p.is_file()}
    damage(installation.folder)
    installation.fails(error, message)
    assert installation.works(installation.whole)
    for path, data in kept.items():  # repaired
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
    installation.forget()
    assert installation.works(installation.hurt)


def test_a_wrong_symbol_is_refused(installation):
    """The manifest names an entry point that the cubin, though it is the right one, does not have."""
    installation.driver.failures["cuLibraryGetKernel"] = 500
    installation.fails(InstallationError, r"expected the entry point \w+ in its cubin, found none; reinstall the wheel")
    installation.driver.failures.clear()
    assert installation.works(installation.hurt)


def test_a_kernel_that_no_record_names_is_refused(installation):
    with pytest.raises(InstallationError, match=r"expected the kernel nothing in .*manifest.json, found none; reinstall"):
        ops.kernel_set(installation.folder).get("nothing", 0)


def test_a_record_of_another_architecture_is_refused_by_the_loader_too(installation):
    edit_gemm(lambda k: k.update(architecture="sm_100a"))(installation.folder)
    with pytest.raises(InstallationError, match=r"expected \w+.cubin for sm_90a, the manifest says sm_100a; reinstall"):
        ops.kernel_set(installation.folder).get(installation.gemm, 0)
    assert installation.driver.loaded == []


def test_a_kernel_that_no_sm_can_hold_is_refused(installation, monkeypatch):
    monkeypatch.setattr(FakeDriver, "_cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *_: (0,))
    installation.fails(InstallationError, r"expected an SM to hold 256 threads of convert_f32_tf32 .*, it holds none; reinstall the wheel")
    monkeypatch.undo()


# ---- device and driver -------------------------------------------------------------------------------------------

#: Driver call that fails, its status, and what the message must say.
FAILURES = {
    "device busy": ("cuDevicePrimaryCtxRetain", 46, r"CUDA_ERROR_DEVICE_UNAVAILABLE .*; another process holds the GPU .*take another GPU"),
    "no memory for a context": ("cuDevicePrimaryCtxRetain", 2, r"CUDA_ERROR_OUT_OF_MEMORY \(out of memory\); free memory of the GPU"),
    "no memory for a cubin": ("cuLibraryLoadData", 2, r"cuLibraryLoadData failed: CUDA_ERROR_OUT_OF_MEMORY .*; free memory of the GPU"),
    "no device": ("cuDeviceGet", 100, r"cuDeviceGet failed: CUDA_ERROR_NO_DEVICE .*; the driver sees no GPU; look at nvidia-smi"),
    "cubin of another GPU": (
        "cuLibraryLoadData",
        209,
        r"NO_BINARY_FOR_GPU .*one for CUDA 13.0, and a GPU that the cubin is for",
    ),
    "cubin of a newer toolkit": ("cuLibraryLoadData", 200, r"INVALID_IMAGE .*expected a driver for CUDA 13.0 .*got one for CUDA 13.0"),
    "launch refused": ("cuLaunchKernelEx", 2, r"cuLaunchKernelEx failed: CUDA_ERROR_OUT_OF_MEMORY"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_driver_that_refuses_is_named_and_a_later_call_works(installation, name):
    call, status, message = FAILURES[name]
    installation.driver.failures[call] = status
    installation.fails(CudaError, message)
    installation.driver.failures.clear()
    assert installation.works(installation.hurt)
    assert installation.works(installation.whole)


def test_a_call_for_which_pytorch_has_no_memory_leaves_the_next_one_right(installation, monkeypatch):
    """PyTorch's own exception, which users know how to catch, passes unchanged."""

    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for warm in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(driver, "empty", exhausted)
            with pytest.raises(torch.OutOfMemoryError):
                installation.run(installation.hurt)
            assert installation.driver.work == []
        assert installation.works(installation.hurt), warm


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_another_gpu_is_named(installation, monkeypatch, capability):
    with monkeypatch.context() as patch:
        for module in (loader, ops, cutlass_ops.launch):
            patch.setattr(module, "device_facts", lambda device: DeviceFacts("Some GPU", capability, 100))
        message = rf"expected compute capability 9.0 .*, got {capability[0]}.{capability[1]} \(Some GPU\); use cutlass_ops.reference"
        installation.fails(UnsupportedDeviceError, message)
        assert installation.driver.loaded == []
    assert installation.works(installation.hurt)


@pytest.fixture
def bindings(monkeypatch):
    """A driver in the place of cuda.bindings.driver, for `driver.api` itself."""
    import cuda.bindings

    def put(module):
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
        monkeypatch.setattr(cuda.bindings, "driver", module, raising=False)
        driver.api.cache_clear()

    yield put
    driver.api.cache_clear()


def test_a_driver_library_that_cannot_be_loaded_is_named_and_asked_again(bindings, monkeypatch):
    fake = FakeDriver({})
    bindings(fake)
    with monkeypatch.context() as patch:
        patch.setattr(FakeDriver, "_cuInit", lambda *_: (_ for _ in ()).throw(RuntimeError("libcuda.so.1: no such file")))
        for _ in range(2):
            with pytest.raises(CudaError, match=r"expected .* library libcuda, could not load it \(libcuda.so.1: .*\); install the driver"):
                driver.api()
    assert driver.api() is fake


def test_bindings_that_are_missing_are_named(bindings):
    import cuda.bindings

    bindings(None)
    del cuda.bindings.driver
    with pytest.raises(InstallationError, match=r"expected the package cuda-bindings, could not import it .*; pip install"):
        driver.api()


def test_a_driver_without_a_device_says_so(bindings):
    fake = FakeDriver({})
    fake.failures["cuInit"] = 100
    bindings(fake)
    with pytest.raises(CudaError, match=r"cuInit failed: CUDA_ERROR_NO_DEVICE \(no CUDA-capable device .*\); the driver sees no GPU"):
        driver.api()


@pytest.mark.parametrize(("version", "shown"), [(12080, "12.8"), (11040, "11.4")])
def test_a_driver_too_old_for_the_cubins_is_refused_before_anything_is_asked_of_it(bindings, version, shown):
    fake = FakeDriver({})
    fake.version = version
    bindings(fake)
    message = rf"expected a driver for CUDA 13.0 \(580\) or newer, as the cubins need, got one for CUDA {shown}; install a newer driver"
    with pytest.raises(CudaError, match=message):
        driver.api()
    fake.version = 13010
    assert driver.api() is fake
