"""Notices that a machine is about to be taken away: a file, an address, or what a cloud tells machines."""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from trigram.errors import ConfigError
from trigram.runtime import logs

VARIABLE = "TRIGRAM_DRAIN"
"""Where a notice appears that this machine will be taken, see :class:`Notice`."""
_EVERY = 1.0
"""Seconds between two looks."""
_LIMIT = 2.0
"""Seconds that an address has to answer."""
_MOST_BYTES = 4096
"""Of an answer that are read."""


def check(where: str) -> None:
    """Raises if no notices can come from there; see :class:`Notice`."""
    _looking(where)


def _looking(where: str) -> Callable[[], bool]:
    """What says whether there is a notice."""
    if where in _CLOUDS:
        return _CLOUDS[where]
    if where.startswith(("http://", "https://")) and _has_host(where):
        return lambda: _says_so(_get(where))
    if "/" in where and "://" not in where:
        return Path(where).exists
    raise ConfigError(
        f"{VARIABLE}={where!r} is invalid; set it to aws, to gcp, to the path of a file (with a /) or to an "
        "address (http://...)"
    )


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname)
    except ValueError:
        return False


class Notice:
    """Looks for a notice once a second, in a thread.

    Args:
        where: ``aws`` or ``gcp``: what these tell a preemptible machine; a path: a file that appears; an
            address that begins with http: it answers 200, and neither nothing nor FALSE.
        tell: Called once, with what has given notice.

    Raises:
        ConfigError: ``where`` is none of these.
    """

    def __init__(self, where: str, tell: Callable[[str], None]) -> None:
        self._where, self._tell, self._look = where, tell, _looking(where)
        self._stop = threading.Event()
        threading.Thread(target=self._run, name="trigram-notices", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread, without waiting for it."""
        self._stop.set()

    def _run(self) -> None:
        silent = False
        while not self._stop.wait(_EVERY):
            try:
                found = self._look()
            except (OSError, ValueError, http.client.HTTPException) as error:
                if not silent:
                    logs.warning(f"{VARIABLE}={self._where}: no answer ({error}); this rank asks again")
                silent = True
                continue
            silent = False
            if found:
                self._tell(f"a notice ({self._where})")
                return


def _get(url: str, method: str = "GET", headers: dict[str, str] | None = None) -> str | None:
    """What an address answers; None: there is nothing (404)."""
    asked = urllib.request.Request(url, method=method, headers=headers or {})
    try:
        with _opener.open(asked, timeout=_LIMIT) as answer:
            text: bytes = answer.read(_MOST_BYTES)
            return text.decode(errors="replace")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Addresses of one machine are not asked through a proxy."""


def _says_so(answer: str | None) -> bool:
    return answer is not None and answer.strip().upper() not in ("", "FALSE")


def _aws() -> bool:
    """A spot instance that will be stopped or terminated, two minutes before."""
    host = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    life = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _get(f"{host}/latest/api/token", "PUT", life) or ""
    return _says_so(
        _get(f"{host}/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token})
    )


def _gcp() -> bool:
    """A spot or preemptible machine that will be stopped, 30 seconds before."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/preempted"
    return _says_so(_get(url, headers={"Metadata-Flavor": "Google"}))


_CLOUDS = {"aws": _aws, "gcp": _gcp}
