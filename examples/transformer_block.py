"""A transformer block that the examples of parallel training share: causal attention and an MLP."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """One block. The number of heads is taken from the width of ``query``, so that a rank which holds some of
    its columns computes some of the heads."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, length, width) to the same."""
        normed = self.attention_norm(x)
        q, k, v = (self._heads(layer(normed)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.mlp_norm(x))))

    def _heads(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (-1, self.head)).transpose(1, 2)


class Model(nn.Module):
    """Blocks, and a projection to classes."""

    def __init__(self, width: int = 32, head: int = 8, blocks: int = 2, classes: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, head) for _ in range(blocks))
        self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, length, width) to (batch, length, classes)."""
        for block in self.blocks:
            x = block(x)
        return self.classes(self.norm(x))


def batch(step: int, size: int, length: int = 16, width: int = 32, classes: int = 16) -> tuple:
    """The inputs and targets of one step, alike wherever they are drawn."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(size, length, width, generator=draw)
    return x, torch.randint(classes, (size, length), generator=draw)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_alone(steps: int, size: int) -> list[float]:
    """The losses of one process that trains the same model on the whole batches."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x, targets = batch(step, size)
        loss = loss_of(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
