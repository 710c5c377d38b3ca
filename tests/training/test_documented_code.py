"""The Python code of README.md and of the pages for users runs, with public names and without warnings."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import warnings

import pytest

import trigram
from tests.support import patience
from tests.support.harness import ROOT, run

_DOCS = ("start", "training", "checkpoints", "extending", "data", "moe", "calls")
PAGES = ("README.md", *(f"docs/{name}.md" for name in _DOCS))
BLOCKS = {
    f"{page}:{number}": code
    for page in PAGES
    for number, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    )
}
CALLS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"),
    *("barrier", "send", "recv", "new_group", "empty"),
)
PUBLIC = {"trigram"} | {
    f"trigram.{module}" for module in ("averaging", "codecs", "data", "errors", "graphs", "mixing", "moe")
}


def test_there_is_code() -> None:
    assert len(BLOCKS) >= 7


def test_calls_have_the_arguments_that_their_page_says() -> None:
    """docs/calls.md has each public call, and its arguments but those that all have, with their defaults."""
    text = (ROOT / "docs" / "calls.md").read_text()
    common = ("group", "async_op", "timeout")
    for name in CALLS:
        arguments = []
        for p in inspect.signature(getattr(trigram, name)).parameters.values():
            default = "" if p.default is p.empty else f"={p.default!r}".replace("'", '"')
            star = "*" if p.kind is p.VAR_POSITIONAL else ""
            arguments += [] if p.name in common else [f"{star}{p.name}{default}"]
        assert f"`{name}({', '.join(arguments)})`" in text, name


def _runs(rank: int, world: int, code: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        exec(compile(code, "documented", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", list(BLOCKS))
def test_it_runs(block: str) -> None:
    used = set(re.findall(r"^\s*(?:from|import) (trigram[\w.]*)", BLOCKS[block], re.MULTILINE))
    assert used <= PUBLIC, used - PUBLIC
    if "trigram.launch(" not in BLOCKS[block]:
        run(2, _runs, BLOCKS[block])
        return
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", BLOCKS[block]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience.seconds(240), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
