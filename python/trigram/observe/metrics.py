"""``TRIGRAM_METRICS=127.0.0.1:9400``: counters of each rank for Prometheus, over prometheus_client.

Each rank of a host serves its own port: the given one and its local rank. Values are those of
``trigram.stats`` and of the times of steps, read when somebody asks; nothing is counted twice.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trigram import _core
from trigram.errors import ConfigError
from trigram.observe import steps
from trigram.observe.calls import engine_of
from trigram.runtime import job, logs, world
from trigram.runtime.job import Part

VARIABLE = "TRIGRAM_METRICS"


def address(text: str, place: int) -> tuple[str, int]:
    """Host and port of a rank, from its place among those of its host.

    Raises:
        ConfigError: The text is no ``HOST:PORT``.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) + place < 1 << 16:
        raise ConfigError(f"{VARIABLE}={text!r} is invalid; set it to HOST:PORT, such as 127.0.0.1:9400")
    return host.strip("[]"), int(port) + place


class Collector:
    """The metrics of this rank, for a registry of prometheus_client; docs/observing.md lists them."""

    def __init__(self) -> None:
        self._job = job.here()

    def collect(self) -> Iterator[Any]:
        """The metric families as of now; nothing outside of a job."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        present = self._job.world
        engine = engine_of(present) if present is not None else None
        if present is None or engine is None:
            return
        me = str(present.rank)
        counters: dict[str, Any] = dict(engine.counters())

        def family(kind: Callable[..., Any], name: str, about: str, *labels: str) -> Any:
            return kind(f"trigram_{name}", about, labels=["rank", *labels])

        def counter(name: str, about: str, value: float) -> Any:
            made = family(CounterMetricFamily, name, about)
            made.add_metric([me], value)
            return made

        def by_rank(kind: Callable[..., Any], name: str, about: str, values: list[float]) -> Any:
            made = family(kind, name, about, "peer")
            for peer, value in enumerate(values):
                if value > 0:  # most ranks exchange nothing with most others
                    made.add_metric([me, str(peer)], value)
            return made

        fixed = ("world_size", "host", "version")
        info = family(GaugeMetricFamily, "info", "1, with what does not change", *fixed)
        info.add_metric([me, str(present.size), socket.gethostname(), _core.__version__], 1)
        yield info
        yield counter("calls", "collectives that ended without error", counters["calls"])
        yield counter("direct_bytes", "bytes read or written in peers' memory", counters["direct_bytes"])
        yield counter("engine_seconds", "processor time of the engine's thread", counters["engine_seconds"])
        yield by_rank(
            CounterMetricFamily, "sent_bytes", "payload bytes sent to a world rank", counters["sent_bytes"]
        )
        yield by_rank(
            CounterMetricFamily,
            "waited_seconds",
            "seconds that calls of this rank waited for a world rank",
            counters["waited_for"],
        )
        yield by_rank(
            GaugeMetricFamily,
            "silent_seconds",
            "seconds without a heartbeat of a world rank, if they are more than 1.5",
            counters["silent_for"],
        )
        ended = family(CounterMetricFamily, "steps", "training steps", "model")
        spent = family(CounterMetricFamily, "step_seconds", "seconds of steps by phase", "model", "phase")
        rates = family(GaugeMetricFamily, "link_bytes_per_second", "what a rank's link carries", "peer")
        for model, (count, _, *phases) in steps.totals(self._job).items():
            ended.add_metric([me, model], count)
            for phase, ns in zip(steps.PHASES, phases, strict=True):
                spent.add_metric([me, model, phase], ns * 1e-9)
        times = steps.latest(self._job)
        for peer, rate in zip(*(times.links() if times else steps.links(present.group)), strict=False):
            rates.add_metric([me, str(peer)], rate)
        yield from (ended, spent, rates)


def _place(present: job.World) -> int:
    """``LOCAL_RANK``; if nobody has set it, as for children of ``torch.multiprocessing.spawn``, this rank's
    place among those with which it shares memory."""
    engine = engine_of(present)
    several = job.here() is not job.of_process  # ranks that are threads have one environment
    if ("LOCAL_RANK" in os.environ and not several) or engine is None:
        return int(os.environ.get("LOCAL_RANK", "0"))
    return engine.hosts[: present.rank].count(engine.hosts[present.rank])


@job.told
class _Server(Part):
    """The server of this rank's metrics, if ``TRIGRAM_METRICS`` asks for it."""

    def __init__(self) -> None:
        self._served: tuple[Any, threading.Thread] | None = None

    def begin(self) -> None:
        """See the class."""
        text, present = os.environ.get(VARIABLE), world.present()
        if not text or present is None or self._served is not None:
            return
        host, port = address(text, _place(present))
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigError(
                f"{VARIABLE} needs prometheus_client: pip install 'trigram[metrics]'"
            ) from error
        registry = CollectorRegistry(auto_describe=False)
        collector: Any = Collector()
        registry.register(collector)
        try:
            self._served = start_http_server(port, host, registry)
        except OSError as error:  # a port that is taken must not end a training
            logs.warning(f"{VARIABLE}: rank {present.rank} serves no metrics at {host}:{port}: {error}")

    def finish(self) -> None:
        """Ends the server."""
        served, self._served = self._served, None
        if served is not None:
            with contextlib.suppress(OSError):
                served[0].socket.shutdown(socket.SHUT_RDWR)  # wakes its thread, which looks twice a second
            served[0].shutdown()
            served[0].server_close()
            served[1].join(1.0)
