"""`trigram top --web PORT`: the ranks of a running job as a page in the browser.

The page is one file and loads nothing from elsewhere. It asks this process every two seconds for what the
ranks have left in the job's store. Who knows the job's secret may ask ranks of an elastic job to leave it.
"""

from __future__ import annotations

import hmac
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import typer

from trigram.cli import drain, status
from trigram.cli.job_store import open_store
from trigram.cli.top import Job
from trigram.elastic.join_queue import JobWatch
from trigram.observe.snapshots import PERIOD
from trigram.runtime import seals

_PAGE = Path(__file__).with_name("page.html")
_LONGEST_ORDER = 4096
_ORDERS = ("/drain", "/evict")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Refused(Exception):
    """An order that is not given, and why."""


def described(job: Job, elastic: dict[str, Any] | None, takes_orders: bool) -> dict[str, Any]:
    """What the page shows: the ranks in ascending order, the members of an elastic job, and whether it takes
    orders."""
    ranks = [
        {
            "rank": rank,
            "host": taken.host,
            "model": taken.model,
            "steps": taken.steps,
            "seconds": taken.seconds,
            "sent": taken.sent,
            "waits_for": taken.waits_for,
            "waits": taken.waits,
            "links": taken.links,
            "lines": taken.lines,
            "state": job.state(rank),
        }
        for rank, (taken, _) in sorted(job.ranks.items())
    ]
    return {
        "ranks": ranks,
        "size": job.size(),
        "problem": job.problem,
        "elastic": elastic,
        "orders": takes_orders,
    }


class Watch:
    """Reads a job's store in a thread; requests get what was read last.

    Args:
        store: ``HOST:PORT``; None: where MASTER_ADDR and MASTER_PORT say.
        takes_orders: Whether the page may ask ranks to leave.
    """

    def __init__(self, store: str | None, takes_orders: bool) -> None:
        self._at, self.takes_orders = store, takes_orders
        self._job = Job(open_store(store))
        self._elastic = JobWatch(self._job.store)
        self._stop = threading.Event()
        self.text = b""
        self._read()
        self._thread = threading.Thread(target=self._run, name="trigram-web", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self._job.read()
        found = self._elastic.status()
        elastic = status.checked(found) if found is not None else None
        self.text = json.dumps(described(self._job, elastic, self.takes_orders)).encode()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD / 4):  # the leader of an elastic job writes more often than ranks
            self._read()

    def order(self, order: bytes, evicts: bool) -> None:
        """Has a rank leave the job.

        Args:
            order: What the page sends: the rank and the job's secret, as JSON.
            evicts: It is taken out at once, and does not end its step.

        Raises:
            Refused: The order is not given.
        """
        try:
            asked = json.loads(order)
            rank, given = int(asked["rank"]), str(asked["secret"]).encode()
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise Refused("this is no order") from error
        key = seals.secret()
        if not self.takes_orders or key is None:
            raise Refused("this page only reads")
        if not hmac.compare_digest(given, key):
            raise Refused("this is not the job's TRIGRAM_SECRET")
        try:
            drain.ask(self._at, [rank], evicts)
        except typer.BadParameter as error:
            raise Refused(str(error)) from error

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(PERIOD)


def server(watch: Watch, host: str, port: int) -> ThreadingHTTPServer:
    """A server of the page; ``serve_forever`` answers.

    Raises:
        OSError: The address is in use, or is none of this machine.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0  # seconds for a request to come

        def _is_strange(self) -> bool:
            """Whether a page of somebody else's asks, whose name leads here."""
            name = re.sub(r":\d+$", "", self.headers.get("Host", ""))
            if host in _LOOPBACK and name not in _LOOPBACK:
                self._answer(403, "text/plain", b"ask for localhost\n")
                return True
            return False

        def do_POST(self) -> None:
            if self._is_strange():
                return
            size = self.headers.get("Content-Length", "")
            # Pages of other origins cannot send this header.
            if self.path not in _ORDERS or self.headers.get("X-Trigram") != self.path[1:]:
                self._answer(404, "text/plain", b"not here\n")
            elif not re.fullmatch("[0-9]{1,9}", size) or int(size) > _LONGEST_ORDER:
                self._answer(400, "text/plain", b"this is no order\n")
            else:
                try:
                    watch.order(self.rfile.read(int(size)), self.path == "/evict")
                    self._answer(200, "text/plain", b"it was ordered\n")
                except Refused as error:
                    self._answer(403, "text/plain", f"{error}\n".encode())

        def do_GET(self) -> None:
            if self._is_strange():
                return
            if self.path == "/":
                self._answer(200, "text/html; charset=utf-8", _PAGE.read_bytes())
            elif self.path == "/job.json":
                self._answer(200, "application/json", watch.text)
            else:
                self._answer(404, "text/plain", b"not here\n")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing of requests."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Says nothing of clients that go in the middle of an answer."""
            if not isinstance(sys.exc_info()[1], OSError):
                super().handle_error(request, client_address)

    return Server((host, port), Handler)


def show(store: str | None, host: str, port: int) -> int:
    """Serves the page until Ctrl-C; returns the exit code."""
    # Orders carry the secret, which must not cross a network unencrypted.
    takes_orders = host in _LOOPBACK and seals.secret() is not None
    watch = Watch(store, takes_orders)
    try:
        with server(watch, host, port) as serving:
            bound = serving.server_address
            does = "reads, and takes orders with the job's secret" if takes_orders else "only reads"
            typer.echo(f"trigram top: http://{bound[0]!s}:{bound[1]}/ until Ctrl-C; it {does}")
            serving.serve_forever()
    except KeyboardInterrupt:
        pass
    except (OSError, UnicodeError, TypeError) as error:  # the last two: of the host's name
        raise typer.BadParameter(f"--web {port}: cannot listen on {host}:{port}: {error}") from error
    finally:
        watch.close()
    return 0
