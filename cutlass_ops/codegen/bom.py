"""The software bill of materials of a wheel with kernels (CycloneDX, as PEP 770 has it): the same text for the same wheel."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from typing import Any, Optional

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from ..manifest import KernelRecord, Manifest

__all__ = ["bill_of_materials"]

_CUDA_LICENCE = DisjunctiveLicense(name="NVIDIA CUDA Toolkit End User License Agreement")


def _package(name: str, version: Optional[str], licence: Any, description: str, **more: Any) -> Component:
    """A package of PyPI; `licence` as an SPDX expression, or as the library models one."""
    licences = [LicenseExpression(licence) if isinstance(licence, str) else licence] if licence else []
    purl = PackageURL("pypi", name=re.sub(r"[-_.]+", "-", name).lower(), version=version)
    reference = str(purl)
    return Component(name=name, version=version, licenses=licences, purl=purl, bom_ref=reference, description=description, **more)


def _cubin(kernels: Sequence[KernelRecord]) -> Component:
    """A cubin, of which these kernels are entry points."""
    first = kernels[0]
    facts = [("architecture", first.architecture), ("operator", first.operator), *(("kernel", k.name) for k in kernels)]
    return Component(
        name=first.cubin,
        type=ComponentType.FILE,
        bom_ref=f"cubin:{first.cubin}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=first.sha256)],
        properties=[Property(name=f"cutlass_ops:{name}", value=value) for name, value in facts if value],
    )


def _compiled_in(made_by: dict[str, Any]) -> list[Component]:
    """What the cubins hold code of."""
    cccl = "Apache-2.0 WITH LLVM-exception"
    return [
        _package("nvidia-cutlass", made_by["cutlass"], "BSD-3-Clause", "CUTLASS and CuTe headers, compiled into the cubins"),
        _package("nvidia-cuda-cccl", None, cccl, "libcu++ headers of the CUDA Toolkit, compiled into the cubins"),
        _package("nvidia-cuda-runtime", None, _CUDA_LICENCE, "CUDA headers (cuda_fp16.hpp and others), compiled into the cubins"),
    ]


def _compiler(made_by: dict[str, Any]) -> Component:
    """nvcc, which is not in the wheel."""
    what = f"The compiler of the cubins: nvcc {made_by['flags']}"
    kind = {"type": ComponentType.APPLICATION, "scope": ComponentScope.EXCLUDED}
    return _package("nvidia-cuda-nvcc", made_by["nvcc"], _CUDA_LICENCE, what, **kind)


def _required(requirements: Iterable[str]) -> list[Component]:
    """What an installer adds; which version, it decides."""
    return [
        _package(
            re.split(r"[^\w.-]", requirement)[0],
            None,
            None,
            "Needed at run time, not in the wheel",
            properties=[Property(name="cutlass_ops:requirement", value=requirement)],
        )
        for requirement in requirements
    ]


def bill_of_materials(name: str, version: str, licence: Optional[str], requirements: Iterable[str], manifest: Manifest) -> str:
    """The bill of a wheel as CycloneDX JSON text.

    Lists the package `name` of this version and licence (SPDX), each cubin of the manifest with its sha256, what is compiled into
    the cubins, their compiler, and the run-time `requirements` (as in `Requires-Dist`). Time and serial number follow from
    the manifest's provenance, so equal wheels have equal bills. Raises KeyError for a manifest that `shipping.stage` has not made.
    """
    made_by = manifest.provenance
    package = _package(name, version, licence, "CUDA kernels compiled ahead of time, as operators of PyTorch")
    by_cubin: dict[str, list[KernelRecord]] = {}
    for kernel in sorted(manifest.kernels, key=lambda k: k.name):
        by_cubin.setdefault(kernel.cubin, []).append(kernel)
    cubins = [_cubin(kernels) for kernels in by_cubin.values()]
    libraries, required = _compiled_in(made_by), _required(requirements)
    facts = [Property(name=f"cutlass_ops:{key}", value=str(value)) for key, value in made_by.items() if value is not None]
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{package.purl}#{manifest.dumps()}"),
        metadata=BomMetaData(component=package, properties=facts),
        components=[*cubins, *libraries, _compiler(made_by), *required],
    )
    bom.metadata.timestamp = datetime.fromtimestamp(made_by["source_date_epoch"], timezone.utc)
    bom.register_dependency(package, [*cubins, *required])
    for cubin in cubins:
        bom.register_dependency(cubin, libraries)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"
