"""What torch asks a process group about itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from trigram.backend.calls.starting import Starting
from trigram.backend.handles.timeouts import seconds
from trigram.backend.names import DEVICES, NAME
from trigram.runtime.memory import empty


@dataclass
class Options:
    """The options that a process group reports, named as torch's backends name theirs."""

    _timeout: timedelta
    backend: str = NAME


class Identity(Starting):
    """Rank and size, names, timeouts, memory, and the answers to what a backend supports."""

    _store: Any
    _options: Any
    _name = ""
    _description = "undefined"
    _bound: torch.device | None = None

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def rank(self) -> int:
        """This rank in the group."""
        return self.trigram_group.rank

    def size(self) -> int:
        """The number of ranks."""
        return self.trigram_group.size

    getRank, getSize = rank, size  # the names that C++ asks for

    def name(self) -> str:
        """The backend's name."""
        return NAME

    getBackendName = _get_backend_name = name

    def getGroupName(self) -> str:
        """The group's name in torch's registry."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Sets the name, for Python and for C++."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What the group is for."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Sets what the group is for."""
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        """The group's name in torch's registry."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._description

    @property
    def bound_device_id(self) -> torch.device | None:
        """The ``device_id`` of ``init_process_group``."""
        return self._bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound = device

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in DEVICES]

    def get_group_store(self) -> Any:
        """The store that the group was made with."""
        return self._store

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _backend_id(self, kind: Any) -> int:
        return id(self)

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """Nothing: calls have no hooks."""

    @property
    def options(self) -> Any:
        """Options with the group's timeout."""
        return self._options

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of calls that set none."""
        self.trigram_group.timeout = seconds(timeout)
        for group in self._beside.values():
            group.timeout = self.trigram_group.timeout
        self._options._timeout = timeout

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self.trigram_group.core.next()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the engine counts."""

    def perform_nocolor_split(self, device: torch.device | None = None) -> None:
        """Nothing: ranks that are not in a group take no part in making it."""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Nothing: the ranks are connected already."""

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether :meth:`allocate_tensor` gives memory that calls use without a copy."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor in registered memory, as :func:`trigram.empty`."""
        return empty(size, dtype=dtype, device=device)
