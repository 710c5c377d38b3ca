"""Seals of what is left in the job's store, to which any process may write: an HMAC with the job's secret, as
endpoint records have (docs/adr/0018). Without a secret nobody can tell who wrote something."""

from __future__ import annotations

import hashlib
import hmac
import os

SEAL = 64
"""Bytes of a seal."""


def secret() -> bytes | None:
    """The job's secret, ``TRIGRAM_SECRET``."""
    return os.environb.get(b"TRIGRAM_SECRET") or None


def sealed(what: str, body: bytes, key: bytes | None) -> bytes:
    """A text with its seal before it.

    Args:
        what: What the text is and whose, such as ``snapshot 3``: the seal holds for nothing else.
        body: The text.
        key: The job's secret; None: it has none.
    """
    if key is None:
        return b"0" * SEAL + body
    text = b"trigram %s " % what.encode() + body
    return hmac.new(key, text, hashlib.sha256).hexdigest().encode() + body


def opened(what: str, value: bytes, key: bytes | None) -> bytes | None:
    """The text that was sealed; None if the seal is not of this secret, this text and this ``what``."""
    body = value[SEAL:]
    return body if hmac.compare_digest(value, sealed(what, body, key)) else None
