"""Elastic training: it continues when ranks are killed, and admits them again. Handwritten digits, an MLP.

    trigram chaos --ready "has made step" --settle 1 --seconds 50 -- examples/elastic.py --pause 0.02

The batch of a step depends on the step and on this rank's index among the present ranks, so the present ranks
cover the data. The last line of each rank has the loss over all training data.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from sklearn.datasets import load_digits
from torch.nn import functional

import trigram


def main() -> None:
    """Trains on one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(step / args.steps, 1))
    )

    trigram.init(elastic=True)
    model = trigram.with_bagua(model, optimizer=optimizer, elastic=[schedule])

    first = trigram.stats(model)["steps"]
    for step in range(first, args.steps):
        draw = torch.Generator().manual_seed(step * 64 + trigram.rank())
        batch = torch.randint(len(x), (64,), generator=draw)
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step == first or step % 100 == 0:
            print(f"has made step {step}", flush=True)
        time.sleep(args.pause)

    with torch.no_grad():
        logits = model(x)
    loss, right = functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
    print(f"rank {trigram.rank()}: loss {loss:.5f}, {100 * right:.1f} % right, {trigram.world_size()} ranks")


if __name__ == "__main__":
    main()
