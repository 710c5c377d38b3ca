"""docs/conformance.md, in which a suite that has been run again has its section made anew."""

from __future__ import annotations

import datetime
import re
import textwrap

from tools.peers.outcomes import FAILED, PASSED, ROOT, SKIPPED, Suite

PAGE = ROOT / "docs" / "conformance.md"


def section(suite: Suite, command: str) -> str:
    """The section of a suite."""
    today = datetime.date.today()
    text = [f"## {suite.title}", "", f"    {command}", ""]
    text += [textwrap.fill(f"{suite.how} Run on {today.day} {today:%B %Y}.", 100), ""]
    text += ["| with | pass | fail | are skipped |", "|---|---:|---:|---:|", _row("Trigram", suite.ours)]
    if suite.theirs is not None:
        text.append(_row(suite.theirs_name, suite.theirs))
    failed = {test for test, how in suite.ours.items() if how == FAILED}
    if suite.theirs is None:
        text += _listed("does not pass", failed, suite)
    else:
        passed = {test for test, how in suite.theirs.items() if how == PASSED}
        missing = {test for test in passed if suite.ours.get(test) != PASSED}
        text += _listed(f"passes with {suite.theirs_name} and not with Trigram", missing, suite)
        text += _listed("passes with neither", failed - missing, suite)
        if not missing:
            text += ["", f"What passes with {suite.theirs_name} passes with Trigram."]
    return "\n".join([*text, ""])


def _listed(head: str, tests: set[str], suite: Suite) -> list[str]:
    """A table of tests by their reasons."""
    told: dict[str, list[str]] = {}
    for test in sorted(tests):
        told.setdefault(suite.reason(test), []).append(f"`{test}`")
    rows = [f"| {', '.join(names)} | {why} |" for why, names in told.items()]
    return ["", f"| {head} | why |", "|---|---|", *rows] if rows else []


def _row(name: str, outcomes: dict[str, str]) -> str:
    counts = [sum(how == kind for how in outcomes.values()) for kind in (PASSED, FAILED, SKIPPED)]
    return f"| {name} | {' | '.join(map(str, counts))} |"


def write(suite: Suite, command: str) -> None:
    """Puts the section of a suite into the page, in the place of its last one."""
    text = PAGE.read_text()
    library = suite.title.split()[0]
    made = section(suite, command)
    old = re.search(rf"^## {re.escape(library)}\b.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if old is None:
        text = text.rstrip("\n") + "\n\n" + made
    else:
        text = text[: old.start()] + made + ("\n" if old.end() < len(text) else "") + text[old.end() :]
    PAGE.write_text(text)
