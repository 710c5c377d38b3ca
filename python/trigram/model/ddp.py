"""``DistributedDataParallel``: torch's class of the same name, for scripts that expect its arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from trigram.algorithms.trigram import Trigram
from trigram.errors import MisuseError, UnsupportedError
from trigram.model import blocks
from trigram.model.counters import stats
from trigram.model.with_bagua import with_bagua
from trigram.model.wrapped import lookup, wrapped_models

_INSTEAD = {
    "delay_all_reduce_named_params": "remove it; to leave parameters out of averages, pass ignore=[names]",
    "param_to_hook_all_reduce": "remove it; to leave parameters out of averages, pass ignore=[names]",
    "mixed_precision": "use torch.autocast, and algorithm='central/bf16/sync' to send 16 bits per gradient",
    "device_mesh": "pass process_group=device_mesh.get_group()",
}
"""Arguments that only None fits, and what to do instead."""


class DistributedDataParallel(nn.Module):
    """A module that is trained data-parallel, with the interface of torch's ``DistributedDataParallel``.

    New scripts call :func:`trigram.with_bagua`, which this class calls on ``module``. As with torch's class,
    the keys of its ``state_dict`` begin with ``module.``, and no attribute of ``module`` is forwarded. The
    functions of ``trigram`` that take a wrapped model take this module or ``module``.

    Args:
        module: See :func:`trigram.with_bagua`.
        device_ids: None, or the one device that ``module`` is on: inputs are moved there.
        output_device: None, or the same device.
        dim: Without effect.
        broadcast_buffers: See :func:`trigram.with_bagua`.
        init_sync: Without effect: ranks always check that they have the same model, and get the weights of
            the first.
        process_group: The ranks that train the module; None: all.
        bucket_cap_mb: Size of a bucket of gradients in MiB; None: 25.
        find_unused_parameters: Not needed: parameters without gradients are always found.
        check_reduction: Without effect, as in torch.
        gradient_as_bucket_view: Not needed: gradients always are views into buckets.
        static_graph: Not needed: steps may always differ.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, device_mesh: Only None.
        algorithm: See :func:`trigram.with_bagua`.
        **options: The other arguments of :func:`trigram.with_bagua`, and the options of the algorithm.

    Attributes:
        module: The module.
        device: The device of its parameters; None: they have several, or there are none.
        process_group: The ranks that train it; None: all, and ``torch.distributed`` is not initialized.
        static_graph, find_unused_parameters, gradient_as_bucket_view: Without effect, see above.
        device_ids, output_device, dim, broadcast_buffers, parameters_to_ignore, bucket_bytes_cap: As given.

    Raises:
        UnsupportedError: An argument is not supported; the message says what to do instead.
        MisuseError: ``device_ids`` is not the device of ``module``; and see :func:`trigram.with_bagua`.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        *,
        algorithm: str | Trigram | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refused = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "device_mesh": device_mesh,
        }
        for name, given in refused.items():
            if given is not None:
                raise UnsupportedError(f"DistributedDataParallel: {name} is not supported; {_INSTEAD[name]}")
        self._moves_to = _device(module, device_ids, output_device)
        devices = {p.device for p in module.parameters()}
        self.device = devices.pop() if len(devices) == 1 else None
        self.device_type = None if self.device is None else self.device.type
        self.is_multi_device_module = False
        self.device_ids, self.output_device, self.dim = device_ids, output_device, dim
        self.broadcast_buffers = self.require_forward_param_sync = broadcast_buffers
        self.static_graph, self.find_unused_parameters = static_graph, find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_bytes_cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * (1 << 20))
        self.process_group = process_group
        if process_group is None and dist.is_available() and dist.is_initialized():
            self.process_group = dist.group.WORLD
        # Where torch's DistributedDataParallel._set_params_and_buffers_to_ignore_for_model puts names.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        self.module = with_bagua(
            module,
            algorithm,
            group=process_group,
            bucket_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            ignore=[*options.pop("ignore", ()), *ignored],
            **options,
        )
        self.parameters_to_ignore = set(ignored)
        wrapped_models[self] = lookup(module, "DistributedDataParallel")

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass averages gradients; scripts set it instead of entering
        :meth:`no_sync`."""
        hooks = lookup(self, "require_backward_grad_sync").hooks
        return hooks is None or hooks.sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, sync: bool) -> None:
        hooks = lookup(self, "require_backward_grad_sync").hooks
        if hooks is not None:
            hooks.sync = sync

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has, and a pickle: all but the process group."""
        return {**self.__dict__, "process_group": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``module``."""
        if self._moves_to is not None:
            move = lambda t: t.to(self._moves_to, non_blocking=True)  # noqa: E731
            args, kwargs = pytree.tree_map_only(torch.Tensor, move, (args, kwargs))
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """See :func:`trigram.no_sync`."""
        return blocks.no_sync(self)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """See :func:`trigram.join`.

        Args:
            divide_by_initial_world_size: Only True: averages are over all ranks.
            enable: False: the block has no effect.
            throw_on_early_termination: See :func:`trigram.join`.
        """
        if not enable:
            return contextlib.nullcontext()
        if not divide_by_initial_world_size:
            raise UnsupportedError(
                "DistributedDataParallel.join: divide_by_initial_world_size=False is not supported; pass "
                "sample_weight= to leave ranks without inputs out of the averages"
            )
        return blocks.join(self, throw_on_early_termination=throw_on_early_termination)

    def join_hook(self, **_: Any) -> Any:
        """Not supported.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "DistributedDataParallel.join_hook: torch's Join is not supported; write "
            "'with trigram.join(model):' instead of 'with Join([model]):'"
        )

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass broadcasts buffers."""
        return (
            self.broadcast_buffers and self.require_backward_grad_sync and any(True for _ in self.buffers())
        )

    def _set_static_graph(self) -> None:
        """Not needed, see ``static_graph``; scripts call it."""
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What ``trigram.stats`` says, and the names that scripts read."""
        return {
            **stats(self),
            "world_size": lookup(self, "_get_ddp_logging_data").size,
            "module_name": type(self.module).__name__,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_buffers": self.broadcast_buffers,
        }

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Not supported.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "DistributedDataParallel.register_comm_hook: not supported; pass algorithm=, for example "
            "'central/f16/sync' or 'powersgd' (trigram.algorithms() lists the names)"
        )


def _device(module: nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> torch.device | None:
    """The device to which inputs are moved; None: they stay where they are."""
    if not device_ids:
        if output_device is not None:
            raise MisuseError(
                f"DistributedDataParallel: output_device={output_device!r} without device_ids has no effect; "
                "remove it"
            )
        return None
    if len(device_ids) > 1:
        raise UnsupportedError(
            f"DistributedDataParallel: device_ids={list(device_ids)}: a process has one device; start one "
            "process per device"
        )
    device, there = _of_id(device_ids[0]), {p.device for p in module.parameters()}
    if there != {device} or (output_device is not None and _of_id(output_device) != device):
        found = ", ".join(sorted(map(str, there)))
        raise MisuseError(
            f"DistributedDataParallel: device_ids={list(device_ids)} and output_device={output_device!r} "
            f"must be the device of the module, which is on {found}; move the module there, or remove both"
        )
    return device


def _of_id(given: Any) -> torch.device:
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
