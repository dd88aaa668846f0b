"""Which rank or host of this round is late: gathers the workers' samples, and compares them on the node of rank 0.

Samples go through the round's store, which lives in the memory of rank 0's agent and ends with the round, as they do: in etcd
each would be kept until the next compaction. For the comparison the clocks of hosts are aligned by asking each other agent for
its time, through the same store, and not by the start of the round: two clocks drift apart by up to some ms a minute, and one
start says nothing of its own error.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from torch.distributed import DistStoreError

from elastic_ext.agent.companion import Companion, LocalWorkers, RoundPlace, read_file_of_worker
from elastic_ext.agent.feature import Feature, RoundParts
from elastic_ext.agent.journal import Journal
from elastic_ext.agent.observation import Observation
from elastic_ext.base import errors, records, round_store, threads
from elastic_ext.base.printable import shown
from elastic_ext.features.stragglers import decide
from elastic_ext.features.stragglers.decide import Alignment, Late, NodeSample, Ping, RankSample, Streak
from elastic_ext.rendezvous.address import machine
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.drains import Answer
from elastic_ext.status.job_status import NodeReport, Straggler
from elastic_ext.workers import worker_env

logger = logging.getLogger(__name__)

WAIT_S = 5.0  # for the samples of other nodes, and for a question to them
ANSWER = timedelta(seconds=1)  # for an answer, and for the next question, which take a millisecond
LOOK_S = 0.05  # between two looks for what comes
NO_QUESTION = "none"
REPLACE = "replace"  # value of the setting stragglers
REPLACE_AFTER_S = 300.0  # that a node must have been late: a disturbance of a minute is cheaper than a restart of the job
JOIN_S = 1.0
TURN_S = 0.2  # for each node that is asked before, at most; it takes about LOOK_S
PINGS = 4  # of each host, of which the fastest counts
MOST_SILENT = 3  # hosts that do not answer; then no more are asked in this comparison
MAX_SAMPLE = 1 << 20  # bytes of a worker's file


class StoreSilent(Exception):
    """A key was not there in time, or the round is over."""


def this_clock() -> str:
    """Return what identifies this process's monotonic clock: the boot, and the namespace of clocks; "" if unknown."""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError as error:
        logger.debug("cannot read this host's namespace of clocks, so its clock counts as one of its own: %s", error)
        return ""
    return f"{boot} {namespace}".replace("/", "_") if (boot := machine()) else ""


class SlowNodes:
    """Has the host of a straggler leave, by `stragglers=replace`. For one round, which ends when it does."""

    def __init__(self, job: Rendezvous) -> None:
        self._job = job
        self._answered = ""  # the last answer, which is logged once

    def look(self, named: Sequence[Streak], now: float) -> None:
        """Ask the job if something is late enough. now: monotonic seconds. It may take seconds."""
        settings = self._job.settings
        streak = decide.to_replace(named, now, REPLACE_AFTER_S) if settings.stragglers == REPLACE else None
        if streak is None:
            return
        reason = f"stragglers=replace: {straggler(streak).text}"
        which = f"rank {streak.late.rank} on " if streak.late.rank >= 0 else streak.late.host  # a rank may be late on any host
        try:
            admission = self._job.replace_host(streak.late.host, reason, f"stragglers=replace: {which}")
        except (errors.ElasticExtError, OSError) as error:
            logger.info("stragglers=replace: it is unknown whether %s leaves: %s", streak.late.host, error)
            return
        if admission.reason != self._answered:
            self._answered = admission.reason
            leaves = admission.answer in (Answer.ADMITTED, Answer.ASKED)
            what = "leaves at the next checkpoint" if leaves else "stays"
            logger.warning("elastic_ext: %s %s (%s): %s", shown(streak.late.host), what, shown(admission.reason), shown(reason))


class LatenessWatch(Companion):
    """Compares the samples of one round, on a thread of its own: a store that hangs must not block the loop."""

    def __init__(
        self,
        place: RoundPlace,
        on_compared: Callable[[Sequence[Late], Sequence[Streak]], None],
        replacement: SlowNodes,
        on_over: Callable[[], None] = lambda: None,
    ) -> None:
        """on_compared: called on that thread, on the node of rank 0, with all that was found, and what is named now. on_over:
        called by the loop at the end of the round."""
        self._place, self._on_compared, self._replacement, self._on_over = place, on_compared, replacement, on_over
        self._clock = this_clock()
        self._seen: list[int] = []
        self._due: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: workers have samples; False: the round is over
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._begun = False
        self._workers: LocalWorkers | None = None
        self._store: round_store.Store | None = None

    def workers_started(self, workers: LocalWorkers) -> None:
        self._workers = workers

    def check(self, workers: LocalWorkers) -> None:
        samples = [row.samples for row in workers.read_progress()]
        if samples == self._seen or not all(samples):
            return
        self._seen = samples
        self._due.put(True)
        if not self._begun:
            self._begun = True
            text = "it is unknown whether a rank is late: %s"
            with threads.held() as received:  # an exception of a signal handler inside `start` would come out of it as a KeyError
                self._thread = threads.started(self._run, "elastic_ext-lateness", logger.warning, text, kind=threads.StoreCall)
            threads.raise_again(received)

    def workers_ended(self, workers: LocalWorkers) -> None:
        self._over.set()
        self._due.put(False)
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self._on_over()

    # On the thread.

    def _run(self) -> None:
        try:
            self._serve()
        except StoreSilent:
            pass  # the round is over
        except (RuntimeError, ValueError) as error:
            log = logger.debug if self._over.is_set() else logger.warning
            log("it is no longer known whether a rank is late: the store of the round does not answer: %s", error)
        except Exception:  # the top of a thread
            logger.exception("it is no longer known whether a rank is late")

    def _serve(self) -> None:
        streaks: Mapping[tuple[str, int], Streak] = {}
        steps = [0, 0, 0]  # of the last samples
        while self._due.get():
            seen = self._seen
            sample = self._own_sample()
            if sample is None or (step := sample.ranks[0].sample.step) == steps[-1]:
                continue  # not all workers have written theirs
            steps = [*steps[1:], step]
            if self._place.node > 0:
                self._give(sample, step, seen, forget=steps[0])
                continue
            nodes, clocks = self._gather(sample, step)
            found = decide.compare(nodes, clocks)
            streaks = decide.follow(streaks, found, now := time.monotonic())
            named = decide.named(streaks)
            if self._over.is_set():
                return  # the end of the round waits for JOIN_S only, and what it has cleared must not come back
            self._on_compared(found, named)
            if not self._over.is_set():
                self._replacement.look(named, now)

    def _own_sample(self) -> NodeSample | None:
        """Return the samples of this node's workers; None if they are not all of one step."""
        assert self._workers is not None
        found = []
        for local_rank, rank in self._workers.ranks.items():
            path = worker_env.issued_path(self._workers.stacks_files.get(local_rank))
            sample = read_file_of_worker(path, decide.decode_worker, MAX_SAMPLE)
            if sample is None:
                return None
            found.append(RankSample(rank, sample))
        same = len({each.sample.step for each in found}) == 1
        return NodeSample(self._place.host, self._clock, tuple(found)) if same else None

    def _connected(self) -> round_store.Store:
        if self._store is None:
            self._store = round_store.connect(*self._place.store_at)
        return self._store

    def _give(self, sample: NodeSample, step: int, seen: Sequence[int], forget: int) -> None:
        """Give this node's sample to the node of rank 0, and answer its questions about the time.

        That node may sample more rarely than this one and not compare this step, so a newer sample of all workers ends the wait.

        seen: how many samples each worker had written by this one.
        """
        store, node = self._connected(), self._place.node
        if forget:
            store.delete_key(round_store.late(forget, node))
        store.set(round_store.late(step, node), decide.encode(sample))
        for number in range(PINGS):
            question = round_store.clock(step, node, number)
            try:
                if number:  # the answers count that come at once, and so not the first
                    store.wait([question], ANSWER)
                else:
                    self._await(store, question, time.monotonic() + WAIT_S + TURN_S * node, seen)
                asked = store.get(question)
            except (TimeoutError, DistStoreError):
                return  # it does not compare this step, or no longer waits
            if asked == NO_QUESTION.encode():
                store.delete_key(question)
                return
            store.set(round_store.clock_answer(step, node, number), str(time.monotonic_ns() // 1000))

    def _gather(self, own: NodeSample, step: int) -> tuple[list[NodeSample], list[Alignment]]:
        """Return the samples of all nodes that have one of this step, the own one first, and how their clocks are aligned."""
        nodes, clocks, silent = [own], [Alignment()], 0
        by = time.monotonic() + WAIT_S
        for node in range(1, self._place.nodes):
            store, key = self._connected(), round_store.late(step, node)
            try:
                self._await(store, key, by)
                sample = decide.decode(store.get(key), key)
            except (TimeoutError, records.RecordError) as error:
                logger.debug("lateness: no sample of node %s after step %s: %s", node, step, error)
                continue
            nodes.append(sample)
            if sample.clock and sample.clock == own.clock:
                store.set(round_store.clock(step, node, 0), NO_QUESTION)
                clocks.append(Alignment())
            else:
                pings = self._ping(store, node, step) if silent < MOST_SILENT else []
                silent += not pings
                clocks.append(decide.aligned(pings))
        return nodes, clocks

    def _ping(self, store: round_store.Store, node: int, step: int) -> list[Ping]:
        found = []
        for number in range(PINGS):
            question, answer = round_store.clock(step, node, number), round_store.clock_answer(step, node, number)
            sent_us = time.monotonic_ns() // 1000
            try:
                store.set(question, "")
                store.wait([answer], ANSWER)
                answered_us = time.monotonic_ns() // 1000
                found.append(Ping(sent_us, int(store.get(answer)), answered_us))
            except DistStoreError:  # not in time
                break
            finally:
                store.delete_key(question)
                store.delete_key(answer)
        return found

    def _await(self, store: round_store.Store, key: str, by: float, seen: Sequence[int] = ()) -> None:
        """Wait for a key. by: monotonic seconds. seen: see `_give`. Raises TimeoutError; StoreSilent: the round is over.

        It looks again and again: each `wait` of a store that is not in time writes two warnings to stderr (torch 2.13).
        """
        while not store.check([key]):
            is_newer = bool(seen) and all(now > then for now, then in zip(self._seen, seen, strict=True))
            if is_newer or time.monotonic() >= by:  # before the wait: where many nodes have no sample, only the first costs time
                raise TimeoutError(f"{key} was not in the store in time")
            if self._over.wait(LOOK_S):
                raise StoreSilent


def straggler(streak: Streak) -> Straggler:
    late = streak.late
    error_s = (late.error_us or 0.0) / 1e6
    return Straggler(
        late.host,
        late.rank,
        round(max(0.0, late.median_us) / 1e6, 6),
        round(max(0.0, late.p90_us) / 1e6, 6),
        round(late.step_us / 1e6, 6),
        round(max(0.0, late.share), 4),
        round(error_s, 6),
    )


class ShownStragglers:
    """Shows and reports which ranks and hosts are late in one round. Any thread may call this."""

    def __init__(self, observation: Observation, journal: Journal) -> None:
        self._observation, self._journal = observation, journal
        self._late: dict[tuple[str, int], Straggler] = {}  # by host and rank

    def compared(self, found: Sequence[Late], named: Sequence[Streak]) -> None:
        stragglers = [straggler(each) for each in named]
        now, before = {(each.node, each.rank): each for each in stragglers}, self._late
        largest = max((each.share for each in found if each.error_us is not None), default=None)
        self._show(now, largest)
        for key, each in now.items():
            if key not in before:
                self._report(each, each.text, True)
        for key, each in before.items():
            if key not in now:
                self._report(each, f"{each.who} is late no longer", False)

    def over(self) -> None:
        self._show({}, None)

    def _show(self, late: dict[tuple[str, int], Straggler], largest: float | None) -> None:
        """largest: share of a step of the latest, named or not; None if unknown."""
        before, self._late = self._late, late
        labelled = {(shown(each.node), str(each.rank) if each.rank >= 0 else ""): each for each in late.values()}
        self._observation.of_features.show(
            straggler_seconds={labels: each.late_s for labels, each in labelled.items()},
            straggler_ratio={labels: each.share for labels, each in labelled.items()},
            lateness_largest_ratio={(): largest} if largest is not None else {},
        )
        found = tuple(late.values())

        def fill(report: NodeReport) -> NodeReport:
            return replace(report, stragglers=found) if report.node_rank == 0 else report  # another node may have that rank now

        self._observation.node.found("stragglers", fill, list(before) != list(late))

    def _report(self, which: Straggler, text: str, late: bool) -> None:
        logger.warning("elastic_ext: %s", shown(text))
        self._journal.events.emit(
            "straggler",
            late=late,
            host=which.node,
            rank=which.rank if which.rank >= 0 else None,
            seconds=which.late_s,
            p90_seconds=which.p90_s,
            step_seconds=which.step_s,
            share=which.share,
            error_seconds=which.error_s,
        )


class Stragglers(Feature):
    def message(self) -> Mapping[str, object]:
        return {"stragglers": "auto" if self.parts.settings.stragglers == "auto" else "all"}  # `replace` looks as `all` does

    def beside_round(self, round_: RoundParts) -> Companion | None:
        if round_.progress is None or round_.place.world == 1:
            return None
        news = ShownStragglers(self.parts.observation, self.parts.journal)
        return LatenessWatch(round_.place, news.compared, SlowNodes(self.parts.job), news.over)
