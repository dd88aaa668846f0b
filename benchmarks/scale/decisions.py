"""What the real modules decide about known causes: classify, judgement, policy and ledger, as a leader calls them.

A leader gets a report from each node of a round. Here it gets those that can differ: the node with the cause, and two others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from elastic_ext.base.diagnosis import Response
from elastic_ext.base.errors import EX_CODE, EX_TRY_AGAIN
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import Diagnosis, classify
from elastic_ext.failures.evidence import WAITS, Evidence, RaisedException
from elastic_ext.failures.joint_evidence import Reach, Silent
from elastic_ext.failures.judgement import Circumstances, Lost, judge
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report
from elastic_ext.failures.policy import NO_LIMIT, Backoff
from elastic_ext.hangs.detector import START_FLOOR_S
from scale.causes import CAUSES, Cause, Look, Shows, Truth, truth_of
from scale.inputs import Mix

_PEER_GONE = RaisedException(
    "torch.distributed.DistBackendError",
    "NCCL error: remote process exited or there was a network error\nLast error:\nConnection closed by remote peer",
)
_ADDRESS = "10.0.0.2"  # of the node with the cause
SETTINGS = Settings()


@dataclass(frozen=True)
class Moment:
    """Where the job was when something failed.

    Attributes:
        steps: that its workers had done since they started; 0: they had not finished the first one.
        resumed_at: step that the round began at. copied_at, saved_at: of the newest copy in memory and checkpoint.
        warm: whether its workers were warm standbys.
    """

    steps: int
    resumed_at: int
    warm: bool
    copied_at: int | None = None
    saved_at: int = 0


@dataclass(frozen=True)
class Place:
    """Where something failed. hosts: those of the cause; others: two hosts of the job that are well. rank: on the first host."""

    hosts: tuple[str, ...]
    others: tuple[str, str]
    rank: int = 0


class Leader:
    """Judges the failures of one job, with its ledger."""

    def __init__(self, nodes: int, spares: int, max_restarts: int = NO_LIMIT, seed: int = 0) -> None:
        self.ledger, self._round = Ledger(), 0
        self._random = random.Random(seed)
        self._nodes, self._max_restarts = nodes, max_restarts
        self._backoff = Backoff(SETTINGS.backoff)
        self.spares = spares

    def judge(self, look: Look, place: Place, moment: Moment, charges: int | None = None) -> JobVerdict:
        """Return the verdict, and keep it in the ledger. charges: see Circumstances."""
        self._round += 1
        gone = look.shows in (Shows.GONE, Shows.SILENT)
        lost = tuple(Lost(host, id=f"{host}#1") for host in place.hosts) if gone else ()
        here = Circumstances(
            self._max_restarts,
            nodes=self._nodes + self.spares - len(lost),
            min_nodes=self._nodes,
            members=self._nodes,
            lost=lost,
            charges=charges,
            backoff=self._backoff,
            jitter=self._random.random(),
        )
        reports = dict(_reports(look, place, moment, self._random))
        self.ledger, verdict = judge(reports, self.ledger, here, self._round)
        return verdict

    def forget(self) -> None:
        """Begin another run: somebody has submitted the job again."""
        self.ledger = Ledger()


def diagnosed(evidence: Evidence, order: int) -> Diagnosis:
    """Return what `classify` says. It never looks at the step, so the answer for one step holds for all."""
    found = _without_step(replace(evidence, step=None))
    return replace(found, evidence=replace(found.evidence, step=evidence.step), order=order)


_without_step = functools.lru_cache(maxsize=4096)(classify)


def _reports(look: Look, place: Place, moment: Moment, random_: random.Random) -> Iterator[tuple[str, Report]]:
    """Yield the reports by node id."""
    done = moment.steps > 0
    common = {"step": moment.steps, "first_step_done": done, "warm": moment.warm, "ended_ns": 1}

    def report(host: str, evidence: Evidence, order: int) -> Report:
        diagnosis = diagnosed(evidence, order)
        where = f"step_{moment.resumed_at:08d}" if moment.resumed_at else ""
        return Report(
            host,
            diagnosis,
            moment.resumed_at,
            resumed_from=where,
            copied_at=moment.copied_at,
            saved_at=moment.saved_at,
            ranks=(evidence.rank,),
        )

    hosts = () if look.shows in (Shows.GONE, Shows.SILENT) else place.hosts
    seen = dict(look.evidence)
    if look.shows is Shows.HANG and seen["hang_blame"][0] == WAITS:
        seen["hang_blame"] = (WAITS, random_.randrange(9))  # so that any rank may be blamed
    for number, host in enumerate(hosts):
        found = report(host, Evidence(rank=place.rank + 8 * number, node=host, **{**common, **seen}), 1 + number)
        yield f"{host}#1", replace(found, reach=Reach((_ADDRESS,))) if look.missed else found
    for number, host in enumerate(place.others):
        rank = 64 + 8 * number
        if look.shows is Shows.HANG:
            evidence = Evidence(
                rank=rank,
                node=host,
                signal="SIGKILL",
                hang=True,
                hang_reason="it waits",
                hang_blame=(WAITS, random_.randrange(9)),
                **common,
            )
        elif number == 0 or not hosts or look.missed:
            evidence = Evidence(rank=rank, node=host, exit_code=1, exception=_PEER_GONE, **common)
        else:
            evidence = Evidence(rank=rank, node=host, signal="SIGTERM", stopped_by_agent=True, **common)
        silent = (Silent(rank, _ADDRESS, 0.0),) if look.missed else ()
        yield f"{host}#1", replace(report(host, evidence, 10 + number), reach=Reach((f"10.0.1.{number}",), silent))


# One cause alone, until the job trains on, has stopped, or the bad node has left.

TRIES = 12
RECOVERY_S = 30.0  # assumed, for outages: from a verdict to the next start, without its pause
# Assumed: (share, seconds) for which a network or a service is still away after the failure. The next starts fail, too.
OUTAGES = ((0.8, 0.0), (0.2, 120.0))


@dataclass(frozen=True)
class Episode:
    """What became of one cause.

    Attributes:
        share: of the failures of its mix.
        restarts: of the same workers' work; the start on another node after one has left counts, too.
        end: "went on", "stopped as code", "stopped", "requeued", "kept on" (it would go on failing).
        left: nodes that left. wrongly: how many of them were well.
    """

    name: str
    look: str
    truth: Truth
    at_start: bool
    progress: bool
    share: float
    restarts: int
    end: str
    left: int = 0
    wrongly: int = 0

    @property
    def fault(self) -> str:
        """What is wrong with it; "" if nothing is."""
        if self.truth is Truth.CODE and self.restarts > 1:
            return "a bug is restarted more than once"
        infrastructure = self.truth in (Truth.NODE, Truth.GONE, Truth.PASSES)
        if infrastructure and self.end == "stopped as code":
            return "infrastructure is stopped as code"
        if infrastructure and self.end == "stopped":
            return "infrastructure is given up"
        if self.truth is Truth.NODE and self.end == "kept on":
            return "a bad node stays"
        return "a good node leaves" if self.wrongly and self.truth in (Truth.PASSES, Truth.CODE) else ""


def episodes(mix: Mix) -> Iterator[Episode]:
    """Yield each way in which a cause of the mix may show and go on, with its share: nothing is drawn."""
    total = sum(count for _, count, _ in mix)
    for name, count, key in mix:
        cause = CAUSES[key]
        for look in cause.looks:
            for at_start, of_start in ((True, cause.at_start), (False, 1 - cause.at_start)):
                for way, of_way in _ways(cause, truth_of(cause, look), at_start):
                    share = count / total * look.share * of_start * of_way
                    if share > 0:
                        yield _play(name, cause, look, at_start, way, share)


@dataclass(frozen=True)
class _Way:
    """How a cause goes on.

    Attributes:
        same: it is the same rank each time.
        progress: it comes back after further steps.
        away_s: see OUTAGES.
    """

    same: bool = True
    progress: bool = False
    away_s: float = 0.0


def _ways(cause: Cause, truth: Truth, at_start: bool) -> list[tuple[_Way, float]]:
    if truth is Truth.CODE:  # assumed: half of the bugs come up on any rank, half on one
        return [(_Way(True), 0.5), (_Way(False), 0.5)]
    if truth in (Truth.NODE, Truth.LIMIT) and not at_start:  # assumed: half come back after progress
        return [(_Way(progress=True), 0.5), (_Way(), 0.5)]
    if truth is Truth.PASSES and cause.outage:
        return [(_Way(away_s=away_s), share) for share, away_s in OUTAGES]
    return [(_Way(), 1.0)]


class _Alone:
    """A job of 64 nodes and 4 spares in which one cause acts: on node BAD, or on rank 56, which that node has at first."""

    BAD = "n7"

    def __init__(self, cause: Cause, look: Look, at_start: bool, way: _Way) -> None:
        self.truth, self._look, self._at_start, self._way = truth_of(cause, look), look, at_start, way
        self._leader, self._step = Leader(nodes=64, spares=4), 0 if at_start else 1400
        self._is_in, self._has_rank = True, self.BAD  # whether BAD is in the job, and the node of rank 56
        self._numbers = self.truth is Truth.NODE and "loss is nan" in str(look.evidence.get("exception"))

    def fail(self, number: int) -> JobVerdict:
        """Let it fail for this time, from 0, and return the verdict."""
        any_rank = self._numbers or (self.truth is Truth.CODE and not self._way.same)  # any rank may see a wrong number
        place = (self.BAD, 56 if self._has_rank == self.BAD else 64) if self.truth is Truth.NODE else (self._has_rank, 56)
        host, rank = (f"n{20 + number}", 160 + 8 * number) if any_rank else place
        early = self._at_start or (self._way.away_s > 0 and number > 0 and not self._look.of_writer)
        resumed_at = (self._step // 1000) * 1000
        moment = Moment(0 if early else self._step - resumed_at, resumed_at, number > 0, self._step or None, resumed_at)
        verdict = self._leader.judge(self._look, Place((host,), ("n40", "n41"), rank), moment)
        leaves = verdict.decision.response is Response.REPLACE_NODE
        self._is_in = self._is_in and not (leaves and verdict.host == self.BAD)
        if leaves and verdict.host == self._has_rank:
            self._has_rank = "n64"  # who replaces a node gets its ranks
        elif verdict.decision.moves_ranks and not any_rank:
            self._has_rank = "n8" if self._has_rank == self.BAD else self.BAD
        if self._way.progress:
            self._step += 1500
        elif self.truth is not Truth.CODE and not early:
            self._step = max(resumed_at + 1, self._step - 100)
        return verdict

    def mended(self, passed_s: float) -> bool:
        """Whether the next start goes well."""
        if self.truth is Truth.PASSES:
            return passed_s > self._way.away_s
        return self.truth in (Truth.GONE, Truth.TAKEN) or (self.truth is Truth.NODE and not self._is_in)


def _play(name: str, cause: Cause, look: Look, at_start: bool, way: _Way, share: float) -> Episode:
    job = _Alone(cause, look, at_start, way)
    left, wrongly, restarts, passed_s, end = 0, 0, 0, 0.0, "kept on"
    for number in range(TRIES):
        verdict = job.fail(number)
        decision = verdict.decision
        if verdict.ends_job:
            end = {EX_TRY_AGAIN: "requeued", EX_CODE: "stopped as code"}.get(decision.exit_code or 0, "stopped")
            break
        restarts += 1
        if decision.response is Response.REPLACE_NODE:
            left, wrongly = left + 1, wrongly + (job.truth is not Truth.NODE or verdict.host != job.BAD)
        at_start_s = START_FLOOR_S if look.shows is Shows.HANG else 0.0  # until the next start counts as a hang
        passed_s += decision.delay_s + RECOVERY_S + at_start_s
        if job.mended(passed_s):
            end = "went on"
            break
    return Episode(name, _shown(look), job.truth, at_start, way.progress, share, restarts, end, left, wrongly)


def _shown(look: Look) -> str:
    evidence = look.evidence
    exception = evidence.get("exception")
    parts = [f"{exception.type.rpartition('.')[2]}: {exception.message.splitlines()[0][:60]}"] if exception else []
    parts += [str(evidence["signal"])] if "signal" in evidence and look.shows is Shows.EXIT else []
    parts += [f"Xid {', '.join(map(str, evidence['xids']))}"] if evidence.get("xids") else []
    parts += [look.shows.value] if look.shows is not Shows.EXIT else []
    return "; ".join(parts) or f"exit code {evidence.get('exit_code')}"
