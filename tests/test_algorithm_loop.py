"""What a training loop may do, under every algorithm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.algorithm_reference import Simulation, flatten
from tests.cases import Cases
from tests.checks import close, equal, fingerprint, raises, same_on_all_ranks, says
from tests.pairs import x
from tests.reference import gloo
from tests.test_algorithms import (
    NAMES_ONCE,
    OPTIMIZERS,
    ROWS,
    TIGHT,
    Row,
    Run,
    Yardstick,
    loss,
    net,
)

CASES, ALONE, HOSTS, HOOKS = Cases(), Cases(), Cases(), Cases()
GRADIENTS = [k for k in NAMES_ONCE if ROWS[k].same]  # and momentum
OTHERS = [k for k in NAMES_ONCE if not ROWS[k].same]


def start(
    rank: int, label: str, make: Callable[[], nn.Module], seed: int = 8
) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    row = ROWS[label]
    module = make()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    return trigram.with_bagua(module, row.algorithm, **given, **row.options), optimizer


@CASES.over(*NAMES_ONCE)
def accumulates(rank: int, world: int, label: str) -> None:
    """Three micro-batches a step, two of them silent; exchanges are counted in steps."""
    run = Run(rank, world, ROWS[label], micros=3)
    run.train(6)
    run.end(world, f"accumulates-{label}")
    assert trigram.stats(run.model)["steps"] == 6


@CASES.over(*NAMES_ONCE)
def accumulates_unevenly(rank: int, world: int, label: str) -> None:
    """Ranks accumulate different numbers of silent steps."""
    model, optimizer = start(rank, label, net)
    for step in range(6):
        optimizer.zero_grad()
        with trigram.no_sync(model):
            for micro in range((rank + step) % 3):
                loss(model, rank, step, micro + 1).backward()
        loss(model, rank, step).backward()
        optimizer.step()
    assert bool(flatten(list(model.parameters())).isfinite().all())
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"unevenly-{label}", model.parameters())


@CASES.over(*NAMES_ONCE)
def forwards_between(rank: int, world: int, label: str) -> None:
    """Evaluations, on some ranks only, and training forwards without a backward change nothing."""
    run = Run(rank, world, ROWS[label])
    for step in range(7):
        if step % 2 == rank % 2:
            run.model.eval()
            with torch.no_grad():
                run.model(x(rank, 300 + step))
            run.model.train()
        run.step()
        if step % 3 == 1:  # the boundary is here: the next forward is none
            run.model(x(rank, 200 + step))
            run.model(x(rank, 250 + step))
    run.end(world, f"between-{label}")


@CASES.over(*(k for k in NAMES_ONCE if k != "qadam 8"))
def clips(rank: int, world: int, label: str) -> None:
    """Between backward and the step; where gradients are everybody's, so is their norm."""
    run = Run(rank, world, ROWS[label])
    for step in range(6):
        run.backward()
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in run.sim.models]
        assert abs(float(norm / norms[rank]) - 1) < 2e-3 and float(norm) > 0.1
        if label in GRADIENTS:
            same_on_all_ranks(rank, world, f"norm-{label}-{step}", [norm])
        run.update()
    run.end(world, f"clips-{label}")


SCALED = [k for k in NAMES_ONCE if k != "qadam 8"]


@CASES.over(*SCALED)
def scaler(rank: int, world: int, label: str) -> None:
    """An infinity on one rank. Whose gradients are everybody's skip together; else only that rank does."""
    model, optimizer = start(rank, label, net)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    seen, skipped = [], []
    for step in range(9):
        optimizer.zero_grad()
        value = loss(model, rank, step)
        if step == 4 and rank == world - 1:
            value = value * float("inf")
        scale.scale(value).backward()
        before = fingerprint(model.parameters())
        scale.step(optimizer)
        was = scale.get_scale()
        scale.update()
        if scale.get_scale() < was:
            skipped.append(step)
            assert fingerprint(model.parameters()) == before, "a skipped step moved the weights"
        weights = flatten(list(model.parameters()))
        assert bool(weights.isfinite().all()), f"not finite after step {step}"
        seen.append(weights)
    if label in GRADIENTS:
        # An infinity goes to all ranks once, and is then forgotten.
        assert skipped == [4], skipped
        same_on_all_ranks(rank, world, f"scaler-{label}", seen)
    else:
        assert skipped == ([4] if rank == world - 1 else []), skipped


@CASES.over(*SCALED)
def scaled(rank: int, world: int, label: str) -> None:
    """A scale that is a power of two, and finite gradients: as if nothing had been scaled."""
    run = Run(rank, world, ROWS[label])
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(7):
        run.sim.step(run.losses)
        run.optimizer.zero_grad()
        scale.scale(loss(run.model, rank, step)).backward()
        scale.step(run.optimizer)
        scale.update()
        run.done += 1
        run.yardstick.check(run.weights(), run.sim.weights(rank), f"after step {step}")


@CASES
def scaled_momenta(rank: int, world: int) -> None:
    """qadam averages momenta, which have no scale: refused on all ranks, who go on without one."""
    model, optimizer = start(rank, "qadam 8", net)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train() -> None:
        for step in range(6):
            optimizer.zero_grad()
            scale.scale(loss(model, rank, step)).backward()
            scale.step(optimizer)
            scale.update()

    says(raises(trigram.UnsupportedError, train), "qadam", "GradScaler")
    trigram.barrier()


class Heads(nn.Module):
    """A trunk, and heads of which a forward takes one; the last is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 9)
        self.heads = nn.ModuleList(nn.Linear(9, 3) for _ in range(4))

    def forward(self, inputs: Tensor, which: int = 0) -> Tensor:
        return self.heads[which](torch.tanh(self.trunk(inputs)))


@CASES.over(*NAMES_ONCE)
def unused(rank: int, world: int, label: str) -> None:
    """Ranks use different heads; what nobody used keeps None. With weight decay, a zero would show."""

    def lossy(model: nn.Module, r: int, step: int) -> Tensor:
        return (model(x(r, step), (r + step) % 3 if step > 2 else 0) - r).square().mean()

    row = ROWS[label]
    chosen = row.optimizer if row.given else "momentum"
    run = Run(rank, world, Row(**{**vars(row), "optimizer": chosen}), Heads)
    last = fingerprint(run.model.heads[3].parameters())
    for step in range(7):
        run.optimizer.zero_grad()
        lossy(run.model, rank, step).backward()
        for k, head in enumerate(run.model.heads):
            mine = k == ((rank + step) % 3 if step > 2 else 0)
            anyone = k < 3 and any(k == ((r + step) % 3 if step > 2 else 0) for r in range(world))
            got = head.weight.grad is not None
            assert got == (anyone if label in GRADIENTS else mine), f"step {step}, head {k}"
        run.optimizer.step()
        if label not in ("qadam 8", "powersgd"):  # what QR makes of no gradient at all is anybody's choice
            run.sim.step(lambda m, r, step=step: [lossy(m, r, step)])
            run.yardstick.check(run.weights(), run.sim.weights(rank), f"after step {step}")
        if label in GRADIENTS:
            run.same.append(run.weights())
    run.end(world, f"unused-{label}")
    if label in GRADIENTS:
        assert fingerprint(run.model.heads[3].parameters()) == last, "a head that nobody used has moved"


@CASES.over(*NAMES_ONCE)
def bfloat16(rank: int, world: int, label: str) -> None:
    """A model in half precision learns, stays what it is, and is the same where it is to be."""
    model, optimizer = start(rank, label, lambda: net().bfloat16())
    losses, seen = [], []
    for _ in range(12):
        optimizer.zero_grad()
        inputs = x(0, 3)
        value = (model(inputs.bfloat16()).float() - inputs[:, :3].sin()).square().mean()
        value.backward()
        losses.append(float(value.detach()))
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        optimizer.step()
        seen += [p.detach().clone() for p in model.parameters()]
    assert all(t.dtype == torch.bfloat16 and bool(t.isfinite().all()) for t in seen)
    # All ranks have the same data here, so nobody parts, whatever is exchanged.
    assert losses[-1] < losses[0], losses
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"bfloat16-{label}", [t.view(torch.int16) for t in seen])


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Linear(6, 9),
            nn.Linear(9, 9, dtype=torch.bfloat16),
            nn.Linear(9, 3),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.three(self.two(torch.tanh(self.one(inputs)).bfloat16()).float())


@CASES.over(*NAMES_ONCE)
def mixed_types(rank: int, world: int, label: str) -> None:
    model, optimizer = start(rank, label, Both)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        seen += [p.detach().float() for p in model.parameters()]
    assert [p.dtype for p in model.two.parameters()] == [torch.bfloat16] * 2
    assert all(bool(t.isfinite().all()) for t in seen)
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"types-{label}", seen)


PAIRS = [
    ("bytegrad sgd", "decentralized"),
    ("async third", "local_sgd"),
    ("low_precision_decentralized", "topk fraction"),
    ("push_sum", "qadam 8"),
    ("async_decentralized third", "async_low_precision_decentralized random"),
    ("decentralized", "decentralized"),
    ("async irregular", "async third"),
    ("signsgd", "gradient_allreduce adam"),
    ("powersgd", "diloco"),
]


@CASES.over(*PAIRS)
def two_models(rank: int, world: int, pair: tuple[str, str]) -> None:
    """Trained in turn, each as if it were alone."""
    one, two = (Run(rank, world, ROWS[label], salt=salt) for salt, label in enumerate(pair))
    for step in range(6):
        one.step()
        two.step()
        if step % 2:
            one.step()
    one.end(world, f"two-{pair}-a")
    two.end(world, f"two-{pair}-b")


@CASES.over(*NAMES_ONCE)
def frozen(rank: int, world: int, label: str) -> None:
    """What needs no gradient stays at home."""

    def make() -> nn.Module:
        module = net()
        module[2].requires_grad_(False)  # type: ignore[index]
        return module

    row = ROWS[label]
    torch.manual_seed(8)
    sim = Simulation(row.reference(world), world, make, Run.optimizer_for(row), row.warmup)
    model, optimizer = start(rank, label, make)
    yardstick = Yardstick(row.coded)
    before = fingerprint(model[2].parameters())
    for step in range(6):
        sim.step(lambda m, r, step=step: [loss(m, r, step)])
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        own = [p for p in model.parameters() if p.requires_grad]
        yardstick.check(flatten(own), sim.weights(rank), f"after step {step}")
    assert fingerprint(model[2].parameters()) == before


class Table(nn.Module):
    """Buffers that forward does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.table: Tensor
        self.count: Tensor
        self.register_buffer("table", torch.zeros(5))
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)


@CASES.over(*NAMES_ONCE)
def buffers(rank: int, world: int, label: str) -> None:
    """They follow rank 0 where gradients are averaged, stay local elsewhere; consensus averages them."""
    model, optimizer = start(rank, label, Table)
    for step in range(4):
        model.table.fill_(rank + 1.0)
        model.count.fill_(rank + 1)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        if step == 0:
            continue
        expected = 1.0 if label in GRADIENTS else rank + 1.0
        equal(model.table, torch.full((5,), expected), f"step {step}")
        equal(model.count, torch.full((2,), int(expected)), f"step {step}, integers")
    model.table.fill_(rank + 1.0)
    with trigram.consensus(model):
        close(model.table, torch.full((5,), (world + 1) / 2), 1e-6, "inside")
    equal(model.table, torch.full((5,), rank + 1.0), "afterwards")
    trigram.consensus(model)
    close(model.table, torch.full((5,), (world + 1) / 2), 1e-6, "a plain call")


@CASES.over(*NAMES_ONCE)
def batch_norm(rank: int, world: int, label: str) -> None:
    """Trains; rank 0's statistics never meet the others' where they are to stay at home."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))

    model, optimizer = start(rank, label, make)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    assert int(model[1].num_batches_tracked) == 5
    assert all(bool(t.isfinite().all()) for t in (*model.parameters(), *model.buffers()))


@CASES.over(*NAMES_ONCE)
def copies(rank: int, world: int, label: str) -> None:
    """A copy is a bare module and trains alone; the original goes on as before."""
    run = Run(rank, world, ROWS[label])
    run.train(3)
    other = copy.deepcopy(run.model)
    if rank == 0:
        bare = net()
        bare.load_state_dict(other.state_dict())
        for m in (other, bare):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            for step in range(4):
                optimizer.zero_grad()
                loss(m, 0, step).backward()
                optimizer.step()
        for a, e in zip(other.parameters(), bare.parameters(), strict=True):
            equal(a, e, "the copy")
    run.train(3)
    run.end(world, f"copies-{label}")


@CASES.over(*NAMES_ONCE)
def the_module_stays_itself(rank: int, world: int, label: str) -> None:
    """The same parameters, the same keys, through every step."""
    module = net()
    before, keys = [id(p) for p in module.parameters()], list(module.state_dict())
    row = ROWS[label]
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    model = trigram.with_bagua(module, row.algorithm, **given, **row.options)
    assert model is module
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(model, rank, step).backward()
        optimizer.step()
    assert [id(p) for p in model.parameters()] == before and list(model.state_dict()) == keys
    assert all(p.is_leaf and p.is_contiguous() for p in model.parameters())


@CASES.over(*(k for k in NAMES_ONCE if not k.startswith("qadam")))
def weights_set_by_hand(rank: int, world: int, label: str) -> None:
    """Between steps somebody changes the weights (here: decays them): that counts as the step's doing."""
    run = Run(rank, world, ROWS[label])
    for _ in range(6):
        run.step()
        with torch.no_grad():
            for model in (run.model, *run.sim.models):
                for p in model.parameters():
                    p.mul_(0.95)


@CASES.over(*NAMES_ONCE, "staleness")
def join(rank: int, world: int, label: str) -> None:
    """Ranks run out of inputs at different times; where gradients are averaged all end with the same.

    Asynchronous ones run freely here: by a script, rounds would need all ranks at the same steps.
    """
    row = ROWS["async third" if label == "staleness" else label]
    options = {k: v for k, v in row.options.items() if k != "script"}
    options |= {"staleness": 2} if label == "staleness" else {}
    torch.manual_seed(8)
    module = net()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    model = trigram.with_bagua(module, row.algorithm, **given, **options)
    for _ in range(2):
        with trigram.join(model):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                optimizer.step()
        assert bool(flatten(list(model.parameters())).isfinite().all())
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"join-{label}", model.parameters())


@CASES.over(*NAMES_ONCE)
def backward_fails(rank: int, world: int, label: str) -> None:
    """Everywhere, in one step: the next is clean."""
    model, optimizer = start(rank, label, net)
    for step in range(7):
        optimizer.zero_grad()
        if step == 3:
            handle = model[0].weight.register_hook(_fault)
            try:
                loss(model, rank, step).backward()
            except ZeroDivisionError:
                pass
            else:
                raise AssertionError("no fault")
            finally:
                handle.remove()
            continue
        loss(model, rank, step).backward()
        optimizer.step()
    assert bool(flatten(list(model.parameters())).isfinite().all())
    if label in GRADIENTS:
        same_on_all_ranks(rank, world, f"fails-{label}", model.parameters())


@CASES.over(*NAMES_ONCE)
def backward_fails_on_one(rank: int, world: int, label: str) -> None:
    """The others are told, or need not know; all go on, and nobody is left waiting at the end.

    Again and again: how far the others have come by then is a matter of timing.
    """
    model, optimizer = start(rank, label, net)
    for step in range(26):
        fails = step % 3 == 1 and step > 3
        optimizer.zero_grad()
        handle = model[0].weight.register_hook(_fault) if fails and rank == world - 1 else None
        try:
            loss(model, rank, step).backward()
        except ZeroDivisionError:
            assert handle is not None
            continue
        except trigram.TrigramError as e:
            if not fails or label not in GRADIENTS:
                raise AssertionError(f"in step {step}") from e
            continue
        finally:
            if handle is not None:
                handle.remove()
        optimizer.step()
    assert bool(flatten(list(model.parameters())).isfinite().all())
    trigram.consensus(model)
    same_on_all_ranks(rank, world, f"fails-on-one-{label}", model.parameters())


@CASES.over(*GRADIENTS)
def several_buckets(rank: int, world: int, label: str) -> None:
    """Blocks and shards are others then, but what is averaged is the same, within what a codec loses."""
    row = ROWS[label]
    exact = label.startswith(("gradient", "powersgd"))
    torch.manual_seed(8)
    sim = Simulation(row.reference(world), world, net, Run.optimizer_for(row), row.warmup)
    torch.manual_seed(8)
    module = net()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    model = trigram.with_bagua(module, row.algorithm, bucket_mb=0.001, **given, **row.options)
    seen = []
    for step in range(6):
        sim.step(lambda m, r, step=step: [loss(m, r, step)])
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        seen.append(flatten(list(model.parameters())))
        far = float((seen[-1] - sim.weights(rank)).norm() / sim.weights(rank).norm())
        assert far < (TIGHT if exact else 0.05), f"after step {step}: off by {far:.1e}"
    same_on_all_ranks(rank, world, f"several-{label}", seen)


def _fault(_: Tensor) -> Tensor:
    raise ZeroDivisionError


@CASES.over(*NAMES_ONCE)
def on_a_group(rank: int, world: int, label: str) -> None:
    """Rank 0 trains alone, the others together."""
    groups = [trigram.new_group([0]), trigram.new_group(list(range(1, world)))]
    row = ROWS[label]
    torch.manual_seed(8 + min(rank, 1))
    module = net()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    model = trigram.with_bagua(module, row.algorithm, group=groups[min(rank, 1)], **given, **row.options)
    torch.manual_seed(9)
    sim = Simulation(row.reference(world - 1), world - 1, net, Run.optimizer_for(row), row.warmup)
    yardstick = Yardstick(row.coded)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        if rank > 0 and world > 2:
            sim.step(lambda m, r, step=step: [loss(m, r + 1, step)])
            weights = flatten(list(model.parameters()))
            yardstick.check(weights, sim.weights(rank - 1), f"after step {step}")


@ALONE.over(*ROWS)
def alone(rank: int, world: int, label: str) -> None:
    """A world of one: it trains, and without a codec as the reference does; there is no outer step."""
    row = ROWS[label]
    if label.startswith("diloco"):
        model, optimizer = start(rank, label, net)
        torch.manual_seed(8)
        plain = net()
        local = OPTIMIZERS[row.optimizer](plain)
        for step in range(row.steps):
            for m, o in ((model, optimizer), (plain, local)):
                o.zero_grad()
                loss(m, rank, step).backward()
                o.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        return
    if row.coded or label.startswith("powersgd"):
        model, optimizer = start(rank, label, net)
        losses = []
        for _ in range(row.steps + 10):
            optimizer.zero_grad()
            value = loss(model, rank, 0)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
        assert losses[-1] < losses[0], losses
    else:
        run = Run(rank, world, row)
        run.train(row.steps)


@HOSTS.over(
    *NAMES_ONCE,
    "powersgd rank",
    "gossip random sign",
    "low_precision_decentralized exponential",
    "central int8 every",
    "push_sum exponential",
)
def across(rank: int, world: int, label: str) -> None:
    row = ROWS[label]
    run = Run(rank, world, row)
    run.train(row.steps)
    run.end(world, f"across-{label}")


# Hooks for DistributedDataParallel.

HOOKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient_allreduce": ("gradient_allreduce sgd", {}),
    "bytegrad": ("bytegrad sgd", {}),
    "bytegrad block": ("bytegrad block", {"block": 64}),
    "central fp8": ("central fp8", {}),
    "powersgd": ("powersgd", {"rank": 2}),
    "signsgd": ("signsgd", {}),
    "signsgd block": ("signsgd block", {"block": 64}),
    "topk": ("topk fraction", {"fraction": 0.05}),
}
FEEDBACK = ("signsgd", "topk")


def several() -> nn.Module:
    """Sizes that need no padding, so that DDP's buckets are laid out as ours."""
    last = nn.Linear(16, 3).requires_grad_(False)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16), last)


def single() -> nn.Module:
    """One parameter: nothing to lay out anew after the first step, which a residual might not survive."""
    first, last = nn.Linear(6, 32).requires_grad_(False), nn.Linear(32, 3).requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), nn.Linear(32, 32, bias=False), last)


@HOOKS.over(*HOOKED)
def hook(rank: int, world: int, label: str) -> None:
    """DDP with our hook trains as the reference does. DDP's first bucket has the model's order."""
    like, options = HOOKED[label]
    row = ROWS[like]
    make = single if label.startswith(FEEDBACK) else several
    torch.manual_seed(8)
    sim = Simulation(row.reference(world), world, make, OPTIMIZERS[row.optimizer], reverse=False)
    torch.manual_seed(8)
    module = make()
    optimizer = OPTIMIZERS[row.optimizer](module)
    trigram.init()
    seen = []
    with gloo(rank, world):
        model = DistributedDataParallel(module)
        model.register_comm_hook(*trigram.ddp_hook(row.algorithm, **options))
        yardstick = Yardstick(row.coded)
        for step in range(row.steps):
            sim.step(lambda m, r, step=step: [loss(m, r, step)])
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            seen.append(flatten([p for p in module.parameters() if p.requires_grad]))
            yardstick.check(seen[-1], sim.weights(rank), f"after step {step}")
    same_on_all_ranks(rank, world, f"hook-{label}", seen)


@HOOKS.over("topk", "signsgd", "bytegrad", "powersgd")
def hook_several_buckets(rank: int, world: int, name: str) -> None:
    """Each bucket keeps its own residuals, also when DDP lays them out anew after the first step."""
    torch.manual_seed(8)
    module = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 900), nn.Tanh(), nn.Linear(900, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    trigram.init()
    losses = []
    with gloo(rank, world):
        model = DistributedDataParallel(module, bucket_cap_mb=1)
        model.register_comm_hook(*trigram.ddp_hook(name))
        for step in range(20):
            optimizer.zero_grad()
            inputs = x(rank, step % 3)
            value = (model(inputs) - inputs[:, :3].sin()).square().mean()
            value.backward()
            optimizer.step()
            losses.append(float(value.detach()))
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), losses
    same_on_all_ranks(rank, world, f"hook-several-{name}", module.parameters())


@HOOKS
def hook_of_weights(rank: int, world: int) -> None:
    """What does not carry gradients is no hook."""
    for name in ("decentralized", "local_sgd", "async"):
        try:
            trigram.ddp_hook(name)
        except trigram.UnsupportedError as e:
            assert name in str(e) or "gradient" in str(e), e
        else:
            raise AssertionError(name)


def test_which_carry_gradients() -> None:
    assert {ROWS[k].algorithm for k in OTHERS} == {
        *("decentralized", "low_precision_decentralized", "async", "async_low_precision"),
        *("async_decentralized", "async_low_precision_decentralized", "local_sgd", "diloco", "push_sum"),
    }


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_loop(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm" if world == 3 else "tcp")


@pytest.mark.parametrize("case", list(ALONE))
def test_world_of_one(in_launch: Callable[..., None], case: str) -> None:
    in_launch("ALONE", case, 1)


@pytest.mark.parametrize("case", list(HOSTS))
def test_across_hosts(in_launch: Callable[..., None], two_hosts: None, case: str) -> None:
    in_launch("HOSTS", case, 4, transport="auto", hosts=[0, 0, 1, 1])


@pytest.mark.parametrize("case", list(HOOKS))
@pytest.mark.parametrize("world", [2, 3])
def test_ddp_hook(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("HOOKS", case, world)
