"""What happens on one rank only: the others must not wait for what does not come, nor go on apart."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import trigram
from tests.support.loops.loop import Flat, Loop, Net, after_steps, mse, sgd, train, train_by_rank
from tests.support.loops.table import ASYNC, GOSSIP, GRADIENTS, WEIGHTS, row

TOLD = tuple(a for a in (*GRADIENTS, *WEIGHTS) if a not in (*GOSSIP, "powersgd"))
"""Where a change on one rank is met by the others' next call; neighbours in a graph wait for `op_timeout`."""


@row()
def saliency_on_one(t: Loop) -> None:
    """`autograd.grad` with respect to the inputs on rank 0 in the middle of training."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        if t.rank == 0 and step in (3, 4, 7):
            shown = inputs.clone().requires_grad_(True)
            torch.autograd.grad(model(shown).sum(), shown)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()


@row()
def exported_on_one(t: Loop) -> None:
    """`torch.export` of the model in training and in evaluation mode on rank 0, in the middle of training."""
    model = t.wrap(nn.Sequential(Net(), nn.BatchNorm1d(3, momentum=0.0)))
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        if t.rank == 0 and step in (0, 3, 4):
            kept = [b.clone() for b in model.buffers()]
            torch.export.export(model.train(step != 3), (inputs,))
            with torch.no_grad():
                for b, before in zip(model.train().buffers(), kept, strict=True):
                    b.copy_(before)
        optimizer.zero_grad()
        mse(model(inputs)[:, : targets.shape[1]], targets).backward()
        optimizer.step()


@row()
def gradient_norm_on_one(t: Loop) -> None:
    """`autograd.grad` with respect to the parameters on one rank, for a log line."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        if t.rank == 1 and step % 3 == 1:
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()


@row(linear=True)
def evaluated_on_one(t: Loop) -> None:
    """Rank 0 evaluates, in all the ways there are."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        inputs, _ = t.batch(step)
        if t.rank == 0 and step % 2:
            model.eval()
            with torch.no_grad():
                model(inputs)
            with torch.inference_mode():
                model(inputs)
            model.train()
            with torch.no_grad():
                model(inputs)


@row(linear=True)
def evaluated_with_gradients_on_one(t: Loop) -> None:
    """Rank 0 evaluates in eval mode and forgets no_grad."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        if t.rank == 0 and step % 2:
            model.eval()
            model(t.batch(step)[0])
            model.train()


@row(linear=True)
def saved_on_one(t: Loop) -> None:
    """Rank 0 reads the state_dict, alone."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for _ in after_steps(t, model, optimizer):
        if t.rank == 0:
            assert {k: v.clone() for k, v in model.state_dict().items()}.keys() == model.state_dict().keys()


@row()
def unused_on_one(t: Loop) -> None:
    """One rank does not use a layer; the mean counts its gradient as 0."""
    model = t.wrap(Flat())
    train_by_rank(t, model, lambda r, step, x, y: mse(model.one(x) if r == 1 and step % 2 else model(x), y))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, inputs: Tensor, which: int) -> Tensor:
        return self.heads[which](self.body(inputs))  # type: ignore[no-any-return]


@row(compare=GRADIENTS)
def another_head_on_each(t: Loop) -> None:
    """Each rank trains a head of its own."""
    model = t.wrap(Heads())
    train_by_rank(t, model, lambda r, _step, x, y: mse(model(x, r), y))


@row(compare=GRADIENTS)
def another_head_where_methods_are_called(t: Loop) -> None:
    """The same past the root's forward."""
    model = t.wrap(Heads())
    train_by_rank(t, model, lambda r, step, x, y: mse(model.heads[(r + step) % 3](model.body(x)), y))


@row()
def loss_times_zero(t: Loop) -> None:
    """One rank's loss is `0 * output.sum()`, because its batch has nothing in it."""
    model = t.wrap(Flat())
    train_by_rank(
        t,
        model,
        lambda r, step, x, y: 0.0 * model(x).sum() if r == 1 and step % 3 == 1 else mse(model(x), y),
    )


@row()
def batch_is_empty_on_one(t: Loop) -> None:
    """One rank's last batch has no samples."""
    model = t.wrap(Flat())

    def loss(r: int, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        n = 0 if r == 1 and step % 3 == 1 else 8
        return (model(inputs[:n]) - targets[:n]).square().sum() / 24

    train_by_rank(t, model, loss)


@row()
def micro_batches_by_rank(t: Loop) -> None:
    """Ranks accumulate different numbers of micro-batches under no_sync."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.02)
    for step in t.steps():
        optimizer.zero_grad()
        if t.rank >= 0:
            with t.no_sync(model):
                for micro in range(t.rank):
                    inputs, targets = t.batch(100 * step + micro + 1)
                    mse(model(inputs), targets).backward()
            inputs, targets = t.batch(step)
            mse(model(inputs), targets).backward()
        else:
            for r in range(t.world):
                for micro in range(r + 1):
                    inputs, targets = t.of(r).batch(100 * step + micro if micro else step)
                    (mse(model(inputs), targets) / t.world).backward()
        optimizer.step()


class Fault(Exception):
    """What a script raises and handles itself."""


def fault(_: object) -> None:
    """A hook that raises."""
    raise Fault


def _backward_raises(
    t: Loop, model: nn.Module, first: Callable[[Tensor], Tensor], rest: Callable[[Tensor], Tensor]
) -> None:
    """In steps 3 and 7 one rank's backward raises at what `first` returns, and is skipped there."""
    optimizer = sgd(model)
    for step in t.steps(12):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        bad = step in (3, 7)
        middle = first(inputs)
        if bad and t.rank == 1:
            middle.register_hook(fault)
        try:
            mse(rest(middle), targets).backward()
        except Fault:
            continue
        except trigram.AbortedError:
            assert bad and t.gradients, step
            continue
        optimizer.step()


@row(compare=False, even=False, spread=False)
def backward_raises_on_one(t: Loop) -> None:
    """One rank's backward raises and is skipped; where gradients are averaged the others raise too."""
    model = t.wrap(Flat())
    _backward_raises(t, model, model, lambda out: out)


@row(compare=False, even=False, spread=False)
def backward_raises_where_methods_are_called(t: Loop) -> None:
    """The same past the root's forward."""
    model = t.wrap(Net())
    _backward_raises(t, model, model.encode, model.decode)


def _forward_raises(t: Loop, model: nn.Module, steps: int = 12) -> None:
    """One rank's forward raises in step 3, and the batch is skipped there."""
    optimizer = sgd(model)
    for step in t.steps(steps):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        handle = None
        if step == 3 and t.rank == 1:
            handle = next(model.children()).register_forward_hook(lambda *_: fault(None))
        try:
            mse(model(inputs), targets).backward()
        except Fault:
            continue
        except trigram.TrigramError:
            assert step == 3 and t.gradients, step  # the others were told that one rank has no gradients
            continue
        finally:
            if handle is not None:
                handle.remove()
        optimizer.step()


@row(compare=False, even=False, spread=False)
def forward_raises_on_one(t: Loop) -> None:
    """A batch is skipped on one rank, because its forward raised: it takes no part in that step's average."""
    _forward_raises(t, t.wrap(Flat()))


@row(compare=False, even=False, spread=False)
def forward_raises_on_one_with_batch_norm(t: Loop) -> None:
    """The same where each forward broadcasts buffers."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    _forward_raises(t, t.wrap(model))


@row(compare=False, even=False, spread=False)
def forward_raises_on_all(t: Loop) -> None:
    """A batch is skipped on all ranks."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps(12):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        try:
            mse(model(inputs[:, :4] if step == 3 else inputs), targets).backward()
        except RuntimeError:
            continue
        optimizer.step()


@row(compare=False, spread=False, steps=9, refused=(WEIGHTS, "check_finite"))
def not_finite_on_one(t: Loop) -> None:
    """With `check_finite` a NaN on one rank is everybody's CorruptError, and the next step is clean."""
    model = t.wrap(Flat(), **({} if t.algorithm is None else {"check_finite": True}))
    optimizer = sgd(model)
    seen = []
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        if t.rank == 1 and step == 4:
            loss = loss * float("nan")
        try:
            loss.backward()
        except trigram.CorruptError as e:
            seen.append((step, e.rank))
            continue
        optimizer.step()
    assert t.algorithm is None or seen == [(4, 1)], seen


@row(compare=False, spread=False)
def scaler_skips_on_one(t: Loop) -> None:
    """A GradScaler meets infinities on one rank: the first steps of that rank are skipped."""
    module = Net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = t.wrap(module, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    for step in t.steps(12):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        if t.rank == 1 and step < 3:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@row(compare=False, spread=False, passes=2, boundaries=2)
def scaler_skips_on_one_before_a_second_pass(t: Loop) -> None:
    """Such a step is followed by a pass whose gradients are dropped: it is a step of its own on all ranks."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for step in t.steps(8):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        if t.rank == 0 and step in (1, 4):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        mse(model(inputs), -targets).backward()


@row(compare=False, spread=False)
def scaler_skips_on_one_and_layers_are_frozen(t: Loop) -> None:
    """Two models, of which the one that does not train is frozen, and the first updates are skipped."""
    g, d = t.wrap(Net()), t.wrap(nn.Linear(3, 3))
    pairs = [(m, sgd(m), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)) for m in (g, d)]
    for step in t.steps(8):
        inputs, targets = t.batch(step)
        for model, optimizer, scaler in pairs:
            g.requires_grad_(model is g)
            d.requires_grad_(model is d)
            optimizer.zero_grad()
            loss = mse(d(g(inputs)), targets)
            if t.rank == 0 and step < 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@row(compare=False, spread=False, only=("local_sgd",))
def another_head_with_state_averaged(t: Loop) -> None:
    """`local_sgd(optimizer=Adam)` where ranks use different heads: their states have different tensors."""
    module = Heads()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = t.wrap(module, optimizer)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs, max(t.rank, 0)), targets).backward()
        optimizer.step()


@row(refused=(TOLD, "all ranks"), alike=False, only=tuple(a for a in TOLD if a not in ASYNC))
def frozen_on_one(t: Loop) -> None:
    """One rank freezes a layer and the others do not: all are told."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    train(t, model, 0, 4, optimizer=optimizer)
    if t.rank == 1:
        model.one.requires_grad_(False)
    train(t, model, 4, 6, optimizer=optimizer)


@row(refused=(TOLD, "all ranks"), alike=False, only=TOLD)
def head_replaced_on_one(t: Loop) -> None:
    """One rank replaces the head by one of another shape: all are told."""
    model = t.wrap(Net())
    for step in t.steps():
        if step == 4 and t.rank == 1:
            model.decoder = nn.Linear(8, 4)
        optimizer = sgd(model)
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs)[:, :3], targets).backward()
        optimizer.step()


@row(refused=(GRADIENTS + WEIGHTS, "on all ranks"))
def another_model_on_one(t: Loop) -> None:
    """The models differ from the start."""
    t.wrap(nn.Linear(6, 3 if t.rank != 1 else 4))


@row(compare=False, spread=False, linear=True)
def weights_changed_on_one(t: Loop) -> None:
    """Where weights are averaged, what one rank adds to its weights is averaged like a step."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        if t.weights and t.rank == 1 and step == 4:
            with torch.no_grad():
                model.one.weight.add_(0.1)
