"""The Markdown pages that users read, and the blocks of code in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str | None = None) -> list[tuple[str, str]]:
    """Language and text of each block of code, or of those in one language."""
    found = [(block.group(2), block.group(3)) for block in _FENCE.finditer(page.read_text())]
    return [each for each in found if language is None or each[0] == language]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `millrace` command in lines of shell: without variables, pipes and what surrounds it."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word[0] not in ";&|<>()":
                words.append(word)
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]
            if words and words[0] == "millrace":
                yield words[1:]
            words = []
