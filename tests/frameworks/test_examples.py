"""The examples on torchvision, transformers and Ray learn."""

from __future__ import annotations

import os

import pytest

from tests.support.examples import play
from tests.support.harness import run


def test_resnet() -> None:
    pytest.importorskip("torchvision")
    for losses in run(2, play, "train_resnet", "--images", "128", timeout=240):
        assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized"])
def test_finetuning(algorithm: str) -> None:
    pytest.importorskip("transformers")
    for before, after in run(
        2, play, "finetune_gpt2", "--algorithm", algorithm, "--steps", "30", timeout=240
    ):
        assert after < 0.8 * before


def test_an_elastic_trainer() -> None:
    pytest.importorskip("transformers")
    for before, after in run(2, play, "transformers_elastic", timeout=240):
        assert after < 0.8 * before


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 dies in step 50 and is replaced."""
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    [found] = run(1, play, "ray_digits", timeout=400, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
    assert found["accuracy"] > 0.85 and found["workers"] == 2, found
