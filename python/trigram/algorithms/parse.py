"""From what a user writes, a name or WHO/WHAT/WHEN, to a checked algorithm."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trigram import codecs
from trigram.algorithms import graphs
from trigram.algorithms.names import DEFAULT, Entry, named, names
from trigram.algorithms.robust import RobustAggregation
from trigram.algorithms.trigram import WHO, Algorithm, Trigram
from trigram.errors import UnsupportedError


def find(algorithm: str | Trigram | None, options: dict[str, Any] | None = None) -> Algorithm:
    """The algorithm that a script or ``TRIGRAM_ALGORITHM`` names.

    Raises:
        UnsupportedError: It is unknown, or an option or a combination is not possible; the message
            says why, and what there is.
    """
    source = ""
    if algorithm is None:
        algorithm = os.environ.get("TRIGRAM_ALGORITHM") or DEFAULT
        source = " (from TRIGRAM_ALGORITHM)" if "TRIGRAM_ALGORITHM" in os.environ else ""
    if isinstance(algorithm, str) and (known := named(algorithm)) is not None:
        name, entry = algorithm, known
    elif isinstance(algorithm, Trigram):
        name, entry = str(algorithm), Entry(algorithm, "")
    elif isinstance(algorithm, str) and algorithm.count("/") == 2:
        name, entry = algorithm, Entry(Trigram(*algorithm.split("/")), "")
    else:
        raise UnsupportedError(
            f"unknown algorithm {str(algorithm)!r}{source}; known are {', '.join(names())}, "
            "and trigrams written out, WHO/WHAT/WHEN: gossip:ring/int8/async"
        )
    return _Parser(name, entry, dict(options or {})).parse()


class _Parser:
    """Checks a trigram and its options, and takes them apart."""

    def __init__(self, name: str, entry: Entry, options: dict[str, Any]) -> None:
        self.name, self.entry = name, entry
        self.given = {**entry.options, **options}
        self.taken: dict[str, Any] = {}
        self.known: list[str] = []

    def refuse(self, why: str) -> UnsupportedError:
        """The error."""
        return UnsupportedError(f"algorithm {self.name!r}: {why}")

    def option(self, name: str, default: Any, check: Callable[[Any], bool], must: str) -> Any:
        """Takes an option that this algorithm has."""
        self.known.append(name)
        value = self.given.pop(name, default)
        if value is not default and not _holds(check, value):
            raise self.refuse(f"{name}={value!r} must be {must}")
        return value

    def parse(self) -> Algorithm:
        """The plan."""
        value, entry = self.entry.value, self.entry
        kind, _, graph = value.who.partition(":")
        if kind in ("gossip", "push"):
            graph = self.option("topology", graph, lambda g: isinstance(g, str), "a graph's name")
            graphs.find(f"push:{graph}" if kind == "push" else graph, 2)
        elif (
            kind != "central" or (graph and RobustAggregation.parse(graph) is None) or value.who.endswith(":")
        ):
            known = ", ".join(w for w, _ in WHO)
            raise self.refuse(f"WHO is {value.who!r}; there are {known} (F an integer, R positive)")
        every, staleness = self._when(value.when)
        gradients = value.carry in ("gradients", "momentum") or (
            value.carry is None and kind == "central" and every == 1 and value.when == "sync"
        )
        what = self._what(value.what)
        if gradients and kind != "central":
            raise self.refuse(
                f"{value.carry or 'gradients'} averaged among neighbours only would let the weights drift "
                "apart for ever; gossip carries weights"
            )
        if gradients and (every != 1 or value.when != "sync"):
            raise self.refuse(
                f"{value.carry} travel in the step they were made in, not {value.when}; carry weights instead"
            )
        carry = value.carry if gradients else None
        if carry is None:
            plain = what == "full" and "outer_lr" not in entry.options
            carry = "gradients" if gradients else "weights" if plain else "differences"
        options = {"staleness": staleness} if every is None else {}
        options |= self._options(kind, what, every, carry)
        if kind == "central" and graph:
            options |= self._robust(graph, what, carry)
        if entry.step is not None:
            options |= {k: self.given.pop(k) for k in entry.options if k in self.given}
            self.known += [k for k in entry.options if k not in self.known]
        if self.given:
            known = ", ".join(sorted(set(self.known))) or "none"
            raise self.refuse(f"no option {', '.join(sorted(map(repr, self.given)))}; there are {known}")
        who = f"{kind}:{graph}" if graph else kind
        when = value.when
        if every is None:
            when = "async" if staleness is None else f"async:{staleness}"
        elif when != "sync":
            when = f"every:{every}"
        value = replace(value, who=who, what=what, when=when, carry=carry)
        return Algorithm(self.name, value, kind, graph, every, options, entry.step)

    def _when(self, when: str) -> tuple[int | None, int | None]:
        """Steps per round, or None and the staleness."""
        kind, _, number = when.partition(":")
        if kind == "sync" and not number:
            return 1, None
        if kind in ("every", "async") and (number.isdigit() or (kind == "async" and not number)):
            count = int(number) if number else None
            if kind == "every":
                count = self.option("every", count, _positive, "a number of steps, 1 or more")
            else:
                count = self.option(
                    "staleness", count, _positive, "a number of boundaries, 1 or more, or None"
                )
            if count != 0:
                return (count, None) if kind == "every" else (None, count)
        raise self.refuse(f"WHEN is {when!r}; there are sync, every:H and async or async:STALENESS, H >= 1")

    def _what(self, what: str) -> str:
        kind, _, parameter = what.partition(":")
        if kind == "full" and not parameter:
            return what
        if kind in ("topk", "randomk"):
            parameter = str(self.option("fraction", parameter, lambda f: 0 < f <= 1, "above 0 and up to 1"))
        elif kind == "powersgd":
            if parameter and not (parameter.isdigit() and int(parameter) > 0):
                raise self.refuse(f"{what!r}: the rank is a positive integer")
            return f"powersgd:{self.option('rank', int(parameter or 2), _positive, 'a positive integer')}"
        what = f"{kind}:{parameter}" if parameter else kind
        codecs.find(what)
        return what

    def _robust(self, rule: str, what: str, carry: str) -> dict[str, Any]:
        """What a robust rule goes with, and its option."""
        codec = what.partition(":")[0]
        if codec == "powersgd":
            raise self.refuse(
                f"central:{rule} combines what each rank sent, and powersgd sends matrices that mean nothing "
                "before they are summed; take int8 or another codec"
            )
        if codec in ("topk", "randomk"):
            raise self.refuse(
                f"central:{rule}: most ranks send nothing at most places of {what}, so nearly all that is "
                "sent would be left out as an outlier; take int8, int4, fp8 or sign"
            )
        if carry == "momentum":
            raise self.refuse(
                f"central:{rule} combines gradients, weights and differences; momenta would remember "
                "what was left out"
            )
        if self.entry.step is not None:
            raise self.refuse(
                f"central:{rule}: a registered exchange makes its averages itself; write central"
            )
        if not rule.startswith("clip"):
            return {}
        must = "a number of iterations, 1 or more"
        return {"iterations": self.option("iterations", 3, lambda i: bool(i) and _positive(i), must)}

    def _options(self, kind: str, what: str, every: int | None, carry: str) -> dict[str, Any]:
        """What is neither in WHO nor in WHAT nor in WHEN."""
        found: dict[str, Any] = {}
        codec, gradients = what.partition(":")[0], carry in ("gradients", "momentum")
        if codec in ("int8", "int4", "fp8", "sign"):
            found["block"] = self.option(
                "block", None, lambda b: b % 8 == 0 and 0 < b <= 2048, "a multiple of 8 up to 2048"
            )
        if codec == "powersgd" and kind != "central":
            raise self.refuse("powersgd averages matrices over all ranks; neighbours would not share P")
        if codec == "topk" and carry == "gradients" and ":" not in self.entry.value.who:
            found["momentum"] = self.option("momentum", 0.0, lambda m: 0 <= m < 1, "in [0, 1)")
        if carry == "momentum":
            found["bits"] = self.option("bits", 8, lambda b: b in (8, 1), "8 or 1")
        if kind == "gossip" and what != "full" and every is not None:
            found["gamma"] = self.option("gamma", gamma(what), lambda g: 0 < g <= 1, "above 0 and up to 1")
        if kind == "push" and (what != "full" or every is None):
            raise self.refuse("push-sum's shares travel full and in step; use gossip for codecs and async")
        if not gradients and every is not None:
            overlaps = kind != "central"
            found["overlap"] = self.option("overlap", overlaps, lambda o: o in (True, False), "True or False")
        if every is None:
            found["script"] = self.option("script", None, callable, "a callable from steps to bool")
        if not gradients and kind == "central":
            found["outer_lr"] = self.option("outer_lr", 1.0, lambda v: v > 0, "positive")
            found["outer_momentum"] = self.option("outer_momentum", 0.0, lambda v: 0 <= v < 1, "in [0, 1)")
        if self.name != DEFAULT:
            found["warmup_steps"] = self.option(
                "warmup_steps", 0, lambda s: isinstance(s, int) and s >= 0, "a number of steps"
            )
        return found


def gamma(what: str) -> float:
    """How much of a coded difference gossip can take: a coarse codec's all would diverge."""
    kind, _, parameter = what.partition(":")
    if kind == "topk":
        return min(1.0, 0.2 * (float(parameter) / 0.1) ** 0.824)
    return {"sign": 0.2, "randomk": float(parameter or 1)}.get(kind, 1.0)


def _positive(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _holds(check: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(check(value))
    except TypeError:
        return False
