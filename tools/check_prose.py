"""Checks the prose of the pages for users: lines of at most 100 columns, sentences of at most 35 words.

Of a page, only paragraphs and items of lists are looked at: not tables, headings and code. A word that is
longer than a line, such as an address, may stand on a line of its own. A span of code is one word, and so is
a formula.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, WORDS = 100, 35
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[^a-z])")
"""Between two sentences; an abbreviation is followed by a small letter."""
WORD = re.compile(r"(?:[-*+] )?(?:[^\s`\[]*(?:`[^`]*`|!?\[[^\]]*\]\([^)]*\))?[^\s`\[]*)")
"""What cannot be broken: a word, a span of code or a link, with the signs around it."""
SIGN = re.compile(r"^[^\w`]+$")


def pages() -> list[Path]:
    """The pages for users and for those who change the project."""
    names = "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").glob("*.md"))]


def plain(token: Token) -> str:
    """The text of a paragraph; a span of code is a word."""
    parts = []
    for child in token.children or []:
        if child.type == "code_inline":
            parts.append("code")
        elif child.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif child.type == "text":
            parts.append(child.content)
    return "".join(parts)


def wrong(page: Path) -> Iterator[str]:
    """What is wrong with a page, a line each."""
    text = page.read_text()
    lines = text.split("\n")
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    for opened, inline in itertools.pairwise(tokens):
        if opened.type != "paragraph_open" or opened.map is None:
            continue
        first, last = opened.map
        where = f"{page.relative_to(ROOT)}:{first + 1}"
        for number, line in enumerate(lines[first:last], first + 1):
            if len(line) > COLUMNS and not WORD.fullmatch(line.strip()):
                yield f"{page.relative_to(ROOT)}:{number}: {len(line)} columns"
        for sentence in END.split(plain(inline)):
            count = sum(1 for word in sentence.split() if not SIGN.match(word))
            if count > WORDS:
                yield f"{where}: a sentence of {count} words: {sentence[:60]} ..."


def main() -> int:
    """Prints what is wrong; returns 1 if anything is."""
    found = [line for page in pages() for line in wrong(page)]
    print("\n".join(found) or f"prose: {len(pages())} pages have short lines and short sentences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
