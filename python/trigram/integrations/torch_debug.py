"""A page of torch's own debug server (``torch.distributed.debug``, torch 2.11 and newer): the report, live.

    from torch.distributed.debug import start_debug_server
    from torch.distributed.debug._debug_handlers import default_handlers
    from trigram.integrations.torch_debug import TrigramPage

    start_debug_server(handlers=[*default_handlers(), TrigramPage()])

All ranks import it: that makes each answer for itself. Interface: torch 2.13,
``torch/distributed/debug/_frontend.py``; torch calls it experimental, and for trusted networks only.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

from trigram.errors import ConfigError
from trigram.observe import figures, rank_report, report, steps, torch_steps
from trigram.runtime import world

try:
    from torch._C._distributed_c10d import _register_handler
    from torch.distributed.debug._frontend import DebugHandler, NavLink, Route, fetch_all
except ImportError as e:
    raise ImportError(
        "trigram.integrations.torch_debug needs torch.distributed.debug with handlers (torch 2.13), and its "
        "dependencies: pip install jinja2 aiohttp"
    ) from e

__all__ = ["TrigramPage"]

_NAME = "trigram"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Trigram{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text|e }}</pre>{% endblock %}
"""


def _answer(_request: Any, response: Any) -> None:
    """What this rank says of itself, as JSON; called in a thread of torch's server."""
    present = world.present()
    if present is None:
        response.set_content(b"this rank is in no job of trigram", "text/plain")
        response.set_status(503)
        return
    row = rank_report.of_this_rank(present, steps.latest())
    response.set_content(figures.line(row).encode(), "application/json")
    response.set_status(200)


torch_steps.watch()
# torch drops its handlers when the process ends, after the interpreter: the last reference to a function of
# Python must not go then, or the process aborts. So this one never goes.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
_register_handler(_NAME, _answer)


class TrigramPage(DebugHandler):  # type: ignore[misc]
    """The page ``/trigram``: where the steps of all ranks go, and which rank or link holds them up."""

    def routes(self) -> list[Any]:
        """The page's path."""
        return [Route("/trigram", self._page)]

    def nav_links(self) -> list[Any]:
        """The entry of the menu."""
        return [NavLink("/trigram", "Trigram")]

    def templates(self) -> dict[str, str]:
        """The page's template, for Jinja2."""
        return {"trigram.html": _TEMPLATE}

    def dump(self) -> str:
        """The same text, for torch's periodic dumps."""
        rows, lines = [], []
        addresses, answers = fetch_all(_NAME, timeout=self.fetch_timeout)
        for rank, (address, answer) in enumerate(zip(addresses, answers, strict=True)):
            try:
                if answer.status_code != 200:
                    raise ConfigError(f"status {answer.status_code}: {answer.text}")
                rows.append(figures.parsed(json.loads(answer.text)))
            except (ConfigError, ValueError, TypeError, KeyError, AttributeError) as error:
                lines.append(f"rank {rank} at {address} has not answered: {error}")
        return "\n".join([*([report.text(rows)] if rows else []), *lines])

    def dump_filename(self) -> str:
        """Of torch's periodic dumps."""
        return _NAME

    def _page(self, request: Any) -> bytes:
        made: bytes = request.frontend.render_template("trigram.html", text=self.dump())
        return made
