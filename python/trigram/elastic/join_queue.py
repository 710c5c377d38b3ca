"""Join requests: how a rank asks to join a running elastic job, and how the members learn of it.

All of it goes through the store that the ranks met in, because a new rank knows nothing else of the job. The
member with the lowest rank is the leader. A thread of the leader publishes the job's status, which shows that
the job is alive, and reads the join requests; threads of the other members read the status.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from trigram import _core
from trigram.elastic import orders
from trigram.elastic.orders import Orders, Period
from trigram.elastic.replicas import Replicas
from trigram.runtime.live_store import ReconnectingStore

# The keys in the store: the protocol between members and joining ranks. `{}` is the number of a request.
STATUS = "elastic/job_status"
"""The leader: epoch, members and heartbeat of the job (JSON), and what ``trigram status`` shows."""
_REQUEST_COUNT = "elastic/join_requests"
"""The number of join requests so far; a new rank adds one."""
_REQUEST = "elastic/join_request/{}"
"""The new rank: its rank, its endpoint record and whether it is a spare (JSON)."""
_HEARTBEAT = "elastic/heartbeat/{}"
"""The new rank, while it waits: a counter."""
_ANSWER = "elastic/answer/{}"
"""The leader: why the request is refused, or the new epoch and the endpoint records of its ranks (JSON)."""
HANDSHAKE = "elastic/handshake/{}"
"""The new rank: ``yes`` if it shares memory with all ranks of its host, else ``no``."""
VERDICTS = "elastic/verdicts/{}"
"""The leader: the same of every rank (JSON list of bools by rank)."""
ADMITTED = "elastic/admitted/{}"
"""The leader: the members use the new epoch."""
_DRAIN_COUNT = "elastic/drains/{}.{}"
"""How many members have told that they were asked to leave, by epoch and number of empty regroups."""
_DRAIN = "elastic/drain/{}.{}/{}"
"""The rank of each of them, by these and its number."""

_POLL = 0.2
"""Seconds between two reads of the store."""
STATUS_TIMEOUT = 3.0
"""Seconds without a new heartbeat after which a job counts as ended."""
MOST_RANKS = 1 << 16
"""Ranks of new processes are below this."""
_LONGEST_ENDPOINT = 2000
"""Hexadecimal digits that an endpoint record has at most."""
_LONGEST_DELAY = 60.0
"""Seconds at most until the next attempt to admit a rank that could not be reached."""
_RECENT, _OF_REPLICA = 64, 8
"""The newest join requests, which the leader reads, and as many for each rank of a replica; older ones are
stale."""
_FORGET = 10.0
"""Seconds without a heartbeat after which an older request is no longer looked at."""
_HEX = re.compile("(?:[0-9a-f]{2})+")


def _parse(value: bytes) -> dict[str, Any]:
    """The JSON object in a value; empty if it is something else: any process may write to the store."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _parse_request(value: bytes | None) -> dict[str, Any] | None:
    """The rank and the endpoint record of a join request; None if it is malformed."""
    parsed = _parse(value or b"")
    rank, endpoint = parsed.get("rank"), parsed.get("endpoint")
    if not isinstance(rank, int) or not 0 <= rank < MOST_RANKS:
        return None
    if not isinstance(endpoint, str) or len(endpoint) > _LONGEST_ENDPOINT or not _HEX.fullmatch(endpoint):
        return None
    return {"rank": rank, "endpoint": endpoint, "spare": parsed.get("spare") is True}


class JobWatch:
    """Whether a job is alive: whether its status in the store goes on changing."""

    def __init__(self, store: ReconnectingStore) -> None:
        self.store = store
        self.last: bytes | None = None
        self.since = 0.0
        self.changed = False

    def known(self) -> bool:
        """Whether any job has published its status in this store, alive or not."""
        return self.store.get(STATUS) is not None

    def is_reached(self) -> bool:
        """Whether the store answered the last call."""
        return self.store.store is not None

    def status(self) -> dict[str, Any] | None:
        """The status of the job; None until it has been seen to change, and when it no longer does."""
        value, now = self.store.get(STATUS), time.monotonic()
        if value is None:
            return None
        if value != self.last:
            self.changed = self.last is not None
            self.last, self.since = value, now
        status = _parse(value)
        return status if self.changed and now - self.since < STATUS_TIMEOUT else None


class JoinQueue:
    """The members' side of join requests. Only the leader reads and answers them.

    Attributes:
        status: What the leader publishes, see :meth:`trigram.elastic.membership.Membership.status`.
        describe: Returns more of the job's status, which changes during an epoch.
        is_leader: Whether this rank is the leader.
        pending: The requests of whole replicas that wait for admission, by their number: ``rank``,
            ``endpoint`` and ``spare``.
        waiting: The ranks that wait, those too whose replica is not complete yet.
        regroup_request: Epoch and number of empty regroups in which the leader asks all members to regroup,
            because a rank waits or is to leave; None: it has not asked. Only jobs whose ranks are not in step
            need it.
        is_asked: Whether this rank was asked to leave the job.
        ask: Asks it to, and says by whom.
        evict: Takes ranks for lost; this process ends if this rank is one of them, or was taken for lost so.
        owes_entry: The present epoch stands in no store yet (``succession.py``), which did not answer.
        hosted_store: Keeps a store alive that this process may serve to the others.
    """

    def __init__(
        self,
        store: ReconnectingStore,
        rank: int,
        is_asked: Callable[[], bool],
        ask: Callable[[str], None],
        evict: Callable[[Collection[int]], None],
        replicas: Replicas,
    ) -> None:
        self.store, self.rank, self.replicas = store, rank, replicas
        self.is_asked, self.ask, self.evict = is_asked, ask, evict
        self._orders = Orders(rank, replicas.touched)
        self.status: dict[str, Any] = {}
        self.describe: Callable[[], dict[str, Any]] = dict
        self.pending: dict[int, dict[str, Any]] = {}
        self.waiting: list[int] = []
        self.answered: set[int] = set()
        self.hosted_store: Any = None
        self.owes_entry = self._entry_is_due = False
        self.is_leader = False
        self.regroup_request: list[int] | None = None
        self._heartbeats: dict[int, bytes | None] | None = None
        self._alive: dict[int, float] = {}  # requests, and when their heartbeat was last seen to go on
        # By rank: the number of failed admissions, and when to try again.
        self._deferred: dict[int, tuple[int, float]] = {}
        self._drain_told: tuple[int, int] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def serve(self, is_leader: bool, status: dict[str, Any]) -> None:
        """Begins a new epoch, in which this rank leads or not; ``status`` describes the job."""
        if is_leader and not self.is_leader:
            self._heartbeats = None  # ranks that sent a request long ago may have ended since
        self.status, self.is_leader, self.pending = status, is_leader, {}
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trigram-join-queue", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread, because this rank leaves the job."""
        self._stop.set()
        if self._thread is not None:
            # Not longer: the thread may be blocked on a store that the network no longer reaches.
            self._thread.join(0.5)

    def requests(self) -> list[dict[str, Any]]:
        """The pending requests, each with ``id``, ``rank``, ``endpoint`` and ``spare``.

        A replica whose admission failed before comes alone and last, so that it holds up no other.
        """
        pending = [{"id": i, **request} for i, request in sorted(self.pending.items())]
        ranks = [request["rank"] for request in pending]
        asks = self.replicas.whole([r for r in ranks if r not in self._deferred])
        asks = asks or self.replicas.first(ranks, 1)
        return [request for request in pending if request["rank"] in asks]

    @property
    def wants_change(self) -> bool:
        """On the leader: whether all members should come to change the membership. Ranks wait to join; or the
        store answers again, so that it can say which part of the job goes on."""
        return bool(self.pending) or self._entry_is_due

    def defer(self, ranks: Sequence[int]) -> None:
        """Delays the next attempt to admit these ranks, longer each time: all members stop for an attempt."""
        for rank in ranks:
            failures = self._deferred.get(rank, (0, 0.0))[0] + 1
            self._deferred[rank] = failures, time.monotonic() + min(2.0 ** (failures - 1), _LONGEST_DELAY)

    def admitted(self, rank: int) -> None:
        """Clears the delay of a rank that has joined."""
        self._deferred.pop(rank, None)

    def answer(self, request: int, value: dict[str, Any]) -> None:
        """Answers a request, which no longer waits then. Each is answered once."""
        self.answered.add(request)
        self.pending.pop(request, None)
        self.store.put(_ANSWER.format(request), json.dumps(value))

    def _run(self) -> None:
        heartbeat = 0
        while not self._stop.wait(_POLL):
            heartbeat += 1
            self.evict(())  # others may have had the order, and this rank not
            status = self.status
            period = status["epoch"], status["empty_regroups"]
            if self.is_asked() and self._drain_told != period:
                self._tell_drain(period)
            if not self.is_leader:
                published = _parse(self.store.get(STATUS) or b"{}")
                self.regroup_request = published.get("regroup_request")
                of = published.get("epoch"), published.get("empty_regroups")
                if of == period and status is self.status:
                    self._follow(published.get("orders"), period)
                continue
            self._scan()
            draining = self._draining(period)
            found = orders.found(self.store, Period(*period))
            given = self._orders.accepted(found, Period(*period), status["ranks"], draining)
            self._entry_is_due = self.owes_entry and self.store(lambda s: s.check([STATUS])) is not None
            if self.wants_change or draining:
                # It stays when the waiting rank ends: some members may have read it and wait for the others.
                self.regroup_request = [status["epoch"], status["empty_regroups"]]
            published = {**status, **self.describe(), "leader": self.rank, "heartbeat": heartbeat}
            published |= {"joining": self.waiting, "draining": draining, "orders": given}
            published["regroup_request"] = self.regroup_request
            if status is self.status:  # else another epoch has begun meanwhile
                self.store.put(STATUS, json.dumps(published))
                self._follow(given, period)  # published first: this process may end by it

    def _follow(self, given: Any, period: tuple[int, int]) -> None:
        """Asks this rank to leave if an order says so, and takes those for lost whom another names."""
        if evicted := self._orders.evicted(given, Period(*period)):
            self.evict(evicted)
        if given and self._orders.name_me(given, Period(*period)):
            self.ask(orders.BY)  # also one that was asked to leave by somebody else: it leaves for good

    def is_ordered(self) -> bool:
        """On a rank that leaves: whether an order has asked it to, which its thread may not have read yet."""
        period = Period(self.status["epoch"], self.status["empty_regroups"])
        return self._orders.name_me(orders.found(self.store, period), period)

    def _tell_drain(self, period: tuple[int, int]) -> None:
        """Tells the leader that this rank was asked to leave; again after each change of the members."""
        number = self.store(lambda s: s.add(_DRAIN_COUNT.format(*period), 1))
        if number is not None:
            self.store.put(_DRAIN.format(*period, int(number)), str(self.rank))
            self._drain_told = period

    def _draining(self, period: tuple[int, int]) -> list[int]:
        """The members that have told so since the last change of the members."""
        members: list[int] = self.status["ranks"]
        count = int(self.store(lambda s: s.add(_DRAIN_COUNT.format(*period), 0)) or 0)
        told = [self.store.get(_DRAIN.format(*period, i + 1)) for i in range(min(count, len(members)))]
        return [r for r in members if str(r).encode() in told]

    def _scan(self) -> None:
        """Reads the recent requests; those with a heartbeat since the last scan are pending."""
        count = int(self.store(lambda s: s.add(_REQUEST_COUNT, 0)) or 0)
        most = max(_RECENT, _OF_REPLICA * self.replicas.size)
        # One whose heartbeat goes on is read for as long, however many others ask meanwhile.
        now = time.monotonic()
        self._alive = {
            i: at for i, at in self._alive.items() if now - at < _FORGET and i not in self.answered
        }
        recent = sorted({*range(max(1, count - most), count + 1), *self._alive})
        before, heartbeats = self._heartbeats, {}
        for i in set(self.answered):
            if i not in recent:
                self.answered.discard(i)
        pending = {}
        for i in recent:
            if i in self.answered:
                continue
            heartbeat = heartbeats[i] = self.store.get(_HEARTBEAT.format(i))
            if before is None or heartbeat is None or heartbeat == before.get(i):
                continue
            self._alive[i] = now
            request = _parse_request(self.store.get(_REQUEST.format(i)))
            if request is None or request["rank"] in self.status["ranks"]:
                continue  # a member's rank: its loss is not known yet, or two processes have the same rank
            if not _core.is_endpoint_record(bytes.fromhex(request["endpoint"]), request["rank"]):
                # Refused here, so that the members do not stop for a process without the job's secret.
                reason = (
                    "its TRIGRAM_SECRET, TRIGRAM_TLS or version of trigram differs from the job's; "
                    "use the same on all ranks"
                )
                self.answer(i, {"refused": reason})
            elif self._deferred.get(request["rank"], (0, 0.0))[1] < time.monotonic():
                pending[i] = request
        self._refuse_mixed(pending)
        self.waiting, self._heartbeats = sorted({r["rank"] for r in pending.values()}), heartbeats
        complete = self.replicas.whole(self.waiting)
        self.pending = {i: r for i, r in pending.items() if r["rank"] in complete}

    def _refuse_mixed(self, pending: dict[int, dict[str, Any]]) -> None:
        """Refuses, and takes out, those of replicas of which some ranks are spares and others are not."""
        kinds: dict[int, set[bool]] = {}
        for request in pending.values():
            kinds.setdefault(self.replicas.number(request["rank"]), set()).add(request["spare"])
        for i, request in list(pending.items()):
            if len(kinds[self.replicas.number(request["rank"])]) > 1:
                why = "only some ranks of its replica are spares (spare=True, or TRIGRAM_SPARE=1)"
                self.answer(i, {"refused": why})
                del pending[i]


class JoinRequest:
    """A new rank's request to join; it counts as withdrawn when its heartbeat ends.

    Args:
        store: The job's store.
        rank: This rank.
        endpoint: Its endpoint record: how other ranks connect to it.
        spare: Whether it is a spare.
    """

    def __init__(self, store: ReconnectingStore, rank: int, endpoint: bytes, spare: bool = False) -> None:
        self.store = store
        self.id = int(store(lambda s: s.add(_REQUEST_COUNT, 1)) or 0)
        request = {"rank": rank, "endpoint": endpoint.hex(), "spare": spare}
        store.put(_REQUEST.format(self.id), json.dumps(request))
        self._heartbeat, self._sent_at = 0, 0.0

    def answer(self) -> dict[str, Any] | None:
        """The leader's answer, or None. Callers repeat it: it also sends the heartbeats of the request."""
        if time.monotonic() - self._sent_at > _POLL / 2:
            self._heartbeat, self._sent_at = self._heartbeat + 1, time.monotonic()
            self.store.put(_HEARTBEAT.format(self.id), str(self._heartbeat))
        value = self.store.get(_ANSWER.format(self.id))
        return None if value is None else json.loads(value)
