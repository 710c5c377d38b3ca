"""Jobs that measure on request: the other scripts let several of them take turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import hosts

from trigram.runtime.launch import free_port


class Job:
    """Ranks that run a script; rank 0 answers each line of its standard input with one line of its output.

    Args:
        stack: Ends the ranks.
        argv: The arguments of `python`.
        world: The number of ranks.
        settings: Additional environment variables.
        cables: The hosts of the ranks, in turns; None: this machine.

    Attributes:
        ranks: The processes.
    """

    def __init__(
        self,
        stack: ExitStack,
        argv: Sequence[str],
        world: int,
        settings: dict[str, str],
        cables: hosts.Hosts | None = None,
    ) -> None:
        shared = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": cables.addresses[0] if cables else "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **({"TRIGRAM_IFACE": hosts.INTERFACE} if cables else {}),
            **settings,
        }
        count = cables.count if cables else 1
        self.ranks = []
        for rank in range(world):
            where = ["ip", "netns", "exec", cables.names[rank % count]] if cables else []
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank // count)}
            process = subprocess.Popen(
                [*where, sys.executable, *argv],
                env={**os.environ, **shared, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.ranks.append(process)

    def ask(self, line: str) -> str:
        """Rank 0's answer."""
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        """Gives rank 0 a line."""
        to = self.ranks[0].stdin
        assert to is not None
        to.write(f"{line}\n")
        to.flush()

    def answer(self) -> str:
        """The next line of rank 0.

        Raises:
            SystemExit: It has ended.
        """
        of = self.ranks[0].stdout
        assert of is not None
        if not (line := of.readline()):
            raise SystemExit("a rank has failed; its error is printed above")
        return line
