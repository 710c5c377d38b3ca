"""The ``trigram`` command imports the package without torch: that takes two seconds, and a launcher, the help
and most commands do not need it.

Everywhere else ``import trigram`` loads all, because a script may rely on what that does: it registers the
backend's name with torch.distributed, and begins to count steps. In the command the first use of a name that
scripts use loads all too, so nothing depends on this but time.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGE = "trigram"


def runs(argv: list[str], orig_argv: list[str]) -> bool:
    """Whether this process runs the command, as its arguments say.

    Args:
        argv: ``sys.argv``; its first is ``-m`` while Python looks for the module that it is to run.
        orig_argv: ``sys.orig_argv``.
    """
    program = argv[0] if argv else ""
    if program == "-m":
        return orig_argv[orig_argv.index("-m") + 1 :][:1] == [PACKAGE] if "-m" in orig_argv else False
    return Path(program).name in (PACKAGE, f"{PACKAGE}.exe")


class Names:
    """What the package has for scripts, before it is loaded: the ``__getattr__`` of its module."""

    def __init__(self) -> None:
        self.used = False

    def __call__(self, name: str) -> Any:
        package = sys.modules[PACKAGE]
        # A module of the package is imported as such, which is not a use of what scripts use.
        if name.startswith("__") or importlib.util.find_spec(f"{PACKAGE}.{name}") is not None:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        if not self.used:
            self.used = True
            importlib.reload(package)
        try:
            return vars(package)[name]
        except KeyError:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}") from None


names = Names()
"""Of this process."""
