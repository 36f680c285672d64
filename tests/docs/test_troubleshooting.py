"""docs/troubleshooting.md has every message that the package raises, and quotes none that it has not."""

from __future__ import annotations

import ast
import re

import cutlass_ops

from .documents import ROOT, Document

PAGE = Document(ROOT / "docs" / "troubleshooting.md")
PACKAGE = ROOT / "cutlass_ops"
#: What people meet who measure, check or soak kernels: these commands explain themselves.
LEFT_OUT = ("benchmark", "soak.py", "accuracy.py")
#: Raised and caught in one module, as the cause of an InstallationError: function -> why.
CAUGHT = {
    "_check": "a record's fields: Manifest.load says that the manifest is damaged",
    "_check_offsets": "the same of where its fields lie",
    "_check_tiles": "the same of its variant and tiles",
    "_check_numbers": "the same of its numbers",
    "_check_names": "the same of its name and file",
    "_checked": "coefficients: Costs.load says that they cannot be read",
    "Manifest.load": "equal names: Manifest.load says that the manifest is damaged",
    "Costs.load": "another schema: Costs.load says that they cannot be read",
    "read_checks": "not an object: read_checks says that the records cannot be read",
}
ERRORS = (
    *("InstallationError", "UnsupportedDeviceError", "NoPlanError", "CudaError", "ChainError", "BuildError"),
    *("RegistersError", "UnknownNameError"),
)
BUILT_IN = ("TypeError", "ValueError", "NotImplementedError", "RuntimeError", "ModuleNotFoundError")
HOLE = "\N{REPLACEMENT CHARACTER}"  # what differs from message to message


def template(node: ast.expr) -> str:
    """A message with a hole for each value; a hole alone where it is computed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return HOLE


def raised(path, inside=""):
    """(function, error, template) of every message that a module raises itself, and of a chain's constructs."""

    def visit(node, where):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
            if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call) and child.exc.args:
                yield where, ast.unparse(child.exc.func), template(child.exc.args[0])
            elif isinstance(child, ast.Call) and ast.unparse(child.func) == "self.fail":
                yield where, "ChainError", template(child.args[1])
            yield from visit(child, [*where, child.name] if named else where)

    return visit(ast.parse(path.read_text(encoding="utf-8")), [])


MESSAGES = [
    (f"{path.relative_to(ROOT)}: {'.'.join(where)}", where, error, text)
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] not in LEFT_OUT
    for where, error, text in raised(path)
]
#: Of inline code those that are messages: words with holes, or sentences.
QUOTES = [code for code in PAGE.code if re.search(r"[a-z]{4}", code) and ("..." in code or " " in code)]


def pattern(quote: str) -> re.Pattern[str]:
    """What a quoted message stands for: `...` is a hole with its punctuation, at the end anything; a message may go on."""
    parts = [re.escape(part.strip()) for part in quote.removesuffix("...").split("...")]
    return re.compile(r"\W*?".join(parts))


PATTERNS = {quote: pattern(quote) for quote in QUOTES}


def is_caught(where) -> bool:
    return any(".".join(where).endswith(name) for name in CAUGHT)


def test_messages_and_quotes_are_found():
    assert len(MESSAGES) > 90
    assert len(QUOTES) > 90
    assert {error for _, _, error, _ in MESSAGES} >= set(ERRORS)
    for name in CAUGHT:
        assert any(".".join(where).endswith(name) for _, where, _, _ in MESSAGES), name


def test_every_message_is_on_the_page():
    wanted = {(site, text) for site, where, error, text in MESSAGES if error in ERRORS + BUILT_IN and not is_caught(where)}
    missing = [
        f"{site}: {text.replace(HOLE, '...')}"
        for site, text in sorted(wanted)
        if text.strip(HOLE) and not any(p.match(text.replace("`", "")) for p in PATTERNS.values())
    ]
    assert missing == [], "add them to docs/troubleshooting.md"


def test_every_error_of_the_package_has_a_heading():
    headings = " ".join(token.content for i, token in enumerate(PAGE.tokens) if PAGE.tokens[i - 1].type == "heading_open")
    exported = [e for e in ERRORS if e in cutlass_ops.__all__]
    assert [error for error in exported if error not in headings] == []


def test_every_quoted_message_exists():
    """In a string of the package or of the shell scripts."""
    texts = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts += [template(node).replace("`", "") for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    for name in ("_setup.sh", "test"):
        text = (ROOT / "scripts" / name).read_text(encoding="utf-8")
        texts.append(re.sub(r"\$\{?\w+(:-)?\}?", HOLE, text))
    assert [quote for quote, p in PATTERNS.items() if not any(p.search(text) for text in texts)] == []
