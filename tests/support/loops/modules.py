"""What a module is made of, and what becomes of it while it trains."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.loops.loop import Flat, Loop, Net, layers_called, mse, sgd, train
from tests.support.loops.table import ALGORITHMS, ASYNC, GRADIENTS, row


def seed(t: Loop, base: int) -> None:
    """Another seed on each rank: what is made now is rank 0's only where somebody sees to it."""
    torch.manual_seed(base + max(t.rank, 0))


@row()
def ranks_start_apart(t: Loop) -> None:
    """Each rank initialises with a seed of its own; rank 0's weights count."""
    seed(t, 70)
    train(t, t.wrap(Net()), 0, 10)


@row(refused=(ASYNC, "trigram.switch"))
def head_replaced(t: Loop) -> None:
    """Halfway the head is replaced by a new layer, made with another seed on each rank."""
    model = t.wrap(Net())
    train(t, model, 0, 5)
    seed(t, 50)
    model.decoder = nn.Linear(8, 3)
    train(t, model, 5, 5)


@row(refused=(ASYNC, "trigram.switch"))
def head_replaced_at_once(t: Loop) -> None:
    """The head is replaced right after wrapping, before any step."""
    model = t.wrap(Net())
    seed(t, 50)
    model.decoder = nn.Linear(8, 3)
    train(t, model, 0, 10)


@row(refused=(GRADIENTS + ASYNC, "trigram.step|trigram.switch"))
def head_replaced_where_methods_are_called(t: Loop) -> None:
    """The same where the root is never called."""
    model = t.wrap(Net())
    loss = lambda m, x, y: mse(m.decode(m.encode(x)), y)  # noqa: E731
    train(t, model, 0, 5, loss)
    seed(t, 50)
    model.decoder = nn.Linear(8, 3)
    train(t, model, 5, 5, loss)


@row(refused=(ASYNC, "trigram.switch"))
def head_replaced_and_step(t: Loop) -> None:
    """The same with `trigram.step(model)` after the change."""
    model = t.wrap(Net())
    loss = lambda m, x, y: mse(m.decode(m.encode(x)), y)  # noqa: E731
    train(t, model, 0, 5, loss)
    seed(t, 50)
    model.decoder = nn.Linear(8, 3)
    t.step(model)
    train(t, model, 5, 5, loss)


@row(refused=(ASYNC, "trigram.switch"))
def head_grows(t: Loop) -> None:
    """The new head has another shape: more classes."""
    model = t.wrap(Net())
    train(t, model, 0, 5)
    seed(t, 50)
    model.decoder = nn.Linear(8, 4)
    train(t, model, 5, 5, lambda m, x, y: mse(m(x)[:, :3], y) + 0.1 * m(x)[:, 3].square().mean())


class Grows(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.extra: nn.ModuleList = nn.ModuleList()

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + sum(layer(torch.sin(inputs)) for layer in self.extra)


@row(refused=(ASYNC, "trigram.switch"))
def layer_added(t: Loop) -> None:
    """A layer is added halfway, with another seed on each rank, and a new optimizer made."""
    model = t.wrap(Grows())
    train(t, model, 0, 5)
    seed(t, 60)
    model.extra.append(nn.Linear(6, 3))
    train(t, model, 5, 5)


@row(refused=(ASYNC, "trigram.switch"))
def layer_added_with_a_group(t: Loop) -> None:
    """A layer is added to the model and, by `add_param_group`, to the optimizer."""
    model = t.wrap(Grows())
    optimizer = sgd(model)
    train(t, model, 0, 5, optimizer=optimizer)
    seed(t, 60)
    model.extra.append(nn.Linear(6, 3))
    optimizer.add_param_group({"params": model.extra.parameters()})
    train(t, model, 5, 5, optimizer=optimizer)


@row(linear=True, refused=(ASYNC, "trigram.switch"))
def layer_removed(t: Loop) -> None:
    """A layer goes halfway."""
    model = t.wrap(Grows())
    model.extra.append(nn.Linear(6, 3, bias=False))
    nn.init.zeros_(model.extra[0].weight)
    train(t, model, 0, 5)
    del model.extra[0]
    train(t, model, 5, 5)


@row(refused=(ASYNC, "trigram.switch"))
def lora_added(t: Loop) -> None:
    """Halfway the layers are frozen and replaced by ones with low-rank additions, as peft does."""

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = (
                nn.Linear(base.in_features, 2, bias=False),
                nn.Linear(2, base.out_features, bias=False),
            )
            nn.init.zeros_(self.b.weight)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.base(inputs) + self.b(self.a(inputs))  # type: ignore[no-any-return]

    model = t.wrap(Net())
    train(t, model, 0, 4)
    seed(t, 80)
    model.encoder, model.decoder = LoRA(model.encoder), LoRA(model.decoder)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    train(t, model, count=8, start=4, optimizer=optimizer)


@row(linear=True)
def frozen_from_the_start(t: Loop) -> None:
    """One layer does not train."""
    model = Flat()
    model.one.requires_grad_(False)
    train(t, t.wrap(model), 0, 10)


@row(linear=True)
def frozen_after_some_steps(t: Loop) -> None:
    """A layer is frozen halfway; its gradient stays from the last step, and the optimizer skips it."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    train(t, model, 0, 5, optimizer=optimizer)
    model.one.requires_grad_(False)
    train(t, model, 5, 5, optimizer=optimizer)


@row(linear=True, refused=(ASYNC, "trigram.switch"))
def unfrozen_after_some_steps(t: Loop) -> None:
    """Head first, then the whole model: a frozen layer is unfrozen."""
    model = Flat()
    model.one.requires_grad_(False)
    model = t.wrap(model)
    optimizer = sgd(model)
    train(t, model, 0, 5, optimizer=optimizer)
    model.one.requires_grad_(True)
    train(t, model, 5, 5, optimizer=optimizer)


@row(linear=True, refused=(ASYNC, "trigram.switch"))
def unfrozen_with_a_group(t: Loop) -> None:
    """The unfrozen layer comes to the optimizer by `add_param_group`, and methods are called."""
    model = Flat()
    model.one.requires_grad_(False)
    model = t.wrap(model)
    optimizer = torch.optim.SGD(model.two.parameters(), lr=0.05)
    train(t, model, 0, 5, layers_called, optimizer=optimizer)
    model.one.requires_grad_(True)
    optimizer.add_param_group({"params": model.one.parameters()})
    train(t, model, 5, 5, layers_called, optimizer=optimizer)


@row(linear=True)
def frozen_by_turns(t: Loop) -> None:
    """In every step another layer trains."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        model.one.requires_grad_(step % 2 == 0)
        model.two.requires_grad_(step % 2 == 1)
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(model(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def frozen_between_forward_and_backward(t: Loop) -> None:
    """requires_grad is changed for the length of a forward."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        model.one.requires_grad_(False)
        out = model(inputs)
        model.one.requires_grad_(True)
        mse(out, targets).backward()
        optimizer.step()


@row(refused=(tuple(ALGORITHMS), "requires_grad|trigram.switch"), sometimes=True, steps=8)
def everything_frozen(t: Loop) -> None:
    """Nothing trains at first (a backbone that is used as it is); halfway everything is unfrozen."""
    model = Flat()
    model.requires_grad_(False)
    model = t.wrap(model)
    for step in t.steps(2):
        model(t.batch(step)[0])
    model.requires_grad_(True)
    train(t, model, 2, 8)


@row(linear=True)
def detached_backbone(t: Loop) -> None:
    """The backbone's output is detached: its parameters never have a gradient."""

    class Detached(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.decode(self.encode(inputs).detach())

    train(t, t.wrap(Detached()), 0, 10)


@row()
def backbone_under_no_grad(t: Loop) -> None:
    """The backbone runs under no_grad in the forward for the first steps."""

    class Warm(Net):
        training_backbone = False

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.set_grad_enabled(self.training_backbone):
                h = self.encode(inputs)
            return self.decode(h)

    model = t.wrap(Warm())
    train(t, model, 0, 5)
    model.training_backbone = True
    train(t, model, 5, 5)


@row()
def tied(t: Loop) -> None:
    """One weight under two names."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.last = nn.Linear(6, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(torch.tanh(self.second(self.first(inputs))))  # type: ignore[no-any-return]

    model = t.wrap(Tied())
    train(t, model, 0, 10)
    assert model.first.weight is model.second.weight


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))  # type: ignore[no-any-return]


@row()
def batch_norm(t: Loop) -> None:
    """Buffers that every forward changes. With the same inputs everywhere the statistics are too."""
    train(t, t.wrap(Normed()), 0, 10)


@row()
def batch_norm_in_eval_mode(t: Loop) -> None:
    """BatchNorm is frozen by eval."""
    train(t, t.wrap(Normed()).eval(), 0, 10)


@row()
def batch_norm_where_layers_are_called(t: Loop) -> None:
    """The same where the root is never called."""
    model = t.wrap(Normed())
    train(t, model, 0, 10, lambda m, x, y: mse(m.last(torch.tanh(m.norm(m.first(x)))), y))


@row(refused=(tuple(ALGORITHMS), "SyncBatchNorm"))
def sync_batch_norm(t: Loop) -> None:
    """torch's SyncBatchNorm needs a process group: without one it would use each rank's statistics."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
    train(t, t.wrap(model).eval(), 0, 10)


@row(compare=False)
def dropout(t: Loop) -> None:
    """Each rank draws its own."""
    torch.manual_seed(5 + max(t.rank, 0))
    train(t, t.wrap(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))), 0, 10)


@row()
def recurrent(t: Loop) -> None:
    """An LSTM, which keeps its weights in a list of its own too."""

    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.out(self.lstm(inputs.unsqueeze(1).repeat(1, 3, 1))[0][:, -1])  # type: ignore[no-any-return]

    train(t, t.wrap(Tags()), 0, 10, lr=0.1)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 6, sparse=sparse), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        words = (inputs.abs() * 7).long().clamp(max=19)
        return self.out(self.table(words).mean(1))  # type: ignore[no-any-return]


@row(refused=(("bytegrad", "topk", "powersgd"), "sparse"), sometimes=True)
def sparse_embedding(t: Loop) -> None:
    """Sparse gradients."""
    train(t, t.wrap(Words(True)), 0, 10)


@row()
def dense_embedding(t: Loop) -> None:
    """Rows that few ranks meet."""
    train(t, t.wrap(Words(False)), 0, 10)


def doubled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A loss in the model's dtype."""
    dtype = next(m.parameters()).dtype
    return mse(m(x.to(dtype)).double(), y.double())


@row(linear=True)
def double_precision(t: Loop) -> None:
    """float64."""
    train(t, t.wrap(Flat().double()), 0, 10, doubled)


@row(tolerance=0.3)
def bfloat16(t: Loop) -> None:
    """Parameters in bf16: what a step changes is rounded."""
    train(t, t.wrap(Flat().bfloat16()), 0, 10, doubled)


@row(tolerance=0.3)
def mixed_dtypes(t: Loop) -> None:
    """One layer in bf16, one in float64."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 3).bfloat16(), nn.Linear(6, 3).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.one(inputs.bfloat16()).double() + self.two(inputs.double())  # type: ignore[no-any-return]

    train(t, t.wrap(Mixed()), 0, 10, lambda m, x, y: mse(m(x), y.double()))


@row(linear=True, refused=(ASYNC, "trigram.switch"))
def double_after_wrapping(t: Loop) -> None:
    """`model.double()` right after with_bagua, then the optimizer."""
    model = t.wrap(Flat())
    model.double()
    train(t, model, 0, 10, doubled)


@row(linear=True, refused=(ASYNC, "trigram.switch"))
def double_halfway(t: Loop) -> None:
    """`model.to(torch.float64)` between two phases."""
    model = t.wrap(Flat())
    train(t, model, 0, 5, doubled)
    model.to(torch.float64)
    train(t, model, 5, 5, doubled)


@row(tolerance=0.3, refused=(ASYNC, "trigram.switch"))
def bfloat16_after_wrapping(t: Loop) -> None:
    """`model.bfloat16()` right after with_bagua."""
    model = t.wrap(Flat())
    model.bfloat16()
    train(t, model, 0, 10, doubled)


@row(linear=True)
def complex_parameter_without_gradient(t: Loop) -> None:
    """No pass reaches it."""

    class Phases(Flat):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    train(t, t.wrap(Phases()), 0, 10)


class Buffered(Flat):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", buffer)


@row(refused=(tuple(ALGORITHMS), "kept", "complex64"), sometimes=True, linear=True)
def complex_buffer(t: Loop) -> None:
    """Trained, or refused by the buffer's name."""
    train(t, t.wrap(Buffered(torch.ones(3, dtype=torch.complex64))), 0, 10)


@row(refused=(tuple(ALGORITHMS), "kept", "int16"), sometimes=True, linear=True)
def int16_buffer(t: Loop) -> None:
    """Trained, or refused by the buffer's name."""
    train(t, t.wrap(Buffered(torch.ones(3, dtype=torch.int16))), 0, 10)


@row(refused=(tuple(ALGORITHMS), "kept", "float8"), sometimes=True, linear=True)
def fp8_buffer(t: Loop) -> None:
    """Trained, or refused by the buffer's name."""
    train(t, t.wrap(Buffered(torch.ones(4).to(torch.float8_e4m3fn))), 0, 10)


@row(refused=(tuple(ALGORITHMS), "kept"), sometimes=True, linear=True)
def expanded_buffer(t: Loop) -> None:
    """All its elements share one place in memory."""
    train(t, t.wrap(Buffered(torch.ones(1).expand(4))), 0, 10)


@row(refused=(tuple(ALGORITHMS), "lazy"))
def lazy_layer(t: Loop) -> None:
    """Its parameters have no shape yet: refused, and the message says to run a forward first."""
    model = t.wrap(nn.Sequential(nn.LazyLinear(3)))
    train(t, model, 0, 10)


@row(linear=True)
def lazy_layer_with_a_shape(t: Loop) -> None:
    """After a first forward it is a layer like any other."""
    model = nn.Sequential(nn.LazyLinear(3))
    model(t.batch(0)[0])
    torch.manual_seed(4)
    for p in model.parameters():
        nn.init.normal_(p)
    train(t, t.wrap(model), 0, 10)


@row(linear=True)
def unusual_shapes(t: Loop) -> None:
    """A scalar, an empty parameter, and one that is not contiguous."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.ones(()))
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.turned = nn.Parameter(torch.randn(3, 6).t())

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.turned + self.scalar + self.empty.sum()

    train(t, t.wrap(Odd()), 0, 10)


@row()
def convolutions(t: Loop) -> None:
    """channels_last."""

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 4, (1, 3)), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            h = self.conv(inputs.reshape(-1, 2, 1, 3).contiguous(memory_format=torch.channels_last))
            return self.out(torch.tanh(h).flatten(1))  # type: ignore[no-any-return]

    train(t, t.wrap(Conv().to(memory_format=torch.channels_last)), 0, 10, lr=0.1)


@row()
def weight_norm(t: Loop) -> None:
    """A parametrization made before wrapping."""
    model = Net()
    parametrizations.weight_norm(model.encoder)
    train(t, t.wrap(model), 0, 10)


@row(refused=(ASYNC, "trigram.switch"))
def weight_norm_after_wrapping(t: Loop) -> None:
    """A parametrization made after wrapping replaces the parameter by two new ones."""
    model = t.wrap(Net())
    parametrizations.weight_norm(model.encoder)
    train(t, model, 0, 10)


@row(refused=(ASYNC, "trigram.switch"))
def weight_norm_folded(t: Loop) -> None:
    """A parametrization is removed halfway: its tensors become one parameter again."""
    model = Net()
    parametrizations.weight_norm(model.encoder)
    model = t.wrap(model)
    train(t, model, 0, 5)
    nn.utils.parametrize.remove_parametrizations(model.encoder, "weight")
    train(t, model, 5, 5)


@row()
def child_of_the_model_wrapped(t: Loop) -> None:
    """Only the head is wrapped; the backbone is frozen and is not."""
    whole = Net()
    whole.encoder.requires_grad_(False)
    head = t.wrap(whole.decoder)
    optimizer = sgd(head)
    for step in t.steps():
        inputs, targets = t.batch(step)
        optimizer.zero_grad()
        mse(whole(inputs), targets).backward()
        optimizer.step()


@row(linear=True)
def copied_as_a_teacher(t: Loop) -> None:
    """A deep copy of the wrapped model, made in the middle, is a teacher; it takes no part."""
    model = t.wrap(Flat())
    optimizer = sgd(model)
    teacher = None
    for step in t.steps():
        inputs, targets = t.batch(step)
        if step % 3 == 1:
            teacher = copy.deepcopy(model).requires_grad_(False)
        optimizer.zero_grad()
        loss = mse(model(inputs), targets)
        if teacher is not None:
            loss = loss + 0.1 * mse(model(inputs), teacher(inputs))
        loss.backward()
        optimizer.step()


@row(linear=True)
def buffer_registered_later(t: Loop) -> None:
    """A buffer comes into being halfway."""
    model = t.wrap(Flat())
    train(t, model, 0, 5)
    model.register_buffer("mask", torch.ones(3))
    train(t, model, 5, 5)
