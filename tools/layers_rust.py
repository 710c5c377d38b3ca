"""Holds the rooms of ``rust/engine/src``: a file uses files of its own room and of the rooms above it in the
list, and no files use each other in a circle.

Reads the sources only: every ``crate::room::file`` outside of tests counts. Run by ``tools/check_layers.py``.
"""

import re
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "rust" / "engine" / "src"

#: Each floor's rooms; those of one floor do not use each other.
FLOORS = [
    ["sys", "security"],
    ["host"],
    ["lanes"],
    ["transport", "group"],
    ["link", "health"],
    ["call"],
    ["drive"],
    ["runtime"],
    ["bootstrap", "device"],
]

#: A room's files stand on each other at most this high.
MOST_FLOORS_IN_A_ROOM = 5

_FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def _code(text: str) -> str:
    """Without comments, and without what only tests compile."""
    text = re.sub(r"//[^\n]*", "", text)
    found = re.search(r"#\[cfg\((?:all\()?test\b[^\n]*\]\s*mod tests \{", text)
    return text[: found.start()] if found else text


def _trees(code: str, at: int) -> list[str]:
    """The paths of the use tree whose brace opens before ``at``, each written out."""
    paths, prefix, name = [], [""], ""
    for char in code[at:]:
        if char == "{":
            prefix.append(prefix[-1] + name.strip())
            name = ""
        elif char in ",}":
            if name.strip():
                paths.append(prefix[-1] + name.strip())
            name = ""
            if char == "}":
                prefix.pop()
                if not prefix:
                    break
        else:
            name += char
    return paths


def _paths(code: str, room: str) -> set[str]:
    """The ``room::file`` of every path that starts at the crate, or at this room."""
    found = re.findall(r"\bcrate::(\w+::\w+)", code)
    found += [f"{room}::{name}" for name in re.findall(r"\bsuper::(\w+)", code)]
    for match in re.finditer(r"\b(?:crate::(?:(\w+)::)?|(super)::)\{", code):
        start = f"{room}::" if match[2] else f"{match[1]}::" if match[1] else ""
        found += [start + path for path in _trees(code, match.end())]
    return {"::".join(path.split("::")[:2]) for path in found}


def graph(source: Path = SOURCE) -> dict[str, set[str]]:
    """Which file uses which, as ``room/file``."""
    files = {
        f"{path.parent.relative_to(source)}/{path.stem}": path
        for path in sorted(source.rglob("*.rs"))
        if path.parent != source and path.stem != "mod"
    }
    uses = {}
    for name, path in files.items():
        used = _paths(_code(path.read_text()), str(path.parent.relative_to(source)))
        targets = {path.replace("::", "/") for path in used}
        uses[name] = {t for t in targets if t in files and t != name}
    return uses


def _circles(uses: dict[str, set[str]]) -> list[list[str]]:
    """Sets of files that use each other, each a sorted list."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in uses[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    reached = {name: reach(name) for name in uses}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in uses
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found)]


def _height(uses: dict[str, set[str]], room: str) -> int:
    """How many files of a room stand on each other; only where there is no circle."""

    def height(name: str) -> int:
        return 1 + max((height(t) for t in uses[name] if t.split("/")[0] == room), default=0)

    return max((height(name) for name in uses if name.split("/")[0] == room), default=0)


def check(source: Path = SOURCE) -> list[str]:
    """What is wrong with the rooms of the engine, a line each; nothing if all is well."""
    uses = graph(source)
    wrong = []
    for room in sorted({name.split("/")[0] for name in uses} - set(_FLOOR)):
        wrong.append(f"rust/engine/src/{room}: this room is not in the list of tools/layers_rust.py")
    for room in sorted(_FLOOR):
        text = source / room / "mod.rs"
        if not text.is_file() or not text.read_text().startswith("//!"):
            wrong.append(f"rust/engine/src/{room}/mod.rs does not say what lives there")
    for name, targets in sorted(uses.items()):
        room = name.split("/")[0]
        for target in sorted(targets):
            other = target.split("/")[0]
            if room != other and _FLOOR.get(other, -1) >= _FLOOR.get(room, len(FLOORS)):
                wrong.append(
                    f"rust/engine/src/{name}.rs uses {target}.rs, which is not in a room above it in the list"
                )
    circles = _circles(uses)
    wrong += [f"rust/engine/src: these files use each other: {', '.join(circle)}" for circle in circles]
    if not circles:
        for room in sorted(_FLOOR):
            floors = _height(uses, room)
            if floors > MOST_FLOORS_IN_A_ROOM:
                wrong.append(
                    f"rust/engine/src/{room}: its files stand {floors} high, at most {MOST_FLOORS_IN_A_ROOM}"
                )
    return wrong


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems) or f"rooms of rust/engine: {len(graph())} files, no arrow upwards, no circle")
    sys.exit(1 if problems else 0)
