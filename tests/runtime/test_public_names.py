"""What users may import, and in which words errors speak."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from tests.support.harness import ROOT

SUPPORT = ROOT / "tests" / "support"
PYTHON = ROOT / "python" / "trigram"
MODULES = [
    "trigram",
    "trigram.averaging",
    "trigram.codecs",
    "trigram.data",
    "trigram.errors",
    "trigram.graphs",
    "trigram.mixing",
    "trigram.moe",
]


def public_names() -> list[str]:
    """`module.name` of all that the public modules offer."""
    return sorted(f"{m}.{name}" for m in MODULES for name in importlib.import_module(m).__all__) + sorted(
        f"trigram.integrations.{file.stem}.{name}"
        for file in (PYTHON / "integrations").glob("*.py")
        for name in _all_of(file)
    )


def _all_of(file: Path) -> list[str]:
    """`__all__` of a module that may need a library which is not installed; none if it has none."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_public_names_are_those_of_the_listing() -> None:
    """A change of a public name changes tests/support/public_names.txt too, and is told in CHANGELOG.md."""
    assert public_names() == (SUPPORT / "public_names.txt").read_text().split()


def test_public_names_exist() -> None:
    for name in public_names():
        module, _, attribute = name.rpartition(".")
        library = module.rpartition(".")[2].removesuffix("_elastic")
        library = {"fsdp": "torch"}.get(library, library)
        if "integrations" in module and not importlib.util.find_spec(library):
            continue  # its library is not installed
        assert hasattr(importlib.import_module(module), attribute), name


def test_import_star_hides_no_builtin() -> None:
    """`from trigram import *` leaves Python's own TimeoutError alone, and still offers what it did."""
    scope: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("from trigram import *", scope)
    builtins = scope.pop("__builtins__")
    assert isinstance(builtins, dict)
    assert not [name for name in scope if name in builtins]


def _words() -> list[tuple[str, re.Pattern[str], str]]:
    """Each forbidden word, how it is found, and what to write."""
    lines = (SUPPORT / "forbidden_words.txt").read_text().splitlines()
    entries = [line.split(" -> ") for line in lines if line and not line.startswith("#")]
    return [(w, re.compile(rf"(?<![\w-]){re.escape(w)}(?![\w-])", re.IGNORECASE), b) for w, b in entries]


WORDS = _words()


def forbidden(text: str) -> list[str]:
    """What is wrong with a sentence."""
    return [f"{word!r} (write {better})" for word, pattern, better in WORDS if pattern.search(text)]


def python_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string in what a file raises, logs or, at the command line, prints."""
    speaks = {"warning", "info", "echo", "print", "exit", "refuse", "Check"}
    for node in ast.walk(ast.parse(path.read_text())):
        said: ast.expr | None = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            said = node if name in speaks else None
        if said is not None:
            for part in ast.walk(said):
                # Keys and arguments of calls are no sentences: those have a space.
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value


LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)


def rust_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string with a space in a file: errors and log lines, for nothing else has one.

    Not comments, test modules and the panics of unreachable code.
    """
    text = path.read_text()
    text = text.split("\n#[cfg(test)]\nmod ")[0]
    text = re.sub(r"//[^\n]*", "", text).replace("'\"'", "")
    for found in LITERAL.finditer(text):
        if " " in found[1] and not re.search(
            r"(expect|assert\w*!|reason =)[^\"]{0,200}$", text[: found.start()]
        ):
            yield text.count("\n", 0, found.start()) + 1, re.sub(r"\\\n\s*", "", found[1])


def rust_files() -> list[Path]:
    """The sources of what users get, without those that only tests compile."""
    files = sorted((ROOT / "rust").glob("*/src/**/*.rs"))
    return [
        f
        for f in files
        if f.name not in ("hostile.rs", "sim.rs") and "tests" not in f.relative_to(ROOT).parts
    ]


def messages() -> Iterator[tuple[str, str]]:
    """Where, and the text of every error message that the sources hold."""
    for path in sorted(PYTHON.rglob("*.py")):
        yield from ((f"{path.relative_to(ROOT)}:{line}", text) for line, text in python_messages(path))
    for path in rust_files():
        yield from ((f"{path.relative_to(ROOT)}:{line}", text) for line, text in rust_messages(path))


def test_messages_are_found() -> None:
    """A search that finds nothing forbids nothing."""
    texts = [text for _, text in messages()]
    assert len(texts) > 300
    for known in ("ranks disagree on call", "TRIGRAM_SECRET", "is gone"):
        assert any(known in text for text in texts), known
    assert forbidden("rank 1 has been told") and not forbidden("rank 1 is a toldster")


def test_no_public_name_holds_a_forbidden_word() -> None:
    split = {name: re.sub(r"[._]|(?<=[a-z])(?=[A-Z])", " ", name) for name in public_names()}
    wrong = [f"{name}: {', '.join(forbidden(text))}" for name, text in split.items() if forbidden(text)]
    assert not wrong, "\n".join(wrong)


def test_no_error_message_holds_a_forbidden_word() -> None:
    wrong = [
        f"{where}: {text!r}: {', '.join(forbidden(text))}" for where, text in messages() if forbidden(text)
    ]
    assert not wrong, "\n".join(wrong)
