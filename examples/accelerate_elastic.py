"""Accelerate in an elastic job: ranks may be killed, leave and join while the script's own loop runs.

trigram run -n 3 --restarts 10 examples/accelerate_elastic.py

Kill one of the ranks meanwhile: the others go on, and it comes back.
"""

import argparse

import digits
import torch
from accelerate.utils import set_seed
from torch.nn import functional as F

from trigram.data import ElasticLoader
from trigram.integrations.accelerate_elastic import ElasticAccelerator


def main() -> float:
    """Trains, and returns the accuracy on images that were not trained on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default=None)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    accelerator = ElasticAccelerator(cpu=True, algorithm=args.algorithm)
    set_seed(7)
    kept, held = digits.load()
    model = digits.cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = ElasticLoader(kept, batch_size=32)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    while loader.epoch < args.epochs:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        mean = accelerator.gather(loss.detach()).mean()
        accelerator.print(f"epoch {loader.epoch}: loss {mean:.3f}")

    right = digits.accuracy(accelerator.unwrap_model(model), held)
    accelerator.print(f"accuracy {right:.3f}")
    return right


if __name__ == "__main__":
    main()
