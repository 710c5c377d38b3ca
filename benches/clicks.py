"""A recommendation model with sparse embeddings, and clicks drawn from a known model, for `losses.py`.

Users and items are drawn with frequencies of a power law, so most rows of the tables are in few batches. All
numbers come from one generator with a fixed seed.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from trigram.cli import workloads

USERS, ITEMS, KINDS, PAST = 4000, 2000, 24, 8
TRAINED, HELD = 1 << 17, 1 << 14


class Recommender(nn.Module):
    """Scores whether a user clicks on an item, from the user, the item, its kind, and items clicked before.

    The three large tables have gradients of few rows (`sparse=True`); the head is dense.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, width, sparse=True)
        self.item = nn.Embedding(ITEMS, width, sparse=True)
        self.past = nn.EmbeddingBag(ITEMS, width, mode="mean", sparse=True)
        self.kind = nn.Embedding(KINDS, width)
        for table in (self.user, self.item, self.past, self.kind):
            nn.init.normal_(table.weight, std=0.1)
        self.head = nn.Sequential(nn.Linear(6 * width, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of (no click, click) for ids of shape (batch, 3 + PAST): user, item, kind, items before."""
        user, item, kind = self.user(x[:, 0]), self.item(x[:, 1]), self.kind(x[:, 2])
        past = self.past(x[:, 3:])
        return self.head(torch.cat([user, item, kind, past, user * item, past * item], 1))


@lru_cache(maxsize=1)
def clicks() -> workloads.Split:
    """The impressions with their clicks: ids of shape (samples, 3 + PAST), and 0 or 1 for each."""
    x, y, _ = _draw()
    return workloads.Split(x[:TRAINED], y[:TRAINED], x[TRAINED:], y[TRAINED:])


def best_loss() -> float:
    """The held-out loss of the known model itself, which no training can beat but by chance."""
    _, y, scores = _draw()
    held = nn.functional.binary_cross_entropy_with_logits(scores[TRAINED:], y[TRAINED:].float())
    return float(held)


def _draw() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, clicks, and the known model's score (log odds) of each."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    total = TRAINED + HELD
    users = torch.multinomial(_frequencies(USERS), total, True, generator=generator)
    items = torch.multinomial(_frequencies(ITEMS), total, True, generator=generator)
    kinds = torch.randint(0, KINDS, (ITEMS,), generator=generator)
    # A user likes some kinds, and has clicked on items of those kinds before.
    likes = normal(USERS, KINDS)
    past = torch.multinomial(_frequencies(ITEMS), total * PAST, True, generator=generator).view(total, PAST)
    favourite = likes.topk(3, 1).indices
    which = torch.randint(0, 3, (total, PAST), generator=generator)
    wanted = favourite[users].gather(1, which)
    of_kind = [torch.nonzero(kinds == k).flatten() for k in range(KINDS)]
    for k in range(KINDS):
        spots = (wanted == k) & (torch.rand(total, PAST, generator=generator) < 0.7)
        drawn = torch.randint(0, len(of_kind[k]), (int(spots.sum()),), generator=generator)
        past[spots] = of_kind[k][drawn]
    quality = normal(ITEMS) + 0.5 * normal(KINDS)[kinds]
    scores = 1.2 * quality[items] + 0.7 * normal(USERS)[users] + 1.2 * likes[users, kinds[items]] - 1.5
    y = (torch.rand(total, generator=generator) < scores.sigmoid()).long()
    return torch.cat([users[:, None], items[:, None], kinds[items][:, None], past], 1), y, scores


def _frequencies(count: int) -> Tensor:
    return 1 / (10 + torch.arange(count, dtype=torch.float64)) ** 0.9
