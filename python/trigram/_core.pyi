"""Types of the extension module, the Rust engine (``rust/python/src/lib.rs``)."""

from collections.abc import Callable

from torch import Tensor

__version__: str

COLLECTIVES: list[tuple[str, int]]
DTYPES: list[tuple[str, int]]
OPS: list[tuple[str, int]]
VIAS: list[tuple[str, int]]

_Asked = tuple[int, int, int, int, int, int]
_Memory = tuple[int, int, int, int]
_Splits = tuple[list[int], list[int]] | None
_Lists = tuple[list[tuple[int, int]], list[tuple[int, int]]] | None

class Rendezvous:
    def __init__(
        self, rank: int, size: int, iface: str | None, toward: str | None, transport: str, /
    ) -> None: ...
    def endpoint_record(self) -> bytes: ...
    def handshake(
        self, records: list[bytes], timeout: float, look: Callable[[], object] | None = None
    ) -> bool: ...
    def connect(
        self,
        verdicts: list[bool],
        timeout: float,
        beside: Engine | None = None,
        look: Callable[[], object] | None = None,
    ) -> Engine: ...

class Engine:
    @property
    def hosts(self) -> list[int]: ...
    def group(self, name: str, ranks: list[int], ordinal: int, helpers: int, /) -> Group: ...
    def allocate(self, nbytes: int, /) -> RegisteredMemory: ...
    def write_out_log(self) -> None: ...
    def shutdown(self, exiting: bool, patient: bool = True, /) -> None: ...
    def send_away(self, rank: int, why: str, /) -> None: ...
    def am_sent_away(self) -> bool: ...
    def losses(self) -> list[tuple[int, str]]: ...
    def counters(self) -> dict[str, int | float | list[int] | list[float]]: ...

class Event:
    """The record of a call, from an ``EventReader``; times are those of ``time.monotonic_ns``.

    Attributes:
        number: In the order in which calls were taken up.
        group: ``Group.id``.
        sequence: The number of the collective in its group, or of the message among those of the same tag and
            peer.
        tag: The tag of a message.
        kind: ``all_reduce`` and so on; messages are ``send`` or ``recv``.
        on_gpu: It stands for a call on GPU memory.
        uneven: Its lengths differ by rank and by peer, as in an ``all_to_all`` of unequal parts.
        dtype: As in ``DTYPES``.
        nbytes: Bytes of a rank's payload, as the collective counts them.
        peer: The world rank that it waited for longest, if it waited; for a message, the other rank.
        waited: Nanoseconds that this rank slept while it waited for ``peer``.
        failed: Whether it has failed.
        made, started, first_byte, ended: When its caller made it, when it began to run, when the peers'
            contributions began to come, and when it ended; None: not yet, or (for the middle two of short
            calls) not known.
    """

    number: int
    group: int
    sequence: int
    tag: int | None
    kind: str
    on_gpu: bool
    uneven: bool
    dtype: str
    nbytes: int
    peer: int | None
    waited: int
    failed: bool
    made: int
    started: int | None
    first_byte: int | None
    ended: int | None

class EventReader:
    def __init__(self, engine: Engine, /) -> None: ...
    def read(self) -> tuple[list[Event], int]: ...
    def all(self, under_way: bool = False) -> list[Event]: ...
    def wait_for_failure(
        self, seen: int, timeout_seconds: float, /
    ) -> tuple[int, list[tuple[int, int | None, str]]]: ...

class RegisteredMemory:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Group:
    @property
    def id(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def hosts(self) -> list[list[int]]: ...
    def help(self) -> None: ...
    def is_helping(self) -> bool: ...
    def run(
        self,
        asked: _Asked,
        memory: _Memory,
        timeout: float | None = None,
        splits: _Splits = None,
        lists: _Lists = None,
    ) -> None: ...
    def all_reduce(self, t: object, op: int, timeout: float | None = None) -> bool: ...
    def start_all_reduce(self, t: object, op: int, timeout: float | None = None) -> Work | None: ...
    def start(
        self,
        asked: _Asked,
        memory: _Memory,
        timeout: float | None = None,
        splits: _Splits = None,
        lists: _Lists = None,
    ) -> Work: ...
    def start_update(
        self,
        memory: _Memory,
        lengths: list[int],
        pieces: list[tuple[int, int, int, int, int, int]],
        rules: list[tuple[str, list[float]]],
        fused: bool,
        timeout: float | None = None,
    ) -> Work: ...
    def check_consistency(
        self, asked: _Asked, timeout: float | None = None, splits: _Splits = None
    ) -> Work: ...
    def message(
        self,
        sends: bool,
        peer: int | None,
        tag: int,
        dtype: int,
        len: int,
        address: int,
        background: bool,
        shorter: bool,
        timeout: float | None,
        /,
    ) -> tuple[Work | None, int | None]: ...
    def next(self) -> int: ...
    def set_pass(self, number: int, /) -> None: ...
    def rates(self) -> list[float]: ...
    def abort(self, through: int, why: str, /) -> None: ...
    def abort_all(self, why: str, /) -> None: ...

class Work:
    """A collective or message under way, from ``Group.start`` or ``Group.message``.

    A small call, of up to 64 KiB, begins in the thread that starts it. Then whoever waits for it drives it;
    if nobody waits within some 0.2 to 0.5 ms, the background thread takes it up. A large call has the
    background thread at once.
    """

    def serve_when_done(self) -> None: ...
    def is_completed(self) -> bool:
        """Whether it has ended, successfully or not. Moves the call on if no other thread does."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; drives the call in this thread if no other thread drives.

        Args:
            timeout: Seconds; None: no limit but the call's own, from ``Group.start``.

        Returns:
            False if ``timeout`` came first; the call goes on, and ``wait`` may be called again.

        Raises:
            TrigramError: The call failed.
        """

    def sender(self) -> int | None:
        """The world rank whose message a receive has taken; None if it is not known, or it is no receive."""

    def add_done_callback(self, callback: Callable[[], object], /) -> None:
        """Has ``callback()`` returned by ``next_done_callbacks`` when the call has ended, or failed; if it
        has ended before, at once. Then ``wait`` does not wait any more. May be called several times.

        The callbacks of one group's collectives come in the order in which they were added; those of messages
        and of different groups as the calls end. The call is driven in the background from now on, unless
        somebody waits for it. ``trigram.runtime.callbacks.when_done`` also starts the thread that runs
        callbacks.
        """

class Nccl:
    def __init__(self, site_packages: list[str], /) -> None: ...
    @property
    def version(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def can_shrink(self) -> bool: ...
    def unique_id(self) -> bytes: ...

class DeviceGroup:
    def __init__(
        self,
        group: Group,
        alarm: Group,
        nccl: Nccl,
        device: int,
        id: bytes,
        priority: int,
        revokes: bool,
        timeout: float | None = None,
    ) -> None: ...
    def revoke(self, timeout: float, /) -> None: ...
    def shrink(
        self, group: Group, alarm: Group, attempt: Group, lost: list[int], timeout: float, /
    ) -> DeviceGroup: ...
    @property
    def stream(self) -> int: ...
    def start(
        self,
        asked: _Asked,
        memory: _Memory,
        caller: int,
        checked: bool,
        timeout: float | None = None,
        splits: _Splits = None,
    ) -> DeviceCall: ...
    def send_and_receive(
        self, parcels: list[tuple[bool, int, int, int, int]], caller: int, timeout: float | None, /
    ) -> DeviceCall: ...
    def abort(self, why: str, /) -> None: ...

class DeviceCall:
    def is_completed(self) -> bool: ...
    def order(self, caller: int, /) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...

def check_process() -> None: ...
def keep_threads_out() -> None: ...
def gpus() -> int: ...
def simulate_all_reduce(len: int, latency: float, rates: list[float], /) -> float: ...
def is_endpoint_record(record: bytes, rank: int, /) -> bool: ...
def interfaces() -> list[tuple[str, str]]: ...
def serve_by(serve: Callable[[], object], active: bool) -> None: ...
def blocked() -> tuple[int, int]: ...
def log_line(level: int, text: str, /) -> None: ...
def next_log_lines(timeout_seconds: float) -> list[tuple[int, str]]: ...
def next_done_callbacks(timeout_seconds: float) -> list[Callable[[], object]]: ...
def assign_units(gradients: list[tuple[int, int]], first: int, full: int) -> list[list[int]]: ...

class Pipeline:
    def assign(self, ids: list[int], units: list[list[int]]) -> None: ...
    def begin(self, task: int | None = None, serving: bool = False) -> None: ...
    def end(self) -> None: ...
    def arrive(self, i: int) -> bool | None: ...
    def next_full(self) -> int | None: ...
    def start(self) -> int | None: ...
    @property
    def started(self) -> int: ...
    def missing(self, unit: int) -> list[int]: ...
    def take(self) -> list[int]: ...
    def learn(self, learns: bool) -> None: ...
    @property
    def order(self) -> list[int] | None: ...

class GradientHook:
    def __init__(
        self,
        pipeline: Pipeline,
        param: Tensor,
        told: Callable[[Tensor], object],
        current_task: Callable[[], int],
    ) -> None: ...
    def __call__(self, inputs: object, given: tuple[Tensor | None, ...]) -> None: ...

class Codec:
    def __init__(self, name: str, block: int | None, /) -> None: ...
    def size(self, n: int, /) -> int: ...
    def encode(
        self,
        src: int,
        n: int,
        dtype: int,
        residual: int,
        feedback: bool,
        seed: int,
        out: int,
        len: int,
        /,
    ) -> None: ...
    def decode(
        self, code: int, len: int, out: int, n: int, dtype: int, weight: float | None, sender: int, /
    ) -> None: ...

def lossless_size(n: int, /) -> int: ...
def lossless_encode(src: int, n: int, out: int, len: int, /) -> int: ...
def lossless_decode(code: int, len: int, out: int, n: int, add: bool, ranks: int, sender: int, /) -> None: ...
def update_alone(
    numbers: tuple[str, list[float]],
    fused: bool,
    flipped_from: int,
    memory: tuple[int, int, int, int],
    n: int,
    /,
) -> None:
    """One step of an optimizer for ``n`` float32 values, without a call.

    Args:
        numbers: The name of the optimizer and the numbers of its arithmetic.
        fused: Whether products and sums are fused multiply-adds.
        flipped_from: The first value where the other of two products is rounded.
        memory: The addresses of the gradient, the weights and the states; 0: none.
        n: The number of values.
    """

def adapt_second_moment(
    second: int, first: int, gradient: int, n: int, factors: tuple[float, float, float, float], /
) -> None: ...
