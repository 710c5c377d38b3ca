"""Two small trainings on real data that needs no download: handwritten digits, and Python's source code.

`digits` is a convolutional network on scikit-learn's 8x8 scans, `gpt` a byte-level transformer on the text of
the standard library. Both train in seconds on one core, and both have held-out data, which shows whether an
algorithm learns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trigram

WORKLOADS = ("digits", "gpt")
CONTEXT = 64
TEXT_FILES = 120


class Split(NamedTuple):
    """Inputs and targets of a workload's training part and of its held-out part."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


class Recipe(NamedTuple):
    """How a workload is trained: samples per rank and step, number of steps, learning rate."""

    batch: int
    steps: int
    lr: float


RECIPES = {
    "digits": Recipe(batch=32, steps=120, lr=0.05),
    "gpt": Recipe(batch=8, steps=160, lr=3e-3),
}


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes each position with those before it."""
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds attention, then the perceptron."""
        x = x + self.attention(x)
        return x + self.mlp(x)


class TinyGPT(nn.Module):
    """A GPT over bytes: (batch, time) of ids to (batch, time, 256) of logits."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2, context: int = CONTEXT) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores the next byte at each position."""
        x = self.token(ids) + self.position[: ids.shape[1]]
        return self.head(self.blocks(x))


def make_model(name: str) -> nn.Module:
    """A new model of the workload; its weights depend only on torch's seed.

    Args:
        name: One of `WORKLOADS`.
    """
    if name == "gpt":
        return TinyGPT()
    _known(name)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def make_optimizer(name: str, model: nn.Module, algorithm: str | None = None) -> torch.optim.Optimizer:
    """The optimizer that the workload is trained with: SGD with momentum for the digits, Adam for the GPT.

    Args:
        name: One of `WORKLOADS`.
        model: What `make_model` made.
        algorithm: The algorithm's name; qadam needs `trigram.QAdam`.
    """
    _known(name)
    if algorithm == "qadam":
        return trigram.QAdam(model.parameters(), 3e-3)
    if name == "gpt":
        return torch.optim.Adam(model.parameters(), RECIPES[name].lr)
    # signsgd with error feedback makes a large step now and then: with momentum the full rate is unstable.
    lr = RECIPES[name].lr * (0.2 if algorithm == "signsgd" else 1)
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def options(name: str, algorithm: str) -> dict[str, Any]:
    """The options of an algorithm in so short a training: a warm-up of a tenth of the steps, frequent
    averaging steps, and a low outer momentum.

    Args:
        name: One of `WORKLOADS`.
        algorithm: Its name.
    """
    _known(name)
    if algorithm in ("qadam", "powersgd"):
        return {"warmup_steps": RECIPES[name].steps // 10}
    if algorithm == "diloco":
        return {"every": 8, "outer_lr": 0.7, "outer_momentum": 0.5}
    return {"fraction": 0.05} if algorithm == "topk" else {}


@lru_cache(maxsize=len(WORKLOADS))
def data(name: str) -> Split:
    """The data of the workload, the same on every rank; read once per process.

    Args:
        name: One of `WORKLOADS`.

    Raises:
        ModuleNotFoundError: `digits` needs scikit-learn.
        FileNotFoundError: `gpt` needs the source files of Python's standard library.
    """
    _known(name)
    return _digits() if name == "digits" else _text()


def batches(name: str, rank: int, world: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches, without end; each epoch is a new permutation, dealt out to the ranks.

    Args:
        name: One of `WORKLOADS`.
        rank: The rank.
        world: The number of ranks.
        seed: The seed of the permutations, the same on all ranks.
    """
    split, size = data(name), RECIPES[name].batch
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(split.x), generator=generator)[rank::world]
        # All ranks must make the same number of steps in an epoch, so samples left over are dropped.
        for start in range(0, len(split.x) // world - size + 1, size):
            index = order[start : start + size]
            yield split.x[index], split.y[index]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of a batch, in nats per label."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def evaluate(model: nn.Module, name: str) -> float:
    """The mean loss of the model on the held-out data, in nats per label.

    Args:
        model: A model of the workload; its training mode is restored afterwards.
        name: The workload.
    """
    split, training = data(name), model.training
    model.eval()
    with torch.no_grad():
        parts = zip(split.held_x.split(64), split.held_y.split(64), strict=True)
        total = sum(float(loss_of(model, x, y)) * len(x) for x, y in parts)
    model.train(training)
    return total / len(split.held_x)


def _known(name: str) -> None:
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}: choose one of {', '.join(WORKLOADS)}")


def _digits() -> Split:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the workload digits needs scikit-learn: pip install 'trigram[demo]'"
        ) from error
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, kept = order[: len(x) // 5], order[len(x) // 5 :]
    return Split(x[kept], y[kept], x[held], y[held])


def _text() -> Split:
    # Whole files are held out: lines of a file resemble the lines before them.
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:TEXT_FILES]
    if len(files) < 10:
        raise FileNotFoundError(
            "the workload gpt trains on the .py files of Python's standard library, but "
            f"{Path(os.__file__).parent} has {len(files)}; install Python with its sources"
        )
    held = _windows(b"".join(file.read_bytes() for file in files[::10]))
    kept = _windows(b"".join(file.read_bytes() for index, file in enumerate(files) if index % 10))
    # 256 evenly spread windows give the loss to about 0.03 nats in a tenth of a second.
    held = held[:: max(1, len(held) // 256)]
    return Split(kept[:, :-1], kept[:, 1:], held[:, :-1], held[:, 1:])


def _windows(text: bytes) -> Tensor:
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return ids.unfold(0, CONTEXT + 1, CONTEXT)
