"""Copies the state to memory, step after step: when one is due, into which buffer, and how it ended."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import xxhash

from elastic_ext.checkpoints.directory.tiers import manifest_of, memory_file, own_checkpoints
from elastic_ext.checkpoints.formats.manifest import Manifest, StoredFile, directory_name
from elastic_ext.checkpoints.memory import commit, interval, part
from elastic_ext.checkpoints.memory.buffers import SPARE, Buffer, Buffers
from elastic_ext.checkpoints.memory.commit import Report
from elastic_ext.checkpoints.memory.devices import Copying, Pair
from elastic_ext.checkpoints.memory.interval import Timing
from elastic_ext.checkpoints.memory.part import Path, Planned
from elastic_ext.checkpoints.memory.peers import request
from elastic_ext.checkpoints.memory.peers.request import Send
from elastic_ext.checkpoints.memory.room import Room
from elastic_ext.checkpoints.writing.errors import CheckpointError, FailureKind, SaveFailure, failure_of
from elastic_ext.checkpoints.writing.local_tier import LocalTier
from elastic_ext.checkpoints.writing.ranks import Ranks
from elastic_ext.checkpoints.writing.state import Objects, capture, parameter_names
from elastic_ext.training import memory as reports

logger = logging.getLogger(__name__)

RECENT = 8  # measurements of each kind that count
TOLD_CHANGE = 1.5  # factor by which the interval changes before the log says so again


class StepTimes:
    """The times that this rank has measured lately. last_stall_s: for how long the last copy has held up training."""

    def __init__(self) -> None:
        self._steps, self._stalls, self._commits = (deque[float](maxlen=RECENT) for _ in range(3))
        self._last: tuple[int, float] | None = None  # the last step and when training went on after it
        self.last_stall_s = 0.0

    def step_ends(self, step: int, now: float) -> None:
        """Note that training has done a step. now: monotonic."""
        if self._last is not None and step > self._last[0]:
            self._steps.append((now - self._last[1]) / (step - self._last[0]))

    def goes_on(self, step: int, now: float) -> None:
        """Note that training goes on after a step."""
        self._last = step, now

    def copied(self, copy_s: float, wait_s: float) -> None:
        """Note a copy, and how long it has waited for the one before, or for its buffers: the interval is to prevent that."""
        self._stalls.append(copy_s)
        self.last_stall_s = wait_s + copy_s

    def committed(self, seconds: float) -> None:
        self._commits.append(seconds)

    def timing(self) -> Timing:
        return Timing(*(statistics.median(each) if each else None for each in (self._steps, self._stalls, self._commits)))


class Trouble:
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


class Schedule:
    """How often to copy. every: now."""

    def __init__(self, asked: int | None, speaks: bool) -> None:
        """asked: see `interval.choose`. speaks: whether this rank writes to the log."""
        self._asked, self._speaks = asked, speaks
        self._told: int | None = None  # what the log has said
        self.every = interval.choose(asked, ()).every

    def send_limit_s(self, timing: Timing) -> float:
        """Return how long it may take to send a part to the peer."""
        return interval.send_limit_s(self.every, timing)

    def choose(self, timings: Sequence[Timing], failures: int) -> None:
        """Choose from the timings of all ranks. failures: attempts in a row that failed."""
        found = interval.choose(self._asked, timings, failures)
        self.every = found.every
        much = self._told is None or max(found.every, self._told) > TOLD_CHANGE * min(found.every, self._told)
        if self._speaks and much and not failures:
            self._told = found.every
            logger.info("the state is copied to memory every %s steps: %s", found.every, found.reason)


class MemorySaver:
    """Copies the state of one rank. All ranks take the same steps, because each decision follows from what all have reported."""

    def __init__(self, tier: LocalTier, room: Room, every: int | None, objects: Objects, ranks: Ranks) -> None:
        """every: see `interval.choose`. ranks: in a group of its own, because a thread uses it."""
        self._tier, self._peer, self._objects, self._ranks = tier, room.peer, objects, ranks
        self._buffers = Buffers(tier.storage, ranks.rank, room.limit)
        self._copying = Copying()
        self._times = StepTimes()
        self._trouble = Trouble(ranks.rank == 0)
        self._thread: threading.Thread | None = None
        self._schedule = Schedule(every, ranks.rank == 0)
        self._next: int | None = None  # the step at which a copy is due; None: none will be
        self._generation: int | None = None

    def begin(self, generation: int | None, kept: str = "") -> None:
        """Begin after a load. Collective. kept: name of the copy in memory that was loaded; all others are removed.

        generation: of this group of workers; None if it has none yet.
        """
        self.wait()
        self._next, self._generation = None, generation

        def clear() -> None:
            if self._tier.first:
                for name in {*own_checkpoints(self._tier.storage), SPARE} - {kept}:
                    _remove(self._tier, name)

        try:
            self._ranks.run_on_all(clear)
            self._ranks.run_on_all(lambda: self._buffers.keep(kept, self._is_own(kept)))
        except CheckpointError as error:
            logger.warning("the state is not copied to memory: %s", error)
            return
        self._next = 0

    def _is_own(self, name: str) -> bool:
        """Return whether these ranks have made a copy, and this one's part is here. Raises OSError, ManifestError."""
        storage = self._tier.storage
        read = manifest_of(storage, name) if name else None
        here = storage.stat(f"{name}/{memory_file(self._ranks.rank)}")
        return read is not None and read[0].nodes == self._tier.nodes and here is not None

    def has_generation(self, generation: int | None) -> None:
        """Begin if this group of workers has got its generation only now. Collective; the same on all ranks."""
        if self._generation is None and generation is not None:
            self.begin(generation)

    def step(self, manifest: Manifest) -> None:
        """Copy the state after the manifest's step if that is due. manifest: without files and generation. Never raises."""
        step, now = manifest.step, time.monotonic()
        self._times.step_ends(step, now)
        if self._next is not None and self._generation is not None and step >= self._next:
            self._copy(replace(manifest, generation=self._generation), now)
        self._times.goes_on(step, time.monotonic())

    def wait(self) -> None:
        """Wait until the copy in progress, if any, is committed or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, manifest: Manifest, called: float) -> None:
        self.wait()
        if self._next is None:
            return  # the ranks can no longer communicate
        self._next = manifest.step + self._schedule.every
        name = directory_name(manifest.step, manifest.generation)
        began = time.monotonic()
        planned = buffer = failure = None
        try:
            planned = part.plan(capture(self._objects, self._ranks.rank, manifest.accumulation), *self._local)
            if self._buffers.fit(planned.size):
                buffer = self._buffers.begin(name)
                self._copying.start(*self._pairs(planned, buffer))
                part.write_index(buffer.bytes, planned)
                self._times.copied(time.monotonic() - began, began - called)
        except Exception as error:  # noqa: BLE001  (training continues; the thread tells all ranks)
            failure = failure_of(error, self._ranks.rank)
        args = (name, Report(manifest, self._times.timing(), failure=failure), planned, buffer)
        self._thread = threading.Thread(target=self._run, args=args, name=f"memory-{manifest.step}", daemon=True)
        self._thread.start()

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

    def _run(self, name: str, report: Report, planned: Planned | None, buffer: Buffer | None) -> None:
        began = time.monotonic()
        report = self._completed(report, planned, buffer)
        try:
            outcome = commit.commit(self._tier, name, self._buffers.kept, report, self._ranks)
        except Exception as error:  # noqa: BLE001  (the top of a thread; as a rule another rank has died, and the agent acts)
            logger.warning("no more copies to memory, as the ranks can no longer communicate: %s", str(error).partition("\n")[0])
            self._next = None
            return
        self._trouble.note(outcome.failure)
        if outcome.failure is not None:
            reports.report_copy_failed()
        self._schedule.choose(outcome.timings, self._trouble.in_a_row)
        if outcome.committed:
            self._buffers.committed(name)
            self._times.committed(time.monotonic() - began)
            reports.report_copied(report.manifest.step, self._times.last_stall_s, self._schedule.every)

    def _completed(self, report: Report, planned: Planned | None, buffer: Buffer | None) -> Report:
        """Return the report with this rank's part, or with the reason why there is none. Makes the buffers that are missing."""
        if report.failure is not None or planned is None:
            return report
        try:
            if buffer is None:
                self._buffers.allocate(planned.capacity)
                return report
            self._copying.finish()
            self._copying.pin(self._buffers.tensors())
            file = StoredFile(memory_file(self._ranks.rank), buffer.size, xxhash.xxh3_64_hexdigest(buffer.bytes))
            self._send(report.manifest, file)
            return replace(report, file=file)
        except Exception as error:  # noqa: BLE001  (all ranks are told)
            return replace(report, failure=failure_of(error, self._ranks.rank))

    def _send(self, manifest: Manifest, file: StoredFile) -> None:
        """Have the agent send the part to the peer. If it cannot, the agent says so, and the copy is on this node only."""
        if self._peer:
            name = directory_name(manifest.step, manifest.generation)
            limit_s = self._schedule.send_limit_s(self._times.timing())
            request.send(self._peer, Send(name, file.name, file.size, file.checksum, self._buffers.kept, limit_s))


def make(
    tier: LocalTier | None, room: Room | None, every: int | None, objects: Objects, timeout: timedelta
) -> MemorySaver | None:
    """Return the saver of this rank; None on all ranks if they have no tier or are to make no copies. Collective.

    every: the script's choice; None: the agent's.
    """
    if tier is None or room is None:
        return None
    every = room.every if every is None else every
    return None if every == 0 else MemorySaver(tier, room, every, objects, Ranks(timeout))


def _rests(path: Path, parameters: set[str]) -> bool:
    return path[0] == "optimizer" or (path[0] == "model" and path[-1] in parameters)


def _remove(tier: LocalTier, name: str) -> None:
    try:
        tier.storage.remove_tree(name)
    except FileNotFoundError:
        pass
