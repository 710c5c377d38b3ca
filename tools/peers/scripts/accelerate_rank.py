"""A rank that runs a script of Accelerate's: ``accelerate_rank.py BACKEND ddp|prepare SCRIPT``.

Accelerate takes a process group that exists. With ``prepare`` its models are given to
``trigram.integrations.accelerate.prepare``.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

backend, how, script = sys.argv[1:4]
if backend == "trigram":
    import trigram

    assert trigram.__version__
dist.init_process_group(backend)
if how == "prepare":
    from trigram.integrations.accelerate import prepare

    theirs = Accelerator.prepare

    def chosen(self: Accelerator, *objects: Any, **options: Any) -> Any:
        """What has a model goes to Trigram, which gives the rest back."""
        models = any(isinstance(one, nn.Module) for one in objects)
        return prepare(self, *objects, **options) if models else theirs(self, *objects, **options)

    Accelerator.prepare = chosen  # type: ignore[method-assign]
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
