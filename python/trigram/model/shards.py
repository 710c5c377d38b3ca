"""The parts of a model that this rank holds, as a module of plain parameters."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from trigram.algorithms.trigram import Algorithm
from trigram.elastic.membership import current
from trigram.errors import MisuseError, UnsupportedError
from trigram.gradients.gradient_sync import GradientSync
from trigram.model.shard_passes import ShardPasses, gather_again
from trigram.model.wrapped import wrapped_models
from trigram.sharded.updates import ShardedUpdates


class LocalShards(nn.Module):
    """The shards that this rank holds; its parameters and buffers share the memory of the model's.

    It has no forward pass: the model is trained as it is. Where weights are averaged :func:`trigram.step` is
    called with the shards after each update; gradients are averaged when the model's backward pass ends.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shards = nn.ParameterList()
        self._model = weakref.ref(model)
        self._passes: ShardPasses | None = None
        self._pairs: list[tuple[Any, nn.Parameter]] = []
        wrapped = wrapped_models.get(model)
        hooks = wrapped.hooks if wrapped is not None and not wrapped.stale else None
        updates = hooks.updates if isinstance(hooks, GradientSync) else None
        self._sharded = weakref.ref(updates) if isinstance(updates, ShardedUpdates) else None
        for name, p in model.named_parameters():
            if p.is_meta:
                raise MisuseError(f"local_shards: the parameter {name} is on the meta device; materialize it")
        if isinstance(updates, ShardedUpdates):
            self.shards.extend(nn.Parameter(part) for part in updates.lend())
        for p in model.parameters():
            if self._sharded is not None and p.requires_grad:
                continue  # its values are in the parts
            local: Any = getattr(p, "_local_tensor", None)
            local = p.detach() if local is None else local.detach()
            self.shards.append(nn.Parameter(local, requires_grad=p.requires_grad))
            self._pairs.append((p, self.shards[-1]))
        for i, b in enumerate(model.buffers()):  # replicas begin with the same, and so does one that joins
            self.register_buffer(f"buffer{i}", getattr(b, "_local_tensor", b))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Raises: the model has the forward pass."""
        raise MisuseError("local_shards: call the model itself; the shards only hold its weights")


def local_shards(model: nn.Module) -> LocalShards:
    """The shards of a model's parameters on this rank, to average them or their gradients between replicas.

    In hybrid sharding (HSDP), the rows of a mesh shard the model with ``fully_shard``, and each row trains a
    replica. An algorithm then works between the ranks that hold the same shard::

        fully_shard(model, mesh=mesh["shard"])
        shards = trigram.with_bagua(trigram.local_shards(model), "diloco", group=mesh["replicate"])
        ...
        optimizer.step()
        trigram.step(shards)      # after each update, where weights are averaged

    Averages of gradients (``"bytegrad"``) are made when the backward pass of the model ends; all passes of an
    update but the last are under ``trigram.no_sync(shards)``. In elastic jobs algorithms may not be
    asynchronous.

    Algorithms that average weights also work with a model that ``with_bagua(model, "sharded", optimizer=...,
    group=...)`` trains in each row: the shards are this rank's parts of the weights, and its optimizer's
    state and the algorithm's are those of the parts. The row has all weights again when
    ``trigram.step(shards)`` returns.

    Args:
        model: A module with DTensor parameters, such as one of ``fully_shard``; one that ``with_bagua`` has
            sharded, on whose ranks all make this call; plain parameters are taken whole. Load checkpoints
            into the model before this call, or in place.

    Raises:
        MisuseError: A parameter is on the meta device.
        UnsupportedError: The model is sharded with ``fused=True``, or trains parameters that are not in its
            ``optimizer=``.
    """
    return LocalShards(model)


_kept: weakref.WeakKeyDictionary[nn.Module, LocalShards] = weakref.WeakKeyDictionary()
"""By model, its shards while an algorithm has them: where gradients are averaged a script need not keep
them, and nothing would average if they went."""


def check_shards(model: nn.Module, chosen: Algorithm) -> None:
    """Raises if the model are shards, and the algorithm is not for these, or another has some of the model.

    Raises:
        UnsupportedError, MisuseError: See above.
    """
    if not isinstance(model, LocalShards):
        return
    whole = model._model()
    other = None if whole is None else _kept.get(whole)
    theirs = None if other is None or other is model else wrapped_models.get(other)
    if theirs is not None and not theirs.stale:
        raise MisuseError(
            f"{chosen.name}: an algorithm has other shards of this model already; call trigram.switch or "
            "trigram.unwrap on what local_shards has returned first"
        )
    options = chosen.options
    if options.sharded or options.fused:
        what = "state='sharded'" if options.sharded else "fused=True"
        raise UnsupportedError(
            f"{chosen.name}: {what} with local_shards: the "
            "optimizer updates the model that the shards are of; remove the option"
        )
    if model._sharded is not None and (chosen.gradients or options.warmup_steps):
        raise UnsupportedError(
            f"{chosen.name}: with local_shards of a model that with_bagua has sharded: its gradients are "
            "averaged inside of each replica only; choose an algorithm that averages weights (local_sgd, "
            "diloco, decentralized), without warmup_steps="
        )


def follow(model: nn.Module, elastic: bool) -> None:
    """After ``with_bagua``: shards follow the passes of the model that they are of, and in an elastic job
    ranks come and go where it begins a step."""
    whole = model._model() if isinstance(model, LocalShards) else None
    if whole is None or not isinstance(model, LocalShards):
        return
    _kept[whole] = model
    if model._passes is not None:
        model._passes.close()
    model._passes = None if model._sharded is not None else ShardPasses(model, whole, model._pairs)
    if not elastic:
        return
    shards = weakref.ref(model)

    def begins(*_: Any) -> None:
        mine = shards()
        wrapped = None if mine is None else wrapped_models.get(mine)
        if wrapped is None or wrapped.stale or wrapped.hooks is None:
            handle.remove()
        elif mine is not None and not isinstance(wrapped.hooks, GradientSync):  # else a pass does
            before = current()[1].epoch
            wrapped.hooks.between_steps()
            if current()[1].epoch != before:
                gather_again(mine._model())

    # Before the hook of FSDP, which gathers the shards.
    handle = whole.register_forward_pre_hook(begins, prepend=True)


def collect(model: nn.Module) -> None:
    """After the weights of ``model`` may have changed: if they are shards of a sharded model, its ranks get
    them.

    Raises:
        MisuseError: The model that the shards belong to is no longer sharded.
    """
    if not isinstance(model, LocalShards):
        return
    gather_again(model._model())
    if model._sharded is None:
        return
    if (sharded := _lender(model)) is None:
        raise MisuseError(
            "local_shards: the model of these shards was unwrapped or switched, so it would not get their "
            "weights; call trigram.unwrap(shards) before the model is unwrapped, and take new shards"
        )
    sharded.collect()


def give_back(model: nn.Module) -> None:
    """After the last average of ``model``: as :func:`collect`, unless the shards' model is sharded no more.
    From now on it collects its weights itself."""
    if isinstance(model, LocalShards) and (whole := model._model()) is not None:
        _kept.pop(whole, None)
    if (sharded := _lender(model)) is not None:
        sharded.collect()
        sharded.lent.active = False


def _lender(model: nn.Module) -> ShardedUpdates | None:
    sharded = model._sharded() if isinstance(model, LocalShards) and model._sharded is not None else None
    return sharded if sharded is not None and sharded.lent.active else None
