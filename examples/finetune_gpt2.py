"""transformers: a causal language model with the Trainer, on the text of Python's standard library.

torchrun --nproc-per-node 2 examples/finetune_gpt2.py
torchrun --nproc-per-node 2 examples/finetune_gpt2.py --algorithm bytegrad --model gpt2

Without ``--model`` a small GPT-2 with random weights learns bytes, and nothing is downloaded.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, TrainingArguments

from trigram.integrations.transformers import TrigramTrainer


def main() -> list[float]:
    """Trains, and returns the losses on text that was not trained on, before and after."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", default=None)
    parser.add_argument("--model", default=None, help="a name on the hub or a folder; needs its tokenizer")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    files = sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    text = "\n".join(file.read_text(errors="replace") for file in files)
    torch.manual_seed(7)
    if args.model is None:
        ids = torch.tensor(list(text.encode()))
        shape = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64, "vocab_size": 256}
        model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    else:
        ids = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt")["input_ids"][0]
        model = AutoModelForCausalLM.from_pretrained(args.model)
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    data = [{"input_ids": row, "labels": row} for row in rows]

    trainer = TrigramTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data[:-64],
        eval_dataset=data[-64:],
        algorithm=args.algorithm,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"loss {before:.4f} before, {after:.4f} after")
    return [before, after]


if __name__ == "__main__":
    main()
