#!/usr/bin/env python3
"""Write docs/api.md, the API reference, from the package's docstrings. --check: write nothing, fail if it is not current."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import griffe

import cutlass_ops

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "docs" / "api.md"

#: Sections of the reference -> public names of cutlass_ops. The shipped operators and `reference` have sections of their own.
SECTIONS = {
    "Calling an operator": ("Operator", "FusedConv2d", "explain", "use_plan", "DeviceFacts"),
    "Declaring an operator": ("operator", "Vector", "AvgPool2d", "MaxPool2d", "Tile", "Spec"),
    "Errors": (
        *("CutlassOpsError", "InstallationError", "UnsupportedDeviceError", "NoPlanError", "CudaError"),
        *("ChainError", "BuildError"),
    ),
}
SHIPPED = "Shipped operators"
CHAIN = "Functions of a chain"
REFERENCE = "Reference path"

HEAD = """\
# API reference

Written by `scripts/api_reference.py` from the docstrings; do not edit. Everything here is an attribute of `cutlass_ops` unless its
heading says otherwise. N is the batch, C and K are input and output channels, H and W height and width in pixels, R and S those of
the filter, P and Q those of the result.
"""


def code(name: str, words: Sequence[str], returns: str = "") -> str:
    """A signature as a code block, one argument a line where it is long."""
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returns}"
    return f"```python\n{line}\n```"


def signature(function: griffe.Function, name: str) -> str:
    """A function's or constructor's signature."""
    star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    words, bare = [], True
    for parameter in function.parameters:
        if parameter.name == "self":
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and bare:
            words.append("*")
        bare = bare and parameter.kind not in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        word = star.get(parameter.kind, "") + parameter.name + (f": {parameter.annotation}" if parameter.annotation else "")
        words.append(word + (f" = {parameter.default}" if parameter.default is not None and parameter.kind not in star else ""))
    if any(d.callable_path == "contextlib.contextmanager" for d in function.decorators):
        return code(f"with {name}", words, ": ...")
    returns = f" -> {function.returns}" if function.returns and str(function.returns) != "None" else ""
    return code(name, words, returns)


def shipped(name: str) -> str:
    """A shipped operator's signature, which no source file has."""
    words = str(inspect.signature(getattr(cutlass_ops, name))).strip("()").split(", ")
    return code(name, words)


def text(item: griffe.Object | griffe.Alias) -> Iterator[str]:
    """A docstring's sections as Markdown."""
    if item.docstring is None:
        raise SystemExit(f"error: expected a docstring of {item.path}, found none; write one")
    for section in item.docstring.parse("google", returns_multiple_items=False):
        if section.kind is griffe.DocstringSectionKind.text:
            yield section.value
            continue
        title = section.title or section.kind.value.capitalize()
        lines = []
        for entry in section.value:
            what = getattr(entry, "name", "") or ("" if section.kind is griffe.DocstringSectionKind.returns else str(entry.annotation))
            lines.append(f"- {f'`{what}`: ' if what else ''}{' '.join(entry.description.split())}")
        yield f"{title}:\n\n" + "\n".join(lines)


def entry(package: griffe.Module, name: str, prefix: str = "") -> Iterator[str]:
    """Heading, signature and text of a public name."""
    item = package[name]
    yield f"### {prefix}{name}"
    if isinstance(item, griffe.Alias):
        item = item.final_target
    if isinstance(item, griffe.Function):
        yield signature(item, prefix + name)
    elif isinstance(item, griffe.Class) and "__init__" in item.members:
        yield signature(item.members["__init__"], name)  # type: ignore[arg-type]
    elif isinstance(item, griffe.Class) and item.bases:
        yield f"A subclass of {' and '.join(f'`{base}`' for base in item.bases)}."
    yield from text(item)


def document(root: Path) -> str:
    """The whole reference."""
    package = griffe.load("cutlass_ops", search_paths=[root])
    blocks = [HEAD.rstrip(), f"## {SHIPPED}", "The arguments that all have in common are those of [`Operator`](#operator)."]
    for name, spec in cutlass_ops.OPERATORS.items():
        blocks += [f"### {name}", shipped(name), spec.doc]
    for section, names in SECTIONS.items():
        blocks.append(f"## {section}")
        for name in names:
            blocks += entry(package, name)  # type: ignore[arg-type]
    chain, reference = package["chain"], package["reference"]
    blocks += [f"## {CHAIN}", "Of `cutlass_ops.chain`, beside `+ - * /` and unary minus. Arguments are values of the chain or numbers."]
    rows = []
    for name in cutlass_ops.chain.FUNCTIONS:
        call = f"{name}({', '.join(p.name for p in chain[name].parameters)})"
        rows.append(f"| `{call}` | {' '.join(text(chain[name]))} |")
    blocks.append("\n".join(["| function | computes |", "|---|---|", *rows]))
    blocks += [f"## {REFERENCE}", *text(reference)]
    for name in cutlass_ops.reference.__all__:
        blocks += entry(reference, name, "reference.")
    return "\n\n".join(blocks) + "\n"


def main() -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/api.md is not current")
    options = parser.parse_args()
    made = document(ROOT)
    if options.check:
        if not PATH.exists() or PATH.read_text(encoding="utf-8") != made:
            print("error: docs/api.md is not what the docstrings say; run scripts/api_reference.py", file=sys.stderr)
            return 1
    else:
        PATH.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
