"""Lightning in an elastic job: ranks may be killed, leave and join while ``fit`` runs.

trigram run -n 3 --restarts 10 examples/lightning_elastic.py

Kill one of the ranks meanwhile: the others go on, and it comes back.
"""

import argparse

import digits
import lightning
from lightning_digits import Digits

from trigram.data import ElasticLoader


def main() -> float:
    """Trains, and returns the accuracy on images that were not trained on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    kept, held = digits.load()
    lightning.seed_everything(7, verbose=False)
    module = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="trigram_elastic",
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, ElasticLoader(kept, batch_size=32))
    right = digits.accuracy(module.cnn, held)
    if trainer.is_global_zero:
        print(f"accuracy {right:.3f}")
    return right


if __name__ == "__main__":
    main()
