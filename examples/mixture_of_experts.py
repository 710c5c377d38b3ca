"""Mixture of experts: the ranks of a set share out the experts, and tokens travel to them.

    torchrun --nproc-per-node 4 examples/mixture_of_experts.py

With 4 ranks there are two sets of two ranks (``SHARING``). Each set has all experts, so each expert has two
copies, whose gradients are averaged; the other parameters are averaged over all ranks. The losses are those
of one process that has all experts and the batches of all ranks.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import trigram
import trigram.moe

STEPS, BATCH, CONTEXT, WIDTH, EXPERTS, CHOSEN, SHARING = 16, 4, 16, 32, 12, 2, 2


class Experts(nn.Module):
    """Some of the experts, each a network of two matrices."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.narrow = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Applies expert i to the i-th part of the tokens, which has ``counts[i]`` rows."""
        if hasattr(F, "grouped_mm") and len(tokens):  # newer versions of torch; it takes no empty input
            ends = counts.cumsum(0).int()
            return F.grouped_mm(F.gelu(F.grouped_mm(tokens, self.wide, offs=ends)), self.narrow, offs=ends)
        parts = zip(tokens.split(counts.tolist()), self.wide, self.narrow, strict=True)
        return torch.cat([F.gelu(part @ wide) @ narrow for part, wide, narrow in parts])


class MixtureOfExperts(nn.Module):
    """A layer that sends each token to two of its experts; `group` shares them out, None: all are here."""

    def __init__(self, group: trigram.Group | None) -> None:
        super().__init__()
        self.group = group
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS)
        if group is not None:  # keeps its share
            mine = EXPERTS // group.size
            for p in self.experts.parameters():
                p.data = p.data[group.rank * mine : (group.rank + 1) * mine].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, WIDTH) to the same."""
        scores, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        if self.group is None:
            rows, order = chosen.flatten(), chosen.flatten().argsort(stable=True)
            made = self.experts(x[order // CHOSEN], rows.bincount(minlength=EXPERTS))
            back = torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOSEN, WIDTH)
            return (back * scores[..., None]).sum(1)
        tokens, counts, handle = trigram.moe.dispatch(x, chosen, EXPERTS, self.group)
        return trigram.moe.combine(handle, self.experts(tokens, counts), scores)


class Model(nn.Module):
    """Bytes to the next byte, through two mixtures of experts."""

    def __init__(self, group: trigram.Group | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.mixtures = nn.ModuleList([MixtureOfExperts(group) for _ in range(2)])
        self.mixing = nn.Linear(CONTEXT, CONTEXT, bias=False)
        self.scores = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The loss of (batch, CONTEXT + 1) bytes."""
        x = self.bytes(text[:, :-1]) + self.place.weight
        x = x + (x.transpose(1, 2) @ self.mixing.weight.tril().t()).transpose(1, 2)
        for mixture in self.mixtures:
            x = x + mixture(F.layer_norm(x, (WIDTH,)).flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.scores(x).flatten(0, 1), text[:, 1:].flatten())


TEXT = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int, rank: int) -> torch.Tensor:
    """What a rank trains on in a step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(len(TEXT) - CONTEXT, (BATCH, 1), generator=draw)
    return TEXT[start + torch.arange(CONTEXT + 1)]


def train(model: nn.Module, ranks: list[int]) -> list[float]:
    """Trains on the batches of these ranks; the losses."""
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    for step in range(STEPS):
        loss = model(torch.cat([batch(step, rank) for rank in ranks]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> tuple[list[float], list[float]]:
    """Trains on all ranks, and in one process; the losses of both."""
    world = trigram.init().size
    sharing, replicas = trigram.moe.groups(SHARING if world % SHARING == 0 else world)
    model = Model(sharing)
    experts = nn.ModuleList([mixture.experts for mixture in model.mixtures])
    shared_out = {id(p) for p in experts.parameters()}
    names = [name for name, p in model.named_parameters() if id(p) in shared_out]
    trigram.with_bagua(model, ignore=names)  # averages all but the experts, over all ranks
    trigram.with_bagua(experts, group=replicas)  # averages each expert over the ranks that have it
    losses = torch.tensor(train(model, [trigram.rank()]))
    trigram.all_reduce(losses, op="avg")
    alone = torch.tensor(train(Model(), list(range(world))) if trigram.rank() == 0 else [0.0] * STEPS)
    trigram.broadcast(alone, 0)
    if trigram.rank() == 0:
        for step, (ours, theirs) in enumerate(zip(losses.tolist(), alone.tolist(), strict=True)):
            print(f"step {step}: loss {ours:.5f}, one process {theirs:.5f}")
    return losses.tolist(), alone.tolist()


if __name__ == "__main__":
    main()
