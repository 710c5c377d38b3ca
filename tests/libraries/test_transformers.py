"""Hugging Face transformers and PEFT: small random GPT-2 and ViT models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="make test-libraries installs it")

from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTForImageClassification

from tests.libraries.script import PATIENCE, Run, script
from tests.support.cases import Cases

CASES = Cases()
STEPS = 6


def gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
        )
    )


def vit() -> Any:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=16,
            patch_size=4,
            num_labels=4,
            hidden_dropout_prob=0.1,
        )
    )


def with_checkpointing(model: Any, mode: str) -> Any:
    if mode in ("reentrant", "not reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
        model.enable_input_require_grads()
    return model


def compiled(model: Any, mode: str) -> Any:
    """The wrapped model, compiled if the mode is a backend of torch.compile."""
    if mode == "inductor":
        from torch._inductor import config

        config.compile_threads = 1
        unit = torch.backends.cpu.get_cpu_capability().lower()  # the cache does not tell vector units apart
        cache = Path(tempfile.gettempdir()) / f"trigram-inductor-{os.getuid()}-{unit}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return torch.compile(model, backend=mode) if mode in ("aot_eager", "inductor") else model


def train(run: Run, module: nn.Module, batch: dict[str, torch.Tensor], mode: str, lr: float = 5e-3) -> None:
    model = run.wrap(module)
    fast = compiled(model, mode)
    torch.manual_seed(run.rank)  # of the dropout
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    model.train()
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode != "inductor"):
            loss = fast(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.losses.append(float(loss.detach()))


def tokens(run: Run) -> dict[str, torch.Tensor]:
    ids = run.labels(64, 4, 16)
    return {"input_ids": ids, "labels": ids}


@script(CASES, ("plain",), ("reentrant",), ("not reentrant",), ("aot_eager",))
def language_model(run: Run, mode: str) -> None:
    train(run, with_checkpointing(gpt2(), mode), tokens(run), mode)


@script(CASES, ("inductor",), tolerance=1e-6)
def language_model_without_dropout(run: Run, mode: str) -> None:
    """Inductor's random numbers depend on how it divides the graph, so there is no dropout."""
    module = gpt2()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    train(run, module, tokens(run), mode)


@script(CASES, ("plain",), ("reentrant",), ("not reentrant",), ("aot_eager",))
def image_classifier(run: Run, mode: str) -> None:
    batch = {"pixel_values": run.data(8, 3, 16, 16), "labels": run.labels(4, 8)}
    train(run, with_checkpointing(vit(), mode), batch, mode)


@script(CASES, ("plain",), ("reentrant",), ("not reentrant",))
def lora(run: Run, mode: str) -> None:
    """PEFT: few parameters are trained; with checkpointing only the hooks on the inputs give gradients."""
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["c_attn", "c_fc", "c_proj"],
        fan_in_fan_out=True,
        modules_to_save=["ln_f"],
    )
    module = get_peft_model(with_checkpointing(gpt2(), mode), config)
    frozen = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    train(run, module, tokens(run), mode, lr=0.05)
    assert frozen
    if run.rank == 0:  # the others have begun with weights of their own
        for name, p in module.named_parameters():
            if name in frozen:
                assert torch.equal(p, frozen[name]), f"{name} is frozen and has changed"


@pytest.mark.parametrize("case", list(CASES))
def test_transformers(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 2, patience=PATIENCE)
