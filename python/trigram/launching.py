"""`trigram.launch`: runs a function on several ranks of this machine, from a notebook or a script.

Each rank is a process of its own, as under ``trigram run``, so that what a notebook has done to this process
(threads, a GPU in use) does no harm. The function travels by value if it is a notebook's or a script's own.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trigram.errors import AbortedError, LaunchError, MisuseError, PeerLostError
from trigram.runtime import job
from trigram.runtime import launch as launcher

_FUNCTION, _RESULT, _ERROR = "function", "result-{}", "error-{}"
"""Files of a launch, in a folder of its own."""
_SERVE = "import sys; sys.path[:] = {!r}; from trigram.launching import _serve; _serve()"
"""The program of a rank: it finds modules where this process does, and not first where it is started."""
_CLOSED = "onnection closed by peer"
"""What gloo says of a rank that has ended."""
_PR_SET_PDEATHSIG = 1


def launch(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    timeout: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs a function on several ranks of this machine, and returns what it has returned on each.

        def train(lr):
            model = trigram.with_bagua(Net())
            ...
            return loss

        losses = trigram.launch(train, 0.1, ranks=2)

    Each rank is a process of its own, with its own copy of the function, of what it uses and of ``args``; a
    function that is defined in a notebook or in the script itself needs the package cloudpickle. What ranks
    write appears here, with their numbers. If one raises, the others are ended. Ctrl-C (a notebook's
    interrupt) ends all.

    Args:
        function: What each rank calls.
        args: Its arguments.
        ranks: The number of ranks.
        timeout: Seconds after which all are ended; None: no limit.
        environment: Variables to set for the ranks.

    Returns:
        The results in the order of the ranks.

    Raises:
        LaunchError: A rank has failed, or the time was over. The message has its traceback, and ``__cause__``
            is what it raised, if that can be sent.
        MisuseError: The function or its arguments cannot be sent, or this process is a rank itself.
    """
    if not callable(function) or not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise MisuseError(
            f"launch({function!r}, ranks={ranks!r}) is invalid; pass a function, its arguments and ranks=, a "
            "number of 1 or more"
        )
    if timeout is not None and (not isinstance(timeout, int | float) or not timeout > 0):
        raise MisuseError(f"launch: timeout={timeout!r} is no positive number of seconds, or None")
    if job.of_process.world is not None or (launcher.is_rank() and os.environ.get("WORLD_SIZE") != "1"):
        raise MisuseError(
            "launch: this process is a rank already (a launcher started it, or it has called trigram.init); "
            "call the function itself here, or launch from a process that is none"
        )
    with tempfile.TemporaryDirectory(prefix="trigram-launch-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(_packed(function, args))
        more = dict(environment or {})
        path = [*filter(None, more.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
        outcome = launcher.launch(
            ranks,
            [sys.executable, "-c", _SERVE.format(path), name],
            environment={"PYTHONUNBUFFERED": "1", **more},
            show="all",
            timeout=timeout,
            prefix=True,
        )
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.code:
            raise _failure(folder, outcome, timeout)
        return [_result(folder, rank) for rank in range(ranks)]


def _result(folder: Path, rank: int) -> Any:
    """What a rank has returned."""
    file = folder / _RESULT.format(rank)
    if not file.exists():
        raise LaunchError(f"launch: rank {rank} has ended without a result, with exit code 0 (os._exit?)")
    try:
        return pickle.loads(file.read_bytes())
    except Exception as error:  # whatever an object's own code raises
        raise LaunchError(
            f"launch: what rank {rank} has returned cannot be made again here "
            f"({type(error).__name__}: {error})"
        ) from error


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function and its arguments."""
    if _cloudpickle() is None and getattr(function, "__module__", None) == "__main__":
        raise MisuseError(f"launch: {_name(function)} is defined in {_OF_MAIN}")
    try:
        return _pickled((function, args))
    except Exception as error:  # whatever an object's own code raises
        raise MisuseError(
            f"launch: {_name(function)} or an argument cannot be sent to another process "
            f"({type(error).__name__}: {error}); open files, locks and connections in the function"
        ) from error


_OF_MAIN = (
    "a notebook, or in the script that runs; install cloudpickle (pip install 'trigram[notebook]'), or "
    "import it from a module"
)


def _cloudpickle() -> Any:
    """The package, which sends what a notebook or a script defines; None: it is not installed."""
    try:
        import cloudpickle  # optional
    except ImportError:
        return None
    return cloudpickle


def _pickled(value: Any) -> bytes:
    data: bytes = (_cloudpickle() or pickle).dumps(value)
    return data


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _failure(folder: Path, outcome: launcher.Outcome, timeout: float | None) -> LaunchError:
    """What has gone wrong: with the rank that failed by itself, rather than with those that lost it."""
    errors = {}
    for rank in range(len(outcome.codes)):
        file = folder / _ERROR.format(rank)
        if file.exists():
            errors[rank] = file.stat().st_mtime_ns, *pickle.loads(file.read_bytes())
    if outcome.timed_out:
        return LaunchError(f"launch: the ranks were ended after timeout={timeout} s")
    own = [r for r, (_, lost, *_) in errors.items() if not lost]
    silent = [r for r, code in enumerate(outcome.codes) if code and r not in errors]
    if silent and not own:
        code = outcome.codes[silent[0]] or 0
        how = (
            f"was ended by the signal {launcher.signal_name(-code)}" if code < 0 else f"has exit code {code}"
        )
        return LaunchError(f"launch: rank {silent[0]} {how}, and has raised no exception")
    rank = min(own or errors, key=lambda r: errors[r][0])
    _, _, text, packed = errors[rank]
    others = sorted({*errors, *silent} - {rank})
    also = f" ({', '.join(f'rank {r}' for r in others)} failed too)" if others else ""
    failure = LaunchError(f"launch: rank {rank} failed{also}\n\n{text}")
    try:
        failure.__cause__ = pickle.loads(packed)
    except Exception:  # its class cannot be found here, or its constructor takes other arguments
        failure.__cause__ = None
    return failure


def _serve() -> None:
    """The program of a rank."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    sys.argv = sys.argv[:1]
    # Ranks of a notebook whose kernel is killed would train on.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        try:
            function, args = pickle.loads((folder / _FUNCTION).read_bytes())
        except AttributeError as error:
            raise MisuseError(f"launch: {error}: it is defined in {_OF_MAIN}") from error
        try:
            value = function(*args)
        except SystemExit as end:
            if end.code not in (0, None):
                raise
            value = None
        result = _sent(value)
        launcher.leave_job()
        _write(folder / _RESULT.format(rank), result)
    except Exception as error:
        _leave_error(folder / _ERROR.format(rank), error)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of the function may run still, and the other ranks wait for this one


def _sent(result: Any) -> bytes:
    try:
        return _pickled(result)
    except Exception as error:  # whatever an object's own code raises
        raise MisuseError(
            f"launch: the function has returned what cannot be sent back ({type(error).__name__}: {error}); "
            "return numbers, tensors on the CPU, lists and dicts of them"
        ) from error


def _leave_error(file: Path, error: Exception) -> None:
    """Leaves an error for the process that has launched this one."""
    lost = isinstance(error, PeerLostError | AbortedError) or _CLOSED in str(error)
    text = "".join(traceback.format_exception(error))
    try:
        packed = _pickled(error)
    except Exception:  # as above
        packed = b""
    _write(file, pickle.dumps((lost, text, packed)))


def _write(file: Path, data: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.replace(file)
