"""How many forward and backward passes there are, and in which order."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.loops.loop import Flat, Loop, Net, after_steps, mse, sgd, train, train_by_rank
from tests.support.loops.table import ASYNC, GRADIENTS, row


@row(linear=True, passes=2)
def two_losses_two_backwards(t: Loop) -> None:
    """One forward, `retain_graph`, two backwards, one step."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        out = model(inputs)
        mse(out, targets).backward(retain_graph=True)
        (0.1 * out.square().mean()).backward()
        optimizer.step()


@row(linear=True, passes=2)
def two_forwards_then_two_backwards(t: Loop) -> None:
    """Both graphs are built before the first backward."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        one = mse(model(inputs), targets)
        two = model(inputs * 0.5).square().mean()
        one.backward()
        two.backward()
        optimizer.step()


@row(linear=True)
def two_forwards_one_backward(t: Loop) -> None:
    """Siamese: one loss of two outputs."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        (mse(model(inputs), targets) + 0.1 * model(inputs * 0.5).square().mean()).backward()
        optimizer.step()


@row(linear=True, passes=3)
def accumulated_without_no_sync(t: Loop) -> None:
    """Three micro-batches, each with forward and backward, then a step."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        for micro in range(3):
            inputs, targets = t.batch(100 * step + micro)
            (mse(model(inputs), targets) / 3).backward()
        optimizer.step()


@row(compare=GRADIENTS, passes=16)
def perturbed_in_each_micro_batch(t: Loop) -> None:
    """Adversarial training (FGM) of a model whose gradients are those of eight micro-batches: a second pass
    of each, with other weights."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps(4):
        optimizer.zero_grad()
        for k in range(8):
            inputs, targets = t.batch(8 * step + k)
            (mse(model(inputs), targets) / 8).backward()
            weight = model.two.weight
            before = weight.detach().clone()
            weight.data.add_(0.01 * weight.grad / weight.grad.norm())
            (mse(model(inputs), targets) / 8).backward()
            weight.data.copy_(before)
        optimizer.step()


@row(linear=True)
def accumulated_with_no_sync(t: Loop) -> None:
    """All but the last micro-batch under no_sync."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        for micro in range(2):
            with t.no_sync(model):
                inputs, targets = t.batch(100 * step + micro)
                (mse(model(inputs), targets) / 3).backward()
        inputs, targets = t.batch(100 * step + 3)
        (mse(model(inputs), targets) / 3).backward()
        optimizer.step()


@row(linear=True)
def accumulated_up_to_a_closure(t: Loop) -> None:
    """All but the last micro-batch under no_sync; the last is in the optimizer's closure, as in Lightning."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        for micro in range(2):
            with t.no_sync(model):
                inputs, targets = t.batch(100 * step + micro)
                (mse(model(inputs), targets) / 3).backward()

        def closure(step: int = step) -> Tensor:
            inputs, targets = t.batch(100 * step + 3)
            loss = mse(model(inputs), targets) / 3
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


@row(linear=True)
def accumulated_before_a_closure(t: Loop) -> None:
    """All micro-batches under no_sync, and a closure that only returns the loss."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        with t.no_sync(model):
            inputs, targets = t.batch(step)
            loss = mse(model(inputs), targets)
            loss.backward()
        optimizer.step(lambda loss=loss: loss)  # type: ignore[misc]


class IgnoresClosures(torch.optim.SGD):
    """An optimizer that takes a closure and does not call it."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-group["lr"])


@row(only=GRADIENTS, refused=(GRADIENTS, "has not called the closure"))
def closure_that_is_ignored(t: Loop) -> None:
    """Gradients from no_sync, and an optimizer that does not call the closure that it is given."""
    model = t.wrap(Flat())
    optimizer = IgnoresClosures(model.parameters(), lr=0.05)
    for step in t.steps():
        optimizer.zero_grad()
        with t.no_sync(model):
            inputs, targets = t.batch(step)
            mse(model(inputs), targets).backward()
        optimizer.step(lambda: None)


@row(linear=True)
def accumulated_in_no_sync_only(t: Loop) -> None:
    """All micro-batches under no_sync, and gradients that zero_grad fills with 0 instead of dropping them."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad(set_to_none=False)
        for micro in range(2):
            with t.no_sync(model):
                inputs, targets = t.batch(100 * step + micro)
                (mse(model(inputs), targets) / 2).backward()
        optimizer.step()


@row(linear=True)
def forward_under_no_sync(t: Loop) -> None:
    """Only the forwards of the micro-batches are under no_sync, as by mistake; the backwards are outside."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        with t.no_sync(model):
            loss = mse(model(inputs), targets)
        loss.backward()
        optimizer.step()


@row(linear=True, passes=6, boundaries=1)
def several_backwards_for_one_forward(t: Loop) -> None:
    """`every:H` counts steps, not passes: six backwards of one graph, then a step."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.01)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        for last in (False, False, False, False, False, True):
            loss.backward(retain_graph=not last)
        optimizer.step()


@row(linear=True, passes=3, boundaries=3)
def several_steps_for_one_forward(t: Loop) -> None:
    """One forward of a graph that holds no weights that change: three backwards, a step after each."""
    model = t.wrap(torch.nn.Linear(6, 3))
    optimizer = sgd(model, 0.02)
    for step in t.steps():
        inputs, targets = t.batch(step)
        loss = mse(model(inputs), targets)
        for k in range(3):
            optimizer.zero_grad()
            loss.backward(retain_graph=k < 2)
            optimizer.step()


@row(linear=True)
def forward_thrown_away(t: Loop) -> None:
    """A forward with gradients whose loss is never used, before each step and after it."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        mse(model(inputs), targets)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        mse(model(inputs), targets)


@row(linear=True)
def forward_between_backward_and_step(t: Loop) -> None:
    """The model is evaluated, with gradients, after backward and before the step."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        mse(model(inputs), targets)
        optimizer.step()


@row(linear=True)
def evaluated_under_no_grad(t: Loop) -> None:
    """An epoch of validation between steps, with torch.no_grad, in train mode."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        with torch.no_grad():
            for _ in range(3):
                model(t.batch(step)[0])


@row(linear=True)
def evaluated_in_inference_mode(t: Loop) -> None:
    """The same in inference mode, and between backward and step too."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.inference_mode():
            model(inputs)
        optimizer.step()
        with torch.inference_mode():
            model.eval()
            model(inputs)
            model.train()


@row(linear=True)
def forward_in_inference_mode_first(t: Loop) -> None:
    """The first forward of all is under inference mode."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    with torch.inference_mode():
        model(t.batch(0)[0])
    train(t, model, optimizer=optimizer)


@row(linear=True, passes=3, boundaries=3)
def epochs_on_one_batch(t: Loop) -> None:
    """As PPO: the old policy without gradients, then several steps on the same batch."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.02)
    for step in t.steps(5):
        inputs, targets = t.batch(step)
        with torch.no_grad():
            old = model(inputs)
        for _ in range(3):
            optimizer.zero_grad()
            out = model(inputs)
            (mse(out, targets) + 0.1 * mse(out, old)).backward()
            optimizer.step()


@row()
def policy_gradient(t: Loop) -> None:
    """Actions are sampled from the model's distribution; the loss is their log-probability times a return."""

    class Policy(Net):
        def forward(self, inputs: torch.Tensor) -> torch.distributions.Categorical:  # type: ignore[override]
            return torch.distributions.Categorical(logits=super().forward(inputs))

    model = t.wrap(Policy())
    optimizer = sgd(model, 0.1)
    for step in t.steps():
        inputs, targets = t.batch(step)
        with torch.no_grad():
            model(inputs)
        actions = (targets.mean(1) > 0).long()
        optimizer.zero_grad()
        policy = model(inputs)
        (-(policy.log_prob(actions) * 1.5).mean() - 0.01 * policy.entropy().mean()).backward()
        optimizer.step()


@row(linear=True)
def step_under_no_sync(t: Loop) -> None:
    """The optimizer's step is inside the no_sync block, with the synced backward before it."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with t.no_sync(model):
            optimizer.step()


@row(linear=True, passes=2)
def heads_backward_in_turn(t: Loop) -> None:
    """Two tasks, each with its forward and backward, one step: each pass leaves some parameters out."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model.one(inputs), targets).backward()
        mse(model.two(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def step_before_backward(t: Loop) -> None:
    """zero_grad at the end of the iteration, the step at its beginning."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.step()
        optimizer.zero_grad()
        inputs, targets = t.batch(step)
        mse(model(inputs), targets).backward()


@row(linear=True, boundaries=0.5)
def step_every_second_backward(t: Loop) -> None:
    """The optimizer steps at every second backward pass, without no_sync."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps(12):
        inputs, targets = t.batch(step)
        mse(model(inputs), targets).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@row(linear=True, tolerance=0.02)
def unequal_batches(t: Loop) -> None:
    """Ranks have batches of different sizes; every rank counts the same. Their gradients are other functions
    of the weights, so the mean of replicas that are apart is only near the one process's weights."""
    model = t.wrap(Flat())
    train_by_rank(t, model, lambda r, _step, x, y: mse(model(x[: 8 - 3 * r]), y[: 8 - 3 * r]))


@row(linear=True)
def grad_mode_switched(t: Loop) -> None:
    """`torch.set_grad_enabled` around train and validation phases."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        for phase in ("train", "val"):
            model.train(phase == "train")
            inputs, targets = t.batch(step)
            with torch.set_grad_enabled(phase == "train"):
                loss = mse(model(inputs), targets)
            if phase == "train":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@row(only=ASYNC, even=False, linear=True, tolerance=0.5)
def free_running(t: Loop) -> None:
    """Asynchronous averages are applied whenever they come, and all of them at the end."""
    model = t.wrap(Flat())
    train(t, model, count=40, lr=0.02)
