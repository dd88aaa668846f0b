"""Copies the state to memory, step after step: when one is due, into which buffer, and how it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from elastic_ext.checkpoints.directory.tiers import manifest_of, memory_file, own_checkpoints
from elastic_ext.checkpoints.formats.manifest import Manifest, StoredFile, checksum_of, directory_name, encode, order_or_oldest
from elastic_ext.checkpoints.memory import commit, interval, part
from elastic_ext.checkpoints.memory.attempt import Attempt
from elastic_ext.checkpoints.memory.buffers import SPARE, Buffer, Buffers
from elastic_ext.checkpoints.memory.commit import Report
from elastic_ext.checkpoints.memory.devices import Copying, Pair
from elastic_ext.checkpoints.memory.pace import Schedule, StepTimes, Trouble
from elastic_ext.checkpoints.memory.part import Path, Planned
from elastic_ext.checkpoints.memory.peers import request
from elastic_ext.checkpoints.memory.peers.request import Send
from elastic_ext.checkpoints.memory.room import Room
from elastic_ext.checkpoints.writing.errors import CheckpointError, failure_of, group_failure
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.state import Objects, capture, parameter_names
from elastic_ext.training import memory as reports

logger = logging.getLogger(__name__)

STEPS_AHEAD = 10  # that training may do while the ranks begin


class MemorySaver:
    """Copies the state of one rank. All ranks take the same steps, because each decision follows from what all have reported."""

    def __init__(self, tier: LocalTier, room: Room, every: int | None, objects: Objects, ranks: Ranks) -> None:
        """every: see `interval.choose`. ranks: in a group of its own, because a thread uses it."""
        self._tier, self._peer, self._objects, self._ranks = tier, room.peer, objects, ranks
        self._buffers = Buffers(tier.storage, ranks.rank, room.limit)
        self._copying = Copying(objects.optimizers)
        self._times = StepTimes()
        self._trouble = Trouble(ranks.rank == 0)
        self._attempt: Attempt | None = None  # the last one
        self._schedule = Schedule(every, ranks.rank == 0)
        self._next: int | None = None  # the step at which a copy is due; None: none will be
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
        self._next, self._generation = None, generation
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
            logger.warning("no more copies to memory: %s", group_failure(error, self._ranks.rank, self._ranks.lost).reason)
        else:
            self._schedule.first = True
            self._next = last + in_steps if in_steps else 0

    def _prepare(self, kept: str) -> None:
        """Remove all copies but this one. Collective. Raises CheckpointError on all ranks; RuntimeError."""
        commit.none_in_progress(self._ranks)

        def clear() -> None:
            if self._tier.first:
                for name in {*own_checkpoints(self._tier.storage), SPARE} - {kept}:
                    _remove(self._tier, name)

        self._ranks.run_on_all(clear)
        own = self._ranks.run_on_all(lambda: self._is_own(kept))
        reuse = all(self._ranks.all_gather(own))
        self._ranks.run_on_all(lambda: self._buffers.keep(kept, reuse))

    def _is_own(self, name: str) -> bool:
        """Return whether these ranks have made a copy, and this one's part is here. Raises OSError, ManifestError."""
        storage = self._tier.storage
        read = manifest_of(storage, name) if name else None
        here = storage.stat(f"{name}/{memory_file(self._ranks.rank)}")
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
        if self._next is not None and self._generation is not None and step >= self._next and self._is_free(step, now):
            self._copy(step, accumulation, manifest, self._generation)
        self._times.goes_on(step, time.monotonic())

    def wait(self) -> None:
        """Wait until the copy in progress, if any, is committed or has failed."""
        if self._attempt is not None:
            self._attempt.join()

    def close(self) -> None:
        """Wait as `wait` does, and let go of the buffers."""
        self.wait()
        self._copying.pin(())

    def _is_free(self, step: int, called: float) -> bool:
        """Wait for the last attempt; return whether it is over, and this step is still to be copied."""
        over = self._attempt is None or self._attempt.hold()
        self._times.waited(time.monotonic() - called)
        if not over:
            # Another rank may have found it over, and copy this step. Then they find out that they are apart.
            self._next = step + self._schedule.every
        # Not if the ranks can no longer communicate, or have copied different steps and go on together later.
        return over and self._next is not None and step >= self._next

    def _copy(self, step: int, accumulation: int, manifest: Callable[[], Manifest], generation: int) -> None:
        # After `begin` no rank has buffers, and this attempt only makes them. Until the next one is committed, parts of the copy
        # that was loaded may be on one node only.
        self._next = step + (1 if self._schedule.first else self._schedule.every)
        self._schedule.first = False
        name = directory_name(step, generation)
        began = time.monotonic()
        planned = buffer = failure = None
        encoded = b""
        try:
            encoded = encode(replace(manifest(), generation=generation)) if self._ranks.rank == 0 else b""
            planned = part.plan(capture(self._objects, self._ranks.rank, accumulation), *self._local)
            self._copying.open(planned.tensors.values())
            if self._buffers.fit(planned.size):
                buffer = self._buffers.begin(name)
                before_s = self._copying.device_stall_s() or 0.0  # known only now, so it counts with this copy
                self._copying.start(step, *self._pairs(planned, buffer))
                part.write_index(buffer.bytes, planned)
                self._times.copied(time.monotonic() - began + before_s)
        except Exception as error:  # noqa: BLE001  (training continues; the thread tells all ranks)
            failure = failure_of(error, self._ranks.rank)
        self._start(Report(name, encoded, self._times.timing(), failure=failure, accumulation=accumulation), planned, buffer)

    def _start(self, report: Report, planned: Planned | None, buffer: Buffer | None) -> None:
        self._times.made_buffers = buffer is None  # until all ranks have said so
        limit_s = interval.hold_limit_s(for_buffers=buffer is None)
        self._attempt = Attempt(lambda: self._run(report, planned, buffer), order_or_oldest(report.name)[1], limit_s)
        try:
            self._attempt.start()
        except RuntimeError as error:  # no more threads: the others wait for this rank's report
            self._attempt = None
            self._run(replace(report, failure=failure_of(error, self._ranks.rank)), None, None)

    @property
    def _local(self) -> tuple[int, int]:
        """The rank's number on its node, and how many ranks the node has."""
        return self._ranks.rank - sum(self._tier.nodes[: self._tier.node]), self._tier.nodes[self._tier.node]

    def _pairs(self, planned: Planned, buffer: Buffer) -> tuple[list[Pair], list[Pair]]:
        """Return (what changes only in an optimizer step, the rest)."""
        parameters = set(parameter_names(self._objects.model).values())
        resting: list[Pair] = []
        moving: list[Pair] = []
        for path, tensor in planned.tensors.items():
            target = part.view(buffer.tensor, planned.places[path])
            (resting if _rests(path, parameters) else moving).append((target, tensor))
        return resting, moving

    # In the thread.

    def _run(self, report: Report, planned: Planned | None, buffer: Buffer | None) -> None:
        began = time.monotonic()
        report = self._completed(report, planned, buffer)
        try:
            outcome = commit.commit(self._tier, self._buffers.kept, report, self._ranks)
            makes_room = outcome.committed and self._buffers.keeps_others  # the same on all ranks
            if makes_room:
                commit.remove_others(self._tier, report.name, self._ranks)
        except Exception as error:  # noqa: BLE001  (the top of a thread; as a rule another rank has died, and the agent acts)
            logger.warning("no more copies to memory: %s", group_failure(error, self._ranks.rank, self._ranks.lost).reason)
            self._next = None
            return
        if outcome.committed or outcome.failure is not None:  # not if a rank has only made its buffers: nothing is known by that
            self._trouble.note(outcome.failure)
        if outcome.failure is not None:
            reports.report_copy_failed()
        self._schedule.choose(outcome.timings, self._trouble.in_a_row)
        self._times.made_buffers = not outcome.committed and outcome.failure is None
        if outcome.apart is not None:
            self._next = outcome.apart + self._schedule.every
        if outcome.committed:
            self._buffers.committed(report.name)
            if makes_room and planned is not None:
                self._make_second(planned.capacity)
            self._times.committed(time.monotonic() - began)
            reports.report_copied(order_or_oldest(report.name)[1], self._times.last_stall_s, self._schedule.every)

    def _make_second(self, capacity: int) -> None:
        """Make the buffer for which there is room only now. If there is none, the next attempt tells all ranks so."""
        self._times.made_buffers = True
        try:
            self._buffers.allocate(capacity)
        except OSError as error:
            logger.debug("no second buffer: %s", error)

    def _completed(self, report: Report, planned: Planned | None, buffer: Buffer | None) -> Report:
        """Return the report with this rank's part, or with the reason why there is none. Makes the buffers that are missing."""
        if report.failure is not None or planned is None:
            return report
        try:
            if buffer is None:
                self._copying.pin(())  # what is pinned stays mapped, and its memory in use
                self._buffers.allocate(planned.capacity)
                self._copying.pin(self._buffers.tensors())
                return report
            self._copying.finish()
            self._copying.pin(self._buffers.tensors())
            file = StoredFile(memory_file(self._ranks.rank), buffer.size, checksum_of(buffer.bytes))
            self._send(report.name, file)
            return replace(report, file=file, common=checksum_of(repr(planned.common).encode()))
        except Exception as error:  # noqa: BLE001  (all ranks are told)
            return replace(report, failure=failure_of(error, self._ranks.rank))

    def _send(self, name: str, file: StoredFile) -> None:
        """Have the agent send the part to the peer. If that does not take it, the copy is on this node only, as the log says.

        Raises NoAgent: then nothing is committed on any node. A worker may outlive its agent for a moment; two such commits would
        remove the last copy that the other nodes have of this one's parts.
        """
        if self._peer:
            limit_s = self._schedule.send_limit_s(self._times.timing())
            request.send(self._peer, Send(name, file.name, file.size, file.checksum, self._buffers.kept, limit_s))


def make(
    tier: LocalTier | None, room: Room | None, every: int | None, objects: Objects, ranks: Ranks, timeout: timedelta
) -> MemorySaver | None:
    """Return the saver of this rank; None on all ranks if they have no tier or are to make no copies. Collective.

    Args:
        every: the script's choice; None: the agent's. Rank 0's is used.
        ranks: for this call only.
    """
    if tier is None or room is None:
        return None
    choices = ranks.all_gather(room.every if every is None else every)
    every = choices[0]
    if ranks.rank == 0 and len(set(choices)) > 1:
        logger.warning("memory_every differs between ranks; all do as rank 0 does")
    return None if every == 0 else MemorySaver(tier, room, every, objects, Ranks(timeout))


def _rests(path: Path, parameters: set[str]) -> bool:
    return path[0] == "optimizer" or (path[0] == "model" and path[-1] in parameters)


def _remove(tier: LocalTier, name: str) -> None:
    try:
        tier.storage.remove_tree(name)
    except FileNotFoundError:
        pass
