"""Builds the documentation site from the Markdown pages of the repository, which stay as they are.

The pages keep their places, so their links among each other hold; links to sources lead to the repository.
The reference of the API is made of the public names, their signatures and docstrings.

    python tools/build_site.py            writes site-out/html
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

from check_links import LINK, ROOT

OUT = ROOT / "site-out"
PAGES = OUT / "pages"
SOURCES = "https://github.com/trigram-project/trigram/blob/main/"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?\.?([^`]+)`")
"""A reference as Sphinx writes it: Markdown shows the name."""
NAMES = ROOT / "tests/support/public_names.txt"
"""Every public name, which the tests compare with the sources."""


def main() -> int:
    """Writes the pages, and builds the site; returns the exit status."""
    shutil.rmtree(OUT, ignore_errors=True)
    home = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
    found = [ROOT / name for name in home]
    found += [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/launch/README.md"]
    staged = {page: PAGES / _name(page) for page in found}
    for page, target in staged.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(LINK.sub(lambda link, page=page: _link(link, page, staged), page.read_text()))
    shutil.copytree(ROOT / "docs/images", PAGES / "docs/images")
    (PAGES / "api.md").write_text(reference())
    for file in sorted((ROOT / "python").rglob("*.py")):
        staged_source = OUT / file.relative_to(ROOT)
        staged_source.parent.mkdir(parents=True, exist_ok=True)
        staged_source.write_text(ROLE.sub(r"`\1`", file.read_text()))
    return subprocess.call([sys.executable, "-m", "zensical", "build", "--strict"], cwd=ROOT)


def _name(page: Path) -> str:
    """A page's place in the site: the README is its first page."""
    name = str(page.relative_to(ROOT))
    return "index.md" if name == "README.md" else name


def _link(link: re.Match[str], page: Path, staged: dict[Path, Path]) -> str:
    """A link as the site needs it: to the page of the site, or to the repository."""
    path, _, anchor = link[1].partition("#")
    file = (page.parent / path).resolve()
    if ":" in link[1] or not path or (file in staged and file.name != "README.md") or file.suffix == ".png":
        return link[0]
    anchor = f"#{anchor}" if anchor else ""
    if file in staged:
        up = "../" * (len(staged[page].relative_to(PAGES).parts) - 1)
        return link[0].replace(link[1], f"{up}{_name(file)}{anchor}")
    return link[0].replace(link[1], f"{SOURCES}{file.relative_to(ROOT)}{anchor}")


def reference() -> str:
    """The page of the API: every public name of every public module."""
    parts, seen = ["# API\n"], set()
    for module in sorted({name.rpartition(".")[0] for name in NAMES.read_text().split()}):
        parts.append(f"## {module}\n")
        path = ROOT / "python" / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for name, source in public_names(file, module).items():
            full = f"{source}.{name}"
            if full not in seen:
                options = f"    options:\n      heading: {module}.{name}\n      toc_label: {name}\n"
                parts.append(f"::: {full}\n{options}")
            seen.add(full)
    return "\n".join(parts)


def public_names(file: Path, module: str) -> dict[str, str]:
    """The names in a module's `__all__`, each with the module that it comes from; nothing is imported."""
    body = ast.parse(file.read_text()).body
    sources = {
        alias.asname or alias.name: node.module or module
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = sorted(ast.literal_eval(node.value), key=str.lower)
            return {name: sources.get(name, module) for name in names if not name.startswith("_")}
    raise ValueError(f"{file} has no __all__")


if __name__ == "__main__":
    sys.exit(main())
