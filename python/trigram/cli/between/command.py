"""`trigram doctor --listen`, `--join` and `--hosts`: runs the check between hosts and shows what it finds."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trigram.cli import remote
from trigram.cli.between import meeting, verdict
from trigram.cli.doctor import COLOURS
from trigram.cli.job_store import endpoint
from trigram.errors import TrigramError

PORT = 29611
"""Where the first host listens, if nothing else is asked for."""
PATIENCE = 120.0
"""Seconds to wait for all hosts to come."""
_LONGEST = 600.0
_END_SECONDS = 5.0


def listen(port: int, count: int, seconds: float, as_json: bool) -> int:
    """Serves the check for so many hosts, this one among them; returns the exit code."""
    try:
        store, port = meeting.served(port, count)
    except (RuntimeError, OSError) as error:
        raise typer.BadParameter(
            f"cannot listen on port {port}: {error}; pass another to --listen"
        ) from error
    names = ", ".join(a["address"] for a in meeting.facts.addresses()) or "no address but loopback's"
    typer.echo(
        f"run on the other {count - 1}:  trigram doctor --join {socket.gethostname()}:{port}   ({names})",
        err=True,
    )
    return _take_part(store, 0, seconds, as_json)


def join(where: str, seconds: float, as_json: bool) -> int:
    """Takes part in the check that another host serves; returns the exit code."""
    host, port = endpoint(
        where, f"--join {where!r} is no HOST:PORT; trigram doctor --listen says what it is, on the first host"
    )
    try:
        store = meeting.joined(host, port, PATIENCE)
    except TrigramError as error:
        typer.echo(str(error), err=True)
        return 1
    return _take_part(store, None, seconds, as_json)


def _take_part(store: Any, number: int | None, seconds: float, as_json: bool) -> int:
    try:
        found = meeting.take_part(store, number, seconds, PATIENCE)
        return show(found, as_json)
    except TrigramError as error:
        typer.echo(str(error), err=True)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        typer.echo(meeting.UNREADABLE.format(f"{type(error).__name__}: {error}"), err=True)
    return 1


class _There:
    """The check on one host, started from here.

    Args:
        ssh: What runs a command there.
        name: The host, as ``ssh`` takes it.
        words: The command.
    """

    def __init__(self, ssh: str, name: str, words: list[str]) -> None:
        self.name = name
        # Files: a host that says much must not wait for us.
        self.out, self.err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115, closed in `close`
        self.process = remote.start(ssh, name, words, stdout=self.out, stderr=self.err)

    def said(self, file: IO[bytes]) -> str:
        """What it has written to one of its files."""
        file.seek(0)
        return file.read().decode(errors="replace").strip()

    def complaint(self) -> str:
        """Its state and last words."""
        code, lines = self.process.poll(), self.said(self.err).splitlines()
        state = "still runs" if code is None else f"exit code {code}"
        return f"{self.name}: {state}: {lines[-1] if lines else 'said nothing'}"

    def close(self) -> None:
        """Ends it: it follows the end of its input."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.err.close()


def over(hosts: str, ssh: str, python: str, port: int, seconds: float, as_json: bool) -> int:
    """Starts the check on these hosts, by ssh or the like, and shows what they find.

    Args:
        hosts: Names with commas in between, as ssh takes them; ``NAME=ADDRESS`` where the others know the
            first by another.
        ssh: The command that runs another on a host: ``ssh``, with its options.
        python: The Python there that has trigram.
        port: Where the first listens.
        seconds: How long to send on each way.
        as_json: As JSON.

    Returns:
        The exit code.
    """
    named = remote.hosts(hosts)
    if len(named) < 2:
        raise typer.BadParameter("--hosts needs two hosts or more, with commas in between")
    roles = [["--listen", str(port), "--count", str(len(named))]]
    roles += [["--join", f"{named[0].address}:{port}"]] * (len(named) - 1)
    there: list[_There] = []
    try:
        for host, role in zip(named, roles, strict=True):
            words = [python, "-m", "trigram", "doctor", "--started", *role]
            words += ["--seconds", str(seconds), "--json"]
            try:
                there.append(_There(ssh, host.name, words))
            except OSError as error:
                raise typer.BadParameter(f"--ssh {ssh!r} cannot be run: {error}") from error
        return _gather(there, as_json)
    finally:
        for one in there:
            one.close()


def _gather(there: list[_There], as_json: bool) -> int:
    """Shows what the hosts have found; they all found the same."""
    end = time.monotonic() + _LONGEST
    while any(one.process.poll() is None for one in there) and time.monotonic() < end:
        if any(one.process.poll() not in (None, 0, 1) for one in there):
            break  # one did not even start: the others would wait for it
        time.sleep(0.1)
    for one in there:
        try:
            return show(json.loads(one.said(one.out))["found"], as_json)
        except (ValueError, KeyError, TypeError):
            continue
    for one in there:
        sys.stderr.write(one.complaint() + "\n")
    return 1


def show(found: dict[str, Any], as_json: bool) -> int:
    """Prints what was found; returns the exit code: 1 if something must be changed."""
    lines = verdict.checks(found)
    code = int(any(line.status == "fail" for line in lines))
    if as_json:
        checks = [line._asdict() for line in lines]
        typer.echo(json.dumps({"checks": checks, "found": _finite(found)}, indent=1))
        return code
    console = Console()
    ways = Table(
        box=SIMPLE, pad_edge=False, title="from a row to a column: rate by one connection, round trip"
    )
    ways.add_column("")
    for k in range(len(found["hosts"])):
        ways.add_column(escape(verdict.name(found, k)), overflow="fold")
    for row in verdict.table(found):
        ways.add_row(*map(escape, row))  # hosts give themselves their names
    console.print(ways)
    table = Table(box=SIMPLE, pad_edge=False)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold", no_wrap=title == "what")
    for line in lines:
        words = map(escape, (line.name, line.found, line.advice))
        table.add_row(f"[{COLOURS[line.status]}]{line.status}[/]", *words)
    console.print(table)
    return code


def _finite(value: Any) -> Any:
    """Without NaN, which is no JSON."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
