"""Builds the package: NCCL's network plugin first, then what maturin builds.

The wheel holds two libraries, and maturin makes one: the extension module. The plugin is loaded by NCCL,
in processes that need not be Python's, so it is a library of its own beside it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import maturin
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


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """See PEP 517."""
    _build_plugin()
    name: str = maturin.build_wheel(directory, settings, metadata)
    return name


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """See PEP 660."""
    _build_plugin()
    name: str = maturin.build_editable(directory, settings, metadata)
    return name


def _build_plugin() -> None:
    """Beside the Python sources, by the name that NCCL expects."""
    command = ["cargo", "rustc", "--release", "--locked", "--package", "trigram-net-plugin", "--lib"]
    command += ["--crate-type", "cdylib", "--message-format", "json-render-diagnostics"]
    made = subprocess.run(
        [*command, "--", "-C", "strip=symbols"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    messages = [json.loads(line) for line in made.stdout.splitlines()]
    files = [f for m in messages for f in m.get("filenames", []) if f.endswith("nccl_net_trigram.so")]
    # Renamed into place: a process that has the old one open keeps it.
    fresh = PLUGIN.with_suffix(".new")
    shutil.copyfile(files[-1], fresh)
    fresh.chmod(0o755)
    fresh.rename(PLUGIN)
