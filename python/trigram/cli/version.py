"""`trigram --version`: the version, the commit that it was built from, and what it runs with."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import torch

import trigram

_PACKAGE = Path(trigram.__file__).parent


def text() -> str:
    """One line."""
    parts = f"commit {commit()}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"trigram {trigram.__version__} ({parts})"


def commit() -> str:
    """The commit that a wheel was built from, or that a clone has checked out now; else `unknown`."""
    file = _PACKAGE / "COMMIT"
    if file.exists():
        return file.read_text().strip()
    clone = _PACKAGE.parent.parent
    if not (clone / ".git").exists() or shutil.which("git") is None:
        return "unknown"
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    done = subprocess.run(asked, cwd=clone, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip() or "unknown"
