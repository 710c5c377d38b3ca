"""The Trainer of transformers in an elastic job: ranks may be killed, leave and join while it trains.

trigram run -n 3 --restarts 10 examples/transformers_elastic.py

Kill one of the ranks meanwhile: the others go on, and it comes back.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from trigram.integrations import transformers_elastic


def main() -> list[float]:
    """Trains, and returns the losses on text that was not trained on, before and after."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=float, default=1)
    args = parser.parse_args()

    transformers_elastic.start()  # before TrainingArguments
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:10]
    ids = torch.tensor(list("\n".join(file.read_text(errors="replace") for file in files).encode()))
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    data = [{"input_ids": row, "labels": row} for row in rows]
    torch.manual_seed(7)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64, "vocab_size": 256}

    trainer = transformers_elastic.TrigramElasticTrainer(
        model=GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0)),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data[:-64],
        eval_dataset=data[-64:],
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {before:.4f} before, {after:.4f} after, {trainer.state.global_step} steps")
    return [before, after]


if __name__ == "__main__":
    main()
