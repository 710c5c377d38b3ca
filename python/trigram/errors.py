"""What can go wrong, by who is to blame.

Each error names the operation, the rank and what to do. The engine's errors arrive here through
``rust/python/src/errors.rs``, which is the only place that knows both sides.
"""

from __future__ import annotations

import builtins

__all__ = [
    "AbortedError",
    "AuthError",
    "ConfigError",
    "CorruptError",
    "IoError",
    "MismatchError",
    "MisuseError",
    "PeerLostError",
    "TimeoutError",
    "TrigramError",
    "UnsupportedError",
]


class TrigramError(Exception):
    """The base of all errors of this library."""


class PeerLostError(TrigramError):
    """A peer died, left or cannot be reached.

    Attributes:
        rank: The world rank of the lost peer.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.rank)


class TimeoutError(TrigramError, builtins.TimeoutError):
    """A deadline passed; the message names those waited for."""


class MismatchError(TrigramError, ValueError):
    """Ranks called different things; the message names both sides."""


class CorruptError(TrigramError):
    """Bytes arrived that no correct peer sends.

    Attributes:
        rank: The world rank that they came from.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.rank)


class UnsupportedError(TrigramError, ValueError):
    """The request is well formed, but this cannot be done; the message says why."""


class MisuseError(TrigramError, ValueError):
    """A rule of the interface was broken by the caller."""


class ConfigError(TrigramError, ValueError):
    """A setting is wrong: an environment variable, an interface, an address."""


class AuthError(TrigramError):
    """A peer could not prove that it belongs to this job."""


class AbortedError(TrigramError):
    """The operation was aborted on purpose, here or on another rank."""


class IoError(TrigramError, OSError):
    """The operating system refused something."""
