"""The errors that Trigram raises, one class for each kind of cause.

A message names the operation and the rank, and says what to do. ``rust/python/src/errors.rs`` converts the
engine's errors to these classes; no other file knows both sides.
"""

from __future__ import annotations

import builtins

from torch.distributed import DistBackendError

__all__ = [
    "AbortedError",
    "AuthError",
    "ConfigError",
    "CorruptError",
    "DrainError",
    "IoError",
    "LaunchError",
    "MismatchError",
    "MisuseError",
    "PeerLostError",
    "TimeoutError",
    "TrigramError",
    "UnsupportedError",
]


class TrigramError(DistBackendError):
    """The base class of all errors of this library. ``torch.distributed.DistBackendError`` is its base, and
    ``RuntimeError`` that of the latter: code that catches the errors of torch's backends catches these."""


class PeerLostError(TrigramError):
    """A peer has died, has left the job or cannot be reached.

    Attributes:
        rank: The world rank of the lost peer.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.rank)


class DrainError(TrigramError):
    """All ranks of an elastic job were asked to leave it (:func:`trigram.drain`), so nobody would go on."""


class LaunchError(TrigramError):
    """A rank of :func:`trigram.launch` has failed; the message has its traceback."""


class TimeoutError(TrigramError, builtins.TimeoutError):
    """A timeout expired; the message names the ranks that this rank waited for."""


class MismatchError(TrigramError, ValueError):
    """Ranks made different calls, or passed different arguments; the message names both and their ranks."""


class CorruptError(TrigramError):
    """A peer sent data that are corrupt, or not what the protocol allows.

    Attributes:
        rank: The world rank of the sender.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.rank)


class UnsupportedError(TrigramError, ValueError):
    """The request is valid, but not supported in this combination; the message says why."""


class MisuseError(TrigramError, ValueError):
    """The caller passed invalid arguments, or made a call that is not allowed at this point."""


class ConfigError(TrigramError, ValueError):
    """A setting is invalid: an environment variable, a network interface or an address."""


class AuthError(TrigramError):
    """Authentication failed: a peer does not have this job's ``TRIGRAM_SECRET``."""


class AbortedError(TrigramError):
    """The operation was aborted, by this rank or by another one; the message has the reason."""


class IoError(TrigramError, OSError):
    """A system call failed; the message has the system's answer."""
