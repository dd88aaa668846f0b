"""Hangs of one round: whether the workers of this node stall, and where each one is when the whole job hangs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from elastic_ext.agent.companion import LocalWorkers, StallWatch
from elastic_ext.agent.feature import Feature, RoundParts
from elastic_ext.agent.leaving import ask_for_save
from elastic_ext.agent.positions import STACKS_KEPT, shown_stack
from elastic_ext.base.diagnosis import Collective
from elastic_ext.failures.joint_evidence import Reach, Silent
from elastic_ext.failures.ledger import Report
from elastic_ext.hangs import detector
from elastic_ext.hangs.watch import HangWatch
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.address import own_addresses
from elastic_ext.rendezvous.contract import Rendezvous

logger = logging.getLogger(__name__)


class Recorder(Protocol):
    """NCCL's flight recorder."""

    def dump(self, ranks: Iterable[int]) -> str:
        """Make these ranks dump their records; return a sentence that says where, "" if none did."""


class HangHandling(StallWatch):
    """Claims that all workers of this node stall, and withdraws the claim. The job hangs when all nodes claim a stall."""

    def __init__(self, watch: HangWatch, handler: Rendezvous, recorder: Recorder | None) -> None:
        """recorder: NCCL's flight recorder; None without NCCL."""
        self.hung: Mapping[int, detector.Stuck] = {}  # set by `examine`
        self._reach: Reach | None = None  # the hosts that did not answer them then
        self._collectives: tuple[Collective, ...] = ()  # those in which the workers waited then
        self._watch, self._handler, self._recorder = watch, handler, recorder
        self._waiting = False  # this node claims a stall by the limit of a wait only

    @property
    def stalled(self) -> bool:
        """Whether all workers of this node stall, as of the last check: the job may hang."""
        return self._watch.stalled

    def next_check_s(self) -> float:
        return self._watch.next_check_s()

    def check(self, workers: LocalWorkers) -> None:
        stalled_before, imminent_before = self._watch.stalled, self._watch.imminent
        assessment = self._watch.check(workers.running_pids(), workers.stacks_files)
        if assessment is None:
            return
        if assessment.imminent and not imminent_before:
            progress = workers.read_progress()
            if progress and all(each.asks_for_saves for each in progress):
                logger.info("asking for a checkpoint because the workers may hang: %s", assessment.reason)
                ask_for_save(self._handler.part)
        if assessment.stalled or stalled_before:
            claim = topics.Stalled() if assessment.stalled else None
            self._handler.part.post(topics.STALLED, claim)
        if (assessment.stalled, assessment.waiting) != (stalled_before, self._waiting):
            # While a rank of another node does its own part, the others wait for it. That is not news for users.
            level = logging.INFO if assessment.waiting or (self._waiting and not assessment.stalled) else logging.WARNING
            logger.log(level, "elastic_ext: %s%s", "" if assessment.stalled else "the workers have resumed: ", assessment.reason)
        self._waiting = assessment.waiting

    def examine(self, workers: LocalWorkers) -> list[str]:
        """Find out and log where each worker is when the whole job hangs; return one text per worker for the verdict."""
        silent = self._watch.silent_hosts(workers.running_pids())
        self._reach = Reach(own_addresses(), tuple(Silent(each.rank, each.address, each.for_s) for each in silent))
        stuck = self._watch.examine(workers.running_pids(), workers.stacks_files)
        self._collectives = tuple(each.collective for each in stuck.values() if each.collective is not None)
        culprits = detector.culprits(list(stuck.values()))
        self.hung = {local_rank: each for local_rank, each in stuck.items() if each in culprits}
        records = self._recorder.dump(each.rank for each in stuck.values()) if self._recorder is not None else ""
        texts = []
        for each in sorted(stuck.values(), key=lambda one: one.blame):
            logger.warning("elastic_ext: %s%s", each.reason, shown_stack(each.stack))
            texts.append(f"{each.reason}\n{detector.main_thread_first(each.stack, STACKS_KEPT)}".rstrip())
        texts += [each.text for each in silent]
        if records:
            logger.warning("elastic_ext: %s", records)
            texts.append(records)
        return texts

    def reported(self, report: Report, workers: LocalWorkers) -> Report:
        return replace(report, reach=self._reach or report.reach, collectives=self._collectives)


class Hangs(Feature):
    """Hangs of a job without NCCL; `flight_recorder` has those of the others."""

    recorder: Recorder | None = None

    def beside_round(self, round_: RoundParts) -> StallWatch | None:
        # Without the bootstrap, workers never report progress, which is not a sign of a hang.
        if not round_.bootstrap or round_.progress is None or not round_.own_groups:
            return None
        watch = HangWatch(round_.progress, round_.ranks, self.parts.settings.hang_timeout, round_.place.world)
        return HangHandling(watch, self.parts.job, self.recorder)
