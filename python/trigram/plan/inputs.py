"""What a prediction is made from: a training step's computation, the machines, and what work costs there."""

from __future__ import annotations

from dataclasses import dataclass, field

from trigram.errors import MisuseError


@dataclass(frozen=True)
class Tensor:
    """A parameter that trains.

    Attributes:
        shape: Its dimensions.
        ready: When backward has computed its gradient: seconds after the step has begun.
    """

    shape: tuple[int, ...]
    ready: float

    @property
    def elements(self) -> int:
        """Number of values."""
        count = 1
        for length in self.shape:
            count *= length
        return count


@dataclass(frozen=True)
class Compute:
    """A training step without communication, of the slowest rank in each step (median over steps).

    Attributes:
        step: Seconds from one step to the next.
        forward: Seconds until the backward pass begins; inputs and the loss included.
        tensors: The parameters in the order in which their gradients become ready.
        cores: Processor cores that a rank's computation keeps busy, on average.
        typical: Seconds of a step of the median rank, which asynchronous algorithms depend on; None: as
            ``step``.
        optimizer_state: Bytes of state that the optimizer keeps for each byte of weights (Adam: 2).
    """

    step: float
    forward: float
    tensors: tuple[Tensor, ...]
    cores: float = 1.0
    typical: float | None = None
    optimizer_state: float = 0.0

    @property
    def elements(self) -> int:
        """Values of all tensors."""
        return sum(t.elements for t in self.tensors)

    @property
    def backward(self) -> float:
        """Seconds after the step's begin at which the last gradient is ready."""
        return max((t.ready for t in self.tensors), default=self.forward)

    @staticmethod
    def even(elements: int, seconds: float, width: int = 1024, forward: float = 0.3, backward: float = 0.61):
        """A step of which only the duration is known.

        The gradients of square matrices become ready at equal intervals during backward. The default parts
        of forward and backward are those of the GPT of docs/benchmarks.md; the rest is the optimizer's.

        Args:
            elements: Parameters of the model.
            seconds: Of a step without communication.
            width: Rows and columns of a matrix, for PowerSGD.
            forward: Part of the step.
            backward: Part of the step.
        """
        width = max(1, min(width, round(elements**0.5)))
        count = max(1, round(elements / width**2))
        rows = elements // (count * width) or 1
        at = [seconds * (forward + backward * (k + 1) / count) for k in range(count)]
        return Compute(seconds, seconds * forward, tuple(Tensor((rows, width), ready) for ready in at))


@dataclass(frozen=True)
class Machines:
    """The hosts and the links between them.

    Attributes:
        rates: For each host, bytes of payload per second that its link carries each way.
        latency: Seconds that a short message takes from host to host.
        ranks_per_host: Ranks on each host, which share its link.
        cores: Processor cores for each rank. May be a fraction: 0.5 if two ranks share a core.
    """

    rates: tuple[float, ...]
    latency: float = 1e-4
    ranks_per_host: int = 1
    cores: float = 2.0

    def __post_init__(self) -> None:
        if not self.rates or min(self.rates) <= 0 or self.latency < 0 or self.ranks_per_host < 1:
            raise MisuseError(
                "plan: there must be one host or more, rates above 0, a latency of 0 or more and one rank "
                f"per host or more; got {len(self.rates)} hosts, latency {self.latency}, "
                f"{self.ranks_per_host} ranks per host"
            )

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.rates)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True)
class CodecCost:
    """What a codec costs the thread that trains, in processor seconds per value.

    Attributes:
        encode: With the residual, if averages of gradients through it have error feedback.
        decode: Overwrites.
        accumulate: Decodes and adds.
    """

    encode: float
    decode: float
    accumulate: float


@dataclass(frozen=True)
class ExactCodes:
    """What exact codes of this model's gradients cost, measured on a sample of them.

    Attributes:
        own: Bytes of code for each value of a rank's gradients.
        mean: The same of their mean.
        cost: Processor seconds per value.
    """

    own: float
    mean: float
    cost: CodecCost


@dataclass(frozen=True)
class Costs:
    """What arithmetic costs in processor seconds, measured; see :mod:`trigram.plan.costs`.

    Attributes:
        codecs: By name, as in WHAT.
        powersgd: Seconds of PowerSGD's arithmetic per step, per value of the model, by its rank.
        copy: Seconds to copy a byte of a tensor that no cache holds.
        shared: Seconds to sum a byte over the ranks of one host.
        wire: Seconds of a processor for each byte that a rank sends to another host, with what it receives.
        message: Processor seconds of a rank for each message to another host.
        call: Seconds of the thread that trains for each collective.
        exact: Of ``lossless``, whose bytes depend on the gradients; None: none were seen.
    """

    codecs: dict[str, CodecCost]
    powersgd: dict[str, float]
    copy: float
    shared: float
    wire: float
    message: float = 0.0
    call: float = 5e-5
    exact: ExactCodes | None = None


@dataclass(frozen=True)
class Job:
    """All of it."""

    compute: Compute
    machines: Machines
    costs: Costs
    source: str = field(default="given", compare=False)
