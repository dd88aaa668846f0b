"""Commit one copy in memory: from the parts of all ranks to the same manifest on each node. Collective, in a thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.manifest import MANIFEST, StoredFile, decode, encode, order_or_oldest
from elastic_ext.checkpoints.memory.interval import Timing
from elastic_ext.checkpoints.writing.errors import FailureKind, SaveFailure, failure_of
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What one rank tells the others of its part.

    Attributes:
        name: of the copy.
        manifest: rank 0's, encoded, complete but for the files and nodes; of others b"". Bytes: what cannot be pickled would
            fail on rank 0 alone, and leave the others waiting.
        timing: for the next interval.
        file: its part; None if it has written none this time.
        common: checksum of what it holds to be common to the ranks of its node, see `part.Planned`.
        failure: why, if that is a failure.
        accumulation: micro-steps after the step of the copy.
    """

    name: str
    manifest: bytes
    timing: Timing
    file: StoredFile | None = None
    common: str = ""
    failure: SaveFailure | None = None
    accumulation: int = 0


@dataclass(frozen=True)
class Outcome:
    """How it ended, the same on all ranks. failure: may be None although nothing was committed: a buffer was made first.

    apart: the last step of which a rank has made a copy, if they are not all of the same step; else None.
    """

    committed: bool
    timings: tuple[Timing, ...]
    failure: SaveFailure | None = None
    apart: int | None = None


def commit(tier: LocalTier, kept: str, report: Report, ranks: Ranks) -> Outcome:
    """Commit a copy if every rank has written its part of it. kept: name of the copy before it, which stays.

    A rank that has left it out may be at a load, and meets the others here by `none_in_progress`.

    When this returns, every rank knows whether the manifest is on every node. Raises RuntimeError if the ranks cannot
    communicate.
    """
    gathered: list[Report | None] = ranks.all_gather(report)
    reports = [each for each in gathered if each is not None]
    if len(reports) < len(gathered):
        away = SaveFailure(FailureKind.OTHER, "it is at a load and has not made this copy", gathered.index(None))
        return Outcome(False, tuple(each.timing for each in reports), away)
    timings = tuple(each.timing for each in reports)
    failures = [each.failure for each in reports if each.failure] or [*_apart(reports), *_differing(reports, tier.nodes)]
    files = tuple(each.file for each in reports if each.file is not None)
    if failures or len(files) < len(reports):
        return Outcome(False, timings, failures[0] if failures else None, _last_of_several(reports))
    failure = _put(tier, reports[0], kept, files, ranks.rank) if tier.first else None
    failures = [each for each in ranks.all_gather(failure) if each]
    return Outcome(not failures, timings, failures[0] if failures else None)


def none_in_progress(ranks: Ranks) -> None:
    """Wait until all ranks call this; a copy that some have left out fails. Collective. Raises RuntimeError as `commit`."""
    while any(report is not None for report in ranks.all_gather(None)):
        pass


def remove_others(tier: LocalTier, name: str, ranks: Ranks) -> None:
    """Remove all copies but this one, which is committed. Collective. Raises RuntimeError if the ranks cannot communicate."""
    if tier.first:
        try:
            for old in tiers.own_checkpoints(tier.storage):
                if old != name:
                    tier.storage.remove_tree(old)
        except Exception as error:  # noqa: BLE001  (the other ranks wait for this one)
            logger.warning("an older copy in memory could not be removed: %s; the next copy tries again", error)
    ranks.all_gather(None)


def _last_of_several(reports: Sequence[Report]) -> int | None:
    steps = {step for each in reports for _, step in [order_or_oldest(each.name)]}
    return max(steps) if len(steps) > 1 else None


def _apart(reports: Sequence[Report]) -> Iterator[SaveFailure]:
    """Yield a failure if the ranks have not copied the same step. The step of each is that of its own script."""
    for rank, each in enumerate(reports):
        if (each.name, each.accumulation) != (reports[0].name, reports[0].accumulation):
            yield SaveFailure(FailureKind.OTHER, f"it has copied {_told(each)}, rank 0 {_told(reports[0])}", rank)


def _told(report: Report) -> str:
    return f"{report.name}, micro-step {report.accumulation}" if report.accumulation else report.name


def _differing(reports: Sequence[Report], nodes: Sequence[int]) -> Iterator[SaveFailure]:
    """Yield a failure for each node whose ranks do not have the same tensors to share: some would be in no part."""
    for node in range(len(nodes)):
        ranks = tiers.ranks_of(nodes, node)
        known = {reports[rank].common for rank in ranks if reports[rank].file is not None}
        if len(known) > 1:
            reason = f"ranks {ranks[0]} to {ranks[-1]}, of one node, do not have the same tensors that are not sharded"
            yield SaveFailure(FailureKind.OTHER, reason, ranks[0])


def _put(tier: LocalTier, first: Report, kept: str, files: tuple[StoredFile, ...], rank: int) -> SaveFailure | None:
    """Write the manifest, after removing what is left of older copies: all ranks have moved their buffers out of them.

    Never raises, because the other ranks wait for the result. first: rank 0's report.
    """
    try:
        manifest = replace(decode(first.manifest), files=files, nodes=tier.nodes)
        for old in tiers.own_checkpoints(tier.storage):
            if old not in (first.name, kept):
                tier.storage.remove_tree(old)
        tier.storage.put(f"{first.name}/{MANIFEST}", encode(manifest))
    except Exception as error:  # noqa: BLE001  (all ranks are told)
        return failure_of(error, rank)
    return None
