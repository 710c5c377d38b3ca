"""torchft's process group over Trigram beside its own over gloo: to meet again, and an all_reduce.

    python benches/torchft_groups.py

Ranks are threads of this process, as in torchft's tests. Both groups take turns; a row has medians. Needs
torchft 0.2 (requirements-integrations.txt).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import typer
from torchft.process_group import ProcessGroupGloo

from trigram.integrations.torchft import ProcessGroupTrigram

SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "25 MiB": 25 << 18}


def together(ranks: int, work: Callable[[int], None]) -> None:
    """Runs ``work(rank)`` in a thread for each rank."""
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(ranks: int = 2, rounds: int = 15) -> None:
    """Prints a table: milliseconds of each group, and ours as a part of gloo's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kinds = {"gloo": ProcessGroupGloo, "trigram": ProcessGroupTrigram}
    groups = {
        name: [kind(timeout=timedelta(seconds=20)) for _ in range(ranks)] for name, kind in kinds.items()
    }
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in kinds}

    def one(name: str, number: int) -> Callable[[int], None]:
        barrier = threading.Barrier(ranks)

        def run(rank: int) -> None:
            group = groups[name][rank]

            def timed(what: str, call: Callable[[], object]) -> None:
                barrier.wait()
                began = time.perf_counter()
                call()
                if rank == 0:
                    seconds[name][what].append(time.perf_counter() - began)

            address = f"127.0.0.1:{store.port}/{name}/{number}"
            timed("reconfigure", lambda: group.configure(address, "0", rank, ranks))
            for what, count in SIZES.items():
                values = torch.ones(count)
                for _ in range(3):
                    timed(what, lambda v=values: group.allreduce([v], dist.ReduceOp.SUM).wait())  # type: ignore[misc]

        return run

    for number in range(rounds):
        for name in kinds:
            together(ranks, one(name, number))
    print("| | gloo, ms | trigram, ms | of gloo's |\n|---|---|---|---|")
    for what in ("reconfigure", *SIZES):
        theirs, ours = (statistics.median(seconds[name][what]) * 1e3 for name in kinds)
        print(f"| {what} | {theirs:.3f} | {ours:.3f} | {ours / theirs:.2f} |")
    for each in groups.values():
        for group in each:
            group.shutdown()


if __name__ == "__main__":
    typer.run(main)
