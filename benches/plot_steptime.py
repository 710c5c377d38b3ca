"""Draws docs/images/steptime.png: the step times of the table in docs/benchmarks.md, as bars.

The script reads the figures from the page, so that the picture and the table cannot differ. Run it after
the table has changed::

    python benches/plot_steptime.py

It needs matplotlib, which ``make demo`` installs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
HEADING = "## Step time between hosts"
BOUND = "compute alone"
METHODS = ("ddp", "ddp_fp16", "bytegrad", "async_low_precision", "powersgd", "diloco (every 32)")
LABELS = {"ddp": "DDP", "ddp_fp16": "DDP, fp16 hook"}
COLUMNS = ("2 hosts, 1 Gbit", "2 hosts, 100 Mbit")


def step_times(page: str) -> dict[str, dict[str, float]]:
    """Milliseconds per step, by column and method.

    Args:
        page: The text of docs/benchmarks.md.

    Raises:
        ValueError: The page has no step-time section, or its table lacks a column that is drawn.
    """
    section = page.partition(HEADING)[2].partition("\n## ")[0]
    if not section:
        raise ValueError(f"docs/benchmarks.md has no section {HEADING!r}")
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    head, body = [cell.strip() for cell in rows[0]], rows[2:]
    return {name: {row[0].strip(): float(row[head.index(name)]) for row in body} for name in COLUMNS}


def draw(times: dict[str, dict[str, float]], file: Path) -> None:
    """Draws one panel for each network; a dashed line marks the step with no communication."""
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    panels = figure.subplots(1, len(times), sharey=True)
    for axes, (title, column) in zip(panels, times.items(), strict=True):
        values = [column[name] for name in METHODS]
        labels = [LABELS.get(name, name.partition(" ")[0]) for name in METHODS]
        colours = ["0.65" if name in LABELS else "tab:blue" for name in METHODS]
        bars = axes.barh(labels, values, color=colours)
        axes.bar_label(bars, fmt="%d ms", padding=3, fontsize="small")
        axes.axvline(column[BOUND], color="black", linestyle="--", linewidth=1)
        axes.set(title=title, xlim=(0, max(values) * 1.2))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.supxlabel("time per step; dashed: no communication (lower bound)", fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Reads the page and writes the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "steptime.png")
    args = parser.parse_args()
    draw(step_times(args.page.read_text()), args.out)


if __name__ == "__main__":
    main()
