"""Lightning: a CNN on handwritten digits, with the strategy ``trigram``.

python examples/lightning_digits.py --devices 2
python examples/lightning_digits.py --devices 2 --algorithm decentralized
"""

import argparse

import digits
import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from trigram.integrations.lightning import TrigramStrategy


class Digits(lightning.LightningModule):
    """A module like any other: it knows nothing of Trigram."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = digits.cnn()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """The loss of one batch."""
        x, y = batch
        return F.cross_entropy(self.cnn(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> float:
    """Trains, and returns the accuracy on images that were not trained on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default=None)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    kept, held = digits.load()
    lightning.seed_everything(7, verbose=False)
    module = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=TrigramStrategy(args.algorithm),  # or strategy="trigram"
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(kept, batch_size=32, shuffle=True))
    right = digits.accuracy(module.cnn, held)
    if trainer.is_global_zero:
        print(f"accuracy {right:.3f}")
    return right


if __name__ == "__main__":
    main()
