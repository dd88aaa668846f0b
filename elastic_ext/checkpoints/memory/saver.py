"""Copies the state of one rank to memory, step after step: when a copy is due, into which buffer, and how all ranks commit it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from elastic_ext.base.contracts import MemoryRoom
from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.directory.own_files import Manifest, StoredFile, checksum_of, decode, encode
from elastic_ext.checkpoints.formats.candidates import directory_name, order_or_oldest
from elastic_ext.checkpoints.memory import devices, pace, part
from elastic_ext.checkpoints.memory.mirror import Mirror, RankReport, keeping_ranks
from elastic_ext.checkpoints.memory.part import SPARE, Buffer, Buffers, Planned
from elastic_ext.checkpoints.ranks import CheckpointError, FailureKind, LocalTier, Ranks, SaveFailure, failure_of
from elastic_ext.checkpoints.state import Objects, capture, parameter_names
from elastic_ext.checkpoints.storage import remove_if_there
from elastic_ext.training.progress import MEMORY_THREAD, this_worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyOutcome:
    """How it ended, the same on all ranks. failure: may be None although nothing was committed: a buffer was made first.

    reports: of all ranks that have made the copy.
    apart: the last step of which a rank has made a copy, if they are not all of the same step; else None.
    """

    committed: bool
    reports: Sequence[RankReport]
    failure: SaveFailure | None = None
    apart: int | None = None


def commit(
    tier: LocalTier,
    kept: str,
    report: RankReport,
    ranks: Ranks,
    exchange: Callable[[Sequence[RankReport]], None] = lambda reports: None,
) -> CopyOutcome:
    """Commit a copy if every rank has written its part of it. kept: name of the copy before it, which stays.

    exchange: called with all ranks' reports before the commit, if that is all right; sends parts to other nodes.

    A rank that has left it out may be at a load, and meets the others here by `MemorySaver.begin`; or at its end, by `close`.

    When this returns, every rank knows whether the manifest is on every node. Raises RuntimeError if the ranks cannot
    communicate.
    """
    gathered: list[RankReport | None] = ranks.all_gather(report)
    reports = [each for each in gathered if each is not None]
    if len(reports) < len(gathered):
        away = SaveFailure(FailureKind.OTHER, "it is at a load and has not made this copy", gathered.index(None))
        return CopyOutcome(False, reports, away)
    failures = [each.failure for each in reports if each.failure] or [*_apart(reports), *_differing(reports, tier.nodes)]
    files = tuple(each.file for each in reports if each.file is not None)
    if failures or len(files) < len(reports):
        steps = {order_or_oldest(each.name)[1] for each in reports}
        return CopyOutcome(False, reports, failures[0] if failures else None, max(steps) if len(steps) > 1 else None)
    exchange(reports)
    failure = _put(tier, reports[0], kept, files, ranks.rank) if tier.first else None
    failures = [each for each in ranks.all_gather(failure) if each]
    return CopyOutcome(not failures, reports, failures[0] if failures else None)


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


def _apart(reports: Sequence[RankReport]) -> Iterator[SaveFailure]:
    """Yield a failure if the ranks have not copied the same step. The step of each is that of its own script."""
    for rank, each in enumerate(reports):
        if (each.name, each.accumulation) != (reports[0].name, reports[0].accumulation):
            yield SaveFailure(FailureKind.OTHER, f"it has copied {_described(each)}, rank 0 {_described(reports[0])}", rank)


def _described(report: RankReport) -> str:
    return f"{report.name}, micro-step {report.accumulation}" if report.accumulation else report.name


def _differing(reports: Sequence[RankReport], nodes: Sequence[int]) -> Iterator[SaveFailure]:
    """Yield a failure for each node whose ranks do not have the same tensors to share: some would be in no part."""
    for node in range(len(nodes)):
        ranks = tiers.ranks_of(nodes, node)
        known = {reports[rank].common for rank in ranks if reports[rank].file is not None}
        if len(known) > 1:
            reason = f"ranks {ranks[0]} to {ranks[-1]}, of one node, do not have the same tensors that are not sharded"
            yield SaveFailure(FailureKind.OTHER, reason, ranks[0])


def _put(tier: LocalTier, first: RankReport, kept: str, files: tuple[StoredFile, ...], rank: int) -> SaveFailure | None:
    """Write the manifest, after removing what is left of older copies: all ranks have moved their buffers out of them.

    Never raises, because the other ranks wait for the result. first: rank 0's report.
    """
    try:
        manifest = replace(decode(first.manifest), files=files, nodes=tier.nodes)
        for old in tiers.own_checkpoints(tier.storage):
            if old not in (first.name, kept):
                tier.storage.remove_tree(old)
        tiers.put_manifest(tier.storage, first.name, manifest)
    except Exception as error:  # noqa: BLE001  (all ranks learn of it)
        return failure_of(error, rank)
    return None


def _met(ranks: Ranks, limit_s: float) -> bool:
    """Meet the ranks that are in `commit` for a copy that this one has left out; return whether all came in time.

    In a thread, because a collective cannot be interrupted: it would wait for ranks that do not end up to the group's timeout.
    """

    def meet() -> None:
        try:
            ranks.all_gather(None)
        except (RuntimeError, ValueError) as error:  # the script has destroyed all groups, say
            logger.debug("the last copy in memory is left as it is: %s", error)

    meeting = threading.Thread(target=meet, name=f"{MEMORY_THREAD}end", daemon=True)
    try:
        meeting.start()
    except RuntimeError as error:  # no more threads, or the interpreter ends
        logger.debug("the last copy in memory is left as it is: %s", error)
        return True
    meeting.join(limit_s)
    return not meeting.is_alive()


class CopyTrouble:
    """Why copies fail, logged when that begins, when it changes, and when it is over."""

    def __init__(self, speaks: bool) -> None:
        """speaks: whether this rank writes to the log."""
        self._speaks = speaks
        self._kind: FailureKind | None = None
        self.in_a_row = 0

    def note(self, failure: SaveFailure | None) -> None:
        before, self._kind = self._kind, failure.kind if failure is not None else None
        self.in_a_row = self.in_a_row + 1 if failure is not None else 0
        if failure is not None and failure.kind is not before and self._speaks:
            logger.warning(
                "rank %s cannot copy its state to memory: %s; training continues, and a restart resumes from an older copy or a "
                "checkpoint on disk",
                failure.rank,
                failure.reason,
            )
        elif failure is None and before is not None and self._speaks:
            logger.warning("the state is copied to memory again")


class Attempt(threading.Thread):
    """Training waits for it, but in all for no longer than its limit. Then copies that are due are left out until it is over."""

    def __init__(self, run: Callable[[], None], step: int, limit_s: float) -> None:
        super().__init__(target=run, name=f"{MEMORY_THREAD}{step}", daemon=True)
        self._step, self._limit_s, self._left_s = step, limit_s, limit_s

    def hold(self) -> bool:
        """Wait until it is over, or its limit is reached; return whether it is over."""
        began = time.monotonic()
        self.join(self._left_s)
        if not self.is_alive():
            return True
        if self._left_s:
            logger.info("no more copies in memory until the attempt at step %s is over: %.3g s are up", self._step, self._limit_s)
        self._left_s = max(0.0, self._left_s - (time.monotonic() - began))
        return False


STEPS_AHEAD = 10  # that training may do while the ranks begin


class MemorySaver:
    """Copies the state of one rank. All ranks take the same steps, because each decision follows from what all have reported."""

    def __init__(
        self, tier: LocalTier, room: MemoryRoom, every: int | None, objects: Objects, ranks: Ranks, mirror: Mirror | None
    ) -> None:
        """
        Args:
            room: its limit is for this rank's own parts, and again for those of others.
            every: see `pace.choose`.
            ranks: in a group of its own, because a thread uses it.
            mirror: None on a single node.
        """
        self._tier, self._objects, self._ranks, self._mirror = tier, objects, ranks, mirror
        self._buffers = Buffers(tier.storage, ranks.rank, room.limit)
        self._copying = devices.Copying(objects.optimizers)
        self._times = pace.StepTimes()
        self._trouble = CopyTrouble(ranks.rank == 0)
        self._attempt: Attempt | None = None  # the last one
        self._schedule = pace.Schedule(every, ranks.rank == 0, room.rate / 1e6 * tier.nodes[tier.node])
        self._deciding = threading.Lock()  # training leaves a copy out, or an attempt ends
        self._generation: int | None = None

    def begin(self, generation: int | None, kept: str = "", in_steps: int = 0) -> None:
        """Begin after a load. Collective. Never raises.

        Args:
            generation: of this group of workers; None if it has none yet.
            kept: name of the copy in memory that was loaded; all others are removed.
            in_steps: how many steps after the last one of any rank the first copy is due; 0: at once.
        """
        self.wait()
        self._copying.pin(())
        self._schedule.begins(None)  # first: with a generation, training would copy at once, while the ranks begin
        self._generation = generation
        self._trouble.in_a_row = 0  # a rank that has left out a copy knows of no failure, and all must choose the same interval
        self._buffers.kept = kept  # even if what follows fails: `has_generation` may follow
        if generation is None and self._ranks.rank == 0:
            logger.warning("the state is not copied to memory until a save has reached the directory of checkpoints")
        try:
            self._prepare(kept)
            last = max(self._ranks.all_gather(self._times.last_step))
        except CheckpointError as error:
            logger.warning("the state is not copied to memory: %s", error)
        except RuntimeError as error:  # disk and training go on
            logger.warning("no more copies in memory: %s", self._ranks.group_failure(error).reason)
        else:
            self._schedule.begins(last + in_steps if in_steps else 0)
        if self._ranks.lost:
            self._ranks.leave()

    def _prepare(self, kept: str) -> None:
        """Remove all copies but this one. Collective. Raises CheckpointError on all ranks; RuntimeError."""
        while any(report is not None for report in self._ranks.all_gather(None)):
            pass  # a rank is in `commit` for a copy that others have left out; it fails

        def clear() -> None:
            if self._tier.first:
                for name in {*tiers.own_checkpoints(self._tier.storage), SPARE} - {kept}:
                    remove_if_there(self._tier.storage, name)

        self._ranks.run_on_all(clear)
        own = self._ranks.run_on_all(lambda: self._is_own(kept))
        reuse = all(self._ranks.all_gather(own))

        def keep() -> None:
            self._buffers.keep(kept, reuse)
            if self._mirror is not None:
                self._mirror.keep(kept if reuse else "")

        self._ranks.run_on_all(keep)

    def _is_own(self, name: str) -> bool:
        """Return whether these ranks have made a copy, and this one's part is here. Raises OSError, ManifestError."""
        storage = self._tier.storage
        read = tiers.manifest_of(storage, name) if name else None
        here = storage.stat(f"{name}/{tiers.memory_file(self._ranks.rank)}")
        return read is not None and read[0].nodes == self._tier.nodes and here is not None

    def has_generation(self, generation: int) -> None:
        """Begin if this group of workers has got its generation only now. Collective, in the thread of a save.

        The copy that was loaded stays: nothing newer is committed yet. Training goes on meanwhile, so the first copy is of a step
        that no rank has reached yet.
        """
        if self._generation is None:
            self.begin(generation, self._buffers.kept, STEPS_AHEAD)

    def step(self, step: int, accumulation: int, manifest: Callable[[], Manifest]) -> None:
        """Copy the state after this step if that is due. Never raises.

        manifest: returns it, without files and generation. Only rank 0 calls this, and only if a copy is made.
        """
        now = time.monotonic()
        self._times.step_ends(step, now)
        due = self._schedule.due
        if due is not None and self._generation is not None and step >= due and self._is_free(step, now):
            self._copy(step, accumulation, manifest, self._generation)
        self._times.goes_on(step, time.monotonic())

    def wait(self) -> None:
        """Wait until the copy in progress, if any, is committed or has failed."""
        if self._attempt is not None:
            self._attempt.join()

    def close(self) -> None:
        """Wait as `wait` does, for CLOSE_S at most, and let go of the buffers. A copy that only this rank has left out fails."""
        deadline = time.monotonic() + pace.CLOSE_S
        if self._attempt is not None:
            self._attempt.join(pace.CLOSE_S)
        over = self._attempt is None or not self._attempt.is_alive()
        if over and self._schedule.owes is not None:
            self._schedule.owes = None  # a second call does not wait
            over = _met(self._ranks, max(0.0, deadline - time.monotonic()))
        if over:
            self._copying.pin(())
        else:  # the buffers are in use
            logger.warning("the last copy in memory is given up: it has not ended within %.3g s", pace.CLOSE_S)

    def _is_free(self, step: int, called: float) -> bool:
        """Wait for the last attempt; return whether it is over, and this step is still to be copied.

        It is not if the ranks can no longer communicate, or have copied different steps and go on together later.
        """
        over = self._attempt is None or self._attempt.hold()
        self._times.waited(time.monotonic() - called)
        with self._deciding:
            return self._schedule.takes(step, over)

    def _copy(self, step: int, accumulation: int, manifest: Callable[[], Manifest], generation: int) -> None:
        self._schedule.copies(step)
        name = directory_name(step, generation)
        began = time.monotonic()
        planned = buffer = failure = None
        encoded = b""
        try:
            encoded = encode(replace(manifest(), generation=generation)) if self._ranks.rank == 0 else b""
            nodes, node, rank = self._tier.nodes, self._tier.node, self._ranks.rank
            planned = part.plan(capture(self._objects, rank, accumulation), rank - sum(nodes[:node]), nodes[node])
            self._copying.open(planned.tensors.values())
            if self._buffers.fit(planned.size):
                buffer = self._buffers.begin(name)
                before_s = self._copying.device_stall_s() or 0.0  # known only now, so it counts with this copy
                self._copying.start(step, *_pairs(self._objects, planned, buffer))
                part.write_index(buffer.bytes, planned)
                self._times.copied(time.monotonic() - began + before_s)
        except Exception as error:  # noqa: BLE001  (training continues; the thread notifies all ranks)
            failure = failure_of(error, self._ranks.rank)
        self._start(RankReport(name, encoded, self._times.timing(), failure=failure, accumulation=accumulation), planned, buffer)

    def _start(self, report: RankReport, planned: Planned | None, buffer: Buffer | None) -> None:
        self._times.made_buffers = buffer is None  # until all ranks have said so
        limit_s = pace.BUFFERS_HOLD_S if buffer is None else pace.HOLD_S
        self._attempt = Attempt(lambda: self._run(report, planned, buffer), order_or_oldest(report.name)[1], limit_s)
        try:
            self._attempt.start()
        except RuntimeError as error:  # no more threads: the others wait for this rank's report
            self._attempt = None
            self._run(replace(report, failure=failure_of(error, self._ranks.rank)), None, None)

    # In the thread.

    def _run(self, report: RankReport, planned: Planned | None, buffer: Buffer | None) -> None:
        began = time.monotonic()
        report = self._completed(report, planned, buffer)
        outcome = makes_room = None
        try:
            exchange = partial(self._exchange, report, buffer)
            outcome = commit(self._tier, self._buffers.kept, report, self._ranks, exchange)
            makes_room = outcome.committed and self._buffers.keeps_others  # the same on all ranks
            if makes_room:
                remove_others(self._tier, report.name, self._ranks)
        except Exception as error:  # noqa: BLE001  (the top of a thread; as a rule another rank has died, and the agent acts)
            logger.warning("no more copies in memory: %s", self._ranks.group_failure(error).reason)
            outcome = None
        if outcome is None:  # not before the error is forgotten, with the calls that hold the group
            with self._deciding:
                self._schedule.begins(None)
            self._ranks.leave()
            return
        self._note(outcome)
        if outcome.committed:
            self._buffers.committed(report.name)
            if self._mirror is not None:
                self._mirror.committed(report.name)
            if makes_room and planned is not None:
                self._times.made_buffers = True
                try:
                    self._buffers.allocate(planned.capacity)  # the second one, for which there is room only now
                except OSError as error:  # the next attempt reports that to all ranks
                    logger.debug("no second buffer: %s", error)
            self._times.committed(time.monotonic() - began)
            this_worker().row.report_copied(order_or_oldest(report.name)[1], self._times.last_stall_s, self._schedule.every)
        if self._mirror is not None and len(outcome.reports) == self._ranks.world and not self._buffers.keeps_others:
            self._mirror.make_room(outcome.reports)

    def _note(self, outcome: CopyOutcome) -> None:
        """Report how an attempt ended, and decide when the next one is due."""
        if outcome.committed or outcome.failure is not None:  # not if a rank has only made its buffers: nothing is known by that
            self._trouble.note(outcome.failure)
        if outcome.failure is not None:
            this_worker().row.report_copy_failed()
        with self._deciding:
            self._schedule.choose([each.timing for each in outcome.reports], self._trouble.in_a_row)
            self._schedule.ended(outcome.apart, len(outcome.reports) < self._ranks.world)
        self._times.made_buffers = not outcome.committed and outcome.failure is None

    def _completed(self, report: RankReport, planned: Planned | None, buffer: Buffer | None) -> RankReport:
        """Return the report with this rank's part, or with the reason why it has no part. Makes the buffers that are missing."""
        if report.failure is not None or planned is None:
            return report
        try:
            if buffer is None:
                self._copying.pin(())  # what is pinned stays mapped, and its memory in use
                capacity = self._buffers.size_for(planned)
                self._buffers.allocate(capacity)
                self._copying.pin(self._buffers.tensors())
                return self._timed(replace(report, capacity=capacity))
            self._copying.finish()
            self._copying.pin(self._buffers.tensors())
            file = StoredFile(tiers.memory_file(self._ranks.rank), buffer.size, checksum_of(buffer.bytes))
            common = checksum_of(repr(planned.common).encode())
            report = self._timed(replace(report, file=file, common=common, capacity=buffer.size))
            mirror = self._mirror
            return report if mirror is None else replace(report, sends=mirror.sends, takes=mirror.ready())
        except Exception as error:  # noqa: BLE001  (all ranks learn of it)
            return replace(report, failure=failure_of(error, self._ranks.rank))

    def _timed(self, report: RankReport) -> RankReport:
        """Return the report with what the part will take to send, unless the others do not wait so long for it."""
        send_s = self._mirror.send_s(report.capacity) if self._mirror is not None else 0.0
        return replace(report, timing=replace(report.timing, send_s=send_s if send_s < self._ranks.timeout_s / 2 else 0.0))

    def _exchange(self, report: RankReport, buffer: Buffer | None, reports: Sequence[RankReport]) -> None:
        """Have the part kept on another node, and keep those of others."""
        if self._mirror is not None and buffer is not None:
            self._mirror.exchange(report.name, buffer, reports, self._schedule.send_limit_s(report.timing))


def make(
    tier: LocalTier | None, room: MemoryRoom | None, every: int | None, objects: Objects, ranks: Ranks, timeout: timedelta
) -> MemorySaver | None:
    """Return the saver of this rank; None on all ranks if they have no tier or are to make no copies. Collective.

    every: the script's choice; None: the agent's. Rank 0's is used. ranks: for this call only.
    """
    if tier is None or room is None:
        return None
    choices, domains = zip(*ranks.all_gather((room.every if every is None else every, room.domain)), strict=True)
    every = choices[0]
    if ranks.rank == 0 and len(set(choices)) > 1:
        logger.warning("memory_every differs between ranks; all do as rank 0 does")
    if every == 0:
        return None
    own, mirror = Ranks(timeout), None
    if len(tier.nodes) > 1:
        first = [domains[tiers.ranks_of(tier.nodes, node)[0]] for node in range(len(tier.nodes))]
        mirror = Mirror(tier, keeping_ranks(tier.nodes, first), room.limit, room.rate, own)
    return MemorySaver(tier, room, every, objects, own, mirror)


def _pairs(objects: Objects, planned: Planned, buffer: Buffer) -> tuple[list[devices.Pair], list[devices.Pair]]:
    """Return (what changes only in an optimizer step, the rest)."""
    parameters = set(parameter_names(objects.model).values())
    resting: list[devices.Pair] = []
    moving: list[devices.Pair] = []
    for path, tensor in planned.tensors.items():
        target = part.view(buffer.tensor, planned.places[path])
        rests = path[0] == "optimizer" or (path[0] == "model" and path[-1] in parameters)
        (resting if rests else moving).append((target, tensor))
    return resting, moving
