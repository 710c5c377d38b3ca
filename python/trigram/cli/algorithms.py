"""`trigram algorithms`: the algorithms by name, each as who talks, what travels and when."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import trigram


def show() -> None:
    """Prints the table of `trigram.algorithms()`; what this version does not have has a star."""
    entries = trigram.algorithms()
    caption = "with_bagua(model, NAME), or written out: WHO/WHAT/WHEN. * not in this version"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    table.add_column("name", min_width=max(len(f"{entry['name']} *") for entry in entries))
    for column in ("who", "what", "when", "carries"):
        table.add_column(column)
    for entry in entries:
        star, style = ("", "") if entry["available"] else (" *", "dim")
        cells = (str(entry[key]) for key in ("who", "what", "when", "carry"))
        table.add_row(f"[bold]{entry['name']}[/]{star}\n{entry['about']}", *cells, style=style)
    Console().print(table)
