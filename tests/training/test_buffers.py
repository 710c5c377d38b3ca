"""Buffers and frozen parameters of every dtype and layout: broadcast, or refused by name on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import equal, raises, same_on_all_ranks, says
from tests.support.twin_training import x
from trigram.collectives import coalesced, serialization

CASES = Cases()
NAMES = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool complex32 "
    "complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2"
)
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "local_sgd", "async")


def values(dtype: torch.dtype, seed: int, *shape: int) -> Tensor:
    """Any values of a dtype, none of them NaN."""
    warnings.filterwarnings("ignore", "ComplexHalf")
    ones = torch.randint(1, 3, shape, generator=torch.Generator().manual_seed(seed))
    if "float4" in str(dtype):
        return ones.to(torch.uint8).view(dtype)
    return (ones == 1) if dtype == torch.bool else ones.to(torch.float32).to(dtype)


def bits(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().contiguous().flatten().view(torch.uint8)


class Buffers(nn.Module):
    """A layer, and buffers of all dtypes, which hold other values on every rank."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        for dtype in DTYPES:
            name = "of_" + str(dtype).removeprefix("torch.")
            self.register_buffer(name, values(dtype, seed, 5, 3))
            self.register_buffer(f"{name}_scalar", values(dtype, seed, 1).squeeze())
            self.register_buffer(f"{name}_transposed", values(dtype, seed, 2, 3).t())
            self.register_buffer(f"{name}_empty", values(dtype, seed, 0))
            self.register_buffer(f"{name}_expanded", values(dtype, seed, 3, 1).expand(4, 3, 2))
        self.register_buffer("conjugate", values(torch.complex64, seed, 3).mul(1 + 1j).conj())
        self.register_buffer("negative", self.conjugate.imag)
        frozen = values(torch.complex64, seed, 3), values(torch.int16, seed, 3)
        self.frozen = nn.ParameterList(nn.Parameter(t, requires_grad=False) for t in frozen)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def same_as(model: nn.Module, seed: int, what: str) -> None:
    expected = {
        **dict(Buffers(seed).named_buffers()),
        **dict(Buffers(seed).frozen.named_parameters("frozen")),
    }
    actual = {**dict(model.named_buffers()), **dict(model.frozen.named_parameters("frozen"))}
    for name, t in expected.items():
        assert actual[name].dtype == t.dtype and actual[name].shape == t.shape, f"{what}: {name}"
        equal(bits(actual[name]), bits(t), f"{what}: {name}")
        assert actual[name].stride() == t.stride(), f"{what}: {name} has another layout"


def write(model: nn.Module, seed: int) -> None:
    """The script changes the buffers, but not those that torch does not let it change."""
    with torch.no_grad():
        for b, new in zip(model.buffers(), Buffers(seed).buffers(), strict=True):
            if 0 not in b.stride():
                b.copy_(new)


@CASES.over(*ALGORITHMS)
def every_dtype(rank: int, world: int, algorithm: str) -> None:
    """All ranks start with rank 0's; where gradients are averaged, they also step with rank 0's."""
    model = trigram.with_bagua(Buffers(rank), algorithm)
    same_as(model, 0, "at the start")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broadcasts = algorithm in ("gradient_allreduce", "bytegrad")
    for step in range(3):
        seed = 100 * (step + 1)
        write(model, seed + rank)
        model(x(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = dict(Buffers(seed if broadcasts else seed + rank).named_buffers())
        for name, b in model.named_buffers():
            if 0 not in b.stride():
                equal(bits(b), bits(wanted[name]), f"step {step}: {name}")
    before = [bits(b).clone() for b in model.buffers()]
    write(model, 50 + rank)
    kept = [bits(b).clone() for b in model.buffers()]
    means = {
        name: sum(dict(Buffers(50 + r).named_buffers())[name].float() for r in range(world)) / world
        for name in ("of_float32", "of_bfloat16", "of_float8_e5m2")
    }
    with trigram.consensus(model):
        held = [bits(b) for b in model.buffers()]
        same_on_all_ranks(rank, world, f"consensus-{algorithm}", held)
        for name, mean in means.items():
            equal(model.get_buffer(name).float(), mean.to(model.get_buffer(name).dtype).float(), name)
        equal(bits(model.get_buffer("of_int16")), bits(Buffers(50).get_buffer("of_int16")), "int16")
    for (name, b), was in zip(model.named_buffers(), kept, strict=True):
        equal(bits(b), was, f"after consensus: {name}")
    assert any(bool((a != b).any()) for a, b in zip(before, kept, strict=True))


class Holds(nn.Module):
    """A layer, and one buffer."""

    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("held", held)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


BAD: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3), nn.ReLU()), "0.weight", "forward pass"),
    "lazy_buffer": (
        lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(3, 2)),
        "0.",
        "forward",
    ),
    "meta": (lambda: Holds(torch.empty(3, device="meta")), "held", "to_empty"),
    "sparse": (lambda: Holds(torch.eye(3).to_sparse()), "held", "to_dense"),
    "quantized": (lambda: Holds(quantized()), "held", "dequantize"),
    "four_bits": (lambda: Holds(torch.empty(4, dtype=torch.uint4)), "held", "uint8"),
}


@CASES.over(*[f"{kind}-{where}" for kind in BAD for where in ("everywhere", "one")])
def refused(rank: int, world: int, what: str) -> None:
    """Also if the model of one rank only has such a tensor: all ranks raise the same."""
    kind, where = what.split("-")
    make, name, way_out = BAD[kind]
    bad = where == "everywhere" or rank == world - 1
    model = make() if bad else Holds(torch.ones(3))
    text = raises((trigram.MisuseError, trigram.UnsupportedError), trigram.with_bagua, model, "decentralized")
    says(text, name, way_out, f"rank {0 if where == 'everywhere' else world - 1} ")


@CASES
def initialized_later(rank: int, world: int) -> None:
    """After the forward pass that the error asks for, the same lazy module trains."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU())
    raises(trigram.MisuseError, trigram.with_bagua, model)
    model(x(rank, 0))
    trigram.with_bagua(model)
    model(x(rank, 1)).square().mean().backward()
    same_on_all_ranks(rank, world, "initialized", [p.grad for p in model.parameters()])


@CASES
def expanded_on_one_rank(rank: int, world: int) -> None:
    """An expanded buffer cannot hold what another rank's buffer holds."""
    held = torch.ones(1).expand(4) if rank == 1 else torch.arange(4.0)
    says(raises(trigram.MismatchError, trigram.with_bagua, Holds(held)), "rank(s) 1", "expanded")


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "resize_": lambda m: m.held.resize_(7, 3).zero_(),
    "set_": lambda m: m.held.set_(torch.zeros(7, 3)),
    "data": lambda m: setattr(m.held, "data", torch.zeros(7, 3)),
    "dtype": lambda m: setattr(m.held, "data", torch.zeros(2, 3, dtype=torch.float64)),
    "emptied": lambda m: m.held.resize_(0),
    "rebound": lambda m: setattr(m, "held", torch.zeros(7, 3)),
}


def _step(model: nn.Module, rank: int, step: int) -> None:
    model(x(rank, step)).square().mean().backward()
    model.zero_grad()


@CASES.over(*[f"{change}-{algorithm}" for change in CHANGES for algorithm in ("bytegrad", "decentralized")])
def changed_in_place(rank: int, world: int, what: str) -> None:
    """A script gives a buffer another shape or dtype, on all ranks: the next pass sends it as it is now."""
    change, algorithm = what.split("-")
    model = trigram.with_bagua(Holds(torch.zeros(2, 3)), algorithm)
    for step in range(3):
        _step(model, rank, step)
        if step == 1:
            with torch.no_grad():
                CHANGES[change](model)
        model.held.fill_(step + rank)
        model.train(step != 0)  # the first of these is sent in backward
    _step(model, rank, 3)
    equal(model.held, torch.full_like(model.held, 2 + (rank if algorithm == "decentralized" else 0)), what)
    trigram.consensus(model)
    assert model.held.numel() != 6 or change == "dtype"


@CASES.over(*[f"{change}-{mode}" for change in CHANGES for mode in ("train", "eval")])
def changed_on_one_rank(rank: int, world: int, what: str) -> None:
    """All ranks learn which buffer has which shape where; in evaluation mode it is sent in backward."""
    change, mode = what.split("-")
    model = trigram.with_bagua(Holds(torch.zeros(2, 3)))
    model.train(mode == "train")
    _step(model, rank, 0)
    if rank == world - 1:
        with torch.no_grad():
            CHANGES[change](model)
    wanted = ("held (2, 3) torch.float32 on rank(s) 0", f"on rank(s) {world - 1}", "ignore=")
    says(raises(trigram.MismatchError, _step, model, rank, 1), *wanted)


class Cache(nn.Module):
    """A layer, and what it has computed for inputs of as many rows as it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("rows", torch.zeros(0, 1), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) > len(self.rows):
            self.rows = torch.arange(float(len(inputs)))[:, None].cos()
        equal(self.rows[:, 0], torch.arange(float(len(self.rows))).cos(), "the cache")
        return self.layer(inputs * self.rows[: len(inputs)])


@CASES.over(*ALGORITHMS)
def grown_by_each_rank(rank: int, world: int, algorithm: str) -> None:
    """Caches of different lengths, which take as much memory when they are padded: an error in the pass, or
    each rank's own and an error in ``consensus``; named in ``ignore`` they are each rank's own everywhere."""
    said = ("rows (4, 1)", "on rank(s) 0", f"rows ({2 * world + 2}, 1)", f"on rank(s) {world - 1}", "ignore=")
    model = trigram.with_bagua(Cache(), algorithm)
    model(torch.ones(4 + 2 * rank, 6)).sum().backward()
    if algorithm in ("gradient_allreduce", "bytegrad"):
        says(raises(trigram.MismatchError, model, torch.ones(4, 6)), *said)
    else:
        for _ in range(4):
            model(torch.ones(3, 6)).sum().backward()
        for call in (trigram.consensus, trigram.consensus_state_dict):
            says(raises(trigram.MismatchError, call, model), *said)
    model = trigram.with_bagua(Cache(), algorithm, ignore=["rows"])
    for rows in (4, 2, 5):
        model(torch.ones(rows + 2 * rank, 6)).sum().backward()
    trigram.consensus(model)
    assert len(model.rows) == 5 + 2 * rank


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_buffers(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_joining_rank_receives_any_dtype(dtype: torch.dtype) -> None:
    """The state that an elastic job sends, buffers included; expanded ones are written to as well."""
    sent = [values(dtype, 1, 5, 3), values(dtype, 2, 3, 1).expand(3, 4)]
    received = serialization.unpack(serialization.pack(sent, "test"), 0)
    own = [values(dtype, 3, 5, 3), values(dtype, 4, 3, 1).expand(3, 4)]
    coalesced.copy_all(own, received)
    for t, wanted in zip(own, sent, strict=True):
        assert t.dtype == dtype
        equal(bits(t), bits(wanted), str(dtype))
