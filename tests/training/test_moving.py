"""The scripts of docs/moving.md: those "after" train, and DistributedDataParallel's "before" trains alike."""

from __future__ import annotations

import re

import pytest
from torch import Tensor

from tests.support.checks import close, same_on_all_ranks
from tests.support.harness import ROOT, run

_TITLED = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/moving.md").read_text(), re.M | re.S)
SECTIONS = {
    title: dict(re.findall(r"^(Before|After):\n\n```py(?:thon)?\n(.*?)^```", text, re.M | re.S))
    for title, text in _TITLED
}


def _trained(rank: int, world: int, title: str, when: str) -> list[Tensor]:
    scope = {"__name__": "__main__"}
    script = SECTIONS[title][when].replace(
        "import horovod.torch as hvd", "import trigram.compat.horovod as hvd"
    )
    exec(compile(script, f"{title}, {when}", "exec"), scope)
    weights = [p.detach() for p in scope["model"].parameters()]  # type: ignore[attr-defined]
    same_on_all_ranks(rank, world, when, weights)
    return weights


def test_each_section_has_both_scripts() -> None:
    assert len(SECTIONS) == 5
    for title, scripts in SECTIONS.items():
        assert set(scripts) == {"Before", "After"}, title
        for when, script in scripts.items():
            compile(script, f"{title}, {when}", "exec")


@pytest.mark.parametrize("title", list(SECTIONS))
def test_script_after(title: str) -> None:
    run(2, _trained, title, "After")


def test_ddp_before_and_after() -> None:
    title = "From DistributedDataParallel"
    for before, after in zip(*(run(2, _trained, title, when) for when in ("Before", "After")), strict=True):
        assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_horovods_script_needs_another_import_only() -> None:
    before, after = (run(2, _trained, "From Horovod", when) for when in ("Before", "After"))
    for mine, theirs in zip(before, after, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            close(a, b, 1e-6, "the weights")
