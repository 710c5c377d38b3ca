"""How the hosts of a check find each other, and take turns: through a store that one of them serves."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from trigram.cli.between import facts
from trigram.cli.between.probing import Attempt, Listener, Way, as_dict, attempt, measure
from trigram.errors import TimeoutError, TrigramError
from trigram.runtime.answers import AnsweringStore, answered

_WORD, _COUNT, _HOST, _REACH, _WAY, _SAID, _LIVES = (
    "doctor/word", "doctor/count", "doctor/host/{}", "doctor/reach/{}", "doctor/way/{}/{}", "doctor/said",
    "doctor/lives/{}",
)  # fmt: skip
_POLL = 0.02
_ANSWER_SECONDS = 5.0
_STEP_SECONDS = 120.0
"""Seconds for a step of all others, beside what it must take."""
_BEAT_SECONDS, _SILENCE_SECONDS = 1.0, 15.0
"""How often a host says that it is there; after so long without a word it has gone."""


UNREADABLE = (
    "doctor: what a host has written into the store is none of this version's ({}); all hosts need the same "
    "version of trigram, and the port must be the check's own"
)


def served(port: int, hosts: int) -> tuple[dist.Store, int]:
    """A store for so many hosts, which this process serves, and its port."""
    store = dist.TCPStore("0.0.0.0", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    store.set(_WORD, secrets.token_hex(8))
    store.set(f"{_COUNT}/wanted", str(hosts))
    store.add(_COUNT, 1)  # this host is number 0, however soon the others come
    return store, store.port


def joined(host: str, port: int, seconds: float) -> dist.Store:
    """The store that another host serves.

    Raises:
        TimeoutError: It does not answer, or serves something else.
    """
    _connected(host, port, seconds)
    limit = timedelta(seconds=_ANSWER_SECONDS)
    try:
        store = answered(
            lambda: dist.TCPStore(host, port, None, False, limit, wait_for_workers=False), 2 * _ANSWER_SECONDS
        )
        end = time.monotonic() + _ANSWER_SECONDS
        while not answered(lambda: store.check([_WORD]), _ANSWER_SECONDS):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"doctor: the store at {host}:{port} is that of something else; trigram doctor --listen "
                    "must run there, with a port of its own"
                )
            time.sleep(_POLL)
    except TrigramError:
        raise
    except (dist.DistError, RuntimeError, OSError) as error:
        raise TimeoutError(
            f"doctor: what accepts connections at {host}:{port} is no trigram doctor --listen: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return store


def _connected(host: str, port: int, seconds: float) -> None:
    """Waits until something accepts connections there: what refuses them is named, which a store does not."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), _ANSWER_SECONDS).close()
            return
        except (OSError, UnicodeError) as error:
            # A name that is none is none later; where it only was not resolved, it may be.
            is_none = isinstance(error, UnicodeError) or getattr(error, "errno", None) == socket.EAI_NONAME
            if is_none or time.monotonic() > end:
                raise TimeoutError(
                    f"doctor: nothing answers at {host}:{port}: trigram doctor "
                    f"--listen {port} must run there, and this host must reach that port ({error})"
                ) from error
        time.sleep(0.2)


def take_part(served: dist.Store, number: int | None, seconds: float, patience: float) -> dict[str, Any]:
    """What this host and the others find out, the same on all.

    Args:
        served: The store where the hosts meet.
        number: 0 on the host that serves the store, and ends last; None elsewhere.
        seconds: How long to send on each way.
        patience: Seconds to wait for all hosts.

    Returns:
        ``hosts``: what each says of itself; ``reach``: by host, by other host, its attempts; ``ways``: by
        host and other host, what the way carries, or None; ``me``: which host this is.

    Raises:
        TimeoutError: Hosts have not come, or have gone.
    """
    try:
        return _take_part(served, number, seconds, patience)
    except TrigramError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise TimeoutError(
            f"doctor: the host that listens has gone, and the check ends here: {str(error).splitlines()[0]}"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TrigramError(UNREADABLE.format(f"{type(error).__name__}: {error}")) from error


def _take_part(served: dist.Store, number: int | None, seconds: float, patience: float) -> dict[str, Any]:
    store = AnsweringStore(served, time.monotonic() + patience)
    word, count = store.get(_WORD).decode(), int(store.get(f"{_COUNT}/wanted"))
    me = store.add(_COUNT, 1) - 1 if number is None else number
    if me >= count:
        raise TimeoutError(f"doctor: {count} hosts take part already; pass a larger --count where it listens")
    listener = Listener(f"{word}:{me}")
    with _beating(store, me), closing(listener):
        mine = facts.of_this_host(word) | {"port": listener.port}
        store.set(_HOST.format(me), json.dumps(mine))
        hosts = [
            _awaited(store, _HOST.format(i), patience, f"{count} hosts to come", count) for i in range(count)
        ]
        pulse = _Pulse(store, hosts)
        words = [f"{word}:{i}" for i in range(count)]
        reached = [_reach(hosts[i], words[i]) if i != me else [] for i in range(count)]
        store.set(_REACH.format(me), json.dumps([[as_dict(a) for a in tried] for tried in reached]))
        wait = _STEP_SECONDS + count * seconds
        reach = [
            _awaited(store, _REACH.format(i), wait, "attempts to connect", count, partial(pulse.check, i))
            for i in range(count)
        ]
        ways: list[list[Any]] = [[None] * count for _ in range(count)]
        for i in range(count):  # one way at a time: others would take of its rate
            for j in range(count):
                if i == j:
                    continue
                if i == me:
                    store.set(_WAY.format(i, j), json.dumps(_way(hosts[j], reached[j], words[j], seconds)))
                what = f"the way from {i} to {j}"
                ways[i][j] = _awaited(store, _WAY.format(i, j), wait, what, count, partial(pulse.check, i))
        store.add(_SAID, 1)
        end = time.monotonic() + 10
        while me == 0 and int(store.add(_SAID, 0)) < count and time.monotonic() < end:
            time.sleep(0.05)  # who serves the store ends last
        return {"hosts": hosts, "reach": reach, "ways": ways, "me": me}


@contextmanager
def _beating(store: AnsweringStore, me: int) -> Iterator[None]:
    """A block in which the others see that this host is there."""
    over = threading.Event()

    def beat() -> None:
        with suppress(TrigramError, dist.DistError, RuntimeError):  # the store has gone, as others see too
            store.add(_LIVES.format(me), 1)
            while not over.wait(_BEAT_SECONDS):
                store.add(_LIVES.format(me), 1)

    beats = threading.Thread(target=beat, name="trigram-doctor-lives", daemon=True)
    beats.start()
    try:
        yield
    finally:
        over.set()
        beats.join(_ANSWER_SECONDS)


class _GoneError(TimeoutError):
    """A host has gone."""


class _Pulse:
    """Sees whether the others are there.

    Args:
        store: Where they say so.
        hosts: What each says of itself.
    """

    def __init__(self, store: AnsweringStore, hosts: list[Any]) -> None:
        self._store, self._hosts = store, hosts
        self._seen = [(-1, time.monotonic())] * len(hosts)

    def check(self, i: int) -> None:
        """Raises if host ``i`` has not been heard of for long.

        Raises:
            TimeoutError: See there.
        """
        now, (beats, since) = time.monotonic(), self._seen[i]
        found = int(self._store.add(_LIVES.format(i), 0))
        if found != beats:
            self._seen[i] = found, now
        elif found and now - since > _SILENCE_SECONDS:  # versions before this one say nothing
            raise _GoneError(
                f"doctor: host {i}, {self._hosts[i]['host']}, has gone: not a word for {now - since:.0f} s"
            )


def _reach(other: dict[str, Any], word: str) -> list[Attempt]:
    return [attempt(a["address"], int(other["port"]), word) for a in other["addresses"]]


def _way(other: dict[str, Any], tried: list[Attempt], word: str, seconds: float) -> dict[str, Any] | None:
    address = next((a.address for a in tried if a.result == "ok"), None)
    if address is None:
        return None
    try:
        return as_dict(measure(address, int(other["port"]), word, seconds))
    except (OSError, ValueError, KeyError):
        return as_dict(Way(address, stalled=True))


def _awaited(
    store: AnsweringStore,
    key: str,
    seconds: float,
    what: str,
    count: int,
    look: Callable[[], object] = lambda: None,
) -> Any:
    end = time.monotonic() + seconds
    try:
        while not (there := store.check([key])) and time.monotonic() <= end:
            look()
            time.sleep(_POLL)
        if there:
            return json.loads(store.get(key))
        raise dist.DistError(key)
    except _GoneError:
        raise
    except (dist.DistError, RuntimeError) as error:  # also if the store has gone, and then this raises
        came = [i for i in range(count) if store.check([_HOST.format(i)])]
        raise TimeoutError(
            f"doctor: waited {seconds:.0f} s for {what}, {key.rpartition('/')[2]} is missing; "
            f"{len(came)} of {count} hosts have come"
        ) from error
