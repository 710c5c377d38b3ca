"""`trigram.launch`: runs a function on several ranks of this machine, from a notebook or a script.

Each rank is a process of its own, as under ``trigram run``, so that what a notebook has done to this process
(threads, a GPU in use) does no harm. The function travels by value if it is a notebook's or a script's own.
"""

from __future__ import annotations

import os
import pickle
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
_SERVE = "from trigram.launching import _serve; _serve()"
_INTERRUPTED = 130


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
    if job.of_process.world is not None or (launcher.is_rank() and os.environ.get("WORLD_SIZE") != "1"):
        raise MisuseError(
            "launch: this process is a rank already (a launcher started it, or it has called trigram.init); "
            "call the function itself here, or launch from a process that is none"
        )
    with tempfile.TemporaryDirectory(prefix="trigram-launch-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(_packed(function, args))
        outcome = launcher.launch(
            ranks,
            [sys.executable, "-c", _SERVE, name],
            environment={"PYTHONUNBUFFERED": "1", **(environment or {})},
            show="all",
            timeout=timeout,
            prefix=True,
        )
        if outcome.code == _INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.code:
            raise _failure(folder, ranks, outcome.code, outcome.code == launcher.TIMED_OUT, timeout)
        return [pickle.loads((folder / _RESULT.format(rank)).read_bytes()) for rank in range(ranks)]


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The function and its arguments, and where to find modules."""
    try:
        try:
            import cloudpickle  # optional: it sends what a notebook or a script defines
        except ImportError:
            if getattr(function, "__module__", None) == "__main__":
                raise MisuseError(
                    f"launch: {_name(function)} is defined in a notebook, or in the script that runs; "
                    "install cloudpickle (pip install 'trigram[notebook]'), or import it from a module"
                ) from None
            packed = pickle.dumps((function, args))
        else:
            packed = cloudpickle.dumps((function, args))
    except MisuseError:
        raise
    except Exception as error:  # whatever an object's own code raises
        raise MisuseError(
            f"launch: {_name(function)} or an argument cannot be sent to another process "
            f"({type(error).__name__}: {error}); open files, locks and connections in the function"
        ) from error
    return pickle.dumps((sys.path, packed))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _failure(folder: Path, ranks: int, code: int, timed_out: bool, timeout: float | None) -> LaunchError:
    """What has gone wrong: the error of the rank that failed by itself, rather than of those that lost it."""
    errors = {}
    for rank in range(ranks):
        file = folder / _ERROR.format(rank)
        if file.exists():
            errors[rank] = file.stat().st_mtime_ns, *pickle.loads(file.read_bytes())
    if not errors:
        if timed_out:
            return LaunchError(f"launch: the ranks were ended after timeout={timeout} s")
        return LaunchError(f"launch: a rank has ended with exit code {code} and no exception")
    rank = min(errors, key=lambda r: (errors[r][1], errors[r][0]))
    _, _, text, packed = errors[rank]
    others = sorted(r for r in errors if r != rank)
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
    try:
        path, packed = pickle.loads((folder / _FUNCTION).read_bytes())
        sys.path[:] = path
        function, args = pickle.loads(packed)
        result = _sent(function(*args))
    except Exception as error:
        _leave_error(folder / _ERROR.format(rank), error)
        raise
    launcher.leave_job()
    _write(folder / _RESULT.format(rank), result)


def _sent(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise MisuseError(
            f"launch: the function has returned what cannot be sent back ({type(error).__name__}: {error}); "
            "return numbers, tensors on the CPU, lists and dicts of them"
        ) from error


def _leave_error(file: Path, error: Exception) -> None:
    """Leaves an error for the process that has launched this one."""
    lost = isinstance(error, PeerLostError | AbortedError)
    text = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(error)
    except Exception:
        packed = b""
    _write(file, pickle.dumps((lost, text, packed)))


def _write(file: Path, data: bytes) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(data)
    part.replace(file)
