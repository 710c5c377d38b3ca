"""`trigram algorithms`: the algorithms by name, each as who, what and when, and the communication graphs."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trigram.algorithms import graphs, names
from trigram.algorithms.trigram import WHO

SIZES = (4, 5, 8, 16, 32)


def show() -> None:
    """Prints the table of `trigram.algorithms()`, and how fast gossip averages on each graph."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    # No table: the longest text about one is as wide as a terminal, and columns beside it would vanish.
    lines = [Text(f" {'name':<34}{'who/what/when':<33}averaged", "bold"), Text(f" {'─' * 78}")]
    for entry in names.algorithms():
        three = f"{entry['who']}/{entry['what']}/{entry['when']}"
        row = Text.assemble(" ", (f"{entry['name']:<33} ", "bold"), f"{three:<32} {entry['carry']}")
        lines += [row, Text(f"   {entry['about']}")]
    lines.append(
        Text("\nwith_bagua(model, NAME), or WHO/WHAT/WHEN, such as gossip:exponential/topk:0.01/async:4")
    )
    for line in lines:
        console.print(line)
    who = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    who.add_column("who", no_wrap=True)
    who.add_column("")
    for name, about in WHO:
        who.add_row(name, about)
    console.print(who)
    caption = "spectral gap per averaging step, by number of ranks: 1 averages exactly, 0 never averages"
    gaps = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    gaps.add_column("graph", no_wrap=True)
    for size in SIZES:
        gaps.add_column(str(size), justify="right")
    for kind in graphs.kinds():
        if not kind.startswith("push:"):
            gaps.add_row(kind, *(f"{graphs.find(kind, size).gap():.3f}" for size in SIZES))
    console.print(gaps)
