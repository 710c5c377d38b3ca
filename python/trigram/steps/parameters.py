"""The parameters of a model that an algorithm averages, and whether a script has changed them since."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.errors import MisuseError, UnsupportedError
from trigram.gpu import device
from trigram.optimizers import optimizer_hooks
from trigram.steps.update_watch import ValuesSnapshot


class Parameters:
    """The parameters of one model, as they were found last.

    Args:
        groups: The model's process groups; they name the ignored parameters and buffers.

    Attributes:
        all: The parameters, in the model's order.
        names: Their names.
        index: By ``id()``, their places there.
        trains: For each, whether it trains.
        ids: ``id()`` of each that trains.
    """

    def __init__(self, groups: ModelGroups) -> None:
        self.groups = groups
        self.all: list[torch.Tensor] = []
        self.names: list[str] = []
        self.index: dict[int, int] = {}
        self.trains: list[bool] = []
        self.ids: set[int] = set()
        self._layouts: list[Any] = []
        self._before_loading: ValuesSnapshot | None = None

    @property
    def trained(self) -> list[torch.Tensor]:
        """Those that train."""
        return [p for p, trains in zip(self.all, self.trains, strict=True) if trains]

    def names_by_id(self) -> dict[int, str]:
        """Their names by ``id()``."""
        return {id(p): name for name, p in zip(self.names, self.all, strict=True)}

    def is_trained(self, param: torch.Tensor) -> bool:
        """Whether the script trains the parameter now."""
        return param.requires_grad

    def tensors(self, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """The parameters and buffers of the model with their names, without the ignored ones."""
        named = [*model.named_parameters(), *model.named_buffers()]
        return [(n, t) for n, t in named if n not in self.groups.ignored]

    def find(self, model: nn.Module) -> None:
        """Finds the parameters, and those that train.

        Raises:
            UnsupportedError: A parameter that trains is where, or of a dtype that, no average is made.
            MisuseError: No parameter trains.
        """
        named = [(n, p) for n, p in model.named_parameters() if n not in self.groups.ignored]
        self.names = [n for n, _ in named]
        self.all = [p for _, p in named]
        self.index = {id(p): i for i, p in enumerate(self.all)}
        self.trains = [self.is_trained(p) for p in self.all]
        trained = [(n, p) for (n, p), trains in zip(named, self.trains, strict=True) if trains]
        if not trained:
            raise MisuseError(
                "with_bagua: the model has no parameter that requires a gradient; set requires_grad=True on "
                "at least one"
            )
        for name, p in trained:
            _check(name, p, trained[0][1].device)
        self.ids = {id(p) for _, p in trained}
        self.groups.trained |= self.ids
        self._layouts = [_layout(p) for p in self.all]

    def new(self, model: nn.Module) -> list[torch.Tensor]:
        """The parameters of the model that were not among them when they were found."""
        return [t for _, t in self.tensors(model) if isinstance(t, nn.Parameter) and id(t) not in self.index]

    def were_replaced(self, model: nn.Module) -> bool:
        """Whether parameters were added, removed or replaced since they were found, or have another dtype,
        shape, device or memory format."""
        now = [p for n, p in model.named_parameters() if n not in self.groups.ignored]
        return (
            len(now) != len(self.all)
            or any(p is not q for p, q in zip(now, self.all, strict=True))
            or any(_layout(p) != layout for p, layout in zip(now, self._layouts, strict=True))
        )

    def train_otherwise(self) -> bool:
        """Whether the script trains other parameters than when they were found."""
        return [self.is_trained(p) for p in self.all] != self.trains

    # What a script loads.

    def before_load(self) -> None:
        """``load_state_dict`` is about to change the model, or a module in it."""
        if self._before_loading is None:
            self._before_loading = ValuesSnapshot(self.all)

    def were_loaded(self, has_failed: bool) -> bool:
        """Whether ``load_state_dict`` has changed parameters since the last call. A script may load other
        weights on one rank, and then those it had.

        Args:
            has_failed: The last pass has failed, perhaps on this rank only: its weights may be those that all
                load.
        """
        before, self._before_loading = self._before_loading, None
        return before is not None and (has_failed or not before.same(self.all))

    def forget_loading(self) -> None:
        """What was loaded came with a state of the algorithm that was saved together with it."""
        self._before_loading = None


class FrozenInTurn(Parameters):
    """Parameters of which a script freezes parts in turn, each while an optimizer updates the others.

    What an optimizer has stays trained, and so does everything if there is no optimizer: a script updates its
    weights by hand.

    Args:
        groups: The model's process groups.
        keeps_all: Says whether all that have trained stay trained: whatever is frozen may be averaged, for
            that changes nothing.
    """

    def __init__(self, groups: ModelGroups, keeps_all: Callable[[], bool]) -> None:
        super().__init__(groups)
        self._keeps_all = keeps_all
        self._holders: dict[int, weakref.ref[Optimizer] | None] = {}

    def is_trained(self, param: torch.Tensor) -> bool:
        """Whether the script trains the parameter, if not in this step."""
        if param.requires_grad or id(param) not in self.groups.trained:
            return param.requires_grad
        if self._keeps_all():
            return True
        holder = self._holders.get(id(param), _nobody)
        if holder is not None and holder() is None:
            self._find_holders()
        return id(param) in self._holders

    def _find_holders(self) -> None:
        """Finds the optimizers of all parameters at once, as it takes long, and forgets what is frozen and in
        none of them."""
        optimizers = optimizer_hooks.optimizers_of(set(self.index))
        self._holders = {} if optimizers else dict.fromkeys(self.index)
        for optimizer in optimizers:
            self._holders |= dict.fromkeys(optimizer_hooks.parameters_of(optimizer), weakref.ref(optimizer))
        self.groups.trained -= {id(p) for p in self.all if not p.requires_grad} - self._holders.keys()

    def frozen_word(self) -> int:
        """16 bits of which parameters are frozen in this step, of those that train; 0: none."""
        frozen = [name for name, p in zip(self.names, self.all, strict=True) if not p.requires_grad]
        return zlib.crc32("\n".join(frozen).encode()) & 0xFFFF


def _nobody() -> None:
    """Like a reference to an optimizer that does not exist any more."""


def _check(name: str, p: torch.Tensor, expected: torch.device) -> None:
    if p.device != expected:
        raise UnsupportedError(
            f"with_bagua: parameter {name} is on {p.device}, but other parameters are on {expected}; move "
            "the whole model to one device"
        )
    if not p.is_cpu and p.device.type not in device.kinds:
        raise UnsupportedError(
            f"with_bagua: parameter {name} is on {p.device}; move the model to the CPU or to a GPU"
        )
    if not (p.is_floating_point() or p.is_complex()):
        raise UnsupportedError(
            f"with_bagua: parameter {name} has dtype {p.dtype}, but only floating-point and complex "
            "parameters can be trained; set requires_grad=False on it"
        )


def _layout(p: torch.Tensor) -> tuple[int, torch.dtype, torch.Size, torch.device, bool]:
    # The address tells of `torch.utils.swap_tensors`: the same object of Python, another node of the graph.
    return p._cdata, p.dtype, p.shape, p.device, coalesced.is_channels_last(p)
