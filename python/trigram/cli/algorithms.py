"""`trigram algorithms`: the algorithms by name, each as who talks, what travels and when."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

import trigram


def show() -> None:
    """Prints the table of `trigram.algorithms()`."""
    table = Table(title="with_bagua(model, NAME)", caption="or written out: WHO/WHAT/WHEN", pad_edge=False)
    for column in ("name", "who", "what", "when", "carries"):
        table.add_column(column, no_wrap=True)
    table.add_column("about")
    for entry in trigram.algorithms():
        cells = (str(entry[key]) for key in ("name", "who", "what", "when", "carry"))
        about = str(entry["about"]) if entry["available"] else f"(not in this build) {entry['about']}"
        table.add_row(*cells, about, style=None if entry["available"] else "dim")
    Console().print(table)
