"""The repository's Markdown documents, parsed: code blocks, inline code, links and anchors."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
#: Languages of fenced blocks that hold commands; "" is an indented block.
SHELL = ("", "sh", "bash", "shell", "console")
#: What inline code begins with where it is a command to type, not the mention of one.
PROGRAM = re.compile(
    r"(\./scripts/|\.venv/bin/|python (scripts/|-m pytest)|pip install \S|cutlass-ops [a-z]+ \S|(torchrun|pre-commit|pytest) "
    r"|(ncu|cuobjdump) -|[A-Z_]+=\S+ \S)"
)


@dataclass(frozen=True)
class Block:
    """A code block: its language ("" if it is indented), its text, its first line, and the paragraph before it."""

    language: str
    text: str
    line: int
    before: str


@dataclass(frozen=True)
class Document:
    """A Markdown file below the root."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @functools.cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.path.read_text(encoding="utf-8"))

    @functools.cached_property
    def inline(self) -> list[Token]:
        """Text, inline code, links and images, in order."""
        return [child for token in self.tokens if token.type == "inline" for child in token.children or ()]

    @property
    def blocks(self) -> list[Block]:
        found, before = [], ""
        for token in self.tokens:
            if token.type in ("fence", "code_block"):
                assert token.map is not None
                found.append(Block(token.info.strip().split(" ")[0], token.content, token.map[0] + 1, before))
            elif token.type == "inline":
                before = token.content
        return found

    @property
    def code(self) -> list[str]:
        """Inline code."""
        return [token.content for token in self.inline if token.type == "code_inline"]

    @property
    def links(self) -> list[str]:
        """Targets of links and images."""
        return [str(token.attrs[name]) for token in self.inline for name in ("href", "src") if name in token.attrs]

    @property
    def anchors(self) -> set[str]:
        """Those that GitHub gives to headings."""
        headings = [self.tokens[i + 1] for i, token in enumerate(self.tokens) if token.type == "heading_open"]
        texts = ("".join(child.content for child in heading.children or ()) for heading in headings)
        return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}

    def commands(self) -> Iterator[str]:
        """Every command line: of shell blocks, and inline."""
        for block in self.blocks:
            if block.language in SHELL:
                yield from _lines(block)
        yield from (code for code in self.code if PROGRAM.match(code))


def _lines(block: Block) -> Iterator[str]:
    """A shell block's commands: joined where they go on, without prompts, comments, and what a prompt's command prints."""
    text = block.text.replace("\\\n", " ")
    prompts = block.language == "console" and re.search(r"^\$ ", text, re.MULTILINE)
    for line in text.splitlines():
        if prompts and not line.startswith("$ "):
            continue
        command = " ".join(re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).split())
        if command:
            yield command


def documents() -> list[Document]:
    """All of them."""
    return [Document(path) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])]


def has_test(node: str) -> bool:
    """Whether `path::name` names a test function."""
    path, _, name = node.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return any(isinstance(item, ast.FunctionDef) and item.name == name for item in ast.walk(tree))
