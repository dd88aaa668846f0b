"""Load a checkpoint on all ranks or on none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.dcp import METADATA as DCP_METADATA
from elastic_ext.checkpoints.formats.manifest import Manifest, order_or_oldest
from elastic_ext.checkpoints.memory.reading import MemoryCopy
from elastic_ext.checkpoints.memory.resharding import ReshardedCopy
from elastic_ext.checkpoints.storage import Storage, open_parent
from elastic_ext.checkpoints.writing import random_state, state
from elastic_ext.checkpoints.writing.commit import SHARED_FILE, rank_file
from elastic_ext.checkpoints.writing.errors import CheckpointError, StorageFailed
from elastic_ext.checkpoints.writing.exchange import PieceExchange
from elastic_ext.checkpoints.writing.local_tier import Directories, LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.reading import read_objects, read_tensors
from elastic_ext.checkpoints.writing.selection import Checked, Selection
from elastic_ext.training import loads
from elastic_ext.training import memory as reports

logger = logging.getLogger(__name__)

Reshard = Callable[[Sequence[Any], int, int], Any]
"""(all saved ranks' states in order, this rank, world size) -> this rank's data loader state; None: start over."""


@dataclass(frozen=True)
class Position:
    """The position of training.

    Attributes:
        step: optimizer steps done.
        epoch: current epoch, from 0.
        accumulation: micro-steps done toward the next optimizer step; their gradients are restored.
        path: the checkpoint; None at the beginning.
        world_size: world size of the group that saved it; 0 at the beginning.
        note: the note passed to `save`.
        dataloader: whether the data loader's state was restored; if not, it is in its initial state.
        generators: whether this rank's random generators were restored; if not, they were seeded, equally in each attempt.
    """

    step: int = 0
    epoch: int = 0
    accumulation: int = 0
    path: str | None = None
    world_size: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    dataloader: bool = False
    generators: bool = False


class Loader:
    """Loads checkpoints into the user's objects.

    Attributes:
        loaded: name of the checkpoint last loaded, if it is in this job's directories on disk.
        copy: name of the copy in memory last loaded; "" if the last load was from disk.
    """

    def __init__(
        self, objects: state.Objects, directories: Directories, ranks: Ranks, verify: bool, reshard: Reshard | None
    ) -> None:
        self._objects, self._directories, self._ranks, self._reshard = objects, directories, ranks, reshard
        self._selection = Selection(directories, ranks, verify)
        self.loaded: str | None = None
        self.copy = ""

    def load_newest(self, refused: Mapping[str, set[str]] | None = None) -> Position | None:
        """Load the newest complete, undamaged checkpoint; return None without one. Collective. Raises StorageFailed, OSError.

        refused: names not to load, by the address of their directory.
        """
        skipped = {address: set(names) for address, names in (refused or {}).items()}
        while (found := self._selection.newest(skipped)) is not None:
            storage, name = found
            try:
                checked = self._checked(storage, name)
            except StorageFailed:
                raise
            except CheckpointError as error:
                logger.warning("skipping checkpoint %s: %s", storage.path(name), error)
                skipped.setdefault(storage.address, set()).add(name)
                continue
            return self._put_in_place(checked)
        return None

    def load_chosen(self, path: str) -> Position:
        """Load the checkpoint that the agent chose. Collective. Raises CheckpointError, OSError.

        If a checkpoint in the local tier is gone or damaged by now, load the newest other one: its remote copy or an older one.
        """
        storage, name = open_parent(path)
        memory = self._directories.memory
        if memory is not None and storage.address == memory.storage.address:
            return self._load_from_memory(memory, name)
        try:
            return self._put_in_place(self._checked(storage, name))
        except CheckpointError as error:
            if self._directories.tier_of(storage) is None:
                raise
            logger.warning("%s cannot be loaded: %s; looking in %s", path, error, self._directories.remote.address)
            position = self.load_newest({storage.address: {name}})
            if position is None:
                raise  # starting from nothing would lose the work
            return position

    def _load_from_memory(self, memory: LocalTier, name: str) -> Position:
        """Load a copy in memory; if it cannot be loaded, the older one or the newest of the lower tiers, whatever is newer."""
        refused: set[str] = set()
        while True:
            try:
                return self._put_copy_in_place(memory, name)
            except CheckpointError as error:
                failure = error
                reports.report_copy_unusable()
                logger.warning("the copy in memory %s cannot be loaded: %s", memory.storage.path(name), error)
            refused.add(name)
            older = self._selection.newest_in_memory(memory, refused)
            if older is not None and not self._lower_has(older):
                name = older
                continue
            position = self.load_newest()
            if position is None:
                raise failure  # starting from nothing would lose the work
            return position

    def _lower_has(self, copy: str) -> bool:
        """Return whether a lower tier has something as new as this copy in memory. Collective. Raises OSError.

        If the storage does not answer, no: the agents have chosen a copy that is newer than all checkpoints, so at most the steps
        from this one to that are lost. An error would end the job's workers, and those after them.
        """
        try:
            lower = self._selection.newest({})
        except StorageFailed as error:
            logger.warning("%s; loading the older copy in memory %s without a look for something newer there", error, copy)
            return False
        return lower is not None and order_or_oldest(lower[1]) >= order_or_oldest(copy)

    def _put_copy_in_place(self, memory: LocalTier, name: str) -> Position:
        with loads.timed_check():
            manifest, parts = self._selection.parts(memory, name)
            copy: MemoryCopy | ReshardedCopy
            if parts.fit(manifest):
                copy = MemoryCopy(memory, name, manifest, self._ranks)
            else:
                copy = ReshardedCopy(memory, name, manifest, parts, self._ranks)
        position = self._restore(memory.storage, name, manifest, copy.saved, copy.fill)
        self.copy = name
        return position

    def _checked(self, storage: Storage, name: str) -> Checked:
        with loads.timed_check():
            return self._selection.checked(storage, name)

    def _put_in_place(self, checked: Checked) -> Position:
        tier, manifest, name, ranks = self._directories.tier_of(checked.storage), checked.manifest, checked.name, self._ranks
        if tier is None or checked.parts is None:
            return self._restore_files(checked.storage, name, manifest, None)
        same = manifest.world_size == ranks.world
        wanted = tiers.ranks_of(tier.nodes, tier.node) if same else range(manifest.world_size)
        small = {DCP_METADATA, SHARED_FILE, *(rank_file(rank) for rank in wanted)}
        exchange = PieceExchange(tier, checked.parts, name, ranks)
        with exchange.with_files(file for file in manifest.files if file.name in small) as storage:
            return self._restore_files(storage, name, manifest, exchange)

    def _restore_files(self, storage: Storage, name: str, manifest: Manifest, exchange: PieceExchange | None) -> Position:
        def saved(wanted: Iterable[int]) -> state.Saved:
            shared = read_objects(storage, name, SHARED_FILE)
            return state.Saved(shared, {rank: read_objects(storage, name, rank_file(rank)) for rank in wanted})

        def fill(tensors: state.StateDict) -> state.StateDict:
            read_tensors(storage, name, tensors, self._ranks, exchange)
            return tensors

        remote = storage if exchange is None else None  # what a local disk cannot read may be in another tier
        return self._restore(storage, name, manifest, saved, fill, remote)

    def _restore(
        self,
        storage: Storage,
        name: str,
        manifest: Manifest,
        read_saved: Callable[[Iterable[int]], state.Saved],
        fill: Callable[[state.StateDict], state.StateDict],
        remote: Storage | None = None,
    ) -> Position:
        """Restore the state on all ranks.

        Args:
            read_saved: returns what is not sharded, with the own states of these ranks.
            fill: fills in tensors; returns them with the values between them.
            remote: the storage that both read, if what it raises does not mean damage.
        """
        ranks, objects = self._ranks, self._objects
        same = manifest.world_size == ranks.world

        def read() -> tuple[state.Saved, state.StateDict]:
            saved = read_saved((ranks.rank,) if same else range(manifest.world_size))
            return saved, state.template(objects, saved)

        saved, template = ranks.run_on_all(read, remote)
        tensors = ranks.run_on_all(lambda: fill(template), remote)
        ranks.run_on_all(lambda: state.restore(objects, tensors, saved))
        dataloader = ranks.run_on_all(lambda: self._put_dataloader(saved.own_states, same))
        if same:
            generators = saved.own_states[ranks.rank]["generators"]
            random_state.restore(generators)  # last: the steps before may draw from them
            if dataloader:
                random_state.restore_after_iter(objects.dataloader, generators)
        else:
            ways = (name, manifest.world_size, ranks.world)
            logger.warning("%s was saved by %s ranks and is loaded by %s: random generators are reseeded", *ways)
            random_state.seed(manifest.step, manifest.accumulation, ranks.rank, ranks.world)
        self.loaded, self.copy = name if storage in self._directories else None, ""
        logger.info("loaded %s: step %s, epoch %s", storage.path(name), manifest.step, manifest.epoch)
        return Position(
            step=manifest.step,
            epoch=manifest.epoch,
            accumulation=manifest.accumulation,
            path=storage.path(name),
            world_size=manifest.world_size,
            note=manifest.extra,
            dataloader=dataloader,
            generators=same,
        )

    def _put_dataloader(self, own_states: Mapping[int, state.StateDict], same: bool) -> bool:
        """Restore the data loader; return whether its state was restored. same: the world size is that of the save."""
        loader, ranks = self._objects.dataloader, self._ranks
        if loader is None or any("dataloader" not in own for own in own_states.values()):
            return False
        if same:
            found = own_states[ranks.rank]["dataloader"]
        elif self._reshard is None:
            logger.warning(
                "the data loader starts from the beginning: its state was saved by %s ranks, and no reshard_dataloader was given",
                len(own_states),
            )
            return False
        else:
            found = self._reshard([own_states[rank]["dataloader"] for rank in sorted(own_states)], ranks.rank, ranks.world)
            if found is None:
                return False
        loader.load_state_dict(found)
        return True
