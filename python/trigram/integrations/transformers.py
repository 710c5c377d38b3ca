"""The Trainer of transformers: ``TrigramTrainer`` in place of ``Trainer``, or the mixin before another one.

Interface: transformers 5.23, ``trainer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import trigram
from trigram.algorithms.trigram import Trigram
from trigram.integrations import accelerate, saved_state

try:
    from transformers import Trainer
except ImportError as e:
    raise ImportError(
        "trigram.integrations.transformers needs transformers: pip install 'transformers>=5' accelerate"
    ) from e

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object

__all__ = ["TrigramTrainer", "TrigramTrainerMixin"]
_FILE = "trigram.pt"
"""The algorithm's states of all ranks, in a checkpoint's folder."""


class TrigramTrainerMixin(_Mixed):
    """Trains with one of Trigram's algorithms: ``class MyTrainer(TrigramTrainerMixin, Seq2SeqTrainer)``.

    Args:
        algorithm: As for :func:`trigram.with_bagua`; None: ``$TRIGRAM_ALGORITHM``, else
            ``gradient_allreduce``, whose weights are bit for bit those of the Trainer on two ranks.
        options: The other arguments of :func:`trigram.with_bagua`. ``bucket_mb`` and ``broadcast_buffers``
            are those of ``TrainingArguments`` (``ddp_bucket_cap_mb``, ``ddp_broadcast_buffers``) unless they
            are here; the other arguments that begin with ``ddp_`` have no effect.
        *args: The arguments of the Trainer.
        **kwargs: Those too.

    ``evaluate``, ``predict`` and checkpoints have the average of the weights, and after ``train`` the model
    is a plain one that has it. A checkpoint also has the algorithm's state of every rank, unless it has the
    model only; ``train(resume_from_checkpoint=...)`` restores it.
    """

    def __init__(
        self,
        *args: Any,
        algorithm: str | Trigram | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.algorithm = algorithm
        self.options = dict(options or {})
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; then the model is a plain one with the average of the weights."""
        result = super().train(*args, **kwargs)
        saved_state.finish(self.model)
        return result

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the average of the weights."""
        with saved_state.averaged(self.model):
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the average of the weights; all ranks call it."""
        with saved_state.averaged(self.model):
            super().save_model(*args, **kwargs)

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Wraps the model before Accelerate would, which then leaves it as it is."""
        model = super()._wrap_model(model, training, *args, **kwargs)
        if not training:
            return model
        if trigram.is_wrapped(self.model):
            trigram.unwrap(self.model)  # an earlier call of train has ended with an exception
        return accelerate.prepare_model(
            self.accelerator, model, self.algorithm, [self.optimizer], **self.options
        )

    def _load_best_model(self) -> None:
        """Ends the averaging steps under way, which would change the weights that are loaded."""
        saved_state.finish(self.model)
        super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if trigram.is_wrapped(self.model) and (states := saved_state.gathered(self.model)) is not None:
            torch.save(states, Path(output_dir) / _FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not trigram.is_wrapped(self.model):
            return
        states = [_read(Path(checkpoint) / _FILE)]
        if dist.is_initialized():
            dist.broadcast_object_list(states, 0)
        if states[0] is not None:
            saved_state.load(self.model, states[0])


def _read(file: Path) -> Any:
    """What rank 0 has saved; None on the other ranks, and where nothing was saved."""
    if (dist.is_initialized() and dist.get_rank() != 0) or not file.exists():
        return None
    return torch.load(file, map_location="cpu", weights_only=True)


class TrigramTrainer(TrigramTrainerMixin, Trainer):
    """The Trainer of transformers with one of Trigram's algorithms, see :class:`TrigramTrainerMixin`."""
