"""`import trigram` registers the backend, and costs nothing more."""

from __future__ import annotations

import re
import subprocess
import sys

import torch.distributed as dist

from tests.support import patience
from tests.support.harness import ROOT

SCRIPT = """
import sys, torch, torch.distributed
before = set(sys.modules)
import trigram
assert "trigram" in torch.distributed.Backend.backend_list
assert torch.distributed.Backend.backend_capability["trigram"] == ["cpu", "cuda"]
assert torch.distributed.get_default_backend_for_device("cpu") == "gloo"
new = sorted(name for name in set(sys.modules) - before)
print(" ".join(name for name in new if name.startswith("trigram.backend")))
store = torch.distributed.HashStore()
torch.distributed.init_process_group("trigram", store=store, rank=0, world_size=1)
t = torch.ones(3)
torch.distributed.all_reduce(t)
torch.distributed.destroy_process_group()
"""


def test_import_is_cheap() -> None:
    """No part of the backend but the registration is imported."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=patience.seconds(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["trigram.backend", "trigram.backend.names", "trigram.backend.registration"]


def test_registering_again_does_nothing() -> None:
    import trigram.backend

    plugin = dist.Backend._plugins["TRIGRAM"]  # type: ignore[attr-defined]
    trigram.backend.register()
    assert dist.Backend._plugins["TRIGRAM"] is plugin  # type: ignore[attr-defined]


def test_entry_points_name_functions_that_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    points = re.findall(r'entry-points."([\w.]+)"\]\ntrigram = "([\w.]+):(\w+)"', text)
    assert {group for group, _, _ in points} == {"torch.distributed.backends", "torchcomms.backends"}
    for _, module, name in points:
        assert callable(getattr(__import__(module, fromlist=[name]), name))
