"""Links, anchors, files and tests that documents name exist."""

from __future__ import annotations

import re

import pytest

from .documents import ROOT, Document, documents, has_test

DOCUMENTS = documents()
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
#: Where a path may begin; paths in the package are also written without it.
ROOTS = (ROOT, ROOT / "cutlass_ops", ROOT / "cutlass_ops" / "codegen", ROOT / "cutlass_ops" / "codegen" / "include" / "cutlass_ops")
FOLDERS = (
    "docs/",
    "scripts/",
    "tests/",
    "cutlass_ops/",
    "generated/",
    "codegen/",
    "kernels/",
    "include/",
    "fused/",
    "benchmark/",
    "specs/",
    ".ci/",
)
FILE = re.compile(r"[\w.*-]+\.(py|hpp|cu|json|md|svg|png|txt|toml|yaml)")
#: Files that documents speak of and that are not the repository's: users' own, and what a build or a run writes.
NOT_OURS = {"my_ops.py", "specs.py"}


def words(document: Document) -> set[str]:
    """What looks like a path in text, inline code and text blocks."""
    texts = [t.content for t in document.inline if t.type in ("text", "code_inline")]
    texts += [b.text for b in document.blocks if b.language in ("text", "")]
    return {word.rstrip(".,:;)") for text in texts for word in re.findall(r"[\w./*:-]+", text)}


def exists(path: str) -> bool:
    return any(any(root.glob(path)) for root in ROOTS)


def test_there_are_documents():
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/how-it-works.md", "docs/api.md"} <= {d.name for d in DOCUMENTS}
    assert all(d.tokens for d in DOCUMENTS)


@each_document
def test_links_and_anchors_lead_somewhere(document):
    broken = []
    for link in document.links:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.path.parent / path).resolve() if path else document.path
        if not target.exists() or (anchor and anchor not in Document(target).anchors):
            broken.append(link)
    assert broken == []


@each_document
def test_files_that_are_named_exist(document):
    missing = []
    for word in words(document):
        path = word.partition("::")[0]
        if path.startswith(FOLDERS):
            if not exists(path.rstrip("/")):
                missing.append(word)
        elif FILE.fullmatch(path) and path not in NOT_OURS and not any(exists(f"{folder}{path}") for folder in ("", *FOLDERS)):
            missing.append(word)
    assert missing == []


@each_document
def test_tests_that_are_named_exist(document):
    named = [word for word in words(document) if word.startswith("tests/") and "::" in word]
    assert [node for node in named if not has_test(node)] == []


def test_every_document_in_docs_is_linked_from_another():
    linked = {(d.path.parent / link.partition("#")[0]).resolve() for d in DOCUMENTS for link in d.links}
    assert [d.name for d in DOCUMENTS if d.path.parent == ROOT / "docs" and d.path not in linked] == []
