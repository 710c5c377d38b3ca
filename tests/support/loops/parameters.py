"""What loops do to parameters beside training them: storage that moves, weights changed by hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tests.support.loops.loop import (
    Flat,
    Loop,
    Loss,
    Net,
    after_steps,
    layers_called,
    mse,
    root_called,
    sgd,
    train,
)
from tests.support.loops.table import ALGORITHMS, ASYNC, GRADIENTS, WEIGHTS, row


@row(linear=True)
def data_assigned_once(t: Loop) -> None:
    """`p.data = ...` after wrapping: the storage is another one from then on."""
    model = t.wrap(Flat())
    for p in model.parameters():
        p.data = p.data.clone() * 0.5
    train(t, model, 0, 10)


@row(linear=True)
def data_assigned_halfway(t: Loop) -> None:
    """`p.data = ...` between two phases."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    for p in model.parameters():
        p.data = p.data.clone()
    train(t, model, 5, 5)


@row(linear=True)
def data_assigned_each_step(t: Loop) -> None:
    """The optimizer is `p.data = p.data - lr * p.grad`."""
    model = t.wrap(Flat())
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.zero_grad()
        mse(model(inputs), targets).backward()
        for p in model.parameters():
            p.data = p.data - 0.05 * p.grad


@row(linear=True)
def vector_to_parameters(t: Loop) -> None:
    """`nn.utils.vector_to_parameters` makes all parameters views of one vector."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        if step in (3, 6):
            vector = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


@row(linear=True)
def data_sub(t: Loop) -> None:
    """`p.data.sub_(lr * p.grad)`: no optimizer at all."""
    model = t.wrap(Flat())
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.zero_grad()
        mse(model(inputs), targets).backward()
        for p in model.parameters():
            p.data.sub_(0.05 * p.grad)


def updated_by_hand(t: Loop, model: nn.Module, loss: Loss) -> Iterator[int]:
    """Iterations whose optimizer is `p -= lr * p.grad`, each left to the script at its end."""
    for step in t.steps():
        loss(model, *t.batch(step)).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad  # noqa: PLW2901
                p.grad = None
        yield step


@row(linear=True)
def no_grad_update(t: Loop) -> None:
    """`with torch.no_grad(): p -= lr * p.grad`, gradients set to None by hand."""
    for _ in updated_by_hand(t, t.wrap(Flat()), root_called):
        pass


@row(linear=True)
def foreach_update(t: Loop) -> None:
    """`torch._foreach_add_` on all parameters."""
    model = t.wrap(Flat())
    params = list(model.parameters())
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            torch._foreach_add_(params, [p.grad for p in params], alpha=-0.05)


@row(linear=True, refused=((*WEIGHTS, "powersgd"), "trigram.step"))
def no_grad_update_where_methods_are_called(t: Loop) -> None:
    """Neither the root's forward nor an optimizer says where a step ends."""
    for _ in updated_by_hand(t, t.wrap(Flat()), layers_called):
        pass


@row(linear=True)
def no_grad_update_with_step(t: Loop) -> None:
    """The same, with `trigram.step(model)` after each update."""
    model = t.wrap(Flat())
    for _ in updated_by_hand(t, model, layers_called):
        t.step(model)


def functional(t: Loop, model: nn.Module) -> Iterator[int]:
    """Iterations of `p -= lr * g` with g of `autograd.grad`: no backward pass and no `p.grad`."""
    for step in t.steps(25):
        inputs, targets = t.batch(step)
        params = list(model.parameters())
        grads = torch.autograd.grad(mse(model(inputs), targets), params)
        for p, g in zip(params, grads, strict=True):
            p.data.sub_(0.05 * g)
        yield step


@row(linear=True, refused=(ALGORITHMS, "trigram.step|p.grad", "autograd.grad"))
def functional_update(t: Loop) -> None:
    """`autograd.grad` and updates by hand: nothing says that there are steps, so ranks would train apart."""
    for _ in functional(t, t.wrap(Flat())):
        pass


@row(linear=True, refused=(GRADIENTS, "p.grad", "autograd.grad"))
def functional_update_with_step(t: Loop) -> None:
    """The same, with `trigram.step(model)` after each update."""
    model = t.wrap(Flat())
    for _ in functional(t, model):
        t.step(model)


@row(linear=True)
def optimizer_and_step(t: Loop) -> None:
    """`trigram.step(model)` after the step of an optimizer, where it is not needed."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for _ in after_steps(t, model, optimizer):
        t.step(model)


@row(linear=True)
def decayed_by_hand(t: Loop) -> None:
    """Weights are scaled after each step, beside the optimizer."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for _ in after_steps(t, model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.98)


@row(compare=GRADIENTS)
def projected(t: Loop) -> None:
    """Weights are clamped after each step, as in the first WGAN."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for _ in after_steps(t, model, optimizer):
        for p in model.parameters():
            p.data.clamp_(-0.6, 0.6)


@row(passes=2)
def sharpness_aware(t: Loop) -> None:
    """SAM: to the top of the slope by `p.data +=`, a second pass there, back, and a step."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        moved = []
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
            for p in model.parameters():
                e = 0.01 * p.grad / norm
                p.add_(e)
                moved.append(e)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), moved, strict=True):
                p.sub_(e)
        optimizer.step()


@row(passes=2)
def sharpness_aware_by_data(t: Loop) -> None:
    """SAM as the well-known implementation: the old weights are kept, and put back by `p.data = old`."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        mse(model(inputs), targets).backward()
        old = {}
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
        for p in model.parameters():
            old[p] = p.data.clone()
            p.data = p.data + 0.01 * p.grad / norm
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        for p in model.parameters():
            p.data = old[p]
        optimizer.step()
        optimizer.zero_grad()


@row(linear=True)
def looked_ahead(t: Loop) -> None:
    """Lookahead: every third step the weights are set between slow copies and themselves."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    slow = [p.detach().clone() for p in model.parameters()]
    for step in after_steps(t, model, optimizer):
        if step % 3 == 2:
            with torch.no_grad():
                for s, p in zip(slow, model.parameters(), strict=True):
                    s.add_(p - s, alpha=0.8)
                    p.copy_(s)


@row(linear=True, spread=False)
def zeroed_in_place(t: Loop) -> None:
    """`nn.init` on the wrapped model, alike on all ranks."""
    model = t.wrap(Flat())
    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    train(t, model, 0, 10)


@row(linear=True)
def added_to_the_optimizer_later(t: Loop) -> None:
    """Parameters of the model come to the optimizer after some steps."""
    model = t.wrap(Flat())
    optimizer = torch.optim.SGD(model.one.parameters(), lr=0.05)
    train(t, model, 0, 4, optimizer=optimizer)
    optimizer.add_param_group({"params": model.two.parameters(), "lr": 0.02})
    train(t, model, 4, 6, optimizer=optimizer)


@row(linear=True)
def gradients_zeroed_in_place(t: Loop) -> None:
    """`zero_grad(set_to_none=False)`."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad(set_to_none=False)
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def zeroed_by_the_model(t: Loop) -> None:
    """`model.zero_grad()`, in both ways, between backward passes."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.zero_grad(set_to_none=step % 2 == 0)
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def zeroed_between_forward_and_backward(t: Loop) -> None:
    """zero_grad after the forward."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        loss = mse(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@row(linear=True)
def never_zeroed(t: Loop) -> None:
    """No zero_grad: gradients add up over all steps."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.01)
    for step in t.steps():
        inputs, targets = t.batch(step)
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def gradients_kept_as_buffers(t: Loop) -> None:
    """The script gives each parameter a gradient tensor of its own before the first step."""
    model = t.wrap(Flat())
    memory = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = memory[at : at + p.numel()].view_as(p)
        at += p.numel()
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad(set_to_none=False)
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(refused=(ASYNC, "trigram.switch"))
def set_parameter(t: Loop) -> None:
    """`model.one.weight = nn.Parameter(...)`: the same values in a new parameter, which are then rank 0's."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    model.one.weight = nn.Parameter(model.one.weight.detach().clone())
    train(t, model, 5, 5)


@row(linear=True)
def storage_swapped(t: Loop) -> None:
    """`p.set_` moves the storage without a new tensor."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p.detach().clone())
    train(t, model, 5, 5)


class Rotated(nn.Module):
    """A complex matrix between real layers; linear in it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.out = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out((inputs.to(torch.complex64) @ self.turn).abs())


@row()
def complex_parameters(t: Loop) -> None:
    """A model with complex parameters, which train as pairs of real ones."""
    train(t, t.wrap(Rotated()), lr=0.02)


@row(compare=("gradient_allreduce", "topk"))
def complex_parameters_with_adam(t: Loop) -> None:
    """The same with Adam, whose second moments are pairs too."""
    module = Rotated()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train(t, t.wrap(module, optimizer), optimizer=optimizer)
