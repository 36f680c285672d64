"""Kernel records and problems for tests that need no compiled kernel."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
from pathlib import Path

from cutlass_ops.fused import PackParams
from cutlass_ops.manifest import KernelRecord, Manifest
from cutlass_ops.problem import PoolArguments, Problem
from cutlass_ops.two_kernel import ConvertParams, PoolParams

FIELDS = {"activation": 0, "filter": 128, "output": 256, "guard": 384, "guard_value": 392}
FIELDS |= {name: 396 + 4 * i for i, name in enumerate(("m", "k", "c", "r", "s", "p", "q"))}
FIELDS |= {f"{name}_{axis}": 424 + 4 * i for i, (name, axis) in enumerate((n, a) for n in ("stride", "padding", "dilation") for a in "hw")}


def record(name: str, family: str, variant: tuple[str, ...], **changes) -> KernelRecord:
    """A record with the sha256 of its name."""
    values = {
        "name": name,
        "family": family,
        "operator": "",
        "cubin": f"{name}.cubin",
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
        "architecture": "sm_90a",
        "variant": variant,
        "threads": 256,
        "shared_memory": 0,
        "params_size": 128,
        "registers": 40,
        "hgmma": 0,
    }
    return KernelRecord(**values | changes)


def gemm_record(operator: str, operand: str, **changes) -> KernelRecord:
    """An implicit GEMM whose chain has a vector v, then a vector bias, then a scalar scale, and one constant."""
    values = {
        "operator": operator,
        "threads": 384,
        "shared_memory": 200_000,
        "params_size": 512,
        "hgmma": 24,
        "tile": (192, 128, 32 if operand == "tf32" else 64),
        "stages": 5,
        "epilogue_tile": (64, 32),
        "fields": FIELDS,
        "vectors": {"bias": 456, "v": 464},  # sorted by name, as JSON gives them
        "scalars": {"scale": 472},
        "constants": ((476, 0.25),),
    }
    return record(f"{operator}_{operand}", "implicit_gemm", (operand,), **values | changes)


FUSED_FIELDS = {"input": 0, "weights": 152, "scales": 160, "x": 168, "output": 176, "counters": 184, "pool_scale": 192}
FUSED_NUMBERS = ("n", "k", "out_h", "out_w", "c", "h", "w", "gathered", "steps", "claim_shift", "padding_h", "padding_w", "shift")
FUSED_NUMBERS += ("strips", "channel_blocks", "box_bytes")
FUSED_FIELDS |= {name: 196 + 4 * i for i, name in enumerate(FUSED_NUMBERS)}

#: Type of x, layout, input channels, filter, aligned or shifted or wide (which is shifted too) -> columns of a TMA load.
FUSED = {
    ("f32", "nchw", 64, "3x3", "aligned"): 68,
    ("f32", "nchw", 64, "3x3", "shifted"): 76,
    ("f32", "nchw", 16, "3x3", "shifted"): 144,
    ("f32", "nchw", 64, "1x1", "aligned"): 68,
    **{(t, "nchw", 64, "3x3", "shifted"): 80 for t in ("f16", "bf16")},
    **{(t, "nchw", 16, "3x3", "shifted"): 144 for t in ("f16", "bf16")},
    **{(t, "nchw", 64, "1x1", "shifted"): 72 for t in ("f16", "bf16")},
    **{(t, "nhwc", 64, "3x3", "aligned"): 66 for t in ("f32", "f16", "bf16")},
    **{(t, "nhwc", 16, "3x3", "aligned"): 130 for t in ("f32", "f16", "bf16")},
    **{(t, "nhwc", 64, "1x1", "aligned"): 64 for t in ("f32", "f16", "bf16")},
    ("f32", "nchw", 64, "3x3", "wide"): 136,
    **{(t, "nchw", 64, "3x3", "wide"): 144 for t in ("f16", "bf16")},
    **{(t, "nchw", 64, "1x1", "wide"): 136 for t in ("f32", "f16", "bf16")},
}


def fused_records(operator: str, pool: str) -> tuple[KernelRecord, ...]:
    """The fused kernels of an operator with the chain of `gemm_record`; `pool` is "none", "avg" or "max"."""
    found = []
    for (element, layout, channels, size, kind), columns in FUSED.items():
        wide = kind == "wide"
        aligned = (element, layout, channels, size, kind) == ("f32", "nchw", 64, "3x3", "aligned")
        if (wide and pool != "none") or (aligned and pool == "none"):
            continue
        strip, outputs = (128 if wide else 64, 128) if channels == 64 else (128, 64)
        stores_apart = pool == "none" and layout == "nchw" and channels == 16  # warps that only store, twice the converters
        values = {
            "operator": operator,
            "threads": 640 if stores_apart else 384,
            "shared_memory": 200_000,
            "params_size": 384,
            "hgmma": 72,
            "tile": (strip if wide else 2 * strip, outputs, channels),
            "stages": 4 if element == "f32" else 8 if layout == "nhwc" else 6 if channels == 64 and not wide else 4,
            "epilogue_tile": (strip if pool == "none" else strip // 2, outputs),
            "box_columns": columns,
            "claims": 2048 if stores_apart and element == "f32" else 0,
            "fields": FUSED_FIELDS,
            "vectors": {"bias": 128, "v": 136},
            "scalars": {"scale": 144},
            "constants": ((148, 0.25),),
        }
        name = f"{operator}_fused_{element}_{layout}_c{channels}_{size}{'' if kind == 'aligned' else f'_{kind}'}"
        found.append(record(name, "fused", (element, layout, size, "shifted" if wide else kind, pool), **values))
    return tuple(found)


def all_records(operator: str, pool: str = "avg") -> tuple[KernelRecord, ...]:
    """Every kernel that an operator can need; `pool`: the kind of its own, or "none"."""
    converts = [("f32", "f16"), ("f32", "tf32"), ("f16", "f16"), ("bf16", "bf16")]
    packs = [("f32", "f16"), ("f16", "f16"), ("bf16", "bf16")]
    return (
        *(gemm_record(operator, operand) for operand in ("f16", "bf16", "tf32")),
        *fused_records(operator, pool),
        *(record(f"pack_{a}_{b}", "pack", (a, b), cubin="pack.cubin", params_size=ctypes.sizeof(PackParams)) for a, b in packs),
        *(
            record(f"convert_{a}_{b}", "convert", (a, b), cubin="convert.cubin", params_size=ctypes.sizeof(ConvertParams))
            for a, b in converts
        ),
        *(
            record(f"pool_{kind}_{t}", "pool", (kind, t), cubin="pool.cubin", params_size=ctypes.sizeof(PoolParams))
            for kind in ("avg", "max")
            for t in ("f32", "f16", "bf16")
        ),
    )


def write_folder(folder: Path, operator: str, pool: str = "avg") -> tuple[KernelRecord, ...]:
    """A folder of kernels for an operator, as the loader reads it; cubins are their own names. All are verified."""
    images = {r.cubin: r.cubin.encode() for r in all_records(operator, pool)}
    records = tuple(dataclasses.replace(r, sha256=hashlib.sha256(images[r.cubin]).hexdigest()) for r in all_records(operator, pool))
    (folder / "cubins").mkdir(parents=True)
    for cubin, data in images.items():
        (folder / "cubins" / cubin).write_bytes(data)
    (folder / "manifest.json").write_text(Manifest(records, {}).dumps())
    (folder / "gpu_checks.json").write_text(json.dumps({"cubins": {r.sha256: {"passed": True} for r in records}}))
    return records


LARGE = Problem(
    operator="op",
    dtype="f32",
    precision="tf32",
    x_shape=(128, 64, 128, 128),
    x_strides=(64 * 128 * 128, 128 * 128, 128, 1),
    weight_shape=(128, 64, 3, 3),
    weight_strides=(64 * 9, 9, 3, 1),
    stride=(1, 1),
    padding=(0, 0),
    dilation=(1, 1),
    pool=PoolArguments("avg", (2, 2), (2, 2)),
    channels_last=False,
)


def problem(**changes) -> Problem:
    """KernelBench-sized problem, with changes; x and weight are dense in the problem's layout unless their strides are given."""
    made = dataclasses.replace(LARGE, **changes)
    for name in ("x", "weight"):
        if f"{name}_strides" not in changes:
            _, c, h, w = getattr(made, f"{name}_shape")
            strides = (c * h * w, 1, c * w, c) if made.channels_last else (c * h * w, h * w, w, 1)
            made = dataclasses.replace(made, **{f"{name}_strides": strides})
    return made
