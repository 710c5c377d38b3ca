"""Checks the links of all Markdown pages: that files exist, and that pages have the headings of anchors.

The navigation of the site must have every page of docs/.

It reads files and needs nothing installed. Addresses on the web are not visited.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """The Markdown files that git knows, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that both GitHub and the site make from a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        github = re.sub(r"[^\w\s-]", "", plain.lower()).strip().replace(" ", "-")
        if re.sub(r"-+", "-", github) == github:
            found.add(github)
    return found


def wrong_links(page: Path) -> list[str]:
    """What is wrong with the links of a page."""
    wrong = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            wrong.append(f"{target}: there is no such file")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            wrong.append(f"{target}: {file.name} has no such heading")
    return wrong


def left_out() -> list[str]:
    """Pages that nobody finds on the site."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    names = [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
    return [f"mkdocs.yml: {name} is not in nav" for name in names if f": {name}\n" not in navigation]


def main() -> int:
    """Prints the links that lead nowhere, and the pages to which none leads; returns 1 if there are any."""
    found = pages()
    wrong = [f"{page.relative_to(ROOT)}: {text}" for page in found for text in wrong_links(page)]
    wrong += left_out()
    print("\n".join(wrong) or f"links: those of {len(found)} pages lead somewhere")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
