"""What a training loop may do, under every algorithm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.reference.simulation import Simulation, flatten
from tests.support.algorithm_rows import GRADIENTS, NAMES_ONCE, ROWS
from tests.support.algorithm_run import OPTIMIZERS, TIGHT, Run, loss, net, start
from tests.support.cases import Cases
from tests.support.checks import equal, fingerprint, raises, same_on_all_ranks, says
from tests.support.marks import long
from tests.support.twin_training import x

CASES = Cases()


@CASES.over(*NAMES_ONCE)
def accumulates(rank: int, world: int, label: str) -> None:
    """Three micro-batches a step, two of them silent; exchanges are counted in steps."""
    run = Run(rank, world, ROWS[label], micros=3, once=True)
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
    run = Run(rank, world, ROWS[label], once=True)
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
            # An averaging step that overlaps it is applied in a skipped step too, as on the other ranks.
            same = fingerprint(model.parameters()) == before
            assert same or label not in GRADIENTS, "a skipped step moved the weights"
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
    one, two = (Run(rank, world, ROWS[label], salt=salt, once=True) for salt, label in enumerate(pair))
    for step in range(6):
        one.step()
        two.step()
        if step % 2:
            one.step()
    one.end(world, f"two-{pair}-a")
    two.end(world, f"two-{pair}-b")


@CASES.over(*NAMES_ONCE)
def copies(rank: int, world: int, label: str) -> None:
    """A copy is a bare module and trains alone; the original goes on as before."""
    run = Run(rank, world, ROWS[label], once=True)
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


@CASES.over(*NAMES_ONCE, "staleness", "central int8 overlap", "central int4 fragments overlap")
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


@CASES.over("central/powersgd:2/every:2", "central:median/full/every:1", "central/topk:0.1/every:1")
def join_while_averaging(rank: int, world: int, algorithm: str) -> None:
    """An average of two phases or more overlaps a step of the others when a rank's inputs end."""
    torch.manual_seed(8)
    model = trigram.with_bagua(net(), algorithm, overlap=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        with trigram.join(model):
            for step in range(4 + 3 * rank):
                optimizer.zero_grad()
                loss(model, rank, step).backward()
                if step != 5:  # a step without an update
                    optimizer.step()
        assert bool(flatten(list(model.parameters())).isfinite().all())
    trigram.consensus(model)
    same_on_all_ranks(rank, world, f"join-{algorithm.replace('/', '-')}", model.parameters())


@CASES.over("ignore", "check_replicas")
def join_with(rank: int, world: int, option: str) -> None:
    """What is left alone stays each rank's own; a rank without inputs is no replica that differs."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = (
        {"ignore": ["1.weight", "1.bias"]} if option == "ignore" else {"check_replicas": 1}
    )
    trigram.with_bagua(model, optimizer=optimizer, **given)
    mine = model[1].weight.detach().clone()
    with trigram.join(model):
        for step in range(2 * rank):
            optimizer.zero_grad()
            model(x(rank, step)[:, :3]).square().mean().backward()
            if option == "ignore":
                assert model[1].weight.grad is not None
                model[1].weight.grad = None
                model[1].bias.grad = None
            optimizer.step()
    if option == "ignore":
        assert torch.equal(mine, model[1].weight.detach())
    same = [model[0].weight.detach()] if option == "ignore" else list(model.parameters())
    same_on_all_ranks(rank, world, f"{option}-joined", [p.detach() for p in same])
    for step in range(3):
        optimizer.zero_grad()
        model(x(rank, step)[:, :3]).square().mean().backward()
        optimizer.step()
    same_on_all_ranks(rank, world, f"{option}-trained", [model[0].weight.detach()])
    trigram.unwrap(model)


@CASES.over("async", "async_low_precision", "outside")
def join_of_two_kinds(rank: int, world: int, label: str) -> None:
    """A rank without inputs answers those that wait for an average in the background, and for a step; also
    where the model that averages in the background is outside of the block."""
    algorithm = "async" if label == "outside" else label
    torch.manual_seed(8)
    pairs = []
    for name, options in ((algorithm, {"staleness": 2}), ("bytegrad", {}), ("local_sgd", {"every": 2})):
        model = trigram.with_bagua(net(), name, **options)
        pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.05)))
    for _ in range(2):
        with trigram.join(*(model for model, _ in pairs[label == "outside" :])):
            for step in range(4 + 3 * rank):
                for model, optimizer in pairs:
                    optimizer.zero_grad()
                    loss(model, rank, step).backward()
                    optimizer.step()
    for model, _ in pairs:
        trigram.consensus(model)
        assert bool(flatten(list(model.parameters())).isfinite().all())


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
    sim = Simulation(row.reference(world), world, net, Run.optimizer_for(row, world), row.warmup)
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


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_loop(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm" if world == 3 else "tcp")
