"""A DataLoader for elastic jobs: each sample of an epoch counts once, while ranks are lost and join."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from trigram.data.dealing import Dealing
from trigram.errors import ConfigError, MisuseError
from trigram.runtime import world

_OURS = ("sampler", "batch_sampler", "drop_last", "batch_size", "shuffle")


class ElasticLoader:
    """Batches of a dataset, dealt to the ranks that are in the job at each step.

    In a job that averages gradients each sample counts once per epoch: what a lost rank had for a step that
    was made without it is dealt again before the epoch ends, and a rank that joins goes on where the others
    are. Pass the loader to ``elastic=``, so that ranks that join get its state::

        loader = ElasticLoader(dataset, batch_size=32, num_workers=2)
        model = trigram.with_bagua(model, optimizer=optimizer, elastic=[loader])
        while loader.epoch < 10:
            for inputs, targets in loader:
                ...                    # one forward pass, backward pass and update

    An epoch ends with a smaller step if its samples do not fill one; samples that are fewer than ranks are
    left out. In jobs that are not elastic it deals to all ranks. Where ranks average weights, they need not
    be at the same step, so :func:`trigram.with_bagua` refuses it.

    Args:
        dataset: A map-style dataset, the same on all ranks.
        batch_size: Samples of a rank in each step.
        shuffle: Each epoch has another order.
        seed: Of the order; the same on all ranks.
        per_replica: With ``init(replica_size=)``: the ranks of a replica get the same samples, as tensor
            parallelism needs; else each rank has its own, as FSDP needs.
        options: Of torch's ``DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, ...

    Attributes:
        epoch: The number of the epoch, from 0; it grows when an epoch ends.
        place: What is made of each batch, such as a copy on a GPU; None: nothing.

    Raises:
        ConfigError: ``batch_size`` is less than 1.
        MisuseError: The dataset has no length, or an option is one that this class decides.
    """

    averages_gradients_only = True

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        per_replica: bool = False,
        **options: Any,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"ElasticLoader: batch_size={batch_size} is invalid; pass a number from 1 on")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise MisuseError(
                "ElasticLoader: the dataset has no length and no indices, so its samples cannot be dealt; "
                "pass a map-style dataset"
            )
        if decided := [name for name in _OURS if name in options]:
            raise MisuseError(f"ElasticLoader: it decides {', '.join(decided)} itself; remove the argument")
        self._dealing = Dealing(len(dataset), batch_size, seed if shuffle else None)
        self._per_replica = per_replica
        self._batches = _Ahead()
        options.setdefault("persistent_workers", bool(options.get("num_workers", 0)))
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._batches, **options)  # type: ignore[arg-type]
        self.place: Callable[[Any], Any] | None = None
        self._fetching: Iterator[Any] | None = None
        self._dealt_at = 0  # so many passes had counted when the last batch was dealt
        self._for: list[int] | None = None  # the holders for whom batches are fetched ahead

    @property
    def epoch(self) -> int:
        """See the class."""
        return self._dealing.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch anew. All ranks call it, outside of a loop over the loader."""
        self._dealing.begin(int(epoch))
        self._fetching = None

    def __len__(self) -> int:
        """Steps of a whole epoch, with as many ranks as there are now."""
        dealing = self._dealing
        return Dealing(dealing.samples, dealing.batch, None).steps(len(self._holders()))

    def steps_left(self, after: bool) -> int:
        """Steps of this epoch beyond the one whose batch was the last, for loops that count.

        Args:
            after: That step is over, so that it is known who has counted in it; else as if nobody is lost.
        """
        dealing = self._settled(self._counted() if after else self._dealing.holders)
        return dealing.steps(len(self._holders()))

    def _settled(self, counted: Collection[int]) -> Dealing:
        """The dealing once the step of the last batch is over, in which only ``counted`` have counted."""
        dealing = replace(self._dealing, returned=list(self._dealing.returned))
        if dealing.holders:
            dealing.settle(counted)
        return dealing

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches until the end of the epoch; after a resumed one, those that are left."""
        dealing = self._dealing
        while True:
            self._settle()
            holders = self._holders()
            if not dealing.deal(holders):
                dealing.begin(dealing.epoch + 1)
                self._fetching = None
                return
            self._dealt_at = self._commits()
            if self._fetching is None or holders != self._for:
                self._batches.begin(dealing, self._me())
                self._for, self._fetching = holders, iter(self._loader)
            batch = next(self._fetching)
            yield batch if self.place is None else self.place(batch)

    def _settle(self) -> None:
        """The step of the last batch is over."""
        holders = self._dealing.holders
        if not holders:
            return
        counted = self._counted()
        if not set(holders) <= set(counted):
            self._fetching = None  # others are dealt next than were fetched
        self._dealing.settle(counted)

    def state_dict(self) -> dict[str, Any]:
        """The epoch and what of it is used, for a checkpoint between two steps and for ranks that join."""
        # Once the step of the last batch has counted, only now is it known who was lost in it.
        is_over = self._commits() > self._dealt_at
        return (self._settled(self._counted()) if is_over else self._dealing).state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was called, on any number of ranks."""
        self._dealing.load(state)
        self._fetching = None
        present = world.present()
        mine = None if present is None else present.elastic
        if mine is not None and mine.newcomer and mine.ranks and not self._dealing.holders:
            # This rank was admitted between two steps, and is in its first. The others have dealt it since.
            holders = self._holders()
            if not self._dealing.deal(holders):
                self._dealing.begin(self._dealing.epoch + 1)
                self._dealing.deal(holders)

    def _unit(self, rank: int) -> int:
        present = world.present()
        size = 1 if present is None or present.elastic is None else present.elastic.replica_size
        return rank // size if self._per_replica else rank

    def _me(self) -> int:
        return self._unit(world.current().rank)

    def _holders(self) -> list[int]:
        """Who gets a share now, ascending."""
        return sorted({self._unit(rank) for rank in world.training()})

    @staticmethod
    def _commits() -> int:
        """How many passes have counted; 0 in a job that is not elastic."""
        present = world.present()
        return 0 if present is None or present.elastic is None else present.elastic.commits

    def _counted(self) -> Collection[int]:
        """Whose samples counted in the last step."""
        present = world.present()
        if present is None or present.elastic is None or present.elastic.counted is None:
            return self._dealing.holders
        return {self._unit(rank) for rank in present.elastic.counted}


class _Ahead:
    """The batches of one rank from now on, if nothing changes: a DataLoader fetches them ahead."""

    def __init__(self) -> None:
        self._dealing: Dealing | None = None
        self._me = 0

    def begin(self, dealing: Dealing, me: int) -> None:
        """Begins with the step under way."""
        self._dealing, self._me = copy.deepcopy(dealing), me

    def __iter__(self) -> Iterator[list[int]]:
        """Lists of samples."""
        dealing = copy.deepcopy(self._dealing)
        if dealing is None:
            return
        holders, share = list(dealing.holders), dealing.share
        while share:
            yield dealing.of(self._me)
            dealing.settle(holders)
            share = dealing.share if dealing.deal(holders) else 0
