"""Fixtures: transports, hosts, launches that many tests share; a limit for every test."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.support import harness
from tests.support.cases import launch
from tests.support.netns import several_hosts

__all__ = ["several_hosts"]

# torch's store asks the name server for the name of everyone who connects, and glibc waits five seconds for
# an answer that is lost. The ranks that tests start inherit this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

LIMIT = 600  # seconds; a launch's own timeouts, with stacks of the hung ranks, come first

_launched: dict[tuple[Any, ...], dict[str, str | None]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How long launches of ranks took: which test to look at when the suite is slow."""
    total = sum(seconds for seconds, _, _ in harness.launches)
    computed = sum(seconds for _, seconds, _ in harness.launches)
    if total > 60:
        count = len(harness.launches)
        terminalreporter.write_line(
            f"{count} launches of ranks took {total:.0f} s; their ranks computed {computed:.0f} s"
        )
        most = heapq.nlargest(int(os.environ.get("TRIGRAM_TEST_LAUNCHES", "10")), harness.launches)
        for seconds, computed, name in most:
            terminalreporter.write_line(f"  {seconds:6.1f} s  {computed:6.1f} s  {name}")


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """Both ways to reach a peer."""
    return str(request.param)


@pytest.fixture
def in_launch(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`in_launch("CASES", case, world, **options)`: fail as the check did, in the launch that it shares.

    The first test that asks starts the ranks, for all selected checks of this test function.
    """

    def look(where: str, case: str, world: int, **options: Any) -> None:
        node = request.node
        key = (node.module.__name__, node.originalname, where, world, repr(sorted(options.items())))
        if key not in _launched:
            mine = {k: v for k, v in node.callspec.params.items() if k != "case"}
            names = [
                i.callspec.params["case"]  # type: ignore[attr-defined]
                for i in request.session.items
                if getattr(i, "originalname", None) == node.originalname
                and i.module is node.module  # type: ignore[attr-defined]
                and mine == {k: v for k, v in i.callspec.params.items() if k != "case"}  # type: ignore[attr-defined]
            ]
            _launched[key] = launch(node.module.__name__, where, names, world, **options)
        failure = _launched[key][case]
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    return look
