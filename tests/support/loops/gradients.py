"""What a loop does with gradients: asks for them, changes them, sets them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.loops.loop import Flat, Loop, Net, before_steps, mse, sgd, train
from tests.support.loops.table import GRADIENTS, row


@row()
def saliency_on_all_ranks(t: Loop) -> None:
    """`autograd.grad` with respect to the inputs, between forward and backward of each step."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        shown = inputs.clone().requires_grad_(True)
        (seen,) = torch.autograd.grad(model(shown).sum(), shown)
        assert seen.shape == inputs.shape
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()


@row()
def saliency_of_the_same_graph(t: Loop) -> None:
    """`autograd.grad` on the graph that backward then uses."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        inputs.requires_grad_(True)
        optimizer.zero_grad()
        out = model(inputs)
        torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        mse(out, targets).backward()
        optimizer.step()


@row()
def gradient_penalty(t: Loop) -> None:
    """The loss holds a gradient: `create_graph=True`."""
    model = t.wrap(Net())
    optimizer = sgd(model, 0.02)
    for step in t.steps():
        inputs, targets = t.batch(step)
        inputs.requires_grad_(True)
        optimizer.zero_grad()
        out = model(inputs)
        (slope,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        (mse(out, targets) + 0.1 * slope.square().mean()).backward()
        optimizer.step()


@row()
def gradient_penalty_of_weights(t: Loop) -> None:
    """The penalty is on the gradient with respect to the parameters."""
    model = t.wrap(Net())
    optimizer = sgd(model, 0.02)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        loss = t.mean(lambda r, s=step: mse(model(t.of(r).batch(s)[0]), t.of(r).batch(s)[1]))
        grads = torch.autograd.grad(
            mse(model(inputs), inputs[:, :3]), list(model.parameters()), create_graph=True
        )
        (loss + 0.01 * sum(g.square().sum() for g in grads)).backward()
        optimizer.step()
        del targets


@row(refused=(GRADIENTS, "create_graph"))
def backward_with_create_graph(t: Loop) -> None:
    """`loss.backward(create_graph=True)`, and the gradients are dropped afterwards."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward(create_graph=True)
        optimizer.step()
        for p in model.parameters():
            p.grad = None


@row(linear=True)
def assigned_by_hand(t: Loop) -> None:
    """`autograd.grad` on every rank, then `p.grad = g`: what the optimizer applies is the mean."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        grads = torch.autograd.grad(mse(model(inputs), targets), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = g
        optimizer.step()


@row(linear=True)
def written_in_place(t: Loop) -> None:
    """`autograd.grad`, copied into gradients that were allocated once: after the first step they are memory
    of trigram, and the next gradients are written there."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for step in t.steps():
        inputs, targets = t.batch(step)
        grads = torch.autograd.grad(mse(model(inputs), targets), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            assert p.grad is not None
            p.grad.copy_(g)
        optimizer.step()


@row(linear=True)
def written_into_what_was_there(t: Loop) -> None:
    """The same, but the gradients were allocated before the model was wrapped."""
    module = Flat()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    model = t.wrap(module)
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        grads = torch.autograd.grad(mse(model(inputs), targets), list(model.parameters()))
        for p, g in zip(model.parameters(), grads, strict=True):
            assert p.grad is not None
            p.grad.copy_(g)
        optimizer.step()


@row(linear=True)
def computed_by_hand(t: Loop) -> None:
    """No autograd at all: the gradient of a linear model, written into `p.grad`."""
    model = t.wrap(nn.Linear(6, 3))
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        with torch.no_grad():
            error = 2 * (model(inputs) - targets) / targets.numel()
            model.weight.grad, model.bias.grad = error.T @ inputs, error.sum(0)
        optimizer.step()


@row(linear=True)
def func_grad(t: Loop) -> None:
    """`torch.func.grad` of a functional call, assigned."""
    model = t.wrap(Flat())
    optimizer = sgd(model)

    def loss(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return mse(torch.func.functional_call(model, params, (inputs,)), targets)

    for step in t.steps():
        inputs, targets = t.batch(step)
        params = {k: p.detach() for k, p in model.named_parameters()}
        grads = torch.func.grad(loss)(params, inputs, targets)
        for k, p in model.named_parameters():
            p.grad = grads[k]
        optimizer.step()


def per_sample_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Of each parameter, the gradients of all samples: one more dimension, in front."""

    def loss(params: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return mse(torch.func.functional_call(model, params, (one[None],)), target[None])

    params = {k: p.detach() for k, p in model.named_parameters()}
    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, inputs, targets)  # type: ignore[no-any-return]


@row(linear=True)
def per_sample(t: Loop) -> None:
    """Per-sample gradients by vmap, clipped and averaged by hand, as for differential privacy."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.01)
    for step in t.steps():
        grads = per_sample_gradients(model, *t.batch(step))
        for k, p in model.named_parameters():
            p.grad = grads[k].mean(0)
        optimizer.step()


@row()
def per_sample_statistics(t: Loop) -> None:
    """Per-sample gradients are looked at (for their noise), and training is by backward."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in before_steps(t, model, optimizer):
        per_sample_gradients(model, *t.batch(step))


@row(compare=GRADIENTS, spread=False)
def clipped(t: Loop) -> None:
    """`clip_grad_norm_` between backward and step."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.2)
    for _ in before_steps(t, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@row(compare=GRADIENTS, spread=False)
def clipped_by_value(t: Loop) -> None:
    """`clip_grad_value_`."""
    model = t.wrap(Flat())
    optimizer = sgd(model, 0.2)
    for _ in before_steps(t, model, optimizer):
        nn.utils.clip_grad_value_(model.parameters(), 0.1)


@row(linear=True)
def scaled_by_hand(t: Loop) -> None:
    """`p.grad.mul_` in place, and `p.grad = p.grad + decay`, between backward and step."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for _ in before_steps(t, model, optimizer):
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
            p.grad = p.grad + 0.01 * p.detach()


@row(linear=True)
def tensor_hooks(t: Loop) -> None:
    """`p.register_hook` of the script changes each gradient before it is accumulated."""
    model = t.wrap(Flat())
    for p in model.parameters():
        p.register_hook(lambda g: 0.5 * g)
    train(t, model)


@row(linear=True, only=(*GRADIENTS, "local_sgd"))
def accumulated_gradients_masked(t: Loop) -> None:
    """A post-accumulate hook of a pruned model, registered after wrapping, writes into each gradient."""
    model = t.wrap(Flat())
    for p in model.parameters():
        kept = torch.arange(p.numel()).reshape(p.shape) % 3 > 0

        def mask(p: Tensor, kept: Tensor = kept) -> None:
            p.grad.mul_(kept)  # type: ignore[union-attr]

        p.register_post_accumulate_grad_hook(mask)
    train(t, model)


@row(linear=True, only=(*GRADIENTS, "local_sgd"))
def accumulated_gradients_replaced(t: Loop) -> None:
    """Such a hook puts another tensor in the gradient's place, and is registered while the model trains."""
    model = t.wrap(Flat())
    train(t, model, 0, 3)
    for p in model.parameters():

        def halve(p: Tensor) -> None:
            p.grad = 0.5 * p.grad  # type: ignore[operator]

        p.register_post_accumulate_grad_hook(halve)
    train(t, model, 3)


@row(linear=True)
def gradient_is_none_in_some_passes(t: Loop) -> None:
    """A function of the script returns None for a weight's gradient: nothing is accumulated."""

    class Unlearned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, _grad: Tensor) -> None:  # type: ignore[override]
            return None

    model = t.wrap(Flat())

    def loss(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
        if t.at % 2:
            return mse(model(inputs), targets)
        weight = Unlearned.apply(model.two.weight)
        return mse(model.one(inputs) + torch.cos(inputs) @ weight.T, targets)  # type: ignore[operator]

    train(t, model, loss=loss)


@row(linear=True)
def backward_of_two_losses(t: Loop) -> None:
    """`torch.autograd.backward([a, b])`."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        out = model(inputs)
        torch.autograd.backward([mse(out, targets), 0.1 * out.square().mean()])
        optimizer.step()


@row(linear=True)
def backward_with_a_vector(t: Loop) -> None:
    """`output.backward(gradient)`."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        out = model(inputs)
        out.backward(2 * (out.detach() - targets) / targets.numel())
        optimizer.step()


@row(linear=True)
def backward_into_some(t: Loop) -> None:
    """`loss.backward(inputs=[...])` fills the gradients of one layer at a time, by turns."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        layer = model.one if step % 2 else model.two
        mse(model(inputs), targets).backward(inputs=list(layer.parameters()))
        optimizer.step()


@row()
def forward_mode_first(t: Loop) -> None:
    """`torch.func.jvp` calls the model, and the loss has its tangent; then `jacrev` looks at the model."""
    model = t.wrap(Net())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        output, tangent = torch.func.jvp(model, (inputs,), (torch.ones_like(inputs),))
        (mse(output, targets) + 0.01 * tangent.square().mean()).backward()
        optimizer.step()
        torch.func.jacrev(model)(inputs[0])


@row(linear=True)
def anomaly_mode(t: Loop) -> None:
    """Under `detect_anomaly`."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps(4):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        with torch.autograd.detect_anomaly(check_nan=False):
            mse(model(inputs), targets).backward()
        optimizer.step()


@row(options={"topk": {"fraction": 0.25}}, compare=False)
def two_heads_in_turn(t: Loop) -> None:
    """Each step uses one of two heads: what a codec left of the other's gradient is kept until its turn."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, 6)
            self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

        def forward(self, inputs: Tensor, which: int) -> Tensor:
            return self.heads[which](self.body(inputs))  # type: ignore[no-any-return]

    model = t.wrap(Heads())
    optimizer = sgd(model, 0.02)
    for step in t.steps(24):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs, step % 2), targets).backward()
        optimizer.step()


@row(only=("topk",), options={"topk": {"fraction": 0.125}}, tolerance=0.02)
def residuals_of_what_was_unused(t: Loop) -> None:
    """All that error feedback held back is sent in the end: steps without any loss bring the rest.

    Weights trained by gradients that do not depend on them, so that only the sum of the gradients counts.
    """

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(2)])

    model = t.wrap(Rows())
    optimizer = sgd(model, 1.0)
    for step in t.steps(72):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for k, part in enumerate(model.parts):
            used = step < 24 and step % 2 == k
            pull = t.mean(lambda r, s=step: (t.of(r).x(s, 64) * part).sum())  # noqa: B023
            loss = loss + (pull if used else 0.0 * pull if step >= 24 else 0.0)
        loss.backward()
        optimizer.step()


@row(only=("topk",), options={"topk": {"fraction": 0.125}}, tolerance=0.02, steps=120)
def residuals_of_what_was_left(t: Loop) -> None:
    """The same of parts with an optimizer each, of which the other keeps its last gradients in a pass."""
    parts = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(2)])
    model = t.wrap(parts)
    optimizers = [torch.optim.SGD([part], 1.0) for part in model]
    for step in t.steps(72):
        for k, (part, optimizer) in enumerate(zip(model, optimizers, strict=True)):
            if step < 24 and step % 2 != k:
                continue
            (optimizer if step < 24 else model).zero_grad()  # what is left may be more than the rest
            pull = t.mean(lambda r, s=step, part=part: (t.of(r).x(s, 64) * part).sum())  # type: ignore[misc]
            ((0.0 if step >= 24 else 1.0) * pull).backward()
            optimizer.step()


@row(only=("topk",), options={"topk": {"fraction": 0.125}}, tolerance=0.02)
def residuals_of_what_was_frozen(t: Loop) -> None:
    """The same of parts that are frozen in turn: what is held back of one waits until it trains again."""
    parts = nn.ParameterList([nn.Parameter(torch.zeros(64)) for _ in range(2)])
    model = t.wrap(parts)
    optimizer = sgd(model, 1.0)
    for step in t.steps(72):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for k, part in enumerate(model):
            part.requires_grad_(step >= 24 or step % 2 == k)
            pull = t.mean(lambda r, s=step, part=part: (t.of(r).x(s, 64) * part).sum())  # type: ignore[misc]
            loss = loss + (0.0 if step >= 24 else 1.0) * pull
        loss.backward()
        optimizer.step()


@row(linear=True)
def gradients_kept_in_a_list(t: Loop) -> None:
    """The gradients of the first pass are kept in a list, and that is zeroed and scaled."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    kept: list[Tensor] = []
    for step in t.steps():
        inputs, targets = t.batch(step)
        torch._foreach_zero_(kept) if kept else optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        kept = kept or [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(kept, 0.5)
        optimizer.step()


@row(linear=True)
def gradients_given_other_memory(t: Loop) -> None:
    """What a gradient is gets another tensor's memory, as old scripts clip and scale."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        mse(model(inputs), targets).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data = p.grad.data * 0.5
        optimizer.step()


class OnePart(Flat):
    """A forward pass of one of the layers."""

    def forward(self, inputs: Tensor, k: int = 0) -> Tensor:
        out: Tensor = self.two(torch.cos(inputs)) if k else self.one(inputs)
        return out


def _train_parts(t: Loop, then: Callable[[nn.Module, int], None]) -> None:
    """Parts train in turn with an optimizer each; in a pass of one, the other has its last gradients. `then`
    is called when the first has stepped, and may change them."""
    model = t.wrap(OnePart())
    optimizers = [sgd(model.one), sgd(model.two)]
    for step in t.steps():
        inputs, targets = t.batch(step)
        for k, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            mse(model(inputs, k), targets).backward()
            optimizer.step()
            if k == 0:
                then(model.one, step)
        optimizers[0].step()


@row(linear=True, passes=2, boundaries=2)
def gradients_left_in_a_part(t: Loop) -> None:
    """The first part steps again with gradients that no pass has reached since."""
    _train_parts(t, lambda part, step: None)


@row(linear=True, passes=2, boundaries=2)
def gradients_written_in_a_part(t: Loop) -> None:
    """And with others, that are written by hand before that pass."""

    def write(part: nn.Module, step: int) -> None:
        own = t.mean(lambda r: t.of(r).batch(step)[1].mean())
        for p in part.parameters():
            assert p.grad is not None
            p.grad.copy_(own.expand_as(p))

    _train_parts(t, write)


@row(linear=True)
def gradients_in_a_flat_tensor(t: Loop) -> None:
    """Gradients are views of one tensor of the script, which it zeroes and scales."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    for step in t.steps():
        inputs, targets = t.batch(step)
        flat.zero_()
        mse(model(inputs), targets).backward()
        flat.mul_(0.5)
        optimizer.step()


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g.T @ x, None


@row(linear=True)
def autograd_function(t: Loop) -> None:
    """A custom `autograd.Function` on the parameter itself."""
    model = t.wrap(nn.Linear(6, 3, bias=False))
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(Ones.apply(model.weight, inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def inner_loop(t: Loop) -> None:
    """MAML, first order: two inner steps on functional copies by `autograd.grad`, then the outer backward."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        params = dict(model.named_parameters())
        for _ in range(2):
            inner = mse(torch.func.functional_call(model, params, (inputs,)), inputs[:, :3])
            grads = torch.autograd.grad(inner, list(params.values()))
            params = {k: p - 0.01 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        optimizer.zero_grad()
        mse(torch.func.functional_call(model, params, (inputs,)), targets).backward()
        optimizer.step()


@row(linear=True)
def inner_loop_second_order(t: Loop) -> None:
    """MAML with the graph of the inner steps kept."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        params = dict(model.named_parameters())
        inner = mse(torch.func.functional_call(model, params, (inputs,)), inputs[:, :3])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        params = {k: p - 0.01 * g for (k, p), g in zip(params.items(), grads, strict=True)}
        optimizer.zero_grad()
        mse(torch.func.functional_call(model, params, (inputs,)), targets).backward()
        optimizer.step()
