"""What tests say about tensors and errors, with enough words to understand a failure in a rank's log."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

import trigram
from tests.support.harness import scratch, until


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Bit for bit; NaN equals NaN."""
    close(actual, expected, 0.0, what)


def close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float | torch.Tensor, what: str = ""
) -> None:
    """Equal to a tolerance (absolute, per element where it is a tensor)."""
    assert actual.shape == expected.shape, (
        f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if torch.equal(actual, expected):  # most are, and this takes a tenth of the time
        return
    if actual.dtype.is_floating_point:
        a, e = actual.detach().double(), expected.detach().double()
        ok = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= tolerance)
    else:
        a, e = actual, expected
        ok = a == e
    if not bool(ok.all()):
        wrong = (~ok).flatten().nonzero().flatten()
        i = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {ok.numel()} elements differ, first at {i}: "
            f"{actual.flatten()[i].item()!r}, expected {expected.flatten()[i].item()!r}"
        )


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of two tensors over the length of the second."""
    a, e = actual.detach().double(), expected.detach().double()
    if not bool(a.isfinite().all()):
        return float("inf")
    return float((a - e).norm() / e.norm().clamp(min=1e-12))


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of the tensors' bits."""
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()[:16]


def same_on_all_ranks(rank: int, world: int, name: str, tensors: Iterable[torch.Tensor]) -> None:
    """All ranks hold the same bits, told through files (no communication library). Once per name."""
    mine = fingerprint(tensors)
    part = scratch() / f"part-{name}-{rank}"
    part.write_text(mine)
    part.rename(scratch() / f"print-{name}-{rank}")
    others = [scratch() / f"print-{name}-{r}" for r in range(world)]
    until(lambda: all(o.exists() for o in others), 30.0, f"the other ranks' bits of {name}")
    prints = [o.read_text() for o in others]
    assert len(set(prints)) == 1, f"{name}: the ranks hold different bits: {prints}"


def from_rank_0(rank: int, name: str, tensors: Any) -> Any:
    """Rank 0's tensors, told through a file (no communication library). Once per name."""
    file, part = scratch() / f"of-rank-0-{name}", scratch() / f"part-of-rank-0-{name}"
    if rank == 0:
        torch.save(tensors, part)
        part.rename(file)
        return tensors
    until(file.exists, 90.0, f"what rank 0 has for {name}")
    return torch.load(file)


def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], fn: Callable[..., Any], *args: Any, **kw: Any
) -> str:
    """The text of the exception that `fn` must raise."""
    try:
        fn(*args, **kw)
    except kind as e:
        return str(e)
    raise AssertionError(f"no error; expected {kind}")


def init_refuses(*settings: tuple[str, str]) -> None:
    """`trigram.init` must refuse each environment variable with its value, and name both."""
    for name, value in settings:
        os.environ[name] = value
        says(raises(trigram.ConfigError, trigram.init), name, value)
        del os.environ[name]


def says(text: str, *words: str) -> None:
    """The text contains every word, whatever the case."""
    missing = [w for w in words if w.lower() not in text.lower()]
    assert not missing, f"the message does not name {missing}: {text!r}"
