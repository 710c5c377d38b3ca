"""Runs suites and writes their sections of docs/conformance.md:

python -m tools.peers torch accelerate torchft
python -m tools.peers horovod=PATH          # a clone of github.com/horovod/horovod
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from tools.peers import page
from tools.peers.outcomes import FAILED

SUITES = {
    "torch": "make test-peers",
    "accelerate": "make test-peers",
    "torchft": "make test-peers",
    "horovod": "make test-peers PEER_HOROVOD=PATH  # git clone https://github.com/horovod/horovod",
    "deepspeed": "make test-peers PEER_DEEPSPEED=PATH  # git clone https://github.com/deepspeedai/DeepSpeed",
    "lightning": "make test-peers PEER_LIGHTNING=PATH  # git clone https://github.com/Lightning-AI/pytorch-lightning",
}
"""Their commands, for the page."""


def main() -> int:
    """Returns 1 if a test that passes elsewhere does not pass, without a reason that is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", help=f"of {', '.join(SUITES)}; a path after =")
    parser.add_argument("--out", type=Path, help="a folder for the outcomes, as JSON")
    asked = parser.parse_args()
    unknown = 0
    for word in asked.suites:
        name, _, path = word.partition("=")
        if name not in SUITES:
            parser.error(f"{name} is none of {', '.join(SUITES)}")
        suite = importlib.import_module(f"tools.peers.{name}").run(Path(path).resolve() if path else None)
        page.write(suite, SUITES[name])
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            told = {"ours": suite.ours, "theirs": suite.theirs}
            (asked.out / f"{name}.json").write_text(json.dumps(told, indent=1))
        failed = [test for test, how in suite.ours.items() if how == FAILED]
        unknown += sum("not known" in suite.reason(test) for test in failed)
        print(page.section(suite, SUITES[name]))
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
