"""Checks the layers: which crate may depend on which, and the rooms of the engine and of the Python package.

Python uses the engine, the engine uses core and nccl-rs; core depends on neither tokio nor pyo3, and the
network plugin on no other crate of the workspace. Run by ``make test``; it reads sources and ``cargo
metadata``, and needs nothing installed.
"""

import json
import subprocess
import sys

import layers_python
import layers_rust

FORBIDDEN = {
    "trigram-core": {"tokio", "pyo3", "rustix", "libc", "trigram-engine", "trigram-python"},
    "trigram-engine": {"pyo3", "trigram-python"},
    "nccl-rs": {"pyo3", "tokio", "trigram-core", "trigram-engine", "trigram-python"},
    "trigram-net-plugin": {"pyo3", "tokio", "nccl-rs", "trigram-core", "trigram-engine", "trigram-python"},
}


def reachable(graph: dict[str, list[str]], start: str) -> set[str]:
    """Package ids that ``start`` depends on, directly or not, outside of tests."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for package in graph[todo.pop()]:
            if package not in seen:
                seen.add(package)
                todo.append(package)
    return seen


def main() -> int:
    """Prints what breaks the layers; returns 1 if anything does."""
    text = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--locked"], check=True, capture_output=True, text=True
    ).stdout
    metadata = json.loads(text)
    names = {p["id"]: p["name"] for p in metadata["packages"]}
    graph = {
        n["id"]: [d["pkg"] for d in n["deps"] if any(k["kind"] is None for k in d["dep_kinds"])]
        for n in metadata["resolve"]["nodes"]
    }
    wrong = [
        f"{crate} depends on {name}"
        for crate, forbidden in FORBIDDEN.items()
        for package in (i for i, n in names.items() if n == crate)
        for name in sorted(forbidden & {names[p] for p in reachable(graph, package)})
    ]
    wrong += layers_rust.check() + layers_python.check()
    print("\n".join(wrong) or "layers: the crates, the rooms of the engine and the rooms of Python hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
