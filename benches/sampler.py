"""Measures what balanced batches gain in the training of a small GPT on sentences of real lengths.

    python benches/sampler.py --out sampler-out [--ranks 2] [--epochs 5] [--sentences 600] [--batch 16]

The sentences are those of the docstrings of the standard library, as bytes, padded to the longest of a batch.
Epochs with torch's DistributedSampler and with `trigram.data.BalancedBatchSampler` take turns, and their
times are compared. Then the same with a last rank that is twice as slow, with and without
`speeds="measured"`; its first two epochs, in which speeds are measured, do not count. At the end the held-out
loss of each, after as many epochs.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import hosts
import paired
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import trigram
from trigram.data import BalancedBatchSampler
from trigram.runtime import launch

PAD, MOST = 0, 512


def sentences(count: int) -> list[Tensor]:
    """Sentences of docstrings, at most 512 bytes of each; the same on all ranks."""
    found: list[str] = []
    for file in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                found += [s for s in re.split(r"(?<=[.!?]) ", text) if len(s) > 9]
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [torch.tensor(list(found[i].encode()[:MOST])) for i in chosen]


def padded(batch: list[Tensor]) -> Tensor:
    """(batch, longest)"""
    return nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=PAD)


class GPT(nn.Module):
    """The loss of the next byte, a mean over sentences."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(MOST, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Of (batch, length) bytes."""
        given, wanted = text[:, :-1], text[:, 1:]
        x = self.token(given) + self.place.weight[: given.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        scores = self.head(self.blocks(x, mask, is_causal=True))
        each = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none").view_as(wanted)
        there = (wanted != PAD).float()
        return ((each * there).sum(1) / there.sum(1)).mean()


class Run:
    """A model, trained an epoch at a time with one sampler; `slow` makes this rank twice as slow."""

    def __init__(self, name: str, data: list[Tensor], args: argparse.Namespace, slow: bool = False) -> None:
        torch.manual_seed(0)
        self.slow, self.epoch, costs = slow, 0, [len(s) for s in data]
        self.model, weight = GPT(), None
        if name == "random":
            self.sampler: Any = DistributedSampler(data, trigram.world_size(), trigram.rank(), seed=0)
            batches = {"batch_size": args.batch, "sampler": self.sampler}
        else:
            speeds = "measured" if name == "measured" else None
            self.sampler = BalancedBatchSampler(
                costs, batch_size=args.batch, padded=True, window=args.window, speeds=speeds
            )
            weight = self.sampler.sample_weight
            batches = {"batch_sampler": self.sampler}
        self.loader: Iterable[Tensor] = DataLoader(data, collate_fn=padded, **batches)
        trigram.with_bagua(self.model, sample_weight=weight)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.bytes = 0

    def train(self) -> None:
        """One epoch."""
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        self.bytes = 0
        for text in self.loader:
            began = time.perf_counter()
            self.bytes += text.numel()
            self.optimizer.zero_grad()
            loss = self.model(text)
            if self.slow:
                time.sleep(2 * (time.perf_counter() - began))  # forward is a third of a step
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def loss(self, data: list[Tensor]) -> float:
        """On sentences that it has not been trained on."""
        return float(torch.stack([self.model(s[None]) for s in data]).mean())


def rank_main(args: argparse.Namespace) -> None:
    """Measures on one rank."""
    torch.set_num_threads(1)
    trigram.init()
    everything = sentences(args.sentences + 100)
    data, held = everything[:-100], everything[-100:]
    lengths = torch.tensor([float(len(s)) for s in data])
    last = trigram.rank() == trigram.world_size() - 1
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "lengths": torch.quantile(lengths, torch.tensor([0.1, 0.5, 0.9, 1.0])).tolist(),
    }
    rows = []
    even = {name: Run(name, data, args) for name in ("balanced", "random")}
    times = paired.in_turns({n: r.train for n, r in even.items()}, args.epochs, trigram.barrier)
    rows.append(("balanced over random", paired.ratio(times["balanced"], times["random"])))
    facts["padded bytes of rank 0"] = {n: r.bytes for n, r in even.items()}
    facts["held-out loss"] = {n: r.loss(held) for n, r in even.items()}
    uneven = {name: Run(name, data, args, last) for name in ("measured", "balanced", "random")}
    slow = paired.in_turns({n: r.train for n, r in uneven.items()}, args.epochs, trigram.barrier, warmup=2)
    rows.append(("slow rank: measured over balanced", paired.ratio(slow["measured"], slow["balanced"])))
    rows.append(("slow rank: measured over random", paired.ratio(slow["measured"], slow["random"])))
    facts["speeds"] = uneven["measured"].sampler.speeds
    facts["held-out loss, slow rank"] = {n: r.loss(held) for n, r in uneven.items()}
    if trigram.rank() == 0:
        facts["seconds"] = {**times, **{f"slow rank: {n}": s for n, s in slow.items()}}
        text = paired.table(rows)
        (args.out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
        (args.out / "table.md").write_text(text)
        print(text + json.dumps({k: v for k, v in facts.items() if k != "seconds"}, indent=1))
    launch.leave_job()


def main() -> int:
    """Starts the ranks; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--window", type=int, default=2048)
    return hosts.run_ranks(parser, rank_main, "sampler-out", 2)


if __name__ == "__main__":
    sys.exit(main())
