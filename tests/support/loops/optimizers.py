"""Optimizers: when they are made, how many there are, where they step."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from tests.support.loops.loop import Flat, Loop, Net, after_steps, layers_called, mse, root_called, sgd, train
from tests.support.loops.table import GRADIENTS, WEIGHTS, row


@row(linear=True)
def made_before_wrapping(t: Loop) -> None:
    """The optimizer is made first."""
    module = Flat()
    optimizer = sgd(module)
    train(t, t.wrap(module), optimizer=optimizer)


@row(linear=True)
def made_before_wrapping_methods_called(t: Loop) -> None:
    """The same, where the root is never called."""
    module = Flat()
    optimizer = sgd(module)
    train(t, t.wrap(module), loss=layers_called, optimizer=optimizer)


@row(compare=GRADIENTS, spread=False)
def adam(t: Loop) -> None:
    """Adam, whose state is each rank's where weights are averaged."""
    model = t.wrap(Net())
    train(t, model, optimizer=torch.optim.Adam(model.parameters(), lr=0.02))


@row(compare=GRADIENTS, spread=False)
def adamw_fused(t: Loop) -> None:
    """The fused implementation."""
    model = t.wrap(Net())
    train(t, model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.02, fused=True))


@row(compare=GRADIENTS, spread=False)
def adam_foreach(t: Loop) -> None:
    """The foreach implementation."""
    model = t.wrap(Net())
    train(t, model, optimizer=torch.optim.Adam(model.parameters(), lr=0.02, foreach=True))


@row(linear=True)
def momentum(t: Loop) -> None:
    """SGD with Nesterov momentum and weight decay, which are linear too."""
    model = t.wrap(Flat())
    train(
        t,
        model,
        optimizer=torch.optim.SGD(
            model.parameters(), lr=0.02, momentum=0.7, nesterov=True, weight_decay=0.01
        ),
    )


@row(linear=True)
def two_optimizers(t: Loop) -> None:
    """One for each layer, given generators of parameters, always in the same order."""
    model = t.wrap(Flat())
    one = torch.optim.SGD((p for p in model.one.parameters()), lr=0.05)
    two = torch.optim.SGD((p for p in model.two.parameters()), lr=0.03)
    for step in t.steps():
        inputs, targets = t.batch(step)
        one.zero_grad()
        two.zero_grad()
        mse(model(inputs), targets).backward()
        one.step()
        two.step()


def orders_vary(t: Loop, by: int) -> None:
    """Two optimizers, whose order changes with step and `by`."""
    model = t.wrap(Flat())
    both = [sgd(model.one), sgd(model.two, 0.03)]
    for step in t.steps():
        model.zero_grad()
        root_called(model, *t.batch(step)).backward()
        for o in both if (step + by) % 2 else reversed(both):
            o.step()


@row(linear=True)
def two_optimizers_in_varying_order(t: Loop) -> None:
    """The order of the two changes from step to step."""
    orders_vary(t, 0)


@row(linear=True)
def two_optimizers_in_another_order_on_each_rank(t: Loop) -> None:
    """Each rank steps them in an order of its own."""
    orders_vary(t, t.rank)


@row(linear=True)
def two_optimizers_by_turns(t: Loop) -> None:
    """In each step only one of the two steps; the other's gradients are dropped."""
    model = t.wrap(Flat())
    both = [sgd(model.one), sgd(model.two, 0.03)]
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.zero_grad()
        mse(model(inputs), targets).backward()
        both[step % 2].step()


@row(linear=True, passes=2, boundaries=2)
def two_optimizers_two_backwards(t: Loop) -> None:
    """Alternating least squares: a backward and a step for one layer, then for the other."""
    model = t.wrap(Flat())
    both = [sgd(model.one), sgd(model.two, 0.03)]
    for step in t.steps():
        inputs, targets = t.batch(step)
        for o in both:
            o.zero_grad()
            mse(model(inputs), targets).backward()
            o.step()


@row(only=WEIGHTS, compare=False)
def one_rank_skips_a_second_optimizer(t: Loop) -> None:
    """The second optimizer makes fewer steps on one rank."""
    model = t.wrap(Flat())
    one, two = sgd(model.one), sgd(model.two, 0.03)
    for step in t.steps():
        inputs, targets = t.batch(step)
        model.zero_grad()
        mse(model(inputs), targets).backward()
        one.step()
        if t.rank != 1 or step % 3:
            two.step()


def steps_in_hooks(model: nn.Module) -> None:
    """An optimizer for each parameter, which steps in a post-accumulate-grad hook."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


def backwards(t: Loop, model: nn.Module) -> None:
    """Backward passes alone."""
    for step in t.steps():
        root_called(model, *t.batch(step)).backward()


@row(linear=True, refused=(GRADIENTS, "backward"), sometimes=True)
def step_inside_backward(t: Loop) -> None:
    """An optimizer for each parameter, which steps in a post-accumulate-grad hook, made after wrapping."""
    model = t.wrap(Flat())
    steps_in_hooks(model)
    backwards(t, model)


@row(linear=True, refused=(GRADIENTS, "backward"), sometimes=True)
def step_inside_backward_hooked_first(t: Loop) -> None:
    """The same with the hooks made before wrapping."""
    module = Flat()
    steps_in_hooks(module)
    backwards(t, t.wrap(module))


def closures(t: Loop, model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 10) -> None:
    """Iterations whose forward and backward are in a closure that the optimizer calls."""
    for step in t.steps(count):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = root_called(model, *t.batch(step))
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


@row(compare=("gradient_allreduce", "topk"), spread=False, rounds=False, even=False)
def lbfgs(t: Loop) -> None:
    """A closure that the optimizer calls several times."""
    model = t.wrap(Flat())
    closures(t, model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4), 4)


@row(linear=True)
def step_raises_and_another_goes_on(t: Loop) -> None:
    """The closure of an optimizer raises; the script goes on with another optimizer, and the first one is
    still there."""
    model = t.wrap(Flat())
    first, optimizer = torch.optim.LBFGS(model.parameters()), sgd(model)

    def closure() -> float:
        raise StopIteration

    with contextlib.suppress(StopIteration):
        first.step(closure)
    train(t, model, optimizer=optimizer)
    assert first.param_groups


@row(linear=True)
def sgd_with_a_closure(t: Loop) -> None:
    """A closure that is called once."""
    model = t.wrap(Flat())
    closures(t, model, sgd(model))


@row(linear=True)
def scheduler(t: Loop) -> None:
    """A schedule of the learning rate, with warm-up from 0."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(k, 4) / 4)
    for _ in after_steps(t, model, optimizer):
        schedule.step()


@row(linear=True, spread=False)
def learning_rate_zero(t: Loop) -> None:
    """Nothing moves."""
    train(t, t.wrap(Flat()), lr=0.0)


@row(linear=True)
def averaged_model(t: Loop) -> None:
    """`swa_utils.AveragedModel` and `update_bn` beside the training."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    mean = swa_utils.AveragedModel(model)
    for step in after_steps(t, model, optimizer):
        if step > 4:
            mean.update_parameters(model)
    swa_utils.update_bn([t.batch(0)[0]], mean)
    with torch.no_grad():
        mean(t.batch(0)[0])


@row(linear=True)
def moving_average_that_is_evaluated(t: Loop) -> None:
    """An EMA of the weights by hand, swapped in for an evaluation and out again."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    ema = copy.deepcopy(dict(model.state_dict()))
    for step in after_steps(t, model, optimizer):
        with torch.no_grad():
            for k, v in model.state_dict().items():
                ema[k].lerp_(v, 0.1)
            if step == 5:
                kept = copy.deepcopy(model.state_dict())
                model.load_state_dict(ema)
                model.eval()
                model(t.batch(step)[0])
                model.train()
                model.load_state_dict(kept)


@row(linear=True)
def grad_scaler(t: Loop) -> None:
    """A GradScaler that has nothing to skip."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        scaler.scale(mse(model(inputs), targets)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()


@row(compare=GRADIENTS, spread=False)
def schedule_free(t: Loop) -> None:
    """An optimizer with train and eval modes, which swap the weights, as schedule-free ones do."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    x = [p.detach().clone() for p in model.parameters()]
    for step in after_steps(t, model, optimizer):
        with torch.no_grad():
            for a, p in zip(x, model.parameters(), strict=True):
                a.lerp_(p, 1 / (step + 1))
            if step % 4 == 3:
                kept = [p.clone() for p in model.parameters()]
                for a, p in zip(x, model.parameters(), strict=True):
                    p.copy_(a)
                model(t.batch(step)[0])
                for k, p in zip(kept, model.parameters(), strict=True):
                    p.copy_(k)


@row(linear=True)
def optimizer_replaced(t: Loop) -> None:
    """A new optimizer halfway."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    train(t, model, 0, 5, lr=0.02)


@row(linear=True)
def optimizer_state_loaded(t: Loop) -> None:
    """The optimizer's state is saved and loaded in the middle."""
    model = t.wrap(Flat())
    make = lambda: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)  # noqa: E731
    optimizer = make()
    for step in t.steps():
        inputs, targets = t.batch(step)
        if step == 5:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def parameters_without_an_optimizer(t: Loop) -> None:
    """Only one layer's parameters are given to the optimizer; the other has gradients all the same."""
    model = t.wrap(Flat())
    train(t, model, optimizer=sgd(model.one))


@row(linear=True)
def step_for_several_models_and_tensors(t: Loop) -> None:
    """The optimizer also has parameters that belong to no wrapped model; they are each rank's."""
    model = t.wrap(Flat())
    free = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), free], lr=0.05)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        (mse(model(inputs), targets) + 0.0 * (free - 1).square().sum()).backward()
        optimizer.step()


@row(only=("local_sgd",), options={"local_sgd": {"every": 2}}, compare=False, spread=False)
def state_averaged_too(t: Loop) -> None:
    """`local_sgd(optimizer=Adam)`."""
    module = Net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    train(t, t.wrap(module, optimizer), optimizer=optimizer)


@row(compare=False, spread=False)
def optimizer_given(t: Loop) -> None:
    """`optimizer=` is given to every algorithm, which uses it where it is needed."""
    module = Net()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = module
    if t.algorithm is None:
        t.models.append(module)
    else:
        import trigram

        model = trigram.with_bagua(module, t.algorithm, optimizer=optimizer, **t.options())
        t.models.append(model)
    train(t, model, optimizer=optimizer)
