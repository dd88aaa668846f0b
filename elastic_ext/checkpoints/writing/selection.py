"""Select the checkpoint to load, and check it for damage. All ranks get the same answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from elastic_ext.checkpoints.choice import in_memory
from elastic_ext.checkpoints.choice.in_memory import NodeMemory
from elastic_ext.checkpoints.directory import marks, tiers
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, StoredFile, decode, order_of
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.errors import CheckpointError, StorageFailed
from elastic_ext.checkpoints.writing.exchange import Parts
from elastic_ext.checkpoints.writing.local_tier import Directories, LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.reading import find_damage

logger = logging.getLogger(__name__)

T = TypeVar("T")

Refused = Mapping[str, Collection[str]]
"""Names of checkpoints not to load, by the address of their directory, because both tiers may have the same name."""


@dataclass(frozen=True)
class Checked:
    """A checkpoint whose files were all checked. parts: in the local tier, which node has which of its files."""

    storage: Storage
    name: str
    manifest: Manifest
    parts: Parts | None = None

    @property
    def path(self) -> str:
        return self.storage.path(self.name)


class Selection:
    """Finds and checks checkpoints. verify: also compare checksums, which reads every file; sizes are always compared."""

    def __init__(self, directories: Directories, ranks: Ranks, verify: bool) -> None:
        self._directories, self._ranks, self._verify = directories, ranks, verify

    def newest(self, refused: Refused) -> tuple[Storage, str] | None:
        """Return the newest complete checkpoint of both tiers, the local copy if both have it. Collective.

        Raises StorageFailed if the remote storage does not answer.
        """
        remote, tier = self._directories.remote, self._directories.local
        name = self._ranks.from_rank_0(_asking(remote, lambda: _newest_complete(remote, refused.get(remote.address, ()))))
        in_remote = (remote, name) if name is not None else None
        if tier is None:
            return in_remote
        local, first = tier.storage, tier.first
        offers = self._ranks.all_gather(self._ranks.run_on_all(lambda: tiers.offers(local) if first else None))
        names = self._ranks.from_rank_0(_asking(remote, lambda: marks.quarantined_names(remote)))
        names = names.union(refused.get(local.address, ()))
        offer = tiers.newest_loadable([each for each in offers if each is not None], names)
        if offer is None or (name is not None and _order(name) > _order(offer.name)):
            return in_remote
        return local, offer.name

    def newest_in_memory(self, memory: LocalTier, refused: Collection[str]) -> str | None:
        """Return the newest copy in memory that these ranks can load, not counting the refused ones. Collective."""
        offers = self._ranks.all_gather(self._ranks.run_on_all(lambda: tiers.offers(memory.storage) if memory.first else None))
        nodes = zip(memory.nodes, (each for each in offers if each is not None), strict=True)
        found = in_memory.newest_whole([NodeMemory(workers, tuple(offers)) for workers, offers in nodes], refused).offer
        return found.name if found is not None else None

    def checked(self, storage: Storage, name: str) -> Checked:
        """Check all files, a share on each rank. Collective. Raises CheckpointError on all ranks if it must not be used.

        That is StorageFailed where the remote storage is to blame. What a local disk cannot read is damaged: it may stay so, and
        other tiers have another copy.
        """
        tier, rank = self._directories.tier_of(storage), self._ranks.rank
        share: tuple[StoredFile, ...]
        if tier is None:
            manifest = self._ranks.from_rank_0(lambda: _manifest(storage, name))
            found, share = Checked(storage, name, manifest), manifest.files[rank :: self._ranks.world]
        else:
            manifest, parts = self.parts(tier, name)
            mine = [file for file in manifest.files if parts.has(tier.node, file.name)]
            found = Checked(storage, name, manifest, parts)
            share = tuple(file for file in mine if parts.responsible_rank(tier.node, file.name) == rank)

        def check() -> None:
            wrong = [text for file in share if (text := self._damage(storage, name, file))]
            if wrong:
                raise CheckpointError(f"{found.path}: {'; '.join(wrong)}")

        self._ranks.run_on_all(check)
        return found

    def _damage(self, storage: Storage, name: str, file: StoredFile) -> str:
        try:
            return find_damage(storage, name, file, self._verify)
        except OSError as error:
            if self._directories.tier_of(storage) is None and not storage.means_damage(error):
                raise StorageFailed(f"{storage.path(name)}/{file.name} cannot be read: {error}") from error
            return f"{file.name} cannot be read: {error}"

    def parts(self, tier: LocalTier, name: str) -> tuple[Manifest, Parts]:
        """Find which node has which files. Collective. Raises CheckpointError on all ranks if a file is on no node."""
        path, ranks = tier.storage.path(name), self._ranks
        mine = _part_here(tier.storage, name) if tier.first else None
        found = ranks.all_gather((mine.digest, mine.files) if mine else None)
        first = next((rank for rank, each in enumerate(found) if each is not None), None)
        if first is None:
            raise CheckpointError(f"{path} has no {MANIFEST} on any node: not a complete checkpoint of elastic_ext")
        manifest = ranks.all_gather(mine.manifest if mine and ranks.rank == first else None)[first]
        assert manifest is not None, "that rank has one"
        _refuse_other(manifest, name, path)
        digest = next(each[0] for each in found if each is not None)
        same = [(rank, each[1]) for rank, each in enumerate(found) if each is not None and each[0] == digest]
        here = {tiers.node_of(tier.nodes, rank): files for rank, files in same}
        holders = {file.name: tuple(node for node, files in here.items() if file.name in files) for file in manifest.files}
        lost = [file for file, nodes in holders.items() if not nodes]
        if lost:
            raise CheckpointError(f"{path}: {len(lost)} files are on no node, e.g. {lost[0]}")
        return manifest, Parts(tier.nodes, tier.node, holders)


@dataclass(frozen=True)
class _Part:
    """One node's part of a checkpoint. digest: of its manifest; on another node the same name may be another checkpoint."""

    digest: str
    manifest: Manifest
    files: frozenset[str]


def _part_here(local: Storage, name: str) -> _Part | None:
    try:
        read = tiers.manifest_of(local, name)
        return _Part(tiers.digest(read[1]), read[0], tiers.files_here(local, name, read[0])) if read is not None else None
    except (ManifestError, OSError) as error:  # another node may have it
        logger.warning("%s: %s", local.path(name), error)
        return None


def _manifest(storage: Storage, name: str) -> Manifest:
    """Read the manifest. Raises CheckpointError."""
    path = storage.path(name)
    try:
        manifest = decode(storage.read(f"{name}/{MANIFEST}"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: not a complete checkpoint of elastic_ext") from None
    except ManifestError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        failed = CheckpointError if storage.means_damage(error) else StorageFailed
        raise failed(f"{path}: {error}") from error
    _refuse_other(manifest, name, path)
    return manifest


def _refuse_other(manifest: Manifest, name: str, path: str) -> None:
    if order_of(name) not in (None, manifest.order):
        raise CheckpointError(f"{path} holds the manifest of step {manifest.step}, generation {manifest.generation}")


def _asking(storage: Storage, ask: Callable[[], T]) -> Callable[[], T]:
    """Return `ask`, which raises StorageFailed for an OSError of the storage."""

    def asked() -> T:
        try:
            return ask()
        except OSError as error:
            raise StorageFailed(f"{storage.address} does not answer: {error}") from error

    return asked


def _newest_complete(storage: Storage, refused: Collection[str]) -> str | None:
    """Return our newest checkpoint that has a manifest and is neither refused nor quarantined. Raises OSError."""
    quarantined = marks.quarantined_names(storage)
    for name in tiers.own_checkpoints(storage):
        if name not in refused and name not in quarantined:
            if storage.stat(f"{name}/{MANIFEST}") is not None:
                return name
            logger.info("skipping checkpoint %s: no %s, the save did not finish", storage.path(name), MANIFEST)
    return None


def _order(name: str) -> tuple[int, int]:
    return order_of(name) or (0, 0)
