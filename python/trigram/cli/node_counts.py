"""``trigram run --nnodes``: how many machines take part. What their launchers do is in ``nodes.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass

import typer


@dataclass(frozen=True)
class Nodes:
    """How many launchers take part.

    Attributes:
        least: The job begins when so many have met.
        most: So many may run at a time.
        place: This one's number, from 0; None: in the order in which they come.
    """

    least: int
    most: int
    place: int | None = None

    @staticmethod
    def parse(text: str, place: int | None) -> Nodes:
        """From ``N`` or ``MIN:MAX``.

        Raises:
            typer.BadParameter: It is neither.
        """
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise typer.BadParameter(f"--nnodes {text} is neither a number of machines nor MIN:MAX of them")
        if place is not None and (least != most or not 0 <= place < least):
            raise typer.BadParameter(
                f"--node-rank {place}: with --nnodes {text} it is from 0 to {least - 1}"
                + ("; with MIN:MAX machines are numbered as they come" if least != most else "")
            )
        return Nodes(least, most, place)

    def __str__(self) -> str:
        """As :meth:`parse` reads it."""
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"
