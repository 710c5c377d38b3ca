"""Small models on real data, and a training loop, the same for DistributedDataParallel and for trigram."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.checks import fingerprint

Wrap = Callable[[nn.Module], nn.Module]
Batches = Iterator[tuple[Tensor, Tensor]]
CONTEXT = 24


@lru_cache
def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)


@lru_cache
def text() -> Tensor:
    """A page of the standard library, as bytes below 128."""
    source = Path(json.__file__).with_name("decoder.py").read_bytes()
    return torch.tensor(list(source), dtype=torch.long).clamp(max=127)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


class GPT(nn.Module):
    """A decoder with two layers; input and output embeddings are tied."""

    def __init__(self, width: int = 32, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(128, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))


def digits_batch(rank: int, world: int, step: int, size: int = 16) -> tuple[Tensor, Tensor]:
    images, labels = digits()
    pick = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))[: world * size][
        rank::world
    ]
    return images[pick], labels[pick]


def text_batch(rank: int, world: int, step: int, size: int = 4) -> tuple[Tensor, Tensor]:
    data = text()
    g = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(data) - CONTEXT - 1, (world * size,), generator=g)[rank::world]
    windows = torch.stack([data[s : s + CONTEXT + 1] for s in starts])
    return windows[:, :-1], windows[:, 1:]


@dataclass
class History:
    """What a training leaves: losses and weights' hashes of every step, and the gradients of the first."""

    losses: list[float] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)


def workload(name: str, rank: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """ "digits" and "gpt" are the demo's; "small digits" and "tied gpt" our own."""
    torch.manual_seed(1234)
    if name == "small digits":
        model = cnn()
        batches = (digits_batch(rank, world, step) for step in count())
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches
    if name == "tied gpt":
        model = GPT()
        batches = (text_batch(rank, world, step) for step in count())
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3), batches
    from trigram.cli import workloads

    model = workloads.make_model(name)
    return model, workloads.make_optimizer(name, model), workloads.batches(name, rank, world, seed=5)


def in_float64(batches: Batches) -> Batches:
    """The batches with inputs in float64; ids stay integers."""
    return ((x.double() if x.is_floating_point() else x, y) for x, y in batches)


def train(
    name: str, wrap: Wrap, rank: int, world: int, steps: int, dtype: torch.dtype = torch.float32
) -> History:
    """Train a workload for some steps; the optimizer is made before the model is wrapped."""
    bare, optimizer, batches = workload(name, rank, world)
    if dtype == torch.float64:
        bare.double()  # the optimizer holds the same parameters
        batches = in_float64(batches)
    model = wrap(bare)
    history = History()
    for x, y in islice(batches, steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        if not history.losses:
            history.first_gradients = {
                k: p.grad.clone() for k, p in bare.named_parameters() if p.grad is not None
            }
        optimizer.step()
        history.losses.append(loss.item())
        history.weights.append(fingerprint(bare.parameters()))
    return history
