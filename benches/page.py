"""Makes the measurements of docs/benchmarks.md anew: runs the commands of its sections, one after another.

    python benches/page.py --list
    python benches/page.py --sections "Busy cores,TCP between hosts" --out page-out

A section's commands stand in it, indented by four spaces, and nowhere else, so that the page and what made it
cannot differ. What each prints is kept in `--out`, a file for each section, with the machine, the date, the
commit, how busy the cores were before, and how long it took; a section whose file is there is not run again.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RUNS = ("python ", "trigram ", "cargo ")
"""What a line of the page begins with that is a command."""


def sections(page: str) -> dict[str, list[str]]:
    """The commands of each section, by its heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in page.replace("\\\n", " ").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("    ") and line.strip().startswith(RUNS):
            found.setdefault(heading, []).append(re.sub(r"\s+", " ", line).strip())
    return found


def machine() -> str:
    """What ran it, in a line."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown processor",
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], check=False, cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"{os.cpu_count()} cores of {cpu}, Linux {os.uname().release}, Python {sys.version.split()[0]}, "
        f"torch {torch.__version__}, commit {commit}, {time.strftime('%d %B %Y, %H:%M')}"
    )


def run(command: str, env: dict[str, str]) -> str:
    """What a command printed, and how it ended."""
    load, started = os.getloadavg()[0], time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command],
        check=False,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        text=True,
    )
    took = time.monotonic() - started
    ended = "" if done.returncode == 0 else f", FAILED with exit code {done.returncode}"
    return f"$ {command}\n(load {load:.1f} before; {took:.0f} s{ended})\n\n{done.stdout}\n"


def main() -> int:
    """Runs the chosen sections; returns how many have a command that failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only say which sections have which commands")
    parser.add_argument("--sections", type=lambda text: text.split(","), help="headings; else all of them")
    parser.add_argument("--out", type=Path, default=Path("page-out"))
    args = parser.parse_args()
    known = sections(PAGE.read_text())
    if args.list:
        for heading, commands in known.items():
            print(heading, *(f"    {command}" for command in commands), sep="\n")
        return 0
    chosen = args.sections or list(known)
    if missing := [heading for heading in chosen if heading not in known]:
        sys.exit(f"page.py: docs/benchmarks.md has no section with commands called {', '.join(missing)}")
    args.out.mkdir(parents=True, exist_ok=True)
    # The page says python, trigram: those of this environment, whatever the shell has.
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    failed = 0
    for heading in chosen:
        file = args.out / f"{re.sub('[^a-z0-9]+', '-', heading.lower())}.md"
        if file.exists():
            continue
        print(f"{heading}: {len(known[heading])} commands", file=sys.stderr, flush=True)
        texts = [run(command, os.environ | {"PATH": path}) for command in known[heading]]
        failed += any("FAILED with exit code" in text.splitlines()[1] for text in texts)
        file.write_text(f"# {heading}\n\n{machine()}\n\n" + "\n".join(texts))
        print(shlex.quote(str(file)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
