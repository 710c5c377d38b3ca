"""Trains the GPT of losses.py with several ranks in one process, to tell which part of an algorithm costs.

    python benches/simulate.py average=gradients graph=complete:overlap=false graph=one_peer:seed=1

Each argument is a training: settings of `Setting` with colons between them. The batches, learning rates and
rules are those of `losses.py` with `--workloads gpt`; there is no network, so that a part can be switched off
that belongs to it, and a training takes 25 s. Prints the held-out loss of the averaged weights.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from losses import TASKS, evaluate
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from trigram.algorithms import graphs
from trigram.cli import workloads

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
MUON_MOMENTUM, DEMO_DECAY = 0.95, 0.999
CHUNK = 64


@dataclass(frozen=True)
class Setting:
    """What is trained, and how.

    Attributes:
        ranks: How many.
        seed: Of weights and batches.
        steps: How many.
        average: `gradients`, as DDP; `weights`; `first`: of weights and of Adam's first moments (Muon's
            momenta); `both`: of weights and both moments.
        graph: Of the averages of weights and moments.
        rounds: How many averaging steps of the graph a training step has.
        overlap: Whether an average is applied after the next step's gradients.
        second_moment: As in `with_bagua`: `mean` or `own`.
        lr: The learning rate.
        warmup: The fraction of the steps that average gradients first.
        own_step: The part of a rank's own last update that its gradients are computed with; with 0 all
            updates arrive equally late.
        follow: The part of what an average moves a rank's weights by that its first moment takes over, as an
            update would have made it: with 1 and a complete graph all have the mean's moment, at no bytes
            (quasi-global momentum, 2102.04761).
        innovation: The part of its own last gradient in its own last update that a rank's gradients are
            computed with; the rest of the update is the moments', which are alike.
        pull: The part of an average that is applied.
        optimizer: `adam`; `muon` (matrices of the blocks, the rest Adam); `demo` (DeMo, 2411.19870).
        matrix_lr: The factor of the learning rate of matrices, with Muon.
        fraction: The part of each chunk's coefficients that DeMo sends.
    """

    ranks: int = 8
    seed: int = 0
    steps: int = TASKS["gpt"].steps
    average: str = "weights"
    graph: str = "one_peer"
    rounds: int = 1
    overlap: bool = True
    second_moment: str = "mean"
    lr: float = TASKS["gpt"].adam
    warmup: float = 0.0
    own_step: float = 1.0
    follow: float = 0.0
    innovation: float = 1.0
    pull: float = 1.0
    optimizer: str = "adam"
    matrix_lr: float = 1.0
    fraction: float = 0.1


def parse(text: str) -> Setting:
    """`graph=one_peer:overlap=false`."""
    found = {}
    for part in filter(None, text.split(":")):
        name, _, value = part.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return Setting(**found)


def batches(split: workloads.Split, ranks: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of all ranks in losses.py, of shape (ranks, batch, context)."""
    size, generator = TASKS["gpt"].batch, torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(split.x), generator=generator)
        for start in range(0, len(split.x) // ranks - size + 1, size):
            index = torch.stack([order[rank::ranks][start : start + size] for rank in range(ranks)])
            yield split.x[index], split.y[index]


class Model:
    """A model whose weights are a vector, of each rank a row."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        named = list(module.named_parameters())
        self.names, self.shapes = [name for name, _ in named], [p.shape for _, p in named]
        self.sizes = [p.numel() for _, p in named]
        self.start = torch.cat([p.detach().flatten() for _, p in named])
        self.gradients: Callable[..., tuple[Tensor, Tensor]] = vmap(grad_and_value(self._loss))

    def _loss(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        views = zip(self.names, flat.split(self.sizes), self.shapes, strict=True)
        scores = functional_call(self.module, {name: v.view(shape) for name, v, shape in views}, (x,))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Views of the parameters, each of shape (ranks, *shape)."""
        pieces = zip(rows.split(self.sizes, 1), self.shapes, strict=True)
        return [piece.view(len(rows), *shape) for piece, shape in pieces]

    def matrices(self) -> list[int]:
        """Which parameters Muon updates."""
        named = enumerate(zip(self.names, self.shapes, strict=True))
        return [i for i, (name, shape) in named if len(shape) == 2 and name.startswith("blocks")]


def orthogonal(update: Tensor) -> Tensor:
    """Muon's Newton-Schulz iteration, for matrices of shape (ranks, rows, columns)."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.bfloat16().mT if tall else update.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


def cosines(size: int) -> Tensor:
    """The matrix of an orthonormal discrete cosine transform."""
    k = torch.arange(size)
    matrix = torch.cos(math.pi * (k[None] + 0.5) * k[:, None] / size) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


def largest(momentum: Tensor, fraction: float) -> Tensor:
    """What DeMo sends of a momentum of shape (ranks, *shape): the largest coefficients of each chunk."""
    m = momentum if momentum.dim() == 3 else momentum.unsqueeze(1)
    n, rows, columns = m.shape
    a, b = (max(d for d in range(1, CHUNK + 1) if size % d == 0) for size in (rows, columns))
    chunks = m.reshape(n, rows // a, a, columns // b, b).permute(0, 1, 3, 2, 4)
    codes = (cosines(a) @ chunks @ cosines(b).T).flatten(-2)
    index = codes.abs().topk(max(1, round(fraction * a * b)), -1).indices
    kept = torch.zeros_like(codes).scatter_(-1, index, codes.gather(-1, index)).view_as(chunks)
    return (cosines(a).T @ kept @ cosines(b)).permute(0, 1, 3, 2, 4).reshape(momentum.shape)


def _apply(late: list[tuple[Tensor, Tensor]], x: Tensor, first: Tensor, follow: Tensor) -> None:
    """Applies averages; the first moment follows those of the weights."""
    for values, change in late:
        values.add_(change)
        if values is x:
            first -= follow * change


def train(setting: Setting, split: workloads.Split) -> float:
    """The held-out loss of one training."""
    n, s = setting.ranks, setting
    torch.manual_seed(s.seed)
    model = Model(workloads.make_model("gpt"))
    x = model.start.repeat(n, 1)
    first, second, momentum = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    last, news, late, averages = torch.zeros_like(x), torch.zeros_like(x), [], 0
    scale = torch.ones_like(x)
    stream = batches(split, n, s.seed)
    for step in range(s.steps):
        factor = min(1.0, (step + 1) / (0.05 * s.steps)) * 0.5 * (1 + math.cos(math.pi * step / s.steps))
        by_gradients = s.average == "gradients" or step < s.warmup * s.steps
        with sdpa_kernel(SDPBackend.MATH):
            held_back = (1 - s.own_step) * last + (1 - s.innovation) * news
            g, _ = model.gradients(x + held_back, *next(stream))
        _apply(late, x, first, s.follow / scale)
        late = []
        if by_gradients and s.optimizer != "demo":
            g = g.mean(0, keepdim=True).expand_as(g)
        before = first
        first, second = BETA1 * first + (1 - BETA1) * g, BETA2 * second + (1 - BETA2) * g * g
        update = first / (1 - BETA1 ** (step + 1)) / ((second / (1 - BETA2 ** (step + 1))).sqrt() + EPS)
        if not by_gradients and s.second_moment == "mean" and step >= 10:
            second -= (1 - BETA2) * (1 - 1 / n) * (g * g - (g * before).clamp_min(0))
        if s.optimizer == "muon":
            momentum = MUON_MOMENTUM * momentum + (1 - MUON_MOMENTUM) * g
            nesterov = MUON_MOMENTUM * momentum + (1 - MUON_MOMENTUM) * g
            parts, inputs = model.parts(update), model.parts(nesterov)
            for i in model.matrices():
                size = s.matrix_lr * 0.2 * math.sqrt(max(model.shapes[i]))
                parts[i].copy_(size * orthogonal(inputs[i]))
        if s.optimizer == "demo":
            momentum = DEMO_DECAY * momentum + g
            sent = torch.cat([largest(m, s.fraction).flatten(1) for m in model.parts(momentum)], 1)
            momentum = momentum - sent
            update = sent.mean(0, keepdim=True).sign().expand_as(x)
        last = s.lr * factor * update
        correction = 1 - BETA1 ** (step + 1)
        scale = s.lr * factor / correction / ((second / (1 - BETA2 ** (step + 1))).sqrt() + EPS)
        news = scale * (1 - BETA1) * g
        x = x - last
        if by_gradients or s.optimizer == "demo":
            continue
        mixing = torch.eye(n)
        for _ in range(s.rounds):
            mixing = graphs.find(s.graph, n).matrix(averages).float() @ mixing
            averages += 1
        mixed = [x]
        if s.average in ("first", "both"):
            mixed += [first, momentum]
        if s.average == "both":
            mixed += [second]
        late = [(values, s.pull * (mixing @ values - values)) for values in mixed]
        if not s.overlap:
            _apply(late, x, first, s.follow / scale)
            late = []
    for values, change in late:
        values.add_(change)
    nn.utils.vector_to_parameters(x.mean(0), model.module.parameters())
    return evaluate(model.module, split)


def main() -> int:
    """Makes the trainings of the command line."""
    torch.set_num_threads(1)
    split = workloads.data("gpt")
    settings = [parse(text) for text in sys.argv[1:]]
    for each in settings:
        graphs.find(each.graph, each.ranks)  # what is unknown is said before the first training
    for text, each in zip(sys.argv[1:], settings, strict=True):
        print(f"{text:60} {train(each, split):.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
