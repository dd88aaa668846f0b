"""One attempt to write one checkpoint: from staged tensors to the manifest, which commits it. Each rank writes its share.

The order of writes is what makes a save atomic:

1. each rank writes its shards, then torch's `.metadata` (rank 0), its own file, the shared file (rank 0);
2. all ranks report what they wrote, with sizes and checksums; one failure ends the attempt, and no manifest is written;
3. rank 0 checks that its group was not replaced;
4. rank 0 writes the manifest. With a local tier, each node's first rank writes the shared small files and the manifest to its own
   disk, rank 0's node last, because it copies the manifest to the remote directory.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory.generations import refuse_stale
from elastic_ext.checkpoints.directory.tiers import rank_of
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, StoredFile, encode
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.checkpoints.writing.dcp_files import Files, Writer
from elastic_ext.checkpoints.writing.errors import FailureKind, SaveFailure, causes, failure_of, summary
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.staging import Staged

logger = logging.getLogger(__name__)

At = tuple[float, int]  # the step of a save and its micro-steps; later ones are greater
AFTER_ALL: At = (math.inf, 0)

SHARED_FILE = "shared.pt"  # the state that all ranks share, pickled


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's own state, pickled."""
    return f"rank_{rank:05d}.pt"


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, the same on all ranks. failure: None if it is committed. size: bytes of the checkpoint."""

    failure: SaveFailure | None
    size: int = 0


def what_prevents(at: At, staged: Staged, ranks: Ranks) -> SaveFailure | None:
    """Return why no attempt to save this state makes sense, wherever it writes to, once all ranks save it. Collective.

    The first of all that ranks do together for a save, and for a load: so they meet here, whatever each has left out. A rank that
    has left out a save is ahead of the others. Their save fails, and the rank asks again, until all are at the same place. So the
    result is the same on all ranks that save one state.
    """
    while True:
        places, failures, extras = zip(*ranks.all_gather((at, staged.failure, staged.extra)), strict=True)
        first, last = min(places), max(places)
        if at < last:
            reason = f"rank {places.index(last)} is at {_told(last)} and has not saved this one"
            return SaveFailure(FailureKind.OTHER, f"{reason}; all ranks must call save for the same steps", ranks.rank)
        if at == first:
            failed = [failure for failure in failures if failure is not None] or [*_differing(extras)]
            return failed[0] if failed else None
        logger.warning("%s waits for rank %s, which is at %s", _told(at), places.index(first), _told(first))


def end_of_saves(ranks: Ranks) -> None:
    """Wait until all ranks call this; what a rank saves that others have left out fails. Collective."""
    what_prevents(AFTER_ALL, Staged(), ranks)


def _told(at: At) -> str:
    step, accumulation = at
    if at == AFTER_ALL:
        return "a load"
    return f"step {step}, micro-step {accumulation}" if accumulation else f"step {step}"


def save(storage: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks) -> Outcome:
    """Write and commit one checkpoint, after `what_prevents`. Collective. manifest: without files; rank 0's is used.

    Raises torch's RuntimeError if the ranks cannot communicate.
    """
    complete = _written(storage, name, staged, manifest, ranks)
    if isinstance(complete, SaveFailure):
        return Outcome(complete)
    return ranks.broadcast(commit(storage, name, complete) if ranks.rank == 0 else Outcome(None))


def save_on_nodes(tier: LocalTier, fence: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks) -> Outcome:
    """Do as `save`, but write to each node's own disk. The checkpoint is committed once rank 0's node has the manifest.

    fence: the remote directory, which shows whether there is a newer group.
    """
    complete = _written(tier.storage, name, staged, replace(manifest, nodes=tier.nodes), ranks)
    if isinstance(complete, SaveFailure):
        return Outcome(complete)
    try:
        common = ranks.from_rank_0(lambda: _common(tier.storage, fence, name, complete))
    except (ElasticExtError, OSError) as error:
        return Outcome(failure_of(error, 0))
    for leads in (False, True):  # rank 0's node last: it copies the manifest to the remote directory
        failure = None
        if tier.first and (ranks.rank == 0) is leads:
            failure = _put_common(tier.storage, name, {MANIFEST: common[MANIFEST]} if leads else common, ranks.rank)
        failures = [failure for failure in ranks.all_gather(failure) if failure]
        if failures:
            return Outcome(failures[0])
    return Outcome(None, complete.size)


def _written(storage: Storage, name: str, staged: Staged, manifest: Manifest, ranks: Ranks) -> Manifest | SaveFailure:
    """Write this rank's files. Return the manifest with all ranks' files, or the first failure, the same on all ranks."""
    files = Files(storage, name)
    failure = _write(files, name, staged, ranks)
    reports = ranks.all_gather((list(files.written.values()), failure))
    failures = [failure for _, failure in reports if failure]
    if failures:
        return failures[0]
    stored: tuple[StoredFile, ...] = tuple(file for written, _ in reports for file in written)
    return replace(manifest, files=stored, saved_at=time.time())


def _differing(extras: Sequence[Mapping[str, str]]) -> Iterator[SaveFailure]:
    """Yield a failure for each extra object and rank with tensors of which rank 0, whose state is kept, knows nothing. Pure."""
    for rank, extra in enumerate(extras):
        for name in sorted(extra):
            if extra[name] != extras[0].get(name):
                reason = f"the state of extra {name!r} has other tensors than on rank 0, whose state is kept for all ranks"
                yield SaveFailure(FailureKind.OTHER, f"{reason}: return the same keys, types and shapes on all", rank)


def _write(files: Files, name: str, staged: Staged, ranks: Ranks) -> SaveFailure | None:
    writer = Writer(files, name, ranks.rank)
    try:
        with ranks.communicating():
            dcp.save(dict(staged.tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
    except CheckpointException as error:  # raised by the planning, on all ranks
        told = causes(error, ranks.rank)
        return SaveFailure(FailureKind.OTHER, summary(told), told[0][0])
    try:
        files.put(f"{name}/{rank_file(ranks.rank)}", staged.own)
        if ranks.rank == 0:
            files.put(f"{name}/{SHARED_FILE}", staged.shared)
    except Exception as error:  # noqa: BLE001  (reported with the files)
        return writer.failure or failure_of(error, ranks.rank)
    return writer.failure


def commit(storage: Storage, name: str, manifest: Manifest) -> Outcome:
    """Write the manifest, unless a newer group has taken over."""
    try:
        refuse_stale(storage, manifest.generation)
        storage.put(f"{name}/{MANIFEST}", encode(manifest))
    except Exception as error:
        logger.debug("committing %s failed", name, exc_info=True)
        return Outcome(failure_of(error, 0))
    return Outcome(None, manifest.size)


def _common(local: Storage, fence: Storage, name: str, manifest: Manifest) -> dict[str, bytes]:
    """Return the small files that every node has, by name, the manifest last. Raises StaleGroup, OSError."""
    refuse_stale(fence, manifest.generation)
    names = [file.name for file in manifest.files if rank_of(file.name) is None]
    return {**{each: local.read(f"{name}/{each}") for each in names}, MANIFEST: encode(manifest)}


def _put_common(local: Storage, name: str, files: Mapping[str, bytes], rank: int) -> SaveFailure | None:
    try:
        for file, data in files.items():
            local.put(f"{name}/{file}", data)
    except Exception as error:  # noqa: BLE001  (all ranks are told)
        return failure_of(error, rank)
    return None
