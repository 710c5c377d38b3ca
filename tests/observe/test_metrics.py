"""Metrics for Prometheus and a page for torch's debug server, from ranks that train."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import ROOT, free_port, run
from trigram.observe import metrics

DASHBOARD = ROOT / "examples" / "grafana.json"


def _train(count: int) -> torch.nn.Module:
    model = trigram.with_bagua(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return model


def _served(rank: int, world: int, port: int) -> tuple[str, dict[str, Any]]:
    model = _train(7)
    trigram.barrier()
    mine = urllib.request.urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=20).read().decode()
    counters = trigram.stats(model)
    trigram.shutdown()
    raises(OSError, urllib.request.urlopen, f"http://127.0.0.1:{port + rank}/metrics", timeout=5)
    return mine, {"calls": counters["calls"], "sent": counters["sent_bytes"]}


def test_metrics_are_served() -> None:
    """What a rank serves is what its counters say, in Prometheus' own words; the port closes with the job."""
    parser = pytest.importorskip("prometheus_client.parser")
    port = free_port()
    ranks = run(2, _served, port, transport="tcp", env={"TRIGRAM_METRICS": f"127.0.0.1:{port}"}, timeout=60)
    for rank, (text, counters) in enumerate(ranks):
        labels_of: dict[str, set[str]] = {}
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for family in parser.text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "rank"}
                assert sample.labels["rank"] == str(rank)
                labels_of.setdefault(sample.name, set()).update(sample.labels)
                values.setdefault(sample.name, {})[tuple(labels.values())] = sample.value
        assert values["trigram_steps_total"][("Linear",)] in (6.0, 7.0)
        assert values["trigram_calls_total"][()] == counters["calls"]
        assert values["trigram_sent_bytes_total"][(str(1 - rank),)] == counters["sent"][1 - rank] > 0
        phases = {key[1] for key in values["trigram_step_seconds_total"]}
        assert {"forward", "backward", "wait", "optimizer"} <= phases
        known = set(re.findall(r"trigram_[a-z_]+", DASHBOARD.read_text()))
        # Rates of links and silences exist only where there are some.
        absent = {"trigram_link_bytes_per_second", "trigram_silent_seconds", "trigram_waited_seconds_total"}
        assert known - set(values) <= absent and known <= _families()
        for panel in json.loads(DASHBOARD.read_text())["panels"]:
            for target in panel["targets"]:
                _has_labels(target["expr"], target["legendFormat"], labels_of)


def _has_labels(expression: str, legend: str, labels_of: dict[str, set[str]]) -> None:
    """A query of the dashboard names labels that the ranks serve, and its legend those that it keeps."""
    kept = {label for group in re.findall(r"by \((.*?)\)", expression) for label in re.split(r",\s*", group)}
    assert set(re.findall(r"{{(\w+)}}", legend)) <= kept
    for name, _, matchers in re.findall(r"(trigram_[a-z_]+)({(.*?)})?", expression):
        used = kept | set(re.findall(r"(\w+)[=!]", matchers))
        if "scalar(" not in expression:
            assert used <= labels_of.get(name, {"rank", "peer"}), expression


def _families() -> set[str]:
    """The names that a collector can have, with Prometheus' endings."""
    source = Path(metrics.__file__).read_text()
    names = re.findall(r"(CounterMetricFamily|GaugeMetricFamily),\s*\"(\w+)\"", source)
    counters = re.findall(r'counter\("(\w+)"', source)
    return {f"trigram_{n}" + ("_total" if k[0] == "C" else "") for k, n in names} | {
        f"trigram_{n}_total" for n in counters
    }


def _without_launcher(rank: int, world: int) -> list[int]:
    trigram.init()
    given = metrics._place(trigram.runtime.world.current())
    del os.environ["LOCAL_RANK"]  # as in a child of torch.multiprocessing.spawn
    return [given, metrics._place(trigram.runtime.world.current())]


def test_ranks_of_a_host_have_ports_of_their_own() -> None:
    assert run(2, _without_launcher, env={"LOCAL_RANK": "4"}, timeout=30) == [[4, 0], [4, 1]]


def _misset(rank: int, world: int) -> str:
    os.environ["TRIGRAM_METRICS"] = "9400"
    return raises(trigram.ConfigError, trigram.init)


def test_a_wrong_address_is_refused() -> None:
    says(run(1, _misset)[0], "TRIGRAM_METRICS", "9400", "127.0.0.1:9400")
    assert metrics.address("[::1]:9400", 2) == ("::1", 9402)


def test_the_dashboard_is_whole() -> None:
    content = json.loads(DASHBOARD.read_text())
    assert len({p["id"] for p in content["panels"]}) == len(content["panels"]) == 8
    assert all(p["targets"][0]["expr"] and p["targets"][0]["legendFormat"] for p in content["panels"])


def test_a_process_with_the_page_ends_well() -> None:
    """torch drops the page's handler after the interpreter; which modules are there decides the order."""
    code = "import trigram.integrations.lightning, trigram.integrations.torch_debug"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )
    assert ended.returncode == 0, ended.stderr


def _debugged(rank: int, world: int, port: int) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = _train(5)
    from torch.distributed.debug import start_debug_server, stop_debug_server

    from trigram.integrations.torch_debug import TrigramPage

    start_debug_server(port=port, start_method="spawn", handlers=[TrigramPage()])
    trigram.barrier()
    text = ""
    if rank == 0:
        for _ in range(900):  # the server's process imports torch first, on busy cores too
            try:
                text = urllib.request.urlopen(f"http://[::1]:{port}/trigram", timeout=20).read().decode()
                break
            except OSError:
                time.sleep(0.1)
    dist.barrier()
    if rank == 0:
        assert trigram.stats(model)["steps"] == 5
        stop_debug_server()
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_a_page_of_torchs_debug_server() -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("jinja2")
    pytest.importorskip("tabulate")
    text, _ = run(2, _debugged, free_port(), timeout=150)
    says(text, "<h1>Trigram</h1>", "trigram report: 2 ranks", "steps of Linear", "Verdict", "forward")
