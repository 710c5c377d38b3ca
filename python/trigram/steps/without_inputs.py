"""What a rank does of a model's steps when it has no inputs left, inside :func:`trigram.join`."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from torch import nn

from trigram.averaging.groups import ModelGroups


class Prepared(Protocol):
    """The passes of a model, see :class:`trigram.steps.passes.Passes`."""

    prepared: bool

    def begin(self, param: int | None) -> None:
        """Begins a pass."""


class Joinable(Protocol):
    """What :func:`trigram.join` needs of a model's step hooks.

    Attributes:
        steps: The number of steps made.
        idle_steps: Those of them that this rank made without inputs.
        weights_differ: Whether ranks may hold different weights.
        passes: The model's passes. One that is prepared has been announced to all ranks, and is not over.
    """

    steps: int
    idle_steps: int
    weights_differ: bool
    groups: ModelGroups

    @property
    def passes(self) -> Prepared:
        """See the class."""

    def abort_failed(self, timeout: float | None = None) -> None:
        """Aborts, on all ranks, a backward pass that has raised an exception on this one."""

    def abort_pass(self) -> None:
        """Aborts a pass on all ranks."""

    def drain(self, timeout: float | None = None) -> None:
        """Ends the averaging steps under way, on all ranks."""


HooksT = TypeVar("HooksT", bound=Joinable)


class WithoutInputs(Generic[HooksT]):
    """The steps that one model makes on a rank without inputs.

    Where gradients are averaged and where weights are, what differs is overridden.

    Args:
        model: The module.
        hooks: Its step hooks.
    """

    def __init__(self, model: nn.Module, hooks: HooksT) -> None:
        self.model, self.hooks = model, hooks

    def inputs_end(self) -> None:
        """This rank has no inputs left; completes its last step."""
        self.hooks.abort_failed()

    def skip_boundary(self) -> None:
        """Counts a step that the other ranks have begun and that no rank completes."""

    def step(self, src: int) -> None:
        """Takes part in a step of the other ranks; ``src``: the group rank whose buffers all ranks get."""
        raise NotImplementedError

    def share_optimizers(self, longest: int) -> None:
        """Some ranks have made fewer updates: all get the optimizers of the group rank ``longest``."""

    def block_ends(self) -> None:
        """The block of ``trigram.join`` is over on all ranks."""
