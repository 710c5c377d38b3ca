"""Several wrapped models in one loop: side by side, through each other, and with parameters in common."""

from __future__ import annotations

import itertools
import threading

import torch
from torch import Tensor, nn

from tests.support.loops.loop import Flat, Loop, Net, mse, sgd, train
from tests.support.loops.table import ALGORITHMS, ASYNC, EVERY, GRADIENTS, SYNC, row


class Critic(nn.Module):
    """Says how real three numbers look."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


def softplus(x: Tensor) -> Tensor:
    """The loss of a logit that should be very negative."""
    return nn.functional.softplus(x).mean()


def critic_steps(
    g: nn.Module, d: nn.Module, o_d: torch.optim.Optimizer, inputs: Tensor, real: Tensor
) -> None:
    """A step of the discriminator, which the generator has no gradients from."""
    o_d.zero_grad()
    (softplus(d(g(inputs).detach())) + softplus(-d(real))).backward()
    o_d.step()


def generator_steps(g: nn.Module, d: nn.Module, o_g: torch.optim.Optimizer, inputs: Tensor) -> None:
    """A step of the generator, whose loss passes through the discriminator."""
    o_g.zero_grad()
    softplus(-d(g(inputs))).backward()
    o_g.step()


@row(linear=True)
def side_by_side(t: Loop) -> None:
    """Two models with losses of their own, each with its optimizer, in turn."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    optimizers = sgd(one), sgd(two)
    for step in t.steps():
        for model, optimizer in zip((one, two), optimizers, strict=True):
            inputs, targets = t.batch(step)
            optimizer.zero_grad()
            mse(model(inputs), targets).backward()
            optimizer.step()


@row(linear=True)
def side_by_side_interleaved(t: Loop) -> None:
    """Both forwards, both backwards in the other order, both steps."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    o_one, o_two = sgd(one), sgd(two)
    for step in t.steps():
        inputs, targets = t.batch(step)
        a, b = mse(one(inputs), targets), mse(two(inputs), targets)
        o_one.zero_grad()
        o_two.zero_grad()
        b.backward()
        a.backward()
        o_one.step()
        o_two.step()


@row(linear=True)
def one_loss_of_two(t: Loop) -> None:
    """One loss, one backward, one optimizer over both."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    optimizer = torch.optim.SGD(itertools.chain(one.parameters(), two.parameters()), lr=0.03)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(one(inputs) + two(inputs), targets).backward()
        optimizer.step()


@row()
def one_after_the_other(t: Loop) -> None:
    """A pipeline: the output of one model is the other's input."""
    body, head = t.wrap(nn.Linear(6, 5)), t.wrap(nn.Linear(5, 3))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(head(torch.tanh(body(inputs))), targets).backward()
        optimizer.step()


@row(linear=True, steps=(12, 4))
def one_trained_less_often(t: Loop) -> None:
    """The second model has a step in every third iteration."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    o_one, o_two = sgd(one), sgd(two)
    for step in t.steps(12):
        inputs, targets = t.batch(step)
        o_one.zero_grad()
        mse(one(inputs), targets).backward()
        o_one.step()
        if step % 3 == 2:
            o_two.zero_grad()
            mse(two(inputs), targets).backward()
            o_two.step()


@row(compare=GRADIENTS, spread=False, steps=(10, 20))
def gan(t: Loop) -> None:
    """The generator's loss passes through the discriminator, whose gradients are thrown away."""
    g, d = t.wrap(Flat()), t.wrap(Critic())
    o_g, o_d = sgd(g), sgd(d)
    for step in t.steps():
        inputs, real = t.batch(step)
        critic_steps(g, d, o_d, inputs, real)
        generator_steps(g, d, o_g, inputs)


@row(compare=GRADIENTS, spread=False)
def gan_with_requires_grad(t: Loop) -> None:
    """The idiom: `D.requires_grad_(False)` while the generator is trained."""
    g, d = t.wrap(Flat()), t.wrap(Critic())
    o_g, o_d = sgd(g), sgd(d)
    for step in t.steps():
        inputs, real = t.batch(step)
        d.requires_grad_(True)
        critic_steps(g, d, o_d, inputs, real)
        d.requires_grad_(False)
        generator_steps(g, d, o_g, inputs)


@row(compare=GRADIENTS, spread=False)
def gan_with_both_frozen_by_turns(t: Loop) -> None:
    """CycleGAN's `set_requires_grad`, on both models."""
    g, d = t.wrap(Flat()), t.wrap(Critic())
    o_g, o_d = sgd(g), sgd(d)
    for step in t.steps():
        inputs, real = t.batch(step)
        g.requires_grad_(True)
        d.requires_grad_(False)
        generator_steps(g, d, o_g, inputs)
        g.requires_grad_(False)
        d.requires_grad_(True)
        o_d.zero_grad()
        (softplus(d(g(inputs))) + softplus(-d(real))).backward()
        o_d.step()


@row(compare=GRADIENTS, spread=False, steps=(8, 16))
def wgan_gp(t: Loop) -> None:
    """Two steps of the critic with a gradient penalty for each of the generator, which freezes the critic."""
    g, d = t.wrap(Flat()), t.wrap(Critic())
    o_g, o_d = sgd(g, 0.02), sgd(d, 0.02)
    for step in t.steps(8):
        d.requires_grad_(True)
        for k in range(2):
            inputs, real = t.batch(2 * step + k)
            o_d.zero_grad()
            fake = g(inputs).detach()
            between = (0.5 * real + 0.5 * fake).requires_grad_(True)
            (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (d(fake).mean() - d(real).mean() + penalty).backward()
            o_d.step()
        d.requires_grad_(False)
        o_g.zero_grad()
        (-d(g(t.batch(step)[0])).mean()).backward()
        o_g.step()


@row()
def actor_and_critic(t: Loop) -> None:
    """Two models, one backward of the sum of their losses, two optimizers."""

    class Policy(Net):
        def forward(self, inputs: Tensor) -> torch.distributions.Normal:  # type: ignore[override]
            return torch.distributions.Normal(super().forward(inputs), 1.0)

    actor, critic = t.wrap(Policy()), t.wrap(nn.Linear(6, 1))
    o_a, o_c = sgd(actor), sgd(critic)
    for step in t.steps():
        inputs, targets = t.batch(step)
        policy, value = actor(inputs), critic(inputs)
        o_a.zero_grad()
        o_c.zero_grad()
        (-policy.log_prob(targets).mean() + mse(value, targets.mean(1, keepdim=True))).backward()
        o_a.step()
        o_c.step()


class WithTrunk(nn.Module):
    def __init__(self, trunk: nn.Module, out: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(8, out)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.trunk(inputs)))  # type: ignore[no-any-return]


@row(refused=(tuple(ALGORITHMS), "trunk"), sometimes=True, compare=GRADIENTS, passes=2)
def trunk_in_two_models(t: Loop) -> None:
    """Actor and critic with one trunk, both wrapped: a parameter in two wrapped models."""
    trunk = nn.Linear(6, 8)
    actor, critic = t.wrap(WithTrunk(trunk, 3)), t.wrap(WithTrunk(trunk, 1))
    params = dict.fromkeys([*actor.parameters(), *critic.parameters()])
    optimizer = torch.optim.SGD(list(params), lr=0.05)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(actor(inputs), targets).backward()
        mse(critic(inputs), targets.mean(1, keepdim=True)).backward()
        optimizer.step()


@row(refused=(tuple(ALGORITHMS), "trunk"), sometimes=True, compare=GRADIENTS)
def trunk_in_two_models_one_backward(t: Loop) -> None:
    """The same with one backward of the sum."""
    trunk = nn.Linear(6, 8)
    actor, critic = t.wrap(WithTrunk(trunk, 3)), t.wrap(WithTrunk(trunk, 1))
    params = dict.fromkeys([*actor.parameters(), *critic.parameters()])
    optimizer = torch.optim.SGD(list(params), lr=0.05)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        (mse(actor(inputs), targets) + mse(critic(inputs), targets.mean(1, keepdim=True))).backward()
        optimizer.step()


@row(refused=(tuple(ALGORITHMS), "encoder"), sometimes=True, compare=GRADIENTS)
def child_then_parent(t: Loop) -> None:
    """A child is wrapped, then the model that holds it."""
    model = Net()
    t.wrap(model.encoder)
    t.wrap(model)
    train(t, model)


@row(refused=(tuple(ALGORITHMS), "weight"), sometimes=True, compare=GRADIENTS)
def parent_then_child(t: Loop) -> None:
    """A model is wrapped, then a child of it."""
    model = t.wrap(Net())
    t.wrap(model.encoder)
    train(t, model)


@row(refused=(tuple(ALGORITHMS), "already"))
def wrapped_twice(t: Loop) -> None:
    """The same module is wrapped a second time."""
    t.wrap(t.wrap(Flat()))


@row(linear=True)
def teacher_and_student(t: Loop) -> None:
    """A teacher in eval mode under no_grad, which is not wrapped, and a student."""
    student = t.wrap(Flat())
    teacher = Flat()
    teacher.eval()
    optimizer = sgd(student)
    for step in t.steps():
        inputs, targets = t.batch(step)
        with torch.no_grad():
            goal = teacher(inputs)
        optimizer.zero_grad()
        out = student(inputs)
        (mse(out, targets) + 0.2 * mse(out, goal)).backward()
        optimizer.step()


@row(linear=True, spread=False, rounds=False, steps=(10, 0))
def one_never_trained(t: Loop) -> None:
    """A second wrapped model is called, with gradients, and never trained."""
    model, idle = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs) + idle(inputs).detach(), targets).backward()
        optimizer.step()


@row(linear=True)
def ensemble(t: Loop) -> None:
    """Three models in a list, one optimizer each, one backward of the sum of their losses."""
    models = [t.wrap(nn.Linear(6, 3)) for _ in range(3)]
    optimizers = [sgd(m) for m in models]
    for step in t.steps():
        inputs, targets = t.batch(step)
        for o in optimizers:
            o.zero_grad()
        sum(mse(m(inputs), targets) for m in models).backward()  # type: ignore[union-attr]
        for o in reversed(optimizers):
            o.step()


@row(linear=True)
def in_two_threads(t: Loop) -> None:
    """Each model is trained by a thread of its own."""
    models = [t.wrap(Flat()), t.wrap(Flat())]
    raised: list[BaseException] = []

    def run(model: nn.Module, first: int) -> None:
        try:
            optimizer = sgd(model)
            for step in range(first, first + 10):
                inputs, targets = t.batch(step)
                optimizer.zero_grad()
                mse(model(inputs), targets).backward()
                optimizer.step()
        except BaseException as e:
            raised.append(e)

    threads = [threading.Thread(target=run, args=(m, 100 * k)) for k, m in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    t.iterations = 10


@row(linear=True, passes=2, boundaries=2)
def two_parts_frozen_in_turn(t: Loop) -> None:
    """One model, whose parts have an optimizer each and train in turn, as with Lightning's
    `toggle_optimizer`."""
    model = t.wrap(Flat())
    optimizers = [sgd(model.one), sgd(model.two)]
    for step in t.steps():
        inputs, targets = t.batch(step)
        for k, optimizer in enumerate(optimizers):
            model.one.requires_grad_(k == 0)
            model.two.requires_grad_(k == 1)
            optimizer.zero_grad()
            mse(model(inputs), targets).backward()
            optimizer.step()


@row(linear=True, refused=(ASYNC, "trigram.switch"), sometimes=True, rounds=False)
def parts_trained_one_after_the_other(t: Loop) -> None:
    """Layer by layer, each with an optimizer that is made for it, and then all."""
    model = t.wrap(Flat())
    for k, part in enumerate((model.one, model.two, model)):
        model.requires_grad_(False)
        part.requires_grad_(True)
        train(t, model, 4 * k, 4, optimizer=sgd(part))


@row(linear=True)
def made_in_the_middle(t: Loop) -> None:
    """A second model is made and wrapped when the first has trained for a while."""
    one = t.wrap(Flat())
    optimizer = sgd(one)
    for step in t.steps(6):
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(one(inputs), targets).backward()
        optimizer.step()
        if step == 0:
            two = t.wrap(nn.Linear(6, 3))
            o_two = sgd(two)
        o_two.zero_grad()
        mse(two(inputs), targets).backward()
        o_two.step()


@row(compare=False, spread=False, even=False, rounds=False)
def two_models_joined(t: Loop) -> None:
    """`join(a, b)`, and ranks with different numbers of batches."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    o_one, o_two = sgd(one), sgd(two)
    with t.join(one, two):
        for step in t.steps(4 + 2 * max(t.rank, 0)):
            inputs, targets = t.batch(step)
            for model, optimizer in ((one, o_one), (two, o_two)):
                optimizer.zero_grad()
                mse(model(inputs), targets).backward()
                optimizer.step()
    t.at = 0


@row(refused=(SYNC, "join(a, b)"), compare=False, spread=False, even=False, rounds=False)
def joins_in_each_other(t: Loop) -> None:
    """`with join(a), join(b)`: refused, as ranks would wait for each other in different blocks."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    with t.join(one), t.join(two):
        pass


@row(
    linear=True,
    only=EVERY,
    options={"local_sgd": {"every": 3}, "diloco": {"every": 5, "outer_lr": 1.0, "outer_momentum": 1e-9}},
    spread=False,
    rounds=False,
)
def unequal_steps_between_averages(t: Loop) -> None:
    """Two models with the same schedule, one with twice the steps."""
    one, two = t.wrap(Flat()), t.wrap(nn.Linear(6, 3))
    o_one, o_two = sgd(one), sgd(two)
    for step in t.steps(10):
        inputs, targets = t.batch(step)
        o_one.zero_grad()
        mse(one(inputs), targets).backward()
        o_one.step()
        o_two.zero_grad()
        mse(two(inputs), targets).backward()
        o_two.step()
