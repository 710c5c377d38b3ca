"""Handwritten digits and a small CNN, which the examples of single libraries share."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def load() -> tuple[TensorDataset, TensorDataset]:
    """1437 images to train on and 360 to test on: (1, 8, 8) in 0 to 1, and the digit."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, kept = order[:360], order[360:]
    return TensorDataset(x[kept], y[kept]), TensorDataset(x[held], y[held])


def cnn() -> nn.Sequential:
    """From (batch, 1, 8, 8) to (batch, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


@torch.no_grad()
def accuracy(model: nn.Module, held: TensorDataset) -> float:
    """The share of images that the model recognises."""
    x, y = held.tensors
    return float((model(x).argmax(1) == y).float().mean())
