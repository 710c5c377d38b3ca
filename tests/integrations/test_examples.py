"""The examples of loops, Lightning and Accelerate learn."""

from __future__ import annotations

import pytest

from tests.support.examples import play
from tests.support.harness import run

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("name", ["lightning_digits", "accelerate_digits"])
def test_of_a_library(name: str) -> None:
    pytest.importorskip(name.split("_", maxsplit=1)[0])
    accuracies = run(2, play, name, "--algorithm", "bytegrad", timeout=120)
    assert min(accuracies) > 0.85 and accuracies[0] == accuracies[1], accuracies


@pytest.mark.parametrize("name", ["lightning_elastic", "accelerate_elastic"])
def test_in_an_elastic_job(name: str) -> None:
    pytest.importorskip(name.split("_", maxsplit=1)[0])
    accuracies = run(2, play, name, timeout=120)
    assert min(accuracies) > 0.85 and accuracies[0] == accuracies[1], accuracies


@pytest.mark.parametrize("ddp", [False, True])
def test_digits(ddp: bool) -> None:
    found = run(2, play, "train_digits", "--epochs", "4", *["--ddp"] * ddp, timeout=120)
    assert min(f["right"] for f in found) > 0.85, found


def test_gpt() -> None:
    run(2, play, "train_gpt", "--steps", "3", timeout=120)
