"""Accelerate: a CNN on handwritten digits, with gradient accumulation, clipping and a checkpoint.

torchrun --nproc-per-node 2 examples/accelerate_digits.py
torchrun --nproc-per-node 2 examples/accelerate_digits.py --algorithm decentralized
"""

import argparse
import tempfile

import digits
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trigram.integrations.accelerate import prepare


def main() -> float:
    """Trains, and returns the accuracy on images that were not trained on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default=None)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    kept, held = digits.load()
    model = digits.cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(kept, batch_size=16, shuffle=True)
    # Instead of accelerator.prepare(model, optimizer, loader).
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, algorithm=args.algorithm)

    for _ in range(args.epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.save_state(folder)  # all ranks; it has the average of the weights
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    right = digits.accuracy(accelerator.unwrap_model(model), held)
    accelerator.print(f"accuracy {right:.3f}")
    return right


if __name__ == "__main__":
    main()
