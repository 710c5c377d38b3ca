"""Fixtures: transports, hosts, launches that many tests share; a limit for every test."""

from __future__ import annotations

import heapq
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import harness
from tests.support.cases import launch
from tests.support.netns import several_hosts
from tests.support.order import longest_first

__all__ = ["several_hosts"]

# torch's store asks the name server for the name of everyone who connects, and glibc waits five seconds for
# an answer that is lost. The ranks that tests start inherit this.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

LIMIT = 1800
"""Seconds, however busy the machine is; a launch's own limits, with stacks of hung ranks, come first."""

_computed: Counter[str] = Counter()
"""Seconds of processor time."""
_launched: dict[tuple[Any, ...], dict[str, str | None]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT))
    if hasattr(config, "workerinput"):
        longest_first(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells what it has launched."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["launches"] = harness.launches
        session.config.workeroutput["computed"] = dict(_computed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Counts what a test's module computes, and the programs that it starts; ranks are counted apart."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [sum(resource.getrusage(one)[:2]) for one in who]
    result = yield
    module = item.nodeid.partition("::")[0]
    for what, one, then in zip(("tests", "programs"), who, before, strict=True):
        _computed[f"{what} of {module}"] += sum(resource.getrusage(one)[:2]) - then
    return result


class _Workers:
    """Hears of it, where there are workers."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        told = getattr(node, "workeroutput", {})
        harness.launches.extend(tuple(launch) for launch in told.get("launches", []))
        _computed.update(told.get("computed", {}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Workers())


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which test to look at when the suite is slow: how long modules took, and launches of ranks."""
    count = int(os.environ.get("TRIGRAM_TEST_LAUNCHES", "10"))
    modules: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                modules[report.nodeid.partition("::")[0]] += report.duration
    if sum(modules.values()) > 300:
        for name, seconds in modules.most_common(2 * count):
            terminalreporter.write_line(f"  {seconds:6.1f} s  {name}")
    total = sum(seconds for seconds, _, _ in harness.launches)
    computed = sum(seconds for _, seconds, _ in harness.launches)
    if total > 60:
        number = len(harness.launches)
        terminalreporter.write_line(
            f"{number} launches of ranks took {total:.0f} s; their ranks computed {computed:.0f} s"
        )
        for seconds, computed, name in heapq.nlargest(count, harness.launches):
            terminalreporter.write_line(f"  {seconds:6.1f} s  {computed:6.1f} s  {name}")
        for what in ("tests", "programs"):
            of = Counter({name: seconds for name, seconds in _computed.items() if name.startswith(what)})
            terminalreporter.write_line(f"{what} computed {sum(of.values()):.0f} s")
            for name, seconds in of.most_common(2 * count):
                terminalreporter.write_line(f"  {seconds:6.1f} s  {name}")


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
