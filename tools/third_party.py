"""Writes the licences of the Rust crates that are compiled into the wheel, with their texts, into one file.

    python tools/third_party.py FILE

Needs the sources of the crates, which cargo has after a build.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUILT = ("trigram-python", "trigram-net-plugin")
"""What the libraries of the wheel are made from."""
_TEXTS = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "license*")
_HEAD = """Trigram's libraries contain these Rust crates, or are built with them.
Each is under the licence named; their texts follow.
"""


def crates() -> list[dict[str, Any]]:
    """The crates of others that are compiled into the wheel, or are run to build it, by name."""
    done = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--locked"], cwd=ROOT, capture_output=True, check=True
    )
    found = json.loads(done.stdout)
    packages = {p["id"]: p for p in found["packages"]}
    nodes = {n["id"]: n for n in found["resolve"]["nodes"]}
    reached: set[str] = set()
    ahead = [i for i, p in packages.items() if p["name"] in BUILT]
    while ahead:
        if (now := ahead.pop()) in reached:
            continue
        reached.add(now)
        for dependency in nodes[now]["deps"]:
            if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"]):
                ahead.append(dependency["pkg"])
    others = [packages[i] for i in reached if packages[i]["source"] is not None]
    return sorted(others, key=lambda p: (p["name"], p["version"]))


def text() -> str:
    """The whole file: the list, then each text once, with the crates that have it."""
    found = crates()
    lines = [_HEAD, *(f"{p['name']} {p['version']}: {p['license'] or 'see below'}" for p in found)]
    texts: dict[str, list[str]] = {}
    for p in found:
        folder = Path(p["manifest_path"]).parent
        name = f"{p['name']} {p['version']}"
        files = sorted({f for pattern in _TEXTS for f in folder.glob(pattern) if f.is_file()})
        for f in files:
            said = f.read_text(encoding="utf-8", errors="replace").strip()
            texts.setdefault(said, []).append(f"{name} ({f.name})")
        if not files:
            lines.append(f"{name} comes without a text; its authors: {', '.join(p['authors']) or 'unnamed'}")
    for said, who in texts.items():
        lines.append(f"\n{'=' * 80}\n{textwrap.fill(', '.join(who), 80)}\n\n{said}")
    return "\n".join(lines) + "\n"


def write(file: Path) -> None:
    """Writes the file."""
    file.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
