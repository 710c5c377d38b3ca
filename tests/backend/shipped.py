"""Runs the tests of c10d that torch ships, `DistributedTest`, over a backend.

    python -m tests.backend.shipped --world 2 --as gloo [--real] [--out FILE] [NAME ...]

`--as trigram` runs them under our own name, which leaves out what they have for gloo alone; `--as gloo` in
gloo's place: the tests ask for gloo, and get us. `--real` runs real gloo, for comparison. Ranks are forked
from this process, which has imported everything, so that a test takes tenths of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing as mp
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 120.0
"""How long a test may take, before its ranks are asked where they are and killed."""
NAME = "trigram"

Outcome = tuple[str, str]
"""passed, failed or skipped, and why."""


def prepare(world: int, posing_as: str, folder: str) -> Any:
    """The class of the tests; the environment and torch's lists of features are set before it is imported."""
    os.environ |= {
        "BACKEND": posing_as,
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/init",
        "OMP_NUM_THREADS": "1",
    }
    import torch.testing._internal.common_distributed as common

    for feature in ("ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add(NAME)
    import torch.testing._internal.distributed.distributed_test as shipped

    class Tests(shipped.TestDistBackend, shipped.DistributedTest._DistTestBase):
        pass

    return Tests


def pose() -> None:
    """From now on a process group of gloo is one of ours, and says that it is gloo's."""
    import torch.distributed.distributed_c10d as c10d

    from trigram.observe import profiling

    profiling.PREFIX = "gloo:"
    make = c10d._new_process_group_helper

    def helper(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        asked = str(backend)
        ours = NAME if "gloo" in asked or asked == "undefined" else backend
        group, store = make(size, rank, ranks, ours, *args, **kwargs)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (c10d.Backend("gloo"), c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = "cpu:gloo,cuda:gloo"
        return group, store

    c10d._new_process_group_helper = helper


def names(tests: Any) -> list[str]:
    """All tests, in the order in which torch would run them."""
    return unittest.TestLoader().getTestCaseNames(tests)  # type: ignore[return-value]


def all_names(posing_as: str, world: int) -> list[str]:
    """All tests, found in a process of its own: their module reads the environment when it is imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.backend.shipped", "--names"]
    command += ["--world", str(world), "--as", posing_as]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    return told.stdout.split()


def _rank(pipe: Connection, tests: Any, name: str, rank: int, world: int, folder: str, backend: str) -> None:
    """The life of a rank: its outcome goes through the pipe."""
    log = os.open(f"{folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        outcome = _outcome(tests, name, rank, world, folder, backend)
    except BaseException:
        outcome = ("failed", traceback.format_exc())
    pipe.send(outcome)
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


def _outcome(tests: Any, name: str, rank: int, world: int, folder: str, backend: str) -> Outcome:
    import torch
    import torch.distributed as dist
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.distributed.distributed_test as shipped
    from torch.testing._internal.common_utils import set_rng_seed

    torch.set_num_threads(1)
    test = tests(name)
    test.rank, test.file_name = rank, f"{folder}/store"
    reasons = {skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()}
    seconds = shipped.CUSTOM_PG_TIMEOUT.get(name, shipped.default_pg_timeout)
    dist.init_process_group(
        init_method=test.init_method,
        backend=backend,
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=seconds),
    )
    test._barrier()
    set_rng_seed()
    try:
        getattr(test, name)()
    except unittest.SkipTest as reason:
        return "skipped", str(reason)
    except SystemExit as end:
        if end.code not in reasons:
            raise
        return "skipped", reasons[end.code]  # type: ignore[index]
    test._barrier()
    with contextlib.suppress(AssertionError, ValueError):  # the test has destroyed it
        dist.destroy_process_group()
    return "passed", ""


def run(tests: Any, name: str, world: int, folder: str, backend: str) -> Outcome:
    """Runs one test on ranks of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("barrier", "test_dir"):
        Path(folder, part).mkdir(parents=True)
    ranks, outcomes = {}, {}
    for rank in range(world):
        ours, theirs = mp.Pipe(duplex=False)
        args = (theirs, tests, name, rank, world, folder, backend)
        process = mp.get_context("fork").Process(target=_rank, args=args)
        process.start()
        theirs.close()
        ranks[ours] = (rank, process)
    end = time.monotonic() + SECONDS
    while len(outcomes) < world and time.monotonic() < end:
        for pipe in wait([p for p, (rank, _) in ranks.items() if rank not in outcomes], 0.5):
            rank, process = ranks[pipe]  # type: ignore[index]
            try:
                outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                outcomes[rank] = ("failed", f"died with exit code {process.exitcode}\n{_log(folder, rank)}")
            if outcomes[rank][0] == "failed":
                end = min(end, time.monotonic() + 10)  # the others may wait for it
    for rank, process in ranks.values():
        if rank not in outcomes:
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            process.kill()
            outcomes[rank] = ("failed", f"did not end\n{_log(folder, rank)}")
        process.join()
        process.close()
    return _together(outcomes)


def _log(folder: str, rank: int) -> str:
    return Path(folder, f"rank{rank}.log").read_text(errors="replace")[-6000:]


def _together(outcomes: dict[int, Outcome]) -> Outcome:
    failed = {rank: why for rank, (how, why) in sorted(outcomes.items()) if how == "failed"}
    if failed:
        return "failed", "\n".join(f"rank {rank}: {why}" for rank, why in failed.items())
    skipped = [why for how, why in outcomes.values() if how == "skipped"]
    return ("skipped", skipped[0]) if len(skipped) == len(outcomes) else ("passed", "")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--as", dest="posing_as", choices=["gloo", NAME], default="gloo")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--out")
    parser.add_argument(
        "--names", dest="only_names", action="store_true", help="print the names of all tests"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trigram-shipped-") as folder:
        place = f"{folder}/test"
        tests = prepare(args.world, args.posing_as, place)
        if args.only_names:
            print("\n".join(names(tests)))
            return 0
        if not args.real:
            # Registers the backend; after torch's tests have been imported, which read the environment.
            import trigram
            import trigram.backend.process_group

            assert trigram.__version__
            if args.posing_as == "gloo":
                pose()
        results: dict[str, Outcome] = {}
        for name in args.names or names(tests):
            began = time.monotonic()
            results[name] = run(tests, name, args.world, place, args.posing_as)
            how, why = results[name]
            print(f"{how:8} {time.monotonic() - began:5.1f} s  {name}", flush=True)
            if how == "failed":
                print(why, flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(results))
    counts = {how: sum(o[0] == how for o in results.values()) for how in ("passed", "failed", "skipped")}
    print(counts)
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
