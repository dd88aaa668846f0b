"""Which hosts may come to a job, and when those that were refused may come back.

A host is refused by a verdict, or because it has joined the running job too often (`late_joins`). The records are in the job's
store, which has no clock. So the nodes in the job keep the time, each by its own monotonic clock: from the verdict, or from the
beginning of the round with which the host joined. Each removes what is over, whoever has written it; the first one does it.
"""

from __future__ import annotations

import functools
import logging
import time

from elastic_ext.base import kinds
from elastic_ext.base.settings import Settings
from elastic_ext.failures.ledger import JobVerdict
from elastic_ext.rendezvous.c10d.store_job import RetryingJob, StoreJob
from elastic_ext.rendezvous.late_joins import WINDOW_S, Answer, is_late

logger = logging.getLogger(__name__)


class Refusals:
    """Hosts that were told to leave by a verdict, and may come back later.

    Invariant: `_ends` is ordered by time, since all refusals of a job last equally long.
    """

    def __init__(self, refuse_s: float) -> None:
        """refuse_s: how long a refusal lasts, in seconds."""
        self._refuse_s = refuse_s
        self._ends: list[tuple[float, str, str]] = []  # end of the refusal (monotonic), host, reason

    def add(self, host: str, reason: str) -> None:
        """Begin a refusal. reason: as it is in the job's store."""
        self._ends.append((time.monotonic() + self._refuse_s, host, reason))

    def ended(self) -> list[tuple[str, str]]:
        """Return the host and reason of each refusal that has ended since the last call."""
        now = time.monotonic()
        ended = [(host, reason) for at, host, reason in self._ends if at <= now]
        del self._ends[: len(ended)]
        return ended


class Rounds:
    """The rounds that this node was in, until they have reached an age.

    Invariant: `_ends` is ordered, by time and by round.
    """

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._ends: list[tuple[float, int]] = []  # when the round reaches the age (monotonic), its number

    def add(self, round_: int, now: float) -> None:
        """Note that a round begins."""
        self._ends.append((now + self._age_s, round_))

    def passed(self, now: float) -> int:
        """Return the newest round that has reached the age since the last call; 0 if none has."""
        passed = [round_ for at, round_ in self._ends if at <= now]
        del self._ends[: len(passed)]
        return passed[-1] if passed else 0


class Admission:
    """One node's view."""

    def __init__(self, job_: RetryingJob, host: str, settings: Settings) -> None:
        """host: this node's."""
        self._job, self._host = job_, host
        self._limit, self._refused_s = settings.max_rejoins, settings.refuse_node
        self._by_verdict = Refusals(settings.refuse_node)
        self._joined, self._refused = Rounds(WINDOW_S), Rounds(settings.refuse_node)
        self._last = 0  # the last round of this node
        self._out = ""  # why this node has to leave; "": it need not

    def refused(self) -> str:
        """Return why this node may not be in the next round; "" if it may."""
        if self._out or self._last:  # who stays is not asked again: only once it has left, it may not come back
            return self._out
        why = self._job.call(lambda job_: job_.refused(self._host))
        return f"this host was told to leave the job and may not come back yet: {why}" if why else ""

    def entered(self, round_: int) -> bool:
        """This node is in a new round. Return whether it has to leave: then it is refused from the next round on."""
        now = time.monotonic()
        for rounds in (self._joined, self._refused):
            rounds.add(round_, now)
        late, self._last = is_late(round_, self._last), round_
        return late and self._count(round_)

    def _count(self, round_: int) -> bool:
        decided = self._job.call(lambda job_: job_.join_late(self._host, round_, self._limit))
        if decided is None:  # not counted, or the store is lost, and then nobody can join
            return False
        line = decided.line(self._refused_s)
        if decided.answer is Answer.LEAVE:
            self._out = line
            return True
        logger.log(decided.level, "%s", line)
        return False

    def judged(self, verdict: JobVerdict) -> None:
        """Begin the refusal of a host that has to leave by this verdict."""
        if verdict.decision.response is kinds.Response.REPLACE_NODE:
            self._by_verdict.add(verdict.host, verdict.decision.reason)

    def keep_time(self) -> None:
        """Remove from the store what is over. To be called again and again; as a rule it has nothing to do."""
        for host, reason in self._by_verdict.ended():
            self._job.call(functools.partial(StoreJob.end_refusal, host=host, reason=reason))
        now = time.monotonic()
        joins, refusals = self._joined.passed(now), self._refused.passed(now)
        if joins or refusals:
            self._job.call(functools.partial(StoreJob.end_late_joins, joins=joins, refusals=refusals))
