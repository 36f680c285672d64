"""The build: specs -> generated/*.cu -> cubins/ and manifest.json. Incremental, parallel, reproducible, safe to kill."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ..errors import BuildError, InstallationError
from ..manifest import Family, KernelRecord, Manifest
from ..spec import Spec
from ..version import __version__
from . import cubin, cutlass_api, source
from .frontend import TraceableChain, normalize
from .toolchain import ARCHITECTURE, FLAGS, Toolchain

_HERE = Path(__file__).parent
_INCLUDE = _HERE / "include"
#: Hand-written sources that all operators share; each is a family.
SHARED_KERNELS: tuple[Family, ...] = ("convert", "pack", "pool")

#: Raise it when `_inspect` records something else of the same cubin.
RECORD_VERSION = 1

Progress = Callable[[str, int, int], None]  # (kernel just finished, done, total)
Sources = dict[str, tuple[str, Optional[cutlass_api.Emission]]]  # unit -> text, and the emission that it came from


@dataclass(frozen=True)
class Unit:
    """One .cu file to compile into one cubin."""

    name: str
    key: str
    family: Family
    #: For an operator's kernels; the kernels shared by all operators have none.
    spec: Optional[Spec] = None
    chain: Optional[TraceableChain] = None
    operand: str = ""
    fused: Optional[source.FusedVariant] = None

    def request(self) -> cutlass_api.Request:
        """What to ask CUTLASS's Python API for."""
        assert self.spec is not None
        assert self.chain is not None
        inputs = tuple((i.internal, i.kind) for i in self.chain.inputs)
        return cutlass_api.Request(self.spec.name, self.chain.source, inputs, self.operand, self.spec.tile.m, self.spec.tile.n)

    @property
    def pool(self) -> str:
        """Kind of the pool."""
        return self.spec.pool.kind if self.spec and self.spec.pool else "none"


@dataclass(frozen=True)
class Report:
    """What a build did."""

    built: tuple[str, ...]
    reused: tuple[str, ...]
    #: Fused kernels that do not fit their registers -> why. The two-kernel plans serve what they would.
    left_out: dict[str, str]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([str(p) for p in parts]).encode()).hexdigest()


def _texts(paths: Iterable[Path]) -> list[str]:
    return [path.read_text() for path in paths]


def _emitter() -> list[str]:
    return _texts(_HERE / name for name in ("cutlass_api.py", "source.py", "frontend.py"))


def _emission_key(*parts: object) -> str:
    """Key of what a source is emitted from: its own spec, CUTLASS, and this emitter."""
    return _digest(cutlass_api.cutlass_version(), *_emitter(), *parts)


def _build_key(source_text: str, toolchain: Toolchain) -> str:
    """Key of what a cubin and its record come from: source, headers, compiler, flags, and how the cubin is read back."""
    headers = _texts(sorted(_INCLUDE.rglob("*.hpp")))
    readers = _texts(_HERE / name for name in ("cubin.py", "source.py"))
    return _digest(source_text, *headers, *readers, RECORD_VERSION, toolchain.version, FLAGS, cutlass_api.cutlass_version())


def plan_units(specs: Sequence[Spec]) -> list[Unit]:
    """Every cubin that the specs need. Raises ChainError for a chain that can't be traced, BuildError for a name clash."""
    names = [s.name for s in specs]
    clash = next((n for n in names if names.count(n) > 1), None)
    if clash is not None:
        raise BuildError(f"expected every operator to have a name of its own, got {clash!r} twice; rename one")
    reserved = next((n for n in names if n.split("_")[0] in SHARED_KERNELS), None)
    if reserved is not None:
        prefixes = ", ".join(f"{n}_" for n in SHARED_KERNELS)
        raise BuildError(f"expected operator names without the prefixes of the shared kernels ({prefixes}), got {reserved!r}; rename it")
    units = []
    for spec in specs:
        chain = normalize(spec)
        for operand in cutlass_api.OPERANDS:
            key = _emission_key(spec.name, spec.doc, chain, spec.tile, operand)
            units.append(Unit(f"{spec.name}_{operand}", key, "implicit_gemm", spec, chain, operand))
        for variant in source.FUSED_VARIANTS:
            if not variant.serves(pooled=spec.pool is not None):
                continue
            # The operand type is not in the tree that is emitted, so that one emission serves all of them.
            key = _emission_key(spec.name, spec.doc, chain, spec.pool, variant)
            units.append(Unit(f"{spec.name}_{variant.name}", key, "fused", spec, chain, "f16", variant))
    units += [Unit(name, _emission_key((_HERE / "kernels" / f"{name}.cu").read_text()), name) for name in SHARED_KERNELS]
    files = [u.name for u in units]
    shared = next((n for n in files if files.count(n) > 1), None)
    if shared is not None:
        raise BuildError(f"expected every kernel to have a file of its own, got {shared}.cubin for two of them; rename an operator")
    return units


def build(
    specs: Sequence[Spec], out: Path, toolchain: Toolchain, *, jobs: int = 0, progress: Optional[Progress] = None, strict: bool = True
) -> Report:
    """Bring `out` up to date: out/*.cu, out/cubins/*.cubin, out/manifest.json.

    Only what changed is built. Every file is written aside and renamed, the manifest last, so a build that is killed
    leaves either the old or the new state of each file, and running it again completes it. A fused kernel that does not fit its
    registers is an error where `strict`, else it is left out (how many registers a chain takes, a user cannot know).
    Raises BuildError, ChainError.
    """
    units = plan_units(specs)
    cubins = out / "cubins"
    try:
        cubins.mkdir(parents=True, exist_ok=True)
        probe = out / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BuildError(f"expected to write to {out}, could not ({error}); name a writable folder with --out") from error

    old = _previous(out)
    emitted = [u for u in units if not _is_current(u, out, old, toolchain, strict)]
    sources = _emit(emitted, toolchain) if emitted else {}
    # A source that came out as it was before need not be compiled again.
    todo = [u for u in emitted if not _is_built(u.name, out, old, _build_key(sources[u.name][0], toolchain), strict)]
    fresh = {u.name for u in units} - {u.name for u in todo}
    for unit in emitted:
        if unit.name in fresh and unit.spec is not None:
            _write(out / f"{unit.name}.cu", sources[unit.name][0].encode())
    records = [k for k in old.kernels if Path(k.cubin).stem in fresh] if old else []
    keys = {n: old.keys[n][1] for n in fresh} if old else {}
    left_out = {n: old.keys[n][2] for n in fresh if len(old.keys[n]) > 2} if old else {}
    compiled, refused = _compile_all(todo, sources, toolchain, out, jobs, progress, strict) if todo else ([], {})
    records += compiled
    left_out |= refused
    provenance = {
        "cutlass_ops": __version__,
        "emitter": _digest(*_emitter(), *_texts(sorted(_INCLUDE.rglob("*.hpp"))), *_texts(sorted((_HERE / "kernels").glob("*.cu")))),
        "cutlass": cutlass_api.cutlass_version(),
        "nvcc": toolchain.version,
        "architecture": ARCHITECTURE,
        "flags": " ".join(FLAGS),
    }
    keys |= {u.name: _build_key(sources[u.name][0], toolchain) for u in todo}
    # The reason beside the keys lets the next build know without compiling.
    reasons = {name: [reason] for name, reason in left_out.items()}
    manifest = Manifest(tuple(records), provenance, {u.name: [u.key, keys[u.name], *reasons.get(u.name, [])] for u in units})
    _write(out / "manifest.json", manifest.dumps().encode())
    _sweep(out, {u.name for u in units}, set(old.keys) if old else set())
    built, reused = (tuple(n for n in names if n not in left_out) for names in ([u.name for u in todo], sorted(fresh)))
    return Report(built, reused, dict(sorted(left_out.items())))


def check(
    specs: Sequence[Spec], out: Path, toolchain: Toolchain, *, jobs: int = 0, progress: Optional[Progress] = None, strict: bool = True
) -> list[str]:
    """Rebuild everything elsewhere and list every way in which `out` differs; an empty list means no drift."""
    with tempfile.TemporaryDirectory(prefix="cutlass_ops_check_") as temporary:
        fresh = Path(temporary)
        build(specs, fresh, toolchain, jobs=jobs, progress=progress, strict=strict)
        problems = []
        for path in sorted([*fresh.glob("*.cu"), *fresh.glob("cubins/*.cubin"), fresh / "manifest.json"]):
            name = path.relative_to(fresh)
            here = out / name
            if not here.exists():
                problems.append(f"{here} is missing")
            elif here.read_bytes() != path.read_bytes():
                problems.append(f"{here} differs from a fresh build")
        for pattern in ("*.cu", "cubins/*.cubin"):
            known = {p.name for p in fresh.glob(pattern)}
            problems += [f"{p} belongs to no operator" for p in sorted(out.glob(pattern)) if p.name not in known]
    return problems


def _previous(out: Path) -> Optional[Manifest]:
    try:
        return Manifest.load(out / "manifest.json")
    except InstallationError:
        return None  # nothing usable: everything is built


def _is_current(unit: Unit, out: Path, old: Optional[Manifest], toolchain: Toolchain, strict: bool) -> bool:
    """Whether the unit's files are those that its keys stand for, as far as that can be told without emitting."""
    if old is None or old.keys.get(unit.name, [""])[0] != unit.key:
        return False
    path = out / f"{unit.name}.cu" if unit.spec else _HERE / "kernels" / f"{unit.name}.cu"
    if not path.exists():
        return False
    text = path.read_text()
    return (unit.spec is None or source.is_sealed(text)) and _is_built(unit.name, out, old, _build_key(text, toolchain), strict)


def _is_built(name: str, out: Path, old: Optional[Manifest], key: str, strict: bool) -> bool:
    """Whether the cubin of this build key is there, as the manifest records it, or known to be left out."""
    if old is None or old.keys.get(name, ["", ""])[1] != key:
        return False
    if len(old.keys[name]) > 2:
        return not strict
    records = [k for k in old.kernels if Path(k.cubin).stem == name]
    path = out / "cubins" / f"{name}.cubin"
    return bool(records) and path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == records[0].sha256


def _emit(units: Sequence[Unit], toolchain: Toolchain) -> Sources:
    """Source text of every unit, and the emission that it came from."""
    sources: Sources = {}
    gemms = [u for u in units if u.spec is not None]
    try:
        requests = list(dict.fromkeys(u.request() for u in gemms))
        emissions = dict(zip(requests, cutlass_api.emit(requests, toolchain.home))) if gemms else {}
    except (RuntimeError, ModuleNotFoundError) as error:
        raise BuildError(str(error)) from error
    for unit in gemms:
        assert unit.spec is not None
        emission = emissions[unit.request()]
        summary = unit.spec.doc.splitlines()[0] if unit.spec.doc else ""
        what = f"fused, {' '.join(unit.fused.facts)}" if unit.fused else f"{unit.operand} operands, {unit.family}"
        text = source.kernel_source(unit.family, unit.name, f"{unit.spec.name}, {what}. {summary}", emission, unit.pool, unit.fused)
        sources[unit.name] = text, emission
    for unit in units:
        if unit.spec is None:
            sources[unit.name] = (_HERE / "kernels" / f"{unit.name}.cu").read_text(), None
    return sources


def _compile_all(
    units: Sequence[Unit], sources: Sources, toolchain: Toolchain, out: Path, jobs: int, progress: Optional[Progress], strict: bool
) -> tuple[list[KernelRecord], dict[str, str]]:
    """Compile units in parallel. Returns their kernels' records, and why fused kernels were left out."""
    records: list[KernelRecord] = []
    left_out: dict[str, str] = {}
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = {pool.submit(_compile, u, sources[u.name], toolchain, out): u for u in units}
        try:
            for done, future in enumerate(as_completed(futures), 1):
                unit = futures[future]
                try:
                    records.extend(future.result())
                except cubin.RegistersError as error:
                    if strict or unit.family != "fused":
                        raise
                    left_out[unit.name] = str(error)
                    # The source stays: it tells the next build that nothing has changed.
                    _write(out / f"{unit.name}.cu", sources[unit.name][0].encode())
                    (out / "cubins" / f"{unit.name}.cubin").unlink(missing_ok=True)
                if progress:
                    progress(unit.name, done, len(units))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return records, left_out


def _compile(unit: Unit, emitted: tuple[str, Optional[cutlass_api.Emission]], toolchain: Toolchain, out: Path) -> list[KernelRecord]:
    """Compile one unit in a private folder, check the cubin, move it to its place. Returns its kernels' records."""
    text, emission = emitted
    with tempfile.TemporaryDirectory(prefix="cutlass_ops_nvcc_") as temporary:
        work = Path(temporary)
        (work / f"{unit.name}.cu").write_text(text)
        # Relative names only: what nvcc writes into a cubin must not depend on where the packages lie.
        (work / "cutlass_ops_include").symlink_to(_INCLUDE, target_is_directory=True)
        includes = ["-Icutlass_ops_include"]
        for i, folder in enumerate(cutlass_api.include_directories()):
            (work / f"cutlass_include{i}").symlink_to(folder, target_is_directory=True)
            includes.append(f"-Icutlass_include{i}")
        command = [str(toolchain.nvcc), *FLAGS, *includes, f"{unit.name}.cu", "-o", f"{unit.name}.cubin"]
        # nvcc takes further flags from NVCC_* variables, which the build key does not know of.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NVCC_")}
        result = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        log = f"$ {' '.join(command)}\n{result.stdout}{result.stderr}"
        if result.returncode:
            _fail(unit, command, log, out)
        (work / "canonical.cubin").write_bytes(cubin.canonical((work / f"{unit.name}.cubin").read_bytes()))
        records = _inspect(unit, emission, (work / "canonical.cubin"), log, toolchain)
        if emission is not None:
            _write(out / f"{unit.name}.cu", text.encode())
        _write(out / "cubins" / f"{unit.name}.cubin", (work / "canonical.cubin").read_bytes())
    return records


def _fail(unit: Unit, command: Sequence[str], log: str, out: Path) -> None:
    path = Path(tempfile.gettempdir()) / f"cutlass_ops_{unit.name}_{os.getpid()}.log"
    path.write_text(log)
    errors = [line[:300] for line in log.splitlines() if re.search(r"\berror\b|fatal", line)][:5]
    shown = "\n  ".join(errors or log.splitlines()[-5:])
    raise BuildError(f"nvcc could not compile {unit.name} for {out}:\n  {shown}\nCommand: {' '.join(command)}\nLog: {path}")


def _inspect(unit: Unit, emission: Optional[cutlass_api.Emission], path: Path, log: str, toolchain: Toolchain) -> list[KernelRecord]:
    """Read the cubin back and describe its entry points. Raises BuildError where it is not what it must be."""
    data = path.read_bytes()
    cubin.check_architecture(unit.name, data, ARCHITECTURE)
    resources = cubin.ptxas_report(unit.name, log)
    words = cubin.read_words(unit.name, data, f"{unit.name}_layout")
    common = {
        "family": unit.family,
        "cubin": f"{unit.name}.cubin",
        "sha256": hashlib.sha256(data).hexdigest(),
        "architecture": ARCHITECTURE,
    }
    if emission is None:
        plain = {"operator": "", "shared_memory": 0, "params_size": words[0], "threads": words[1], "hgmma": 0}
        return [
            KernelRecord(name=name, variant=tuple(name.split("_")[1:]), registers=found.registers, **plain, **common)  # type: ignore[arg-type]
            for name, found in sorted(resources.items())
        ]
    assert unit.spec is not None
    assert unit.chain is not None
    hgmma = cubin.count_hgmma(toolchain.sass(path))
    if hgmma == 0:
        raise BuildError(f"{unit.name}: expected wgmma instructions (HGMMA) in the SASS, found none")
    entries = [*source.HEADER, *source.FAMILY_HEADER[unit.family]]
    header = dict(zip(entries, words))
    offsets = iter(words[len(entries) :])
    fields = {name: next(offsets) for name in source.PARAMETERS[unit.family]}
    names = {i.internal: (i.name, i.kind) for i in unit.chain.inputs}
    chain = {names[internal]: next(offsets) for internal in emission.inputs}
    return [
        KernelRecord(
            name=unit.name,
            operator=unit.spec.name,
            variant=(*unit.fused.facts, unit.pool) if unit.fused else (unit.operand,),
            threads=header["threads"],
            shared_memory=header["shared_memory"],
            params_size=header["params_size"],
            registers=resources[unit.name].registers,
            hgmma=hgmma,
            tile=(header["tile_m"], header["tile_n"], header["tile_k"]),
            stages=header["stages"],
            epilogue_tile=(header["epilogue_tile_m"], header["epilogue_tile_n"]),
            box_columns=header.get("box_columns", 0),
            claims=header.get("claims", 0),
            fields=fields,
            vectors={name: offset for (name, kind), offset in chain.items() if kind == "vector"},
            scalars={name: offset for (name, kind), offset in chain.items() if kind == "scalar"},
            constants=tuple((next(offsets), value) for _, value in emission.constants),
            **common,  # type: ignore[arg-type]
        )
    ]


def _write(path: Path, data: bytes) -> None:
    """Write a file aside and rename it; leave it alone where it already holds these bytes."""
    if path.exists() and path.read_bytes() == data:
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise BuildError(f"expected to write {path}, could not ({error}); free space or name another folder with --out") from error


def _sweep(out: Path, names: set[str], before: set[str]) -> None:
    """Remove what no unit stands for: files of dropped operators, and halves that a killed build left.

    Only what a build has made: the files of the units `before`, sources that carry our seal with their cubins, and names
    that `_write` gives to a file aside. Whatever else a user keeps in the folder stays.
    """
    sealed = {p.stem for p in out.glob("*.cu") if p.is_file() and source.is_sealed(p.read_text(errors="replace"))}
    for name in (before | sealed) - names:
        if name in sealed:
            (out / f"{name}.cu").unlink()
        (out / "cubins" / f"{name}.cubin").unlink(missing_ok=True)
    final = {"manifest.json", *(f"{n}{end}" for n in names | before | sealed for end in (".cu", ".cubin"))}
    for path in [*out.glob(".*"), *out.glob("cubins/.*")]:
        made = re.fullmatch(r"\.(?:(?P<name>.+)\.|writable-)\d+", path.name)
        if made and path.is_file() and (made["name"] is None or made["name"] in final):
            path.unlink()
