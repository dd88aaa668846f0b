"""Commit one copy in memory: from the parts of all ranks to the same manifest on each node. Collective, in a thread."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, StoredFile, encode
from elastic_ext.checkpoints.memory.interval import Timing
from elastic_ext.checkpoints.writing.errors import SaveFailure, failure_of
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks


@dataclass(frozen=True)
class Report:
    """What one rank tells the others of its part.

    Attributes:
        manifest: complete but for the files and nodes; rank 0's is used.
        timing: for the next interval.
        file: its part; None if it has written none this time.
        failure: why, if that is a failure.
    """

    manifest: Manifest
    timing: Timing
    file: StoredFile | None = None
    failure: SaveFailure | None = None


@dataclass(frozen=True)
class Outcome:
    """How it ended, the same on all ranks. failure: may be None although nothing was committed: a buffer was made first."""

    committed: bool
    timings: tuple[Timing, ...]
    failure: SaveFailure | None = None


def commit(tier: LocalTier, name: str, kept: str, report: Report, ranks: Ranks) -> Outcome:
    """Commit the copy of this name if every rank has written its part. kept: name of the copy before it, which stays.

    When this returns, every rank knows whether the manifest is on every node. Raises RuntimeError if the ranks cannot
    communicate.
    """
    reports = ranks.all_gather(report)
    timings = tuple(each.timing for each in reports)
    failures = [each.failure for each in reports if each.failure]
    files = tuple(each.file for each in reports if each.file is not None)
    if failures or len(files) < len(reports):
        return Outcome(False, timings, failures[0] if failures else None)
    failure = None
    if tier.first:
        failure = _put(tier, name, kept, replace(reports[0].manifest, files=files, nodes=tier.nodes), ranks.rank)
    failures = [each for each in ranks.all_gather(failure) if each]
    return Outcome(not failures, timings, failures[0] if failures else None)


def _put(tier: LocalTier, name: str, kept: str, manifest: Manifest, rank: int) -> SaveFailure | None:
    """Write the manifest, after removing what is left of older copies: all ranks have moved their buffers out of them."""
    try:
        for old in tiers.own_checkpoints(tier.storage):
            if old not in (name, kept):
                tier.storage.remove_tree(old)
        tier.storage.put(f"{name}/{MANIFEST}", encode(manifest))
    except Exception as error:  # noqa: BLE001  (all ranks are told)
        return failure_of(error, rank)
    return None
