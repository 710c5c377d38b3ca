"""What faults cost jobs of 100 to 10,000 ranks: the table of docs/planning.md, and docs/images/goodput.png.

The simulation is that of ``trigram goodput``::

    python benches/goodput_at_scale.py [--out docs/images/goodput.png]

It needs matplotlib, which ``make demo`` installs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from trigram.plan.goodput import Setting, elastic, meetings, restarted

ROOT = Path(__file__).resolve().parent.parent
HOUR = 3600.0
PARAMETERS, LINK = 7e9, 0.948 * 25 / 8 * 1e9
"""The model, and what payloads get of a link of 25 Gbit/s, in bytes per second."""
CHANCES = {"50,000 h": 50_000 * HOUR, "500 h": 500 * HOUR}
"""Mean times between failures of a rank: of a machine that is kept, and of a preemptible one."""
SIZES = (100, 1000, 10_000)
CURVE = (100, 200, 500, 1000, 2000, 5000, 10_000)


def goodputs(setting: Setting) -> dict[str, float]:
    """By kind of job, the part of the ranks' time that counts."""
    found = {"from checkpoints": restarted(setting).goodput}
    return found | {f"elastic, {kind.title}": elastic(setting, kind).goodput for kind in meetings(32)}


def main() -> None:
    """Prints the table, and draws."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, default=ROOT / "docs/images/goodput.png")
    out = options.parse_args().out
    # Weights and Adam's moments go to a rank that joins; the mean of all weights has its bytes twice.
    transfer, moments = 12 * PARAMETERS / LINK, 8 * PARAMETERS / LINK
    setting = Setting(SIZES[0], step=2.0, mtbf=HOUR, transfer=transfer, moments=moments, mean=moments)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rows: dict[str, list[str]] = {}
    axes = figure.subplots(1, len(CHANCES), sharey=True)
    for panel, (title, mtbf) in zip(axes, CHANCES.items(), strict=True):
        curves = {n: goodputs(replace(setting, ranks=n, mtbf=mtbf)) for n in CURVE}
        for name, style in zip(curves[SIZES[0]], ("k--", "C0o-", "C3d-", "C1s-", "C2^-"), strict=True):
            panel.plot(CURVE, [100 * curves[n][name] for n in CURVE], style, label=name, markersize=4)
            rows.setdefault(name, []).extend(f"{100 * curves[n][name]:.2f} %" for n in SIZES)
        panel.set(xscale="log", xlabel="ranks", title=f"a rank fails every {title}", ylim=(0, 102))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("goodput, %")
    axes[0].legend(fontsize="small", loc="lower left")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    head = [f"{title}: {n:,} ranks" for title in CHANCES for n in SIZES]
    print("| job | " + " | ".join(head) + " |")
    print("|---|" + "---:|" * len(head))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
