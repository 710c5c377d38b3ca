"""Checks the dependencies of the Rust crates: python -> engine -> core and nccl-rs. Core depends on
neither tokio nor pyo3; the network plugin depends on no other crate of the workspace.

Run by ``make test``. Reads ``cargo metadata`` only, so it needs nothing installed.
"""

import json
import subprocess
import sys

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
    """Prints the forbidden dependencies; returns 1 if there are any."""
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
    print("\n".join(wrong) or f"layers: {', '.join(FORBIDDEN)} have no forbidden dependencies")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
