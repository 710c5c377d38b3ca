"""The life of a wrapped model: saved, loaded, averaged, copied, switched, wrapped again."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

import trigram
from tests.support.loops.loop import Flat, Loop, Net, after_steps, layers_called, mse, sgd, train
from tests.support.loops.table import ALGORITHMS, ASYNC, GRADIENTS, WEIGHTS, row


@row()
def loaded_halfway(t: Loop) -> None:
    """`load_state_dict` of other weights, the same on all ranks, in the middle."""
    torch.manual_seed(21)
    other = Flat().state_dict()
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    model.load_state_dict(other)
    train(t, model, 5, 5)


@row(refused=(ASYNC, "trigram.switch"))
def loaded_by_assignment(t: Loop) -> None:
    """`load_state_dict(assign=True)`: the parameters are other tensors from then on."""
    torch.manual_seed(21)
    other = copy.deepcopy(Flat().state_dict())
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    model.load_state_dict(copy.deepcopy(other), assign=True)
    train(t, model, 5, 5)


@row(refused=(ASYNC, "trigram.switch"))
def loaded_by_assignment_at_once(t: Loop) -> None:
    """The same right after wrapping."""
    torch.manual_seed(21)
    other = Flat().state_dict()
    model = t.wrap(Flat())
    model.load_state_dict(copy.deepcopy(other), assign=True)
    train(t, model, 0, 10)


@row(
    # An asynchronous algorithm does not notice that weights were loaded, and sends the jump in 8 bits.
    only=tuple(a for a in ALGORITHMS if a != "async_low_precision"),
    spread=False,
    linear=True,
    tolerance=1e-3,
)
def loaded_stays_where_it_is(t: Loop) -> None:
    """At learning rate 0, loaded weights stay: nothing remembers those of before."""
    torch.manual_seed(21)
    other = Flat().state_dict()
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    model.load_state_dict(other)
    train(t, model, 5, 7, lr=0.0)


@row(
    only=("diloco",),
    options={"diloco": {"every": 2, "outer_lr": 0.7, "outer_momentum": 0.9}},
    spread=False,
    linear=True,
    tolerance=1e-3,
)
def outer_step_after_loading(t: Loop) -> None:
    """DiLoCo's outer step does not move loaded weights at learning rate 0: its reference is new."""
    torch.manual_seed(21)
    other = Flat().state_dict()
    model = t.wrap(Flat())
    train(t, model, 0, 1)
    model.load_state_dict(other)
    train(t, model, 1, 7, lr=0.0)


@row(linear=True)
def saved_and_loaded(t: Loop) -> None:
    """A checkpoint through a file of each rank, back into the same model."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    train(t, model, 5, 5)


@row(compare=False)
def resumed_in_a_new_model(t: Loop) -> None:
    """Weights and the algorithm's state go into a new model, which trains on; the old one is dropped."""
    model = t.wrap(Flat())
    train(t, model, 0, 6)
    state = trigram.algorithm_state(model) if t.algorithm is not None else None
    weights = copy.deepcopy(model.state_dict())
    again = t.wrap(Flat())
    again.load_state_dict(weights)
    if state is not None:
        trigram.load_algorithm_state(again, state)
        assert trigram.stats(again)["steps"] == 6
    for _ in t.steps(0):
        pass
    t.iterations = 0
    t.models.remove(model)
    train(t, again, 6, 6)
    t.iterations = 12


@row(linear=True)
def consensus_halfway(t: Loop) -> None:
    """`consensus` for good, in the middle: the ranks are together, and train on."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    if t.algorithm is not None:
        trigram.consensus(model)
    train(t, model, 5, 5)


@row(linear=True)
def consensus_for_evaluation(t: Loop) -> None:
    """`with consensus(model)` around an evaluation and a checkpoint: each rank's weights come back."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        if step % 4 == 3:
            with t.consensus(model), torch.no_grad():
                model.eval()
                model(t.batch(step)[0])
                model.train()


@row(linear=True, rounds=False)
def averaged_by_hand_at_the_end(t: Loop) -> None:
    """The script's own all_reduce of the weights at the end."""
    model = t.wrap(Flat())
    train(t, model, 0, 10)
    if t.algorithm is not None:
        if t.algorithm in ASYNC:
            trigram.switch(model, "gradient_allreduce")
        with torch.no_grad():
            for p in model.parameters():
                trigram.all_reduce(p.data, "avg")


@row(linear=True, rounds=False, spread=False)
def switched_and_back(t: Loop) -> None:
    """To plain averages of gradients and back."""
    model = t.wrap(Flat())
    train(t, model, 0, 4)
    if t.algorithm is not None:
        trigram.switch(model, "gradient_allreduce")
    train(t, model, 4, 4)
    if t.algorithm is not None:
        trigram.switch(model, t.algorithm, **t.options())
    train(t, model, 8, 4)


@row(linear=True)
def deep_copied(t: Loop) -> None:
    """Copies train alone, on one rank, and disturb nothing."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    other = copy.deepcopy(model)
    if t.rank == 0:
        optimizer = sgd(other)
        for _ in range(3):
            optimizer.zero_grad()
            mse(other(t.batch(0)[0]), t.batch(0)[1]).backward()
            optimizer.step()
    train(t, model, 5, 5)


@row(linear=True)
def pickled(t: Loop) -> None:
    """The wrapped model is pickled whole; what is read back is a plain module."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    other = pickle.loads(pickle.dumps(model))
    if t.rank == 0:
        optimizer = sgd(other)
        mse(other(t.batch(0)[0]), t.batch(0)[1]).backward()
        optimizer.step()
    train(t, model, 5, 5)


@row(compare=False, spread=False, even=False, rounds=False)
def uneven_inputs(t: Loop) -> None:
    """`join`: ranks have different numbers of batches."""
    model = t.wrap(Flat())
    with t.join(model):
        train(t, model, 0, 4 + 2 * max(t.rank, 0))
    t.at = 0


@row(refused=(ASYNC, "throw_on_early_termination"), compare=False, spread=False, even=False, rounds=False)
def uneven_inputs_are_an_error(t: Loop) -> None:
    """`join(throw_on_early_termination=True)`: all ranks raise when the first has no more inputs."""
    model = t.wrap(Flat())
    if t.algorithm is None:
        return
    try:
        with trigram.join(model, throw_on_early_termination=True):
            train(t, model, 0, 4 + 2 * t.rank)
    except trigram.MisuseError as e:
        assert "input" in str(e), e
        t.at = 0
    else:
        raise AssertionError("nobody was told")


@row(compare=False, spread=False, even=False, rounds=False)
def uneven_inputs_where_methods_are_called(t: Loop) -> None:
    """`join`, where the root is never called."""
    model = t.wrap(Flat())
    with t.join(model):
        train(t, model, 0, 4 + 2 * max(t.rank, 0), layers_called)
    t.at = 0


@row(linear=True)
def dropped_and_made_anew(t: Loop) -> None:
    """A model is trained and dropped; the next one trains as if there had been none."""
    first = t.wrap(Flat())
    train(t, first, 0, 3)
    if t.algorithm in ASYNC:
        trigram.switch(first, "gradient_allreduce")
    t.models.clear()
    t.iterations = 0
    del first
    train(t, t.wrap(Flat()), 0, 10)


@row(refused=(tuple(ALGORITHMS), "dropped", "keep a reference"))
def dropped_and_its_parts_trained(t: Loop) -> None:
    """The parts are wrapped in a container that nobody keeps: they would train apart."""
    first, second = nn.Linear(6, 5), nn.Linear(5, 3)
    t.wrap(nn.ModuleList([first, second]))
    t.models.clear()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(second(first(inputs)), targets).backward()
        optimizer.step()


@row()
def many_hooks_are_not_left(t: Loop) -> None:
    """Fifty steps add no hooks to parameters or modules."""
    model = t.wrap(Net())

    def hooks() -> int:
        count = 0
        for p in model.parameters():
            count += len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
        for m in model.modules():
            count += len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        return count

    train(t, model, 0, 4)
    before = hooks()
    train(t, model, 4, 46, lr=0.01)
    assert hooks() == before, (before, hooks())


@row(linear=True)
def state_dict_keys(t: Loop) -> None:
    """The class and the keys stay, all along."""
    module = Flat()
    keys = list(module.state_dict())
    model = t.wrap(module)
    train(t, model, 0, 10)
    assert type(model) is Flat and list(model.state_dict()) == keys


@row(compare=False, spread=False, refused=(WEIGHTS, ""), sometimes=True)
def replicas_checked(t: Loop) -> None:
    """`check_replicas` finds nothing where nothing is wrong, with methods called too."""
    model = t.wrap(Net(), **({} if t.algorithm is None else {"check_replicas": 3}))
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs) if step % 2 else model.decode(model.encode(inputs)), targets).backward()
        optimizer.step()


@row(linear=True, only=GRADIENTS)
def weighted_samples(t: Loop) -> None:
    """`sample_weight=1`: as without."""
    model = t.wrap(Flat(), **({} if t.algorithm is None else {"sample_weight": 1.0}))
    train(t, model, 0, 10)


@row(linear=True)
def on_a_group_of_all(t: Loop) -> None:
    """The model is trained by a group."""
    group = {} if t.algorithm is None else {"group": trigram.new_group(list(range(t.world)))}
    model = t.wrap(nn.Linear(6, 3), **group)
    train(t, model, 0, 10)


@row()
def replaced_inside_of_blocks(t: Loop) -> None:
    """`switch` and `unwrap` inside of `no_sync`, and of `join` where ranks wait for each other, are errors,
    and the training goes on as if nobody had tried."""
    model = t.wrap(Flat())
    blocks = [t.no_sync] if t.algorithm in ASYNC else [t.no_sync, t.join]
    for block in blocks if t.algorithm is not None else []:
        with block(model):
            for call in (trigram.unwrap, lambda m: trigram.switch(m, "gradient_allreduce")):
                try:
                    call(model)
                except trigram.MisuseError as e:
                    assert "block" in str(e), e
                else:
                    raise AssertionError("nobody was told")
    train(t, model, 0, 10)


@row(linear=True)
def unwrapped_and_wrapped_again(t: Loop) -> None:
    """`unwrap`, a step of plain training alike on all ranks, and `with_bagua` again on the same module."""
    module = Flat()
    model = t.wrap(module)
    train(t, model, 0, 5)
    if t.algorithm is not None:
        trigram.consensus(model)
        assert trigram.unwrap(model) is module and not trigram.is_wrapped(module)
    t.models.clear()
    t.iterations = 0
    train(t, t.wrap(module), 5, 8)


@row(linear=True)
def averages_saved_in_the_middle(t: Loop) -> None:
    """`consensus_state_dict` gives all ranks the same, and training goes on as before."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in after_steps(t, model, optimizer):
        if step == 5 and t.algorithm is not None:
            state = trigram.consensus_state_dict(model)
            assert state.keys() == model.state_dict().keys()
            sums = torch.stack([v.double().sum() for v in state.values()])
            everybodys = sums.new_empty(t.world, len(sums))
            trigram.all_gather(everybodys, sums)
            assert all(torch.equal(other, sums) for other in everybodys)


def accumulate_by_method(t: Loop, model: Any) -> None:
    """Iterations of two micro-batches, the first under `model.no_sync()`."""
    optimizer = sgd(model)
    for step in t.steps():
        optimizer.zero_grad()
        with model.no_sync() if t.algorithm is not None else contextlib.nullcontext():
            inputs, targets = t.batch(100 + step)
            mse(model(inputs), targets).backward()
        inputs, targets = t.batch(step)
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def distributed_data_parallel(t: Loop) -> None:
    """The class for scripts that expect torch's, with no_sync and `module`."""
    if t.algorithm is None:
        model: Any = nn.Sequential(Flat())
        t.models.append(model)
    else:
        model = trigram.DistributedDataParallel(
            Flat(), find_unused_parameters=True, algorithm=t.algorithm, **t.options()
        )
        t.models.append(model)
        assert isinstance(model.module, Flat)
    accumulate_by_method(t, model)


@row(linear=True)
def method_no_sync(t: Loop) -> None:
    """`model.no_sync()`, as scripts for torch's class call it."""
    accumulate_by_method(t, t.wrap(Flat()))
