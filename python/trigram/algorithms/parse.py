"""Parses and checks what a user passes as ``algorithm``: a name, WHO/WHAT/WHEN, or a ``Trigram``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

from trigram import codecs
from trigram.algorithms import compatibility, graphs
from trigram.algorithms.names import DEFAULT, SHARDED, Entry, named, names
from trigram.algorithms.options import AlgorithmOptions
from trigram.algorithms.robust import RobustAggregation
from trigram.algorithms.trigram import WHO, Algorithm, Trigram
from trigram.errors import UnsupportedError
from trigram.runtime.signatures import misfit

_OWN = (
    "overlap",
    "warmup_steps",
    "script",
    "staleness",
    "fragments",
    "second_moment",
    "state",
    "fused",
    "gradients",
    "copies",
    "elementwise",
)
"""Options that are never those of a registered class."""
COPIES = 2
"""How many ranks of an elastic job hold each part of a sharded optimizer."""


def find(algorithm: str | Trigram | None, options: dict[str, Any] | None = None) -> Algorithm:
    """The algorithm that a script or ``TRIGRAM_ALGORITHM`` names.

    The script's options may belong to another algorithm than that of the environment: those that this one
    does not have are listed in the result.

    Args:
        algorithm: A name, WHO/WHAT/WHEN (WHO/WHAT: in every step) or a ``Trigram``; None:
            ``TRIGRAM_ALGORITHM``, or the default.
        options: The algorithm's options.

    Raises:
        UnsupportedError: The algorithm is unknown, or an option or a combination is invalid; the message says
            why, and lists the alternatives.
    """
    from_environment = False
    if algorithm is None:
        from_environment = bool(os.environ.get("TRIGRAM_ALGORITHM"))
        algorithm = os.environ.get("TRIGRAM_ALGORITHM") or DEFAULT
    source = " (from TRIGRAM_ALGORITHM)" if from_environment else ""
    if isinstance(algorithm, str) and (known := named(algorithm)) is not None:
        name, entry = algorithm, known
    elif isinstance(algorithm, Trigram):
        name, entry = str(algorithm), Entry(algorithm, "")
    elif isinstance(algorithm, str) and algorithm.count("/") in (1, 2):
        written = Trigram(*algorithm.split("/"))
        if written.what.partition(":")[0] in ("sync", "every", "async"):
            raise UnsupportedError(
                f"algorithm {algorithm!r}{source}: WHAT is left out; write {written.who}/full/{written.what}"
            )
        name, entry = str(written), Entry(written, "")
    else:
        raise UnsupportedError(
            f"unknown algorithm {str(algorithm)!r}{source}; use one of {', '.join(names())}, sharded, or "
            "WHO/WHAT/WHEN, such as gossip:ring/int8/async"
        )
    return _Parser(name, entry, dict(options or {}), from_environment).parse()


class _Parser:
    """Checks a trigram and its options."""

    def __init__(self, name: str, entry: Entry, options: dict[str, Any], from_environment: bool) -> None:
        self.name, self.entry, self.from_environment = name, entry, from_environment
        self.given = {**entry.options, **options}
        self.taken: dict[str, Any] = {}
        self.known: list[str] = []
        self.due: Callable[[int], bool] | None = None

    def refuse(self, why: str) -> UnsupportedError:
        """The error to raise, with the algorithm's name."""
        return UnsupportedError(f"algorithm {self.name!r}: {why}")

    def option(self, name: str, default: Any, check: Callable[[Any], bool], must: str) -> Any:
        """Removes an option that this algorithm has from the given ones, checks it and returns it."""
        self.known.append(name)
        value = self.given.pop(name, default)
        if value is not default and not _holds(check, value):
            raise self.refuse(f"{name}={value!r} is invalid; it must be {must}")
        return value

    def parse(self) -> Algorithm:
        """The checked algorithm."""
        value, entry = self.entry.value, self.entry
        kind, _, graph = value.who.partition(":")
        if kind in ("gossip", "push"):
            names = graphs.names(kind)
            must = f"one of {', '.join(names)}"
            graph = self.option("topology", graph, lambda g: g in names, must)
            if graph not in names:
                raise self.refuse(f"WHO={value.who!r} is invalid; use {kind}:TOPOLOGY with {must}")
        elif (
            kind != "central" or (graph and RobustAggregation.parse(graph) is None) or value.who.endswith(":")
        ):
            known = ", ".join(w for w, _ in WHO)
            raise self.refuse(f"WHO={value.who!r} is invalid; use one of {known} (F an integer, R positive)")
        every, staleness = self._when(value.when)
        what = self._what(value.what)
        shares = what.startswith("share")
        gradients = value.carry in ("gradients", "momentum") or (
            value.carry is None
            and kind == "central"
            and every == 1
            and value.when == "sync"
            and not shares
            and entry.step is None  # which averages weights
        )
        if entry.average is not None and not (
            gradients and value.carry != "momentum" and value.who == "central" and what == "full"
        ):
            raise self.refuse(
                "it is registered with average=, which averages gradients in every step and sends what it "
                f"likes, and with {value}, carry={value.carry!r}; use trigram.Trigram(), and its own options"
            )
        if gradients and entry.step is not None:
            raise self.refuse(
                f"it is registered with step=, which averages weights, and with carry={value.carry!r}; use "
                "carry='weights'"
            )
        if shares and (gradients or value.who != "central" or value.carry == "differences"):
            raise self.refuse(
                f"WHAT={what!r} averages a share of the weights, the same on all ranks: it needs "
                "who='central' and carry='weights'; topk and randomk send a share of gradients or differences"
            )
        if gradients and kind != "central":
            raise self.refuse(
                f"gossip and push cannot average {value.carry or 'gradients'}: with only neighbours "
                "averaged, the ranks' weights would drift apart without limit; use carry='weights'"
            )
        if gradients and (every != 1 or value.when != "sync"):
            raise self.refuse(
                f"{value.carry} can only be averaged in every step (when='sync'), not {value.when}; use "
                "carry='weights'"
            )
        carry = value.carry if gradients else None
        if carry is None:
            plain = (what == "full" and "outer_lr" not in entry.options) or shares
            carry = "gradients" if gradients else "weights" if plain else "differences"
        options: dict[str, Any] = {"staleness": staleness} if every is None else {}
        options |= self._options(kind, what, every, carry)
        options |= self._sharding(what, carry)
        if self.due is not None:
            options["due"] = self.due
        if kind == "central" and graph:
            options |= self._robust(graph)
        arguments: dict[str, Any] = {}
        if entry.step is not None or entry.average is not None:
            own = {**options, **{k: self.given.pop(k) for k in entry.options if k in self.given}}
            self.known += [k for k in entry.options if k not in self.known]
            arguments = {k: own[k] for k in entry.options if k in own and k not in _OWN}
            self._check_class(arguments)
        if self.given and not self.from_environment:
            known = ", ".join(sorted(set(self.known))) or "none"
            raise self.refuse(
                f"unknown option {', '.join(sorted(map(repr, self.given)))}; its options are: {known}"
            )
        who = f"{kind}:{graph}" if graph else kind
        when = value.when
        if every is None:
            when = "async" if staleness is None else f"async:{staleness}"
        elif when != "sync":
            when = f"every:{every}"
        value = replace(value, who=who, what=what, when=when, carry=carry)
        algorithm = Algorithm(
            self.name,
            value,
            kind,
            graph,
            every,
            AlgorithmOptions(**options),
            entry.step,
            entry.average,
            arguments,
            self.from_environment,
            tuple(self.given),
        )
        compatibility.check(f"algorithm {self.name!r}", compatibility.features(algorithm))
        return algorithm

    def _check_class(self, arguments: dict[str, Any]) -> None:
        """Raises if a registered class cannot be made, or its program not be run."""
        role, given = "step", ["tensors", "groups"]
        if self.entry.average is not None:
            role, given = "average", ["memory", "views", "groups"]
        made_by = self.entry.average or self.entry.step
        assert made_by is not None
        title = f"it is registered with {role}={getattr(made_by, '__name__', made_by)}, which is called with"
        if why := misfit(made_by, *given, **arguments):
            called = ", ".join([*given, *(f"{option}=" for option in arguments)])
            raise self.refuse(f"{title} ({called}), and {why}")
        phases = inspect.getattr_static(made_by, "phases", None)
        if inspect.isfunction(phases) and (why := misfit(phases, made_by, 0)):
            raise self.refuse(f"{title} phases(number), and {why}")

    def _when(self, when: str) -> tuple[int | None, int | None]:
        """Training steps per averaging step and None, or None and the staleness."""
        kind, _, number = when.partition(":")
        if kind == "sync" and not number:
            return 1, None
        if kind in ("every", "async") and (number.isdigit() or (kind == "async" and not number)):
            count = int(number) if number else None
            if kind == "every":
                must = "a number of steps, 1 or more, or a function that says after which steps"
                count = self.option(
                    "every", count, lambda h: callable(h) or (h is not None and _positive(h)), must
                )
                if callable(count):
                    if why := misfit(count, 1):
                        raise self.refuse(
                            f"every= of a function is called with the number of steps, and {why}"
                        )
                    self.due, count = count, 1
            else:
                count = self.option("staleness", count, _positive, "a number of steps, 1 or more, or None")
            if count != 0:
                return (count, None) if kind == "every" else (None, count)
        raise self.refuse(
            f"WHEN={when!r} is invalid; use sync, every:H, async or async:STALENESS, with H and STALENESS 1 "
            "or more; options such as fragments=2 are arguments of with_bagua of their own"
        )

    def _what(self, what: str) -> str:
        kind, _, parameter = what.partition(":")
        if kind in ("full", "lossless") and not parameter:
            return what
        if kind == "share":
            share = self.option(
                "share", parameter, lambda s: 0 < float(s) <= 1, "a number above 0 and up to 1"
            )
            if not _holds(lambda s: 0 < float(s) <= 1, share):
                raise self.refuse(
                    f"WHAT={what!r} is invalid; use a number above 0 and up to 1, as in share:0.05"
                )
            return f"share:{float(share):g}"
        if kind in ("topk", "randomk", "chunktopk"):
            parameter = str(self.option("fraction", parameter, lambda f: 0 < f <= 1, "above 0 and up to 1"))
        elif kind == "powersgd":
            if parameter and not (parameter.isdigit() and int(parameter) > 0):
                raise self.refuse(
                    f"WHAT={what!r} is invalid; the rank of powersgd must be a positive integer"
                )
            return f"powersgd:{self.option('rank', int(parameter or 2), _positive, 'a positive integer')}"
        what = f"{kind}:{parameter}" if parameter else kind
        codecs.find(what)
        return what

    def _robust(self, aggregation: str) -> dict[str, Any]:
        """The option of a robust aggregation."""
        if not aggregation.startswith("clip"):
            return {}
        must = "a number of iterations, 1 or more"
        return {"iterations": self.option("iterations", 3, lambda i: bool(i) and _positive(i), must)}

    def _options(self, kind: str, what: str, every: int | None, carry: str) -> dict[str, Any]:
        """The options that are part of neither WHO nor WHAT nor WHEN."""
        found: dict[str, Any] = {}
        codec, gradients = what.partition(":")[0], carry in ("gradients", "momentum")
        if codec in ("int8", "int4", "fp8", "sign"):
            found["block"] = self.option(
                "block",
                None,
                lambda b: _whole(b) and b % 8 == 0 and 0 < b <= 2048,
                "an integer, a multiple of 8 up to 2048",
            )
        if codec == "lossless" and not (carry == "gradients" and self.entry.value.who == "central"):
            raise self.refuse(
                "lossless sends gradients exactly, to add them up in full: it needs who='central' and "
                "carry='gradients'; use full, or another codec"
            )
        if codec == "powersgd" and kind != "central":
            raise self.refuse(
                "powersgd needs who='central': all ranks must use the same projection matrix; use another "
                "codec"
            )
        if codec == "chunktopk" and (kind != "central" or gradients):
            raise self.refuse(
                f"{what} sends weight differences to all ranks: it needs who='central', and every:H, async "
                "or carry='weights'; use topk for gradients and neighbours"
            )
        if codec == "topk" and carry == "gradients" and ":" not in self.entry.value.who:
            found["momentum"] = self.option("momentum", 0.0, lambda m: 0 <= m < 1, "in [0, 1)")
        if carry == "momentum":
            found["bits"] = self.option("bits", 8, lambda b: b in (8, 1), "8 or 1")
        if kind == "gossip" and what != "full" and every is not None:
            found["gamma"] = self.option("gamma", gamma(what), lambda g: 0 < g <= 1, "above 0 and up to 1")
        if kind == "push" and (what != "full" or every is None):
            raise self.refuse(
                "push supports only what='full', and no async; use gossip for codecs and asynchronous "
                "training"
            )
        if not gradients and every is not None:
            overlaps = kind != "central"
            found["overlap"] = self.option("overlap", overlaps, _flag, "True or False")
            divides = lambda f: _whole(f) and f > 0 and every % f == 0  # noqa: E731
            must = f"a divisor of the {every} steps" if self.due is None else "1 where every= is a function"
            found["fragments"] = self.option("fragments", 1, divides, must)
        if every is None:
            several = lambda f: f is None or (_whole(f) and f > 0)  # noqa: E731
            found["fragments"] = self.option("fragments", None, several, "a number, 1 or more, or None")
            found["script"] = self.option(
                "script", None, callable, "a callable that takes the number of steps and returns a bool"
            )
        mixes = kind == "gossip" and what == "full" and every is not None
        own = self.entry.step is None  # a registered class averages in its own way
        if own and not gradients and codec != "share" and (kind == "central" or mixes):
            found["outer_lr"] = self.option("outer_lr", 1.0, lambda v: 0 < v < inf, "positive and finite")
            found["outer_momentum"] = self.option("outer_momentum", 0.0, lambda v: 0 <= v < 1, "in [0, 1)")
        if (
            own
            and not gradients
            and self.entry.value.who == "central"
            and codec not in ("full", "share", "powersgd")
        ):
            found["feedback"] = self.option("feedback", None, lambda b: 0 <= b <= 1, "from 0 to 1, or None")
        if (
            own
            and not gradients
            and self.entry.value.who == "central"
            and what == "full"
            and every is not None
        ):
            found |= self._quorum()
        if not gradients:
            # An outer optimizer makes up for short steps itself, and is tuned with the plain inner one.
            outer = found.get("outer_lr", 1.0) != 1 or found.get("outer_momentum", 0.0) != 0
            found["second_moment"] = self.option(
                "second_moment", "own" if outer else "mean", lambda v: v in ("mean", "own"), "'mean' or 'own'"
            )
        if self.name not in (DEFAULT, SHARDED):
            found["warmup_steps"] = self.option(
                "warmup_steps", 0, lambda s: _whole(s) and s >= 0, "a number of steps, 0 or more"
            )
        return found

    def _quorum(self) -> dict[str, Any]:
        """The options of averaging steps that go on without ranks that are late; nothing without a quorum."""
        must = "a number of ranks, 1 or more"
        quorum = self.option("quorum", None, lambda q: q is None or (bool(q) and _positive(q)), must)
        grace = self.option("grace", None, lambda s: 0 <= s < inf, "seconds, 0 or more, or None")
        if quorum is None:
            if grace is not None:
                raise self.refuse(f"grace={grace} is how long a quorum waits for the others; add quorum=")
            return {}
        return {"quorum": quorum, "grace": grace}

    def _sharding(self, what: str, carry: str) -> dict[str, Any]:
        """Where the optimizer's state lives, and how its slices are updated; nothing if it is on all
        ranks."""
        places = ("replicated", "sharded")
        found: dict[str, Any] = {}
        plain = what == "full" and ":" not in self.entry.value.who and self.entry.average is None
        needs_plain = self.given.get("fused") or self.given.get("gradients") == "shards"
        if self.from_environment and (carry != "gradients" or (needs_plain and not plain)):
            return {}  # the script's options belong to another algorithm
        state = self.option("state", "replicated", lambda s: s in places, "replicated or sharded")
        fused = self.option("fused", False, _flag, "True or False")
        if state == "sharded":
            found = {
                "state": state,
                "gradients": self.option(
                    "gradients", "full", lambda g: g in ("full", "shards"), "full or shards"
                ),
                "overlap": self.option("overlap", False, _flag, "True or False"),
            }
            if "copies" in self.given:
                several = lambda n: _whole(n) and n > 1  # noqa: E731
                found["copies"] = self.option("copies", COPIES, several, "a number of ranks, 2 or more")
        if fused:
            found["fused"] = True
        if found:
            must = "True, False or None"
            found["elementwise"] = self.option("elementwise", None, lambda e: e is None or _flag(e), must)
        return found


def gamma(what: str) -> float:
    """The default fraction of a compressed difference that gossip applies: with a coarse codec 1 would
    diverge."""
    kind, _, parameter = what.partition(":")
    if kind == "topk":
        return min(1.0, 0.2 * (float(parameter) / 0.1) ** 0.824)
    return {"sign": 0.2, "randomk": float(parameter or 1)}.get(kind, 1.0)


def _positive(value: Any) -> bool:
    return value is None or (_whole(value) and value > 0)


def _whole(value: Any) -> bool:
    """Whether it is a number of something: True is not 1."""
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _holds(check: Callable[[Any], bool], value: Any) -> bool:
    try:
        return bool(check(value))
    except (TypeError, ValueError):
        return False
