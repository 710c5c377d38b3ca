"""The time of a training step, by algorithm: follows the thread that trains and the link of the slowest host.

Averages of gradients are followed call by call, in the order in which training starts them
(``rust/core/src/pipeline.rs``, the same code). Encoding and decoding take the thread's time, and second
phases start at the next gradient. Averages of weights follow ``training/schedule.py``.
Communication takes processor time: it slows computation on the cores that a rank has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trigram import _core, codecs
from trigram.algorithms import graphs
from trigram.algorithms.trigram import Algorithm
from trigram.averaging.lossless import MOST_TO_ALL
from trigram.codecs import lossless
from trigram.errors import UnsupportedError
from trigram.gradients.buckets import FIRST_BUCKET
from trigram.gradients.compressors import NEEDS_FEEDBACK
from trigram.mixing.async_gossip.timing import TAKES
from trigram.mixing.rare_averages import most
from trigram.plan import wire
from trigram.plan.inputs import CodecCost, Job
from trigram.training.pace import default_fragments

FLOAT = 4
"""Bytes of a value: predictions are for float32."""
IDLE = 1.3
"""The part of the time, as its inverse, in which a link that is the bottleneck carries asynchronous averages:
some wait for a boundary."""
ROUNDS = 8
"""Iterations to find how many steps an asynchronous averaging step takes."""


@dataclass(frozen=True)
class Prediction:
    """What an algorithm would do.

    Attributes:
        seconds: Of a training step of the slowest rank, on average over an averaging period.
        nbytes: Bytes that a rank sends per step.
        memory: Bytes that a rank needs besides weights, gradients and the optimizer's state.
        exposed: Seconds of the step that computation alone would not take.
    """

    seconds: float
    nbytes: float
    memory: float
    exposed: float


def predict(job: Job, algorithm: Algorithm, bucket_bytes: int, averaged_state: bool = False) -> Prediction:
    """Predicts the step of an algorithm.

    Args:
        job: Computation, machines and costs.
        algorithm: A checked algorithm; robust averages and registered steps are not modelled.
        bucket_bytes: Size of a bucket of gradients.
        averaged_state: The optimizer's state is averaged with the weights (``local_sgd`` with
            ``optimizer=``).

    Raises:
        UnsupportedError: The model does not have this algorithm, or no cost of its codec was measured.
    """
    if algorithm.aggregation or algorithm.step or algorithm.average:
        raise UnsupportedError(
            f"plan: the model has no robust averages and no registered classes: {algorithm.name}"
        )
    if algorithm.value.what == "lossless" and job.costs.exact is None:
        raise UnsupportedError("plan: the bytes of lossless depend on the gradients, which were not measured")
    if algorithm.options.quorum is not None or algorithm.options.due is not None:
        raise UnsupportedError(
            f"plan: the model has no quorum, and no every= of a function: {algorithm.name}"
        )
    if job.machines.ranks == 1:
        return Prediction(job.compute.step, 0.0, 0.0, 0.0)
    if algorithm.gradients:
        seconds, nbytes = _Gradients(job, algorithm, bucket_bytes).run()
    elif algorithm.every is None:
        seconds, nbytes = _background(job, algorithm)
    elif algorithm.kind == "central":
        seconds, nbytes = _every(job, algorithm, averaged_state)
    else:
        seconds, nbytes = _gossip(job, algorithm)
    return Prediction(seconds, nbytes, _memory(job, algorithm), max(0.0, seconds - job.compute.step))


@dataclass
class _Thread:
    """The thread that trains, and the link: calls pass it one after the other.

    Attributes:
        job: The job.
        now: The thread's time, in seconds after the step's begin.
        calls: When each call occupied the link: none begins before the one before it has ended.
        over: How many of them, the first ones, have ended by ``now``.
        slow: How many times as long computation takes beside a call.
    """

    job: Job
    now: float = 0.0
    calls: list[tuple[float, float]] = field(default_factory=list)
    over: int = 0
    slow: float = field(init=False)

    def __post_init__(self) -> None:
        self.slow = slowdown(self.job, 1.0)

    def send(self, call: wire.Call) -> float:
        """A call begins; returns when it will have ended."""
        self.now += self.job.costs.call
        begin = max(self.now, self.calls[-1][1] if self.calls else 0.0)
        self.calls.append((begin, begin + call.busy))
        return begin + call.alone

    def spend(self, seconds: float) -> None:
        """Computes for so much processor time, which takes longer if ranks share a core."""
        self.work(elapsed(self.job, seconds))

    def work(self, seconds: float) -> None:
        """Computes for so long, and longer while a call takes processor time."""
        while self.over < len(self.calls) and self.calls[self.over][1] <= self.now:
            self.over += 1
        for k in range(self.over, len(self.calls)) if self.slow > 1 else ():
            begin, end = self.calls[k]
            if end > self.now:
                free = max(0.0, begin - self.now)
                if free >= seconds:
                    break
                self.now, seconds = self.now + free, seconds - free
                shared = min(seconds, (end - self.now) / self.slow)
                self.now, seconds = self.now + shared * self.slow, seconds - shared
        self.now += seconds


def elapsed(job: Job, seconds: float) -> float:
    """How long the thread that trains takes for so much processor time."""
    return seconds * max(1.0, 1 / job.machines.cores)


def slowdown(job: Job, part: float) -> float:
    """How many times as long computation takes while a rank's link is busy for ``part`` of the time."""
    machines, cores = job.machines, job.machines.cores
    load = part * min(machines.rates) / machines.ranks_per_host * job.costs.wire
    left = max(cores - load, cores / 2)
    return max(1.0, job.compute.cores / left) / max(1.0, job.compute.cores / cores)


def _cost(job: Job, what: str) -> CodecCost:
    try:
        return job.costs.codecs[what]
    except KeyError:
        raise UnsupportedError(
            f"plan: no cost of the codec {what!r} was measured; measured are "
            f"{', '.join(sorted(job.costs.codecs))}"
        ) from None


def second_phase(what: str) -> str:
    """The codec of the second phase of a coded average."""
    return "int8" if what == "sign" else what


class _Gradients:
    """A step that averages gradients during backward."""

    def __init__(self, job: Job, algorithm: Algorithm, bucket_bytes: int) -> None:
        self.job, self.what, self.bucket_bytes = job, algorithm.value.what, bucket_bytes
        self.sent = 0.0
        self.thread = _Thread(job)
        self.buckets: list[_Bucket] = []
        self.advanced = 0  # of them, the first ones, have no second phase to begin

    def run(self) -> tuple[float, float]:
        """Seconds of the step, and bytes that a rank sends."""
        compute, thread = self.job.compute, self.thread
        tensors = compute.tensors
        gradients = [(0, FLOAT * t.elements) for t in tensors]
        units = _core.assign_units(gradients, FIRST_BUCKET, self.bucket_bytes)
        pipeline = _core.Pipeline()
        pipeline.assign(list(range(len(tensors))), units)
        before = compute.forward
        thread.now = before
        for k, tensor in enumerate(tensors):
            thread.work(max(0.0, tensor.ready - before))
            before = max(before, tensor.ready)
            pipeline.arrive(k)
            while (unit := pipeline.next_full()) is not None:
                self._start([tensors[i].shape for i in units[unit]])
                pipeline.start()
            self._advance()
        for bucket in self.buckets:
            bucket.wait(thread)
            self._advance()
        thread.now += 2 * self.job.machines.latency if self.buckets and self.buckets[0].coded else 0.0
        return thread.now + compute.step - before, self.sent

    def _start(self, shapes: list[tuple[int, ...]]) -> None:
        """The next bucket starts."""
        bucket = _Bucket(self.job, self.what, shapes)
        self.buckets.append(bucket)
        self.sent += bucket.sent
        bucket.start(self.thread)

    def _advance(self) -> None:
        """Starts the second phases of buckets whose first has ended, in order."""
        while self.advanced < len(self.buckets):
            bucket = self.buckets[self.advanced]
            if bucket.phase == 1 and not bucket.advance(self.thread):
                break
            self.advanced += 1


class _Bucket:
    """One bucket under way.

    Attributes:
        coded: Whether its average has two phases.
        phase: 0, 1 or 2.
        sent: Bytes that a rank sends for it.
    """

    def __init__(self, job: Job, what: str, shapes: list[tuple[int, ...]]) -> None:
        self.job, machines, costs = job, job.machines, job.costs
        n = machines.ranks
        self.phase, self.ends = 0, 0.0
        elements = sum(_product(shape) for shape in shapes)
        self.coded = what != "full"
        self.begin = self.middle = self.end = 0.0
        self.second = wire.Call(0.0)
        if what == "full":
            nbytes = FLOAT * (elements + len(shapes))
            self.first = wire.all_reduce(nbytes, machines, costs)
            self.sent = 2 * (n - 1) / n * nbytes
            self.begin = costs.copy * FLOAT * elements  # gradients outside of the bucket are copied to it
        elif what.startswith("powersgd"):
            rank = int(what.partition(":")[2])
            p, q = power_values(shapes, rank)
            work = costs.powersgd.get(str(rank))
            if work is None:
                raise UnsupportedError(f"plan: no cost of powersgd with rank {rank} was measured")
            # A third each for M Q, for QR and M'P, and for P Q' with the residual.
            self.begin = self.middle = self.end = work * elements / 3
            self.first, self.second = (wire.all_reduce(FLOAT * k, machines, costs) for k in (p, q))
            self.sent = 2 * (n - 1) / n * FLOAT * (p + q)
        elif what == "lossless":
            self._code_exactly(elements)
        else:
            shard = wire.shard_elements(elements, n)
            after = second_phase(what)
            one, two = codecs.find(what).size(shard), codecs.find(after).size(shard)
            first, second = _cost(job, what), _cost(job, after)
            self.begin = first.encode * shard * n + costs.copy * FLOAT * elements
            self.middle = shard * (first.decode + (n - 1) * first.accumulate + second.encode)
            self.end = second.decode * shard * n
            self.first = wire.exchange(one, machines, costs, gathers=False)
            self.second = wire.exchange(two, machines, costs, gathers=True)
            self.sent = (n - 1) * (one + two)

    def _code_exactly(self, elements: int) -> None:
        """``averaging/lossless.py``: lengths go before codes."""
        job, exact = self.job, self.job.costs.exact
        assert exact is not None
        machines, costs, cost = job.machines, job.costs, exact.cost
        n = machines.ranks
        lengths = wire.exchange(8 * n, machines, costs, gathers=True)
        self.begin = cost.encode * elements + costs.copy * FLOAT * elements
        if n <= MOST_TO_ALL:
            code = round(exact.own * elements)
            self.first, self.second = lengths, wire.exchange(code, machines, costs, gathers=True)
            self.end = cost.accumulate * elements
            self.sent = (n - 1) * code
            return
        shard = wire.shard_elements(elements, n)
        one, two = round(exact.own * shard), round(exact.mean * shard)
        self.middle = shard * (n * cost.accumulate + cost.encode)
        self.end = cost.decode * shard * (n - 1)
        self.first = wire.exchange(one, machines, costs, gathers=False).after(lengths)
        self.second = wire.exchange(two, machines, costs, gathers=True).after(lengths)
        self.sent = (n - 1) * (one + two)

    def start(self, thread: _Thread) -> None:
        """The thread encodes, and the first call begins."""
        thread.spend(self.begin)
        self.ends, self.phase = thread.send(self.first), 1

    def advance(self, thread: _Thread) -> bool:
        """Begins the second phase if the first has ended; whether it has begun."""
        if self.coded and self.phase == 1 and self.ends <= thread.now:
            thread.spend(self.middle)
            self.ends, self.phase = thread.send(self.second), 2
        return not self.coded or self.phase == 2

    def wait(self, thread: _Thread) -> None:
        """The thread waits for the average."""
        thread.now = max(thread.now, self.ends)
        if self.coded and self.phase == 1:
            self.advance(thread)
            thread.now = max(thread.now, self.ends)
        thread.spend(self.end)
        self.phase = 0


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def power_values(shapes: list[tuple[int, ...]], rank: int) -> tuple[int, int]:
    """Values in the two all-reduces of PowerSGD: P with what stays full, and Q."""
    p = q = 0
    for shape in shapes:
        rows = shape[0] if len(shape) > 1 else 1
        columns = _product(shape) // max(rows, 1)
        if len(shape) > 1 and rank * (rows + columns) < rows * columns:
            p, q = p + rank * rows, q + rank * columns
        else:
            p += rows * columns
    return p, q


@dataclass(frozen=True)
class _Weights:
    """An averaging step on weights.

    Attributes:
        before: Seconds of the thread before it: snapshot, encoding.
        seconds: Of the link.
        after: Seconds of the thread when it ends: decoding, applying.
        sent: Bytes that a rank sends.
        phases: Calls one after the other, between which the thread must come by.
    """

    before: float
    seconds: float
    after: float
    sent: float
    phases: int = 1


def _weights(job: Job, algorithm: Algorithm, state: float = 0.0) -> _Weights:
    """The averaging step of an algorithm; ``state``: bytes of the optimizer for each byte of weights."""
    machines, costs, elements = job.machines, job.costs, job.compute.elements
    n, what, size = machines.ranks, algorithm.value.what, FLOAT * elements
    touch = costs.copy * size
    if what.startswith("share"):
        part = size / round(1 / float(what.partition(":")[2]))
        seconds = wire.all_reduce(round(part), machines, costs).alone
        copies = 3 * costs.copy * part  # mixing/share.py
        return _Weights(copies, seconds, copies, 2 * (n - 1) / n * part)
    cost = None if what == "full" or what.startswith("powersgd") else _cost(job, what)
    if what.startswith("chunktopk") and cost is not None:  # averaging/gathered.py
        code = codecs.find(what).size(elements)
        seconds = wire.exchange(code, machines, costs, gathers=True).alone
        before, after = 3 * touch + elements * cost.encode, 4 * touch + n * elements * cost.accumulate
        return _Weights(before, seconds, after, (n - 1) * code)
    if algorithm.kind == "central":
        if cost is None:
            shapes = [t.shape for t in job.compute.tensors]
            bucket = _Bucket(job, what, shapes)
            outer = 4 if algorithm.value.carry == "differences" else 1
            sent, seconds = bucket.sent, bucket.first.alone + bucket.second.alone
            begin, end = bucket.begin if bucket.coded else 0.0, bucket.middle + bucket.end
            if not bucket.coded:
                seconds = wire.all_reduce(round(size * (1 + state)), machines, costs).alone
                sent *= 1 + state
            return _Weights((2 + state) * touch + begin, seconds, (1 + state + outer) * touch + end, sent)
        bucket = _Bucket(job, what, [(elements,)])
        after = 6 * touch + bucket.middle + bucket.end
        return _Weights(
            2 * touch + bucket.begin, bucket.first.alone + bucket.second.alone, after, bucket.sent, 2
        )
    kind = f"push:{algorithm.graph}" if algorithm.kind == "push" else algorithm.graph
    nbytes = size if cost is None else codecs.find(what).size(elements)
    if algorithm.every is None:
        share = wire.pair_share(machines) * machines.ranks_per_host
        seconds = nbytes * share / min(machines.rates) + 2 * machines.latency
        work = 2 * touch if cost is None else 3 * touch + elements * cost.encode
        after = 4 * touch if cost is None else 3 * touch + 4 * elements * cost.accumulate
        return _Weights(work, seconds, after, nbytes)
    seconds, degree = wire.neighbours(nbytes, kind, machines)
    if cost is None:
        passes = 4 if algorithm.kind == "push" else 1
        return _Weights(passes * touch, seconds, (2 + degree) * touch, degree * nbytes)
    fixed = not graphs.find(kind, n).changes
    decodes = 1 if fixed else 0
    before = 3 * touch + elements * (cost.encode + decodes * cost.accumulate)
    after = 4 * touch + degree * elements * cost.accumulate * (1 if fixed else 4)
    return _Weights(before, seconds, after, degree * nbytes)


def _every(job: Job, algorithm: Algorithm, averaged_state: bool) -> tuple[float, float]:
    """All ranks average at each h-th boundary, and training pauses."""
    assert algorithm.every is not None
    state = job.compute.optimizer_state if averaged_state else 0.0
    step = _weights(job, algorithm, state)
    if algorithm.options.overlap:
        return _overlapped(job, step, algorithm.every)
    pause = elapsed(job, step.before + step.after) + step.seconds
    return job.compute.step + pause / algorithm.every, step.sent / algorithm.every


def _gossip(job: Job, algorithm: Algorithm) -> tuple[float, float]:
    """An averaging step begins with a training step, and is applied before its update."""
    assert algorithm.every is not None
    step = _weights(job, algorithm)
    if not algorithm.options.overlap:
        pause = elapsed(job, step.before + step.after) + step.seconds
        return job.compute.step + pause / algorithm.every, step.sent / algorithm.every
    return _overlapped(job, step, algorithm.every)


def _overlapped(job: Job, step: _Weights, every: int) -> tuple[float, float]:
    thread, compute = _Thread(job), job.compute
    thread.spend(step.before)
    ends = thread.send(wire.Call(step.seconds))
    thread.work(compute.backward)
    thread.now = max(thread.now, ends)
    thread.spend(step.after)
    thread.work(compute.step - compute.backward)
    return compute.step + (thread.now - compute.step) / every, step.sent / every


def _background(job: Job, algorithm: Algorithm) -> tuple[float, float]:
    """Averaging steps of fragments, one after the other; each begins at a boundary, and is applied before an
    update or at a boundary."""
    step = _weights(job, algorithm)
    alone = job.compute.typical or job.compute.step
    staleness = algorithm.options.staleness
    fragments = algorithm.options.fragments or default_fragments(FLOAT * job.compute.elements)
    seconds, period = alone, 1.0
    takes = 1.0 if algorithm.kind == "central" else TAKES
    # Training steps between two averages of a fragment.
    least = takes * fragments / most(fragments, job.machines.ranks, takes)
    for _ in range(ROUNDS):
        period = max(least, IDLE * step.seconds / seconds if fragments > 1 else -(-step.seconds // seconds))
        waits = 0.0
        if staleness is not None and period > staleness:
            waits, period = max(0.0, step.seconds - staleness * seconds) / staleness, float(staleness)
        busy = min(1.0, step.seconds / (period * seconds))
        seconds = alone * slowdown(job, busy) + elapsed(job, step.before + step.after) / period + waits
    return seconds, step.sent / period


def _memory(job: Job, algorithm: Algorithm) -> float:
    """Bytes besides weights, gradients and the optimizer's state: the tensors that the classes named keep."""
    n, elements, what = job.machines.ranks, job.compute.elements, algorithm.value.what
    size = FLOAT * elements
    power = what.startswith("powersgd")
    if what.startswith("share"):
        return 2 * size / round(1 / float(what.partition(":")[2]))
    if what == "lossless":  # averaging/lossless.py
        return float(lossless.most(elements) * (3 if n <= MOST_TO_ALL else 2) + (0 if n == 2 else size / n))
    code = 0 if what == "full" or power else codecs.find(what).size(elements)
    coded = 0.0
    if what.startswith("chunktopk"):  # averaging/gathered.py
        coded = (n + 1) * code
    elif code:  # averaging/coded.py
        second = codecs.find(second_phase(what)).size(elements)
        coded = 2 * code + second + (size + second) / n
    if algorithm.gradients:
        fed = what.partition(":")[0] in NEEDS_FEEDBACK or power
        return coded + (size if fed else 0) + (size / n if fed and not power else 0)
    taken = 2 * size  # mixing/step.py
    if algorithm.kind == "central":
        differs = algorithm.value.carry == "differences"
        outer = size if algorithm.options.outer_momentum else 0
        return taken + coded + outer + (size if differs else 0) + (size if code or power else 0)
    if algorithm.kind == "push":
        return taken + 4 * size
    degree = len(graphs.find(algorithm.graph, n).sends(0))
    if algorithm.every is None:
        return taken + (2 * size if not code else 2 * code + size * (1 + min(2 * degree, n - 1)))
    if algorithm.options.outer_lr != 1 or algorithm.options.outer_momentum:  # mixing/outer_gossip.py
        return taken + (3 + degree) * size
    return taken + degree * size if not code else taken + 2 * size + (1 + degree) * code
