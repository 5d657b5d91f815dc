"""The English of docstrings, messages and documents: rates of words that the field does not use.

A rate, per 1,000 words, leaves room for a sentence that is right as it is. Lower a limit when a rate has fallen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import ROOT

PATTERNS = {
    "ranks and files that say, tell or hear": r"\b(says?|said|tells?|told|hears?|heard)\b",
    "files and arrays that lie somewhere": r"\b(lies?|lay|lying)\b",
    "clauses with 'what' as a noun":
        r"(?:^|[.:;,]\s+)[Ww]hat (?!to\b|if\b|happens\b)[a-z]+|\b(?:of|to|and|is|with) what (?:is|it|a|the)\b",
    "owners in place of adjectives": r"\bof [A-Z]\w*['’]s\b|\b(?:ours|theirs)\b",
    "nobody, anew, beside, but for": r"\b(?:nobody|somebody|anew|beside|whence|but for|so many)\b",
    "is no, has none": r"\b(?:is|are) no (?!longer|more|such)[a-z]+|\b(?:is|has) none\b",
}  # fmt: skip

LIMITS = {
    "docstrings": (0.1, 0.1, 0.1, 0.2, 0.1, 0.6),
    "messages": (5.0, 1.8, 1.4, 0.4, 2.8, 5.6),
    "documents": (5.5, 1.1, 2.0, 1.3, 2.0, 1.0),
}
"""Most hits per 1,000 words, in the order of `PATTERNS`: those of messages and documents are today's rates."""

CLAUSE = re.compile(r"(What|Whether|How|Who|Whoever|Which|Whose)\b")

SOURCES = [path for package in ("xla_ckpt", "neuron_compat") for path in sorted((ROOT / package).rglob("*.py"))]


def docstrings_of(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes, functions and fields, without examples and names of code."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else ()
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield re.sub(r"`[^`]*`", "x", re.sub(r"(?m)^\s*>>>(.|\n)*?(?=^\s*$|\Z)", "", statement.value.value))


def messages_of(path: Path) -> Iterator[str]:
    """Yield the texts that a module passes to errors and loggers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called.endswith(("Error", "Warning")) or called in ("warning", "error", "info", "debug"):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                        yield part.value


def documents() -> Iterator[str]:
    """Yield the documents, without blocks of code and measurements."""
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        yield re.sub(r"`[^`]*`", "x", re.sub(r"(?s)^```.*?^```", "", path.read_text(), flags=re.MULTILINE))


TEXTS = {
    "docstrings": [text for path in SOURCES for text in docstrings_of(path)],
    "messages": [text for path in SOURCES for text in messages_of(path)],
    "documents": list(documents()),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_texts_use_the_words_of_the_field(kind: str) -> None:
    words = sum(len(text.split()) for text in TEXTS[kind])
    assert words > 1_000
    found = {
        name: 1_000 * sum(len(re.findall(pattern, text)) for text in TEXTS[kind]) / words
        for name, pattern in PATTERNS.items()
    }
    limits = dict(zip(PATTERNS, LIMITS[kind], strict=True))
    assert {name: rate for name, rate in found.items() if rate > limits[name]} == {}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert [text.strip()[:60] for text in TEXTS["docstrings"] if CLAUSE.match(text.strip())] == []
