"""Checks the imports of python/trigram: a room uses only rooms above it in ``ROOMS``, and there are no
cycles.

Rooms are the folders, in the order of ``ROOMS``; the modules beside them are named there too. Imports inside
functions count, and each needs a comment that says why it is not at the top of its file.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "python"

BELOW_STEPS = {
    "errors",
    "runtime",
    "observe",
    "codecs",
    "gpu",
    "collectives",
    "averaging",
    "elastic",
    "optimizers",
}
BELOW_TRAINING = BELOW_STEPS | {"algorithms", "mixing", "steps", "gradients", "sharded"}

ROOMS = {
    "errors": set(),
    "runtime": {"errors"},
    "observe": {"errors", "runtime"},
    "codecs": {"errors"},
    "algorithms": {"errors", "runtime", "codecs"},
    "gpu": {"errors", "runtime"},
    "collectives": {"errors", "runtime", "gpu"},
    "backend": {"errors", "runtime", "observe", "gpu", "collectives"},
    "averaging": {"errors", "runtime", "codecs", "algorithms", "gpu", "collectives"},
    "mixing": {"errors", "runtime", "observe", "codecs", "algorithms", "gpu", "collectives", "averaging"},
    "elastic": {"errors", "runtime", "collectives", "averaging"},
    "optimizers": {"errors", "runtime", "observe", "algorithms", "averaging", "collectives"},
    "steps": BELOW_STEPS,
    "gradients": BELOW_STEPS | {"algorithms", "steps"},
    "sharded": BELOW_STEPS - {"codecs"} | {"steps", "gradients"},
    "training": BELOW_TRAINING,
    "plan": {
        "errors",
        "runtime",
        "codecs",
        "algorithms",
        "collectives",
        "averaging",
        "mixing",
        "optimizers",
        "steps",
        "gradients",
        "sharded",
        "training",
    },
    "model": BELOW_TRAINING | {"training", "plan"},
    "data": {"errors", "runtime", "collectives"},
    "moe": {"errors", "runtime", "codecs", "collectives"},
}
"""Which rooms each room may use."""
OUTSIDE = {
    "integrations": set(ROOMS) | {"package"},
    "graphs": {"algorithms"},
    "exchange": {"mixing"},
    "compat": set(ROOMS) | {"package"},
    "cli": set(ROOMS) | {"package"},
    "launching": {"errors", "runtime"},
    "_command": set(),
    "__main__": {"cli"},
}
"""Modules beside the rooms: old and short names of what is in one, and the command line."""
MAY_USE = {**ROOMS, **OUTSIDE, "package": set(ROOMS) | {"launching", "_command"}}
MOST_FLOORS = 5


def _modules() -> dict[str, Path]:
    found = {}
    for file in sorted((ROOT / "trigram").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "package"


def _imports(module: str, file: Path, modules: dict[str, Path]) -> tuple[set[str], list[str]]:
    """The modules that one imports, and imports inside functions that do not say why."""
    lines = file.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    at_top = {id(node) for node in tree.body}
    at_top |= {id(node) for found in tree.body if isinstance(found, ast.If) for node in found.body}
    used, hidden = set(), []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        names = [n for n in names if n.split(".")[0] == "trigram" and n != "trigram._core"]
        used |= {n if n in modules else n.rpartition(".")[0] for n in names}
        if names and id(node) not in at_top:
            near = lines[max(node.lineno - 2, 0) : node.lineno]
            if not any("#" in line for line in near):
                hidden.append(
                    f"{module}, line {node.lineno}: an import inside a function says why in a comment"
                )
    return used & modules.keys() - {module}, hidden


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for following in graph[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        return seen

    reached = {module: reach(module) for module in graph}
    groups = {frozenset({m, *(o for o in reached[m] if m in reached[o])}) for m in graph if m in reached[m]}
    return sorted(sorted(group) for group in groups)


def check() -> list[str]:
    """What is wrong, a line each; nothing if the rooms hold."""
    modules = _modules()
    wrong: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        graph[module], hidden = _imports(module, file, modules)
        wrong += hidden
        if file.name == "__init__.py" and not ast.get_docstring(ast.parse(file.read_text())):
            wrong.append(f"{module} does not say what lives there")
    for module, used in graph.items():
        room = _room(module)
        if room not in MAY_USE:
            wrong.append(f"{module} is in no room of tools/layers_python.py")
            continue
        wrong += [
            f"{module} uses {other}: {room} may use {', '.join(sorted(MAY_USE[room])) or 'no other room'}"
            for other in sorted(used)
            if _room(other) not in {room, *MAY_USE[room]}
        ]
    circles = _circles(graph)
    wrong += [f"these import each other: {', '.join(circle)}" for circle in circles]
    if circles:
        return wrong

    def folder(module: str) -> str:
        return str(modules[module].parent)

    @cache
    def floor(module: str) -> int:
        return 1 + max((floor(m) for m in graph[module] if folder(m) == folder(module)), default=0)

    wrong += [
        f"{module} is on floor {floor(module)} of its folder; {MOST_FLOORS} are the most"
        for module in sorted(graph)
        if floor(module) > MOST_FLOORS
    ]
    return wrong
