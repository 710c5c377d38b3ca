"""How a loop calls the model, and what comes out of it."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.loops.loop import Flat, Loop, Net, layers_called, mse, sgd, train
from tests.support.loops.table import ALGORITHMS, GRADIENTS, WEIGHTS, row


@row(linear=True)
def plain(t: Loop) -> None:
    """The root is called, a tensor comes out, one backward, one step."""
    train(t, t.wrap(Flat()))


@row()
def plain_deep(t: Loop) -> None:
    """The same, not linear in the weights: it shows how near the others can be expected."""
    train(t, t.wrap(Net()))


@row()
def methods(t: Loop) -> None:
    """The root is never called: `model.encode(x)`, `model.decode(h)`."""
    train(t, t.wrap(Net()), loss=lambda m, x, y: mse(m.decode(m.encode(x)), y))


@row(linear=True)
def submodules(t: Loop) -> None:
    """The loop calls the children of the model."""
    train(t, t.wrap(Flat()), loss=layers_called)


class WithTrainingStep(Flat):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, targets = batch
        return {"loss": mse(self.forward(inputs), targets)}


@row(linear=True)
def training_step(t: Loop) -> None:
    """Lightning's way."""
    train(t, t.wrap(WithTrainingStep()), loss=lambda m, x, y: m.training_step((x, y))["loss"])


@row(linear=True)
def forward_called(t: Loop) -> None:
    """`model.forward(x)`, past the hooks of modules."""
    train(t, t.wrap(Flat()), loss=lambda m, x, y: mse(m.forward(x), y))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.decoder = nn.Linear(2, 6)

    def elbo(self, inputs: Tensor, noise: Tensor) -> Tensor:
        h = torch.tanh(self.encoder(inputs))
        mean, spread = self.mean(h), self.spread(h)
        out = self.decoder(mean + noise * torch.exp(0.5 * spread))
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return mse(out, inputs) + 0.1 * divergence


@row()
def vae(t: Loop) -> None:
    """The loss is a method's, which samples."""
    model = t.wrap(VAE())
    optimizer = sgd(model, 0.02)
    for step in t.steps():
        inputs = t.x(step) + 3 * t.batch(0)[1].mean(1, keepdim=True)
        optimizer.zero_grad()
        model.elbo(inputs, t.x(step + 500, 8, 2)).backward()
        optimizer.step()


class Returns(Flat):
    """A forward whose output is of some kind."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.pack(super().forward(*args, **kwargs), self)


@dataclass
class Prediction:
    logits: Tensor
    note: str = "a dataclass"


@row(linear=True)
def dataclass_output(t: Loop) -> None:
    """As transformers' models return."""
    train(t, t.wrap(Returns(lambda out, _: Prediction(out))), loss=lambda m, x, y: mse(m(x).logits, y))


@row(linear=True)
def distribution_output(t: Loop) -> None:
    """A policy that returns `torch.distributions.Normal`."""
    model = t.wrap(Returns(lambda out, _: torch.distributions.Normal(out, torch.ones(3))))
    train(t, model, loss=lambda m, x, y: -m(x).log_prob(y).mean())


class Holder:
    """Not a container that torch knows."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


@row(linear=True)
def object_output(t: Loop) -> None:
    """An object of the script's that holds a tensor."""
    train(t, t.wrap(Returns(lambda out, _: Holder(out))), loss=lambda m, x, y: mse(m(x).value, y))


@row(linear=True)
def dict_output(t: Loop) -> None:
    """A dict."""
    train(t, t.wrap(Returns(lambda out, _: {"out": out})), loss=lambda m, x, y: mse(m(x)["out"], y))


Pair = namedtuple("Pair", ["first", "rest"])


@row(linear=True)
def nested_output(t: Loop) -> None:
    """Tuples of lists of dicts, and things that are no tensors."""
    model = t.wrap(Returns(lambda out, _: Pair(first=None, rest=[("text", {"out": [out, 3]})])))
    train(t, model, loss=lambda m, x, y: mse(m(x).rest[0][1]["out"][0], y))


@row(linear=True)
def function_output(t: Loop) -> None:
    """A forward that returns a function of the loss."""
    train(t, t.wrap(Returns(lambda out, _: lambda y: mse(out, y))), loss=lambda m, x, y: m(x)(y))


@row(linear=True)
def attribute_output(t: Loop) -> None:
    """A forward that returns nothing and leaves its result in the module."""

    def keep(out: Tensor, model: Any) -> None:
        model.last = [out]

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        assert m(x) is None
        return mse(m.last[0], y)

    train(t, t.wrap(Returns(keep)), loss=loss)


@row(linear=True)
def keyword_arguments(t: Loop) -> None:
    """All arguments by name."""
    train(t, t.wrap(Flat()), loss=lambda m, x, y: mse(m(inputs=x), y))


class ReturnsLoss(Flat):
    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        out = super().forward(inputs)
        return out if targets is None else mse(out, targets)


@row(linear=True)
def no_output_in_an_except_clause(t: Loop) -> None:
    """The forward keeps its loss and returns None, while the script handles an exception of its own."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = Flat()

        def forward(self, inputs: Tensor, targets: Tensor) -> None:
            self.loss = mse(self.flat(inputs), targets)

    model = t.wrap(Keeps())
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        try:
            raise ValueError
        except ValueError:
            model(*t.batch(step))
        model.loss.backward()
        optimizer.step()


@row(linear=True)
def loss_in_forward(t: Loop) -> None:
    """The forward returns the loss."""
    train(t, t.wrap(ReturnsLoss()), loss=lambda m, x, y: m(x, y))


@row(linear=True)
def leaf_in_the_output(t: Loop) -> None:
    """The output holds a parameter: after 50 steps it has no 50 hooks."""
    model = t.wrap(Returns(lambda out, m: (out, m.two.weight)))
    counts = []
    optimizer = sgd(model, 0.01)
    for step in t.steps(50):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        out, weight = model(inputs)
        (mse(out, targets) + 0.01 * weight.square().sum()).backward()
        optimizer.step()
        counts.append(len(model.two.weight._backward_hooks or ()))
    assert counts[-1] == counts[0] <= 2, counts


@row(linear=True)
def input_that_requires_grad(t: Loop) -> None:
    """The inputs collect a gradient too, as in adversarial training, and one of them is returned as it is."""
    model = t.wrap(Returns(lambda out, _: out))
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        inputs.requires_grad_(True)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        assert inputs.grad is not None
        optimizer.step()


@row(linear=True)
def functional_call(t: Loop) -> None:
    """`torch.func.functional_call` with the model's parameters."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse(torch.func.functional_call(m, dict(m.named_parameters()), (x,)), y)

    train(t, t.wrap(Flat()), loss=loss)


@row(linear=True)
def functional_call_with_others(t: Loop) -> None:
    """`functional_call` with functions of the parameters: each is trained through what replaces it."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        halves = {k: 0.5 * p for k, p in m.named_parameters()}
        return mse(torch.func.functional_call(m, halves, (x,)), y)

    train(t, t.wrap(Flat()), loss=loss)


@row(linear=True)
def eval_mode(t: Loop) -> None:
    """Fine-tuning in `model.eval()`, so that dropout and BatchNorm rest."""
    train(t, t.wrap(Flat()).eval())


@row(linear=True)
def eval_mode_by_turns(t: Loop) -> None:
    """Training steps in eval mode and in train mode."""
    model = t.wrap(Flat())

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        m.train(not m.training)
        return mse(m(x), y)

    train(t, model, loss=loss)


@row(linear=True)
def mode_switched_each_step(t: Loop) -> None:
    """train, a step, eval, an evaluation."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.train()
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(inputs)


@row(linear=True, spread=False, compare=True)
def never_called(t: Loop) -> None:
    """The loss is a function of the parameters alone."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        goal = t.batch(step)[1].mean()
        optimizer.zero_grad()
        sum((p - goal).square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()


@row(linear=True)
def in_a_container(t: Loop) -> None:
    """The wrapped model lies in a dict of the script's and in a ModuleList."""
    parts = nn.ModuleDict({"body": t.wrap(Flat())})
    bag = {"model": parts["body"]}
    train(t, parts, loss=lambda _, x, y: mse(bag["model"](x), y))


@row(linear=True)
def as_a_child(t: Loop) -> None:
    """The wrapped model becomes a child of another module, which is called, and has weights of its own."""

    class Parent(nn.Module):
        def __init__(self, child: nn.Module) -> None:
            super().__init__()
            self.child, self.scale = child, nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.child(inputs) * self.scale

    parent = Parent(t.wrap(Flat()))
    train(t, parent, optimizer=sgd(parent.child))


@row(linear=True)
def module_list(t: Loop) -> None:
    """The wrapped module is a ModuleList, which cannot be called."""
    model = t.wrap(nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)]))
    train(t, model, loss=lambda m, x, y: mse(sum(layer(x) for layer in m), y))


@row(linear=True)
def user_hooks(t: Loop) -> None:
    """Forward hooks of the script, installed after wrapping, change inputs and outputs."""
    model = t.wrap(Flat())
    model.register_forward_pre_hook(lambda _m, args: (args[0] * 0.5,))
    model.register_forward_hook(lambda _m, _args, out: out * 0.75)
    train(t, model)


@row(linear=True)
def full_backward_hook(t: Loop) -> None:
    """`register_full_backward_hook` on root and child, after wrapping."""
    model = t.wrap(Flat())
    seen: list[str] = []
    model.register_full_backward_hook(lambda *_: seen.append("root"))
    model.one.register_full_backward_hook(lambda *_: seen.append("child"))
    train(t, model)
    assert seen.count("root") == seen.count("child") == 10, seen


class Checkpointed(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.encode(inputs)
        return checkpoint(self.decode, h, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


@row()
def checkpoint_not_reentrant(t: Loop) -> None:
    """Activation checkpointing."""
    train(t, t.wrap(Checkpointed(False)))


@row()
def checkpoint_reentrant(t: Loop) -> None:
    """Activation checkpointing, with a backward inside the backward."""
    train(t, t.wrap(Checkpointed(True)))


@row(only=WEIGHTS)
def checkpoint_of_methods(t: Loop) -> None:
    """The loop itself checkpoints the model's parts, reentrantly."""
    _checkpoints_methods(t)


@row(only=GRADIENTS, passes=2)
def checkpoint_of_methods_by_gradients(t: Loop) -> None:
    """Each backward pass inside the other counts as a pass: nothing tells that there is an outer one."""
    _checkpoints_methods(t)


def _checkpoints_methods(t: Loop) -> None:
    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_(True)
        h = checkpoint(m.encode, x, use_reentrant=True)
        return mse(checkpoint(m.decode, h, use_reentrant=True), y)

    train(t, t.wrap(Net()), loss=loss)


@row(linear=True, tolerance=0.2)
def autocast(t: Loop) -> None:
    """bf16 autocast."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        return mse(out.float(), y)

    train(t, t.wrap(Flat()), loss=loss)


@row(refused=(tuple(ALGORITHMS), "torch.jit"))
def scripted_before(t: Loop) -> None:
    """`torch.jit.script` before wrapping."""
    train(t, t.wrap(torch.jit.script(Flat())))


@row(linear=True)
def scripted_child(t: Loop) -> None:
    """A child of the model is scripted."""
    model = Flat()
    model.one = torch.jit.script(model.one)
    train(t, t.wrap(model))


@row(linear=True)
def traced_after(t: Loop) -> None:
    """`torch.jit.trace` of the wrapped model."""
    model = t.wrap(Flat())
    traced = torch.jit.trace(model, t.batch(0)[0])
    train(t, model, loss=lambda _, x, y: mse(traced(x), y))


@row(linear=True, long=True)
def compiled(t: Loop) -> None:
    """`torch.compile` of the wrapped model."""
    model = t.wrap(Flat())
    torch._dynamo.reset()
    fast = torch.compile(model, backend="eager")
    train(t, model, loss=lambda _, x, y: mse(fast(x), y))


@row(linear=True, long=True)
def compiled_fullgraph(t: Loop) -> None:
    """`torch.compile(fullgraph=True)` of a function that calls the model's layers."""
    model = t.wrap(Flat())
    torch._dynamo.reset()
    fast = torch.compile(lambda x: model.one(x) + model.two(torch.cos(x)), backend="eager", fullgraph=True)
    train(t, model, loss=lambda _, x, y: mse(fast(x), y))


@row(linear=True)
def two_inputs_one_of_them_empty(t: Loop) -> None:
    """A batch without samples among others adds nothing."""

    def loss(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse(torch.cat([m(x), m(x[:0])]), y)

    train(t, t.wrap(Flat()), loss=loss)


@row(linear=True)
def generator_of_outputs(t: Loop) -> None:
    """The forward yields its outputs one after the other."""

    class Yields(Flat):
        def forward(self, inputs: Tensor) -> Any:  # type: ignore[override]
            yield self.one(inputs)
            yield self.two(torch.cos(inputs))

    train(t, t.wrap(Yields()), loss=lambda m, x, y: mse(sum(m(x)), y))
