"""Select the checkpoint to load, check it for damage, and load it on all ranks or on none. All ranks get the same answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ext.base.printable import counted
from elastic_ext.checkpoints import state
from elastic_ext.checkpoints.directory import own_files, tiers
from elastic_ext.checkpoints.directory.own_files import MANIFEST, Manifest, ManifestError, StoredFile, checksum
from elastic_ext.checkpoints.formats.candidates import order_or_oldest
from elastic_ext.checkpoints.formats.layouts import METADATA as DCP_METADATA
from elastic_ext.checkpoints.memory.part import MemoryCopy, ReshardedCopy, fetch_parts
from elastic_ext.checkpoints.ranks import CheckpointError, Directories, LocalTier, Parts, PieceExchange, Ranks, StorageFailed
from elastic_ext.checkpoints.storage import Storage, open_parent
from elastic_ext.checkpoints.writing.dcp_files import read_objects, read_tensors
from elastic_ext.checkpoints.writing.saving import SHARED_FILE, rank_file
from elastic_ext.training import generators
from elastic_ext.training.progress import this_worker

logger = logging.getLogger(__name__)


Refused = Mapping[str, Collection[str]]
"""Names of checkpoints not to load, by the address of their directory, because both tiers may have the same name."""


class Selection:
    """Finds and checks checkpoints. verify: also compare checksums, which reads every file; sizes are always compared."""

    def __init__(self, directories: Directories, ranks: Ranks, verify: bool) -> None:
        self._directories, self._ranks, self._verify = directories, ranks, verify

    def newest(self, refused: Refused) -> tuple[Storage, str] | None:
        """Return the newest complete checkpoint of both tiers, the local copy if both have it. Collective.

        Raises StorageFailed if the remote storage does not answer.
        """
        remote, tier = self._directories.remote, self._directories.local

        def look() -> tuple[str | None, frozenset[str]]:
            try:
                quarantined = own_files.quarantined_names(remote)
                return _newest_complete(remote, quarantined.union(refused.get(remote.address, ()))), quarantined
            except OSError as error:
                raise StorageFailed(f"{remote.address} does not answer: {error}") from error

        name, quarantined = self._ranks.from_rank_0(look)
        in_remote = (remote, name) if name is not None else None
        if tier is None:
            return in_remote
        local, offers = tier.storage, self.offers(tier)
        names = quarantined.union(refused.get(local.address, ()))
        offer = tiers.newest_loadable(offers, names)
        if offer is None or (name is not None and order_or_oldest(name) > order_or_oldest(offer.name)):
            return in_remote
        return local, offer.name

    def offers(self, tier: LocalTier) -> list[list[tiers.Offer]]:
        """Return what each node has in a tier. Collective."""
        offers = self._ranks.all_gather(self._ranks.run_on_all(lambda: tiers.offers(tier.storage) if tier.first else None))
        return [each for each in offers if each is not None]

    def checked(self, storage: Storage, name: str) -> tuple[Manifest, Parts | None]:
        """Check all files, a share on each rank; return the manifest, and in the local tier which node has which files.

        Collective. Raises CheckpointError on all ranks if it must not be used.

        That is StorageFailed where the remote storage is to blame. What a local disk cannot read is damaged: it may stay so, and
        other tiers have another copy.
        """
        tier, rank = self._directories.tier_of(storage), self._ranks.rank
        parts: Parts | None = None
        if tier is None:
            manifest = self._ranks.from_rank_0(lambda: _manifest(storage, name))
            share = manifest.files[rank :: self._ranks.world]
        else:
            parts = self.parts(tier, name)
            manifest = parts.manifest
            mine = [file for file in manifest.files if parts.has(tier.node, file.name)]
            share = tuple(file for file in mine if parts.responsible_rank(tier.node, file.name) == rank)

        def check() -> None:
            wrong = [text for file in share if (text := self._damage(storage, name, file))]
            if wrong:
                raise CheckpointError(f"{storage.path(name)}: {'; '.join(wrong)}")

        self._ranks.run_on_all(check)
        return manifest, parts

    def _damage(self, storage: Storage, name: str, file: StoredFile) -> str:
        """Return how a file differs from its manifest entry, or ""."""
        path = f"{name}/{file.name}"
        try:
            found = storage.stat(path)
            if found is None:
                return f"{file.name} is missing"
            if found.size != file.size:
                return f"{file.name} has {found.size} bytes, expected {file.size}"
            if not self._verify:
                return ""
            with storage.open(path) as stream:
                found_sum = checksum(stream)
        except OSError as error:
            if self._directories.tier_of(storage) is None and not storage.means_damage(error):
                raise StorageFailed(f"{storage.path(path)} cannot be read: {error}") from error
            return f"{file.name} cannot be read: {error}"
        return "" if found_sum == file.checksum else f"{file.name} has checksum {found_sum}, expected {file.checksum}"

    def parts(self, tier: LocalTier, name: str) -> Parts:
        """Find which node has which files. Collective. Raises CheckpointError on all ranks if a file is on no node."""
        path, ranks = tier.storage.path(name), self._ranks
        mine = _part_here(tier.storage, name) if tier.first else None
        found = ranks.all_gather((mine[0], mine[2]) if mine else None)
        first = next((rank for rank, each in enumerate(found) if each is not None), None)
        if first is None:
            raise CheckpointError(f"{path} has no {MANIFEST} on any node: not a complete checkpoint of elastic_ext")
        manifest = ranks.all_gather(mine[1] if mine and ranks.rank == first else None)[first]
        assert manifest is not None, "that rank has one"
        _refuse_other(manifest, name, path)
        digest = next(each[0] for each in found if each is not None)
        same = [(rank, each[1]) for rank, each in enumerate(found) if each is not None and each[0] == digest]
        here = {tiers.node_of(tier.nodes, rank): files for rank, files in same}
        holders = {file.name: tuple(node for node, files in here.items() if file.name in files) for file in manifest.files}
        lost = [file for file, nodes in holders.items() if not nodes]
        if lost:
            raise CheckpointError(f"{path}: {counted(len(lost), 'file')} on no node, e.g. {lost[0]}")
        return Parts(tier, name, manifest, holders)


def _part_here(local: Storage, name: str) -> tuple[str, Manifest, frozenset[str]] | None:
    """Return what a node has of a checkpoint: the digest of the manifest, the manifest, and the files. None: nothing.

    On another node the same name may be another checkpoint, with another digest.
    """
    try:
        read = tiers.manifest_of(local, name)
        return (tiers.digest(read[1]), read[0], tiers.files_here(local, name, read[0])) if read is not None else None
    except (ManifestError, OSError) as error:  # another node may have it
        logger.warning("%s: %s", local.path(name), error)
        return None


def _manifest(storage: Storage, name: str) -> Manifest:
    """Read the manifest. Raises CheckpointError."""
    path = storage.path(name)
    try:
        read = tiers.manifest_of(storage, name)
    except ManifestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        failed = CheckpointError if storage.means_damage(error) else StorageFailed
        raise failed(f"{path}: {error}") from error
    if read is None:
        raise CheckpointError(f"{path} has no {MANIFEST}: not a complete checkpoint of elastic_ext")
    _refuse_other(read[0], name, path)
    return read[0]


def _refuse_other(manifest: Manifest, name: str, path: str) -> None:
    if order_or_oldest(name) not in (order_or_oldest(""), manifest.order):
        raise CheckpointError(f"{path} holds the manifest of step {manifest.step}, generation {manifest.generation}")


def _newest_complete(storage: Storage, refused: Collection[str]) -> str | None:
    """Return our newest checkpoint that has a manifest and is not refused. Raises OSError."""
    for name in tiers.own_checkpoints(storage):
        if name not in refused:
            if storage.stat(f"{name}/{MANIFEST}") is not None:
                return name
            logger.info("skipping checkpoint %s: no %s, the save did not finish", storage.path(name), MANIFEST)
    return None


Reshard = Callable[[Sequence[Any], int, int], Any]
"""(all saved ranks' states in order, this rank, world size) -> this rank's data loader state; None: start over."""


@dataclass(frozen=True)
class TrainingPosition:
    """The position of training."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # current epoch, from 0
    accumulation: int = 0  # micro-steps done toward the next optimizer step; their gradients are restored
    path: str | None = None  # the checkpoint; None at the beginning
    world_size: int = 0  # world size of the group that saved it; 0 at the beginning
    note: Mapping[str, Any] = field(default_factory=dict)  # the note passed to `save`
    dataloader: bool = False  # whether the data loader's state was restored; if not, it is in its initial state
    # whether this rank's random generators were restored; if not, they were seeded, equally in each attempt
    generators: bool = False


class Loader:
    def __init__(
        self, objects: state.Objects, directories: Directories, ranks: Ranks, verify: bool, reshard: Reshard | None
    ) -> None:
        self._objects, self._directories, self._ranks, self._reshard = objects, directories, ranks, reshard
        self._selection = Selection(directories, ranks, verify)
        self.loaded: str | None = None  # name of the checkpoint last loaded, if it is in this job's directories on disk
        self.copy = ""  # name of the copy in memory last loaded; "" if the last load was from disk

    def load_newest(self, refused: Mapping[str, set[str]] | None = None) -> TrainingPosition | None:
        """Load the newest complete, undamaged checkpoint; return None without one. Collective. Raises StorageFailed, OSError.

        refused: names not to load, by the address of their directory.
        """
        skipped = {address: set(names) for address, names in (refused or {}).items()}
        while (found := self._selection.newest(skipped)) is not None:
            storage, name = found
            try:
                manifest, parts = self._checked(storage, name)
            except StorageFailed:
                raise
            except CheckpointError as error:
                logger.warning("skipping checkpoint %s: %s", storage.path(name), error)
                skipped.setdefault(storage.address, set()).add(name)
                continue
            return self._put_in_place(storage, name, manifest, parts)
        return None

    def load_chosen(self, path: str) -> TrainingPosition:
        """Load the checkpoint that the agent chose. Collective. Raises CheckpointError, OSError.

        If a checkpoint in the local tier is gone or damaged by now, load the newest other one: its remote copy or an older one.
        """
        storage, name = open_parent(path)
        memory = self._directories.memory
        if memory is not None and storage.address == memory.storage.address:
            return self._load_from_memory(memory, name)
        try:
            return self._put_in_place(storage, name, *self._checked(storage, name))
        except CheckpointError as error:
            if self._directories.tier_of(storage) is None:
                raise
            logger.warning("%s cannot be loaded: %s; looking in %s", path, error, self._directories.remote.address)
            position = self.load_newest({storage.address: {name}})
            if position is None:
                raise  # starting from nothing would lose the work
            return position

    def _load_from_memory(self, memory: LocalTier, name: str) -> TrainingPosition:
        """Load a copy in memory; if it cannot be loaded, the older one or the newest of the lower tiers, whichever is newer."""
        refused: set[str] = set()
        while True:
            try:
                return self._put_copy_in_place(memory, name)
            except CheckpointError as error:
                failure = error
                this_worker().row.report_copy_unusable()
                logger.warning("the copy in memory %s cannot be loaded: %s", memory.storage.path(name), error)
            refused.add(name)
            older = tiers.newest_loadable(self._selection.offers(memory), refused)
            if older is not None and not self._lower_has(older.name):
                name = older.name
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

    def _put_copy_in_place(self, memory: LocalTier, name: str) -> TrainingPosition:
        with this_worker().row.timed_check():
            parts = self._selection.parts(memory, name)
            if parts.manifest.nodes == memory.nodes:
                parts = fetch_parts(parts, self._ranks)
            copy = MemoryCopy(parts, self._ranks) if parts.fit else ReshardedCopy(parts, self._ranks)
        position = self._restore(memory.storage, name, parts.manifest, copy.saved, copy.fill)
        self.copy = name
        return position

    def _checked(self, storage: Storage, name: str) -> tuple[Manifest, Parts | None]:
        with this_worker().row.timed_check():
            return self._selection.checked(storage, name)

    def _put_in_place(self, storage: Storage, name: str, manifest: Manifest, parts: Parts | None) -> TrainingPosition:
        tier, ranks = self._directories.tier_of(storage), self._ranks
        if tier is None or parts is None:
            return self._restore_files(storage, name, manifest, None)
        same = manifest.world_size == ranks.world
        wanted = tiers.ranks_of(tier.nodes, tier.node) if same else range(manifest.world_size)
        small = {DCP_METADATA, SHARED_FILE, *(rank_file(rank) for rank in wanted)}
        exchange = PieceExchange(parts, ranks)
        with exchange.with_files(file for file in manifest.files if file.name in small) as completed:
            return self._restore_files(completed, name, manifest, exchange)

    def _restore_files(self, storage: Storage, name: str, manifest: Manifest, exchange: PieceExchange | None) -> TrainingPosition:
        def saved(wanted: Iterable[int]) -> state.UnshardedState:
            shared = read_objects(storage, name, SHARED_FILE)
            return state.UnshardedState(shared, {rank: read_objects(storage, name, rank_file(rank)) for rank in wanted})

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
        read_saved: Callable[[Iterable[int]], state.UnshardedState],
        fill: Callable[[state.StateDict], state.StateDict],
        remote: Storage | None = None,
    ) -> TrainingPosition:
        """Restore the state on all ranks.

        Args:
            read_saved: returns what is not sharded, with the own states of these ranks.
            fill: fills in tensors; returns them with the values between them.
            remote: the storage that both read, if what it raises does not mean damage.
        """
        ranks, objects = self._ranks, self._objects
        same = manifest.world_size == ranks.world

        def read() -> tuple[state.UnshardedState, state.StateDict]:
            saved = read_saved((ranks.rank,) if same else range(manifest.world_size))
            return saved, state.template(objects, saved)

        saved, template = ranks.run_on_all(read, remote)
        tensors = ranks.run_on_all(lambda: fill(template), remote)
        ranks.run_on_all(lambda: state.restore(objects, tensors, saved))
        dataloader = ranks.run_on_all(lambda: self._put_dataloader(saved.own_states, same))
        if same:
            before = saved.own_states[ranks.rank]["generators"]
            generators.restore(before)  # last: the steps before may draw from them
            if dataloader:
                generators.restore_after_iter(objects.dataloader, before)
        else:
            ways = (name, manifest.world_size, ranks.world)
            logger.warning("%s was saved by %s ranks and is loaded by %s: random generators are reseeded", *ways)
            generators.seed(manifest.step, manifest.accumulation, ranks.rank, ranks.world)
        self.loaded, self.copy = name if storage in self._directories else None, ""
        logger.info("loaded %s: step %s, epoch %s", storage.path(name), manifest.step, manifest.epoch)
        return TrainingPosition(
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
