"""`trigram test`: says that an installation works if it does, and what is wrong if it does not."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from typing import Any

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.harness import run
from trigram.cli import self_test


def test_this_installation_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trigram", "test"],
        capture_output=True,
        text=True,
        timeout=patience.seconds(300),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "trigram",
        *["two", "collectives", "training", "algorithms"] * 2,
        "all",
    ], done.stdout
    assert "bit for bit" in done.stdout and "8 corners" in done.stdout


def _broken(rank: int, world: int, what: str) -> tuple[int, str]:
    """The status of a rank where something is wrong on rank 1, and what it says of it."""
    if rank == 1 and what == "a collective":
        gather = trigram.all_gather

        def wrong(out: torch.Tensor, *rest: Any, **more: Any) -> Any:
            done = gather(out, *rest, **more)
            out.view(-1)[-1] += 1
            return done

        trigram.all_gather = wrong
    if rank == 1 and what == "an update":
        with_bagua = trigram.with_bagua

        def moved(model: torch.nn.Module, *rest: Any, **more: Any) -> torch.nn.Module:
            wrapped = with_bagua(model, *rest, **more)
            with torch.no_grad():
                next(model.parameters()).view(-1)[3] += 1e-6
            return wrapped

        trigram.with_bagua = moved
    said = io.StringIO()
    status = 0
    with contextlib.redirect_stderr(said), contextlib.suppress(trigram.TrigramError):  # rank 1 has ended
        status = self_test._main()
    return status, said.getvalue()


@pytest.mark.parametrize(
    "what, words",
    [("a collective", "FAILED collectives: rank 1: all_gather of 1 torch.float32: 1 of 2 elements"),
     ("an update", "FAILED training: rank 1: 0.weight after 5 steps")],
)  # fmt: skip
def test_what_is_wrong_is_said(what: str, words: str) -> None:
    [(_, _), (status, said)] = run(2, _broken, what, timeout=120)
    assert status == 1 and words in said, said
