"""The manifest: round trip, damage, other versions' manifests, and the tracked one's offsets."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from pathlib import Path

import pytest

from cutlass_ops import OPERATORS, InstallationError, __version__
from cutlass_ops.codegen import source
from cutlass_ops.fused import PackParams
from cutlass_ops.manifest import CLAIMS, FIELDS, SCHEMA, KernelRecord, Manifest, read_checks, verified_hashes
from cutlass_ops.two_kernel import ConvertJob, ConvertParams, PoolParams

from .records import FUSED_FIELDS, all_records, fused_records, gemm_record, record

MANIFEST = Manifest(all_records("op"), {"nvcc": "13.0.88"}, {"op_f16": "key"})


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(MANIFEST.dumps())
    return path


def damaged(path, change):
    data = json.loads(MANIFEST.dumps())
    change(data)
    path.write_text(json.dumps(data))
    return path


def of_family(data, family):
    return next(k for k in data["kernels"] if k["family"] == family)


def set_fused(data, **values):
    of_family(data, "fused").update(values)


def test_a_manifest_survives_json(path):
    loaded = Manifest.load(path)
    assert sorted(loaded.kernels, key=lambda k: k.name) == sorted(MANIFEST.kernels, key=lambda k: k.name)
    assert (loaded.provenance, loaded.keys) == (MANIFEST.provenance, MANIFEST.keys)
    assert loaded.dumps() == MANIFEST.dumps()


def test_equal_builds_give_equal_bytes():
    shuffled = Manifest(MANIFEST.kernels[::-1], MANIFEST.provenance, MANIFEST.keys)
    assert shuffled.dumps() == MANIFEST.dumps()


@pytest.mark.parametrize(
    "kernel",
    [gemm_record("op", "f16"), fused_records("op", "none")[0], record("pool_avg_f32", "pool", ("avg", "f32"))],
    ids=lambda k: k.name,
)
def test_a_record_survives_json_and_omits_defaults(kernel):
    data = json.loads(json.dumps(kernel.to_json()))
    assert KernelRecord.from_json(data) == kernel
    assert ("tile" in data) == (kernel.family != "pool")
    assert ("box_columns" in data) == (kernel.family == "fused")


def test_a_missing_manifest_is_named_with_the_remedy(tmp_path):
    with pytest.raises(
        InstallationError, match=r"expected the kernels' manifest at .*nowhere.json, found none; build the kernels or reinstall"
    ):
        Manifest.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("text", ["", "{", "\x00", MANIFEST.dumps()[:-40], "[" * 100_000])
def test_text_that_is_no_json_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(InstallationError, match=r"expected a JSON manifest at .*manifest.json, could not read it"):
        Manifest.load(path)


def test_bytes_that_are_no_utf8_are_refused(path):
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(InstallationError, match="expected a JSON manifest at"):
        Manifest.load(path)


@pytest.mark.parametrize("text", ["[]", "3", '"text"', "null"])
def test_json_that_is_no_manifest_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(InstallationError, match=f"expected manifest schema {SCHEMA}"):
        Manifest.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("kernels"),
        lambda data: data.pop("provenance"),
        lambda data: data.pop("keys"),
        lambda data: data["kernels"][0].pop("sha256"),
        lambda data: data["kernels"][0].update(unknown=1),
        lambda data: data["kernels"][0].update(constants=[["a", "b"]]),
        lambda data: data["kernels"][0].update(tile=3),
        lambda data: data.update(kernels=[3]),
        lambda data: data.update(kernels=3),
        lambda data: of_family(data, "fused").update(variant=[]),
        lambda data: of_family(data, "fused").update(tile=[0, 0, 0]),
        lambda data: of_family(data, "fused").update(epilogue_tile=[0, 0]),
        lambda data: of_family(data, "fused").update(epilogue_tile=[2 * of_family(data, "fused")["tile"][0], 128]),  # no row a step
        lambda data: of_family(data, "fused").pop("tile"),
        lambda data: of_family(data, "implicit_gemm").update(variant=["f8"]),
        lambda data: of_family(data, "implicit_gemm").update(tile=[128, 128]),
        lambda data: of_family(data, "pool").update(variant=["avg"]),
        lambda data: of_family(data, "fused")["fields"].update(k=of_family(data, "fused")["fields"]["n"]),
        lambda data: of_family(data, "fused")["fields"].update(input=of_family(data, "fused")["params_size"] - 64),
        lambda data: of_family(data, "fused")["fields"].update(strips=of_family(data, "fused")["fields"]["input"] + 124),
        lambda data: of_family(data, "implicit_gemm")["vectors"].update(v=of_family(data, "implicit_gemm")["vectors"]["bias"] + 4),
        lambda data: of_family(data, "implicit_gemm").update(constants=[[of_family(data, "implicit_gemm")["fields"]["guard"], 1.0]]),
        lambda data: of_family(data, "implicit_gemm").update(constants=[[math.inf, 1.0]]),
        *(functools.partial(set_fused, claims=claims) for claims in (-1, 1, 4096, 10**30)),
        *(functools.partial(set_fused, **{name: -1}) for name in ("box_columns", "stages", "registers", "hgmma", "shared_memory")),
        *(functools.partial(set_fused, **{name: 10**12}) for name in ("box_columns", "threads", "shared_memory", "params_size")),
        functools.partial(set_fused, tile=[10**20, 64, 16]),
        *(functools.partial(set_fused, cubin=name) for name in ("", "a\0b.cubin", "../../a.cubin", "a/b.cubin", "cubin")),
        lambda data: of_family(data, "pool").update(family="later"),
        lambda data: of_family(data, "convert").update(family="pool"),
        lambda data: of_family(data, "convert").update(variant=["f16", "f32"]),
    ],
)
def test_missing_unknown_and_damaged_fields_are_refused(path, change):
    with pytest.raises(
        InstallationError, match=r"expected a complete manifest at .*manifest.json, got a damaged one .*; reinstall the wheel"
    ):
        Manifest.load(damaged(path, change))


# ---- manifests of other versions: docs/compatibility.md ------------------------------------------------------------


def of_version(version, change):
    def apply(data):
        data["provenance"]["cutlass_ops"] = version
        change(data)

    return apply


def fields(data):
    return next(k["fields"] for k in data["kernels"] if "fields" in k)


OTHER = rf"the kernels are of cutlass_ops 9.1.0, this is {__version__}: install 9.1.0, or build them again with {__version__}"


@pytest.mark.parametrize("schema", [SCHEMA + 1, SCHEMA - 1, str(SCHEMA), None])
@pytest.mark.parametrize(
    ("version", "remedy"),
    [("9.1.0", OTHER), (__version__, "build the kernels again"), (None, "build the kernels again"), (3, "build the kernels again")],
)
def test_another_schema_is_refused_and_the_versions_are_named(path, schema, version, remedy):
    change = of_version(version, lambda data: data.update(schema=schema))
    with pytest.raises(InstallationError, match=rf"expected manifest schema {SCHEMA} at .*manifest.json, got {schema!r}; {remedy}"):
        Manifest.load(damaged(path, change))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data["kernels"][0].update(added=1), "added"),
        (lambda data: fields(data).update(added=0), "others too: ['added']"),
        (lambda data: fields(data).pop("k"), "not all: ['k']"),
    ],
)
def test_what_another_version_adds_to_a_kernel_or_leaves_out_is_refused_and_the_versions_are_named(path, change, what):
    with pytest.raises(InstallationError, match=rf"got a damaged one or another version's .*{re.escape(what)}.*, or {OTHER}"):
        Manifest.load(damaged(path, of_version("9.1.0", change)))


@pytest.mark.parametrize("version", ["0.0.1", __version__, "9.1.0", None])
def test_the_same_schema_is_read_whichever_version_wrote_it(path, version):
    loaded = Manifest.load(damaged(path, of_version(version, lambda data: None)))
    assert sorted(loaded.kernels, key=lambda k: k.name) == sorted(MANIFEST.kernels, key=lambda k: k.name)


def test_what_another_version_says_beside_the_kernels_is_kept_or_ignored(path):
    loaded = Manifest.load(damaged(path, lambda data: (data.update(added=1), data["provenance"].update(added=2))))
    assert loaded.provenance["added"] == 2


def test_kernels_of_a_later_family_are_no_hindrance(path):
    later = {"family": "later", "name": "later", "fields": {"x": 0}}
    loaded = Manifest.load(damaged(path, lambda data: data["kernels"].append(data["kernels"][0] | later)))
    assert {k.name for k in loaded.kernels} == {k.name for k in MANIFEST.kernels} | {"later"}


def test_an_older_record_without_a_later_optional_field_has_its_default(path):
    loaded = Manifest.load(damaged(path, lambda data: [k.pop("box_columns", None) for k in data["kernels"]]))
    assert {k.box_columns for k in loaded.kernels} == {0}


#: What builder and loader of a schema share. Where this test fails and a version with the schema has been released: raise SCHEMA and
#: add a line, unless the change is a new field of KernelRecord whose default means what held before. Before that: replace the line.
CONTRACTS = {1: "79ef4de9e62fbeade9eaee47731725456680d987d463569fa6ce69e37d686b1f"}


def test_what_builder_and_loader_share_is_that_of_the_schema():
    record = [(f.name, str(f.type), None if f.default is dataclasses.MISSING else f.default) for f in dataclasses.fields(KernelRecord)]
    structures = [
        (s.__name__, [(n, getattr(s, n).offset) for n, *_ in s._fields_]) for s in (ConvertJob, ConvertParams, PackParams, PoolParams)
    ]
    shared = json.dumps([record, {family: sorted(names) for family, names in FIELDS.items()}, structures])
    assert hashlib.sha256(shared.encode()).hexdigest() == CONTRACTS[SCHEMA]


def test_kernels_claim_as_often_as_records_may_say():
    header = Path(source.__file__).parent / "include/cutlass_ops/fused/tile.hpp"
    (found,) = re.findall(r"kClaims = .* \? (\d+) : 0;", header.read_text())
    assert int(found) == CLAIMS


def test_the_builder_emits_the_fields_that_launches_fill():
    assert {family: frozenset(names) for family, names in source.PARAMETERS.items()} == FIELDS


# ---- GPU check records -------------------------------------------------------------------------------------------


def test_without_a_file_nothing_is_verified(tmp_path):
    assert read_checks(tmp_path / "gpu_checks.json") == {}
    assert verified_hashes(tmp_path / "gpu_checks.json") == frozenset()


def test_only_passed_checks_verify(tmp_path):
    path = tmp_path / "gpu_checks.json"
    checks = {"a": {"passed": True}, "b": {"passed": False}, "c": {}, "d": {"passed": "true"}, "e": {"passed": 1}}
    path.write_text(json.dumps({"cubins": checks}))
    assert verified_hashes(path) == {"a"}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, '{"cubins": 3}', '{"cubins": {"a": 3}}', '{"cubins": {"a": null}}'])
def test_damaged_check_records_are_refused(tmp_path, text):
    path = tmp_path / "gpu_checks.json"
    path.write_text(text)
    with pytest.raises(InstallationError, match=r"expected GPU check records at .*gpu_checks.json, could not read them .*; reinstall"):
        verified_hashes(path)


# ---- the tracked manifest ----------------------------------------------------------------------------------------

DESCRIPTORS = {"implicit_gemm": ("activation", "filter", "output"), "fused": ("input",)}
POINTERS = {"implicit_gemm": ("guard",), "fused": ("weights", "scales", "output")}


TRACKED = Path(__file__).parents[2] / "generated" / "manifest.json"


@pytest.fixture(scope="module")
def tracked():
    return Manifest.load(TRACKED)


def regions(kernel):
    """(name, first byte, size, alignment) of everything that the loader writes into a kernel's parameter."""
    for name, offset in kernel.fields.items():
        is_descriptor, is_pointer = (name in names[kernel.family] for names in (DESCRIPTORS, POINTERS))
        size, alignment = (128, 64) if is_descriptor else (8, 8) if is_pointer else (4, 4)
        yield name, offset, size, alignment
    yield from ((name, offset, 8, 8) for name, offset in kernel.vectors.items())
    yield from ((name, offset, 4, 4) for name, offset in kernel.scalars.items())
    yield from ((f"constant {value}", offset, 4, 4) for offset, value in kernel.constants)


def test_the_tracked_manifest_has_every_operators_kernels(tracked):
    names = {k.name for k in tracked.kernels}
    assert names >= {f"{name}_{operand}" for name in OPERATORS for operand in ("f16", "bf16", "tf32")}
    assert names >= {f"pool_{kind}_{t}" for kind in ("avg", "max") for t in ("f32", "f16", "bf16")}
    assert names >= {"convert_f32_f16", "convert_f32_tf32", "convert_f16_f16", "convert_bf16_bf16"}
    assert names >= {"pack_f32_f16", "pack_f16_f16", "pack_bf16_bf16"}
    assert len(names) == len(tracked.kernels)


@pytest.mark.parametrize("name", OPERATORS)
def test_tracked_fused_kernels_are_those_of_these_tests(tracked, name):
    """Facts and fields that selection and launch go by, of every variant."""

    def facts(kernels):
        found = {k.name: (k.variant, k.threads, k.tile, k.stages, k.epilogue_tile, k.box_columns, set(k.fields)) for k in kernels}
        assert all(fields == set(FUSED_FIELDS) for *_, fields in found.values())
        return found

    pool = OPERATORS[name].pool
    ours = [k for k in tracked.kernels if k.family == "fused" and k.operator == name]
    assert facts(ours) == facts(fused_records(name, pool.kind if pool else "none"))


def test_the_tracked_manifest_is_in_canonical_form_and_of_no_commit(tracked):
    """The commit that holds it cannot be in it: the build of a wheel adds it."""
    assert TRACKED.read_text() == tracked.dumps()
    assert tracked.provenance.keys() == {"cutlass_ops", "emitter", "cutlass", "nvcc", "architecture", "flags"}
    assert tracked.provenance["cutlass_ops"] == __version__


def test_tracked_offsets_lie_inside_the_parameter_apart_and_aligned(tracked):
    for kernel in tracked.kernels:
        found = sorted(regions(kernel), key=lambda region: region[1])
        for name, offset, size, alignment in found:
            assert 0 <= offset <= kernel.params_size - size, (kernel.name, name)
            assert offset % alignment == 0, (kernel.name, name)
        for (first, offset, size, _), (second, following, _, _) in itertools.pairwise(found):
            assert offset + size <= following, (kernel.name, first, second)


def test_tracked_records_list_their_operators_arguments(tracked):
    for kernel in tracked.kernels:
        if kernel.operator:
            spec = OPERATORS[kernel.operator]
            assert set(kernel.vectors) == {a.name for a in spec.vectors}
            assert set(kernel.scalars) == {a.name for a in spec.scalars}
            assert kernel.family == "fused" or kernel.tile[:2] == (spec.tile.m, spec.tile.n)
            assert kernel.hgmma > 0
        assert kernel.architecture == "sm_90a"
