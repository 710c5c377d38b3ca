"""The build backend (PEP 517): builds NCCL's network plugin, then calls maturin.

The wheel contains two libraries. maturin builds only the extension module; the plugin is a separate library
because NCCL loads it, also in processes without Python. A wheel also says which commit it is of, and has the
licences of the crates in its libraries.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import maturin
import third_party
from maturin import (
    build_sdist,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

get_requires_for_build_editable = maturin.get_requires_for_build_editable
prepare_metadata_for_build_editable = maturin.prepare_metadata_for_build_editable

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "python/trigram/libnccl-net-trigram.so"
COMMIT = ROOT / "python/trigram/COMMIT"
LICENCES = ROOT / "python/trigram/THIRD_PARTY_LICENSES.txt"


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """See PEP 517."""
    build_plugin()
    with described():
        name: str = maturin.build_wheel(directory, settings, metadata)
    return name


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """See PEP 660."""
    build_plugin()
    name: str = maturin.build_editable(directory, settings, metadata)
    return name


@contextlib.contextmanager
def described() -> Iterator[None]:
    """A block in which the sources have what a wheel says of itself. An installation that is editable asks
    git instead, so the files go afterwards."""
    made = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        COMMIT.write_text(made.stdout.strip() or "unknown")
        third_party.write(LICENCES)
        yield
    finally:
        COMMIT.unlink(missing_ok=True)
        LICENCES.unlink(missing_ok=True)


def build_plugin(cargo: Sequence[str] = ("cargo",), target: Sequence[str] = ()) -> None:
    """Builds the plugin into python/trigram, under the name that NCCL expects.

    Args:
        cargo: The command that compiles.
        target: Its arguments that name another target than this machine.
    """
    command = [*cargo, "rustc", "--release", "--locked", "--package", "trigram-net-plugin", "--lib", *target]
    command += ["--crate-type", "cdylib", "--message-format", "json-render-diagnostics"]
    made = subprocess.run(
        [*command, "--", "-C", "strip=symbols"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    messages = [json.loads(line) for line in made.stdout.splitlines()]
    files = [f for m in messages for f in m.get("filenames", []) if f.endswith("nccl_net_trigram.so")]
    # Renaming leaves the old file intact for processes that have it open.
    fresh = PLUGIN.with_suffix(".new")
    shutil.copyfile(files[-1], fresh)
    fresh.chmod(0o755)
    fresh.rename(PLUGIN)
