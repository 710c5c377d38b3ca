"""Figures of one run: printed, and written one by one as they are measured, so that a run that is ended keeps
what it has.

`tools/gpu_report.py` names the file in `TRIGRAM_FIGURES`, and puts the figures of several scripts on one
page.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


class Figures:
    """Writes figures to the file that `TRIGRAM_FIGURES` names, if it does."""

    def __init__(self) -> None:
        named = os.environ.get("TRIGRAM_FIGURES")
        self.file = Path(named) if named else None

    def add(self, what: str, value: float | str, unit: str = "", least: float | None = None) -> None:
        """Adds a figure; with `least`, it is held against that bar."""
        shown = value if isinstance(value, str) else f"{value:.4g}"
        bar = "" if least is None else f" (at least {least:g})"
        print(f"{what}: {shown} {unit}{bar}", flush=True)
        if self.file is not None:
            with self.file.open("a") as lines:
                lines.write(json.dumps({"what": what, "value": value, "unit": unit, "least": least}) + "\n")
