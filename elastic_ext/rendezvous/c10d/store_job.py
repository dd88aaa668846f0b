"""A job's verdicts and its ledger in the job's store: `ext_c10d` over several nodes has no etcd.

Each node of a failed round puts its report there. The first node to claim the round judges all reports together, once all nodes
have reported or the settle window is over. If every report so far only follows from another failure, that node waits longer for
the silent nodes: the cause may be theirs.

The ledger is the decision. The judge swaps it against the ledger that it judged on, and its last verdict is the verdict. So if a
judge was given up too early and there are two, only one of them counts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from torch.distributed import Store

from elastic_ext.base import kinds
from elastic_ext.base.printable import printable
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report, encode_ledger, encode_report, encode_verdict
from elastic_ext.rendezvous import judging
from elastic_ext.rendezvous.c10d import job_keys, late_joins
from elastic_ext.rendezvous.c10d.job_keys import LateJoins, NodeReport
from elastic_ext.rendezvous.c10d.store_calls import NOTHING, StoreCalls, StoreLost
from elastic_ext.rendezvous.late_joins import Decision
from elastic_ext.rendezvous.reader import RecordReader

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_AGENTS = 2**16  # at the end the host waits for at most this many agents
JUDGING_S = 10.0  # time for a judge that need not wait any more; then another node takes its place

# Called with the reports, the ledger before the judgement, and the id of the node that hosts the store ("" if none does).
Judge = Callable[[Mapping[str, Report], Ledger, str], tuple[Ledger, JobVerdict]]


@dataclass(frozen=True)
class Membership:
    """One node's place in a round. nodes: number of nodes in the round."""

    round: int
    rank: int
    nodes: int


class StoreJob:
    """One agent's view of the job's store. `job_keys` lists its keys.

    Every method raises StoreLost if the store does not answer. Each may be called again after `reconnect`.
    """

    def __init__(self, store: Store, run_id: str, node_id: str, hosts: bool, ledger: Ledger) -> None:
        """hosts: the store lives in this process. ledger: what this node knows of earlier failures."""
        self.calls = StoreCalls(store, job_keys.folder(run_id))
        self._node_id = node_id
        self._hosts = hosts
        self._known = ledger
        self._reader = RecordReader()
        self._first = ""
        self._number = 0  # of this agent; 0 until `enter_job`

    def enter_job(self) -> Ledger:
        """Enter the job and return its ledger. Call this before anything else."""
        if not self.calls.connected:
            self.calls.connect()
        self._first = self.calls.swap(job_keys.FIRST, "", self._node_id)
        if self._hosts:
            self.calls.put(job_keys.HOST, self._node_id)
        if self._known != Ledger():
            self.calls.swap(job_keys.LEDGER_BEFORE, "", encode_ledger(self._known))
        self._number = self._number or self.calls.add(job_keys.AGENTS, 1)
        return self.ledger()

    def reconnect(self) -> None:
        """Connect again after StoreLost.

        Also raises StoreLost if another store listens there now: that of an agent started in place of the lost one. It knows
        nothing of this job's rounds, and would take our records for its own.
        """
        self.calls.connect()
        if self._number == 0:
            self.enter_job()
        elif self.calls.read(job_keys.FIRST) != self._first:
            raise self.calls.mark_lost("another store has taken its place")

    def conclude(
        self, membership: Membership, report: Report, judge: Judge, settle_s: float, patience_s: float
    ) -> tuple[Ledger, JobVerdict]:
        """Return the ledger after the job's one verdict, and the verdict. The workers of this node have failed.

        Args:
            settle_s: how long to wait for nodes that have not reported yet.
            patience_s: the same, if no report names a cause. A dead host holds up the job for this long.
        """
        self._report(membership, encode_report(report))
        judging_node = ""
        while True:
            before, judging_node = judging_node, self.calls.swap(job_keys.judge(membership.round), judging_node, self._node_id)
            if judging_node == self._node_id:
                return self._judge(membership, report, judge, settle_s, patience_s)
            if before:
                logger.warning(
                    "no verdict on round %s in time; node %s judges instead", membership.round, printable(judging_node)
                )
            if (concluded := self._await(membership, max(settle_s, patience_s) + JUDGING_S)) is not None:
                return concluded

    def await_verdict(self, membership: Membership, timeout_s: float) -> tuple[Ledger, JobVerdict] | None:
        """Return what `conclude` returns on the nodes where workers failed; None if nothing comes in time. None failed here."""
        self._report(membership, "")
        return self._await(membership, timeout_s)

    def ledger(self) -> Ledger:
        """Return the ledger of the job; a new one if it is missing or unreadable."""
        return judging.ledger_of(self.calls.read(job_keys.LEDGER) or self.calls.read(job_keys.LEDGER_BEFORE))

    def stopped(self) -> JobVerdict | None:
        """Return the verdict that has ended the job for all nodes; None if none has."""
        text = self.calls.read(job_keys.STOPPED)
        return self._reader.verdict(text, job_keys.STOPPED.encode()) if text else None

    def stop(self, verdict: JobVerdict) -> JobVerdict:
        """End the job by a verdict of this node alone. The other nodes find the job closed, and read why.

        Return the verdict that holds for all nodes: another one may have come first.
        """
        self.calls.swap(job_keys.STOPPED, "", encode_verdict(verdict))
        return self.stopped() or verdict

    def refused(self, host: str) -> str:
        """Return why this host may not come back yet; "" if it may."""
        by_verdict = self.calls.read(job_keys.refused(host))
        return printable(by_verdict or late_joins.why_refused(self._late_joins()[1], host))

    def end_refusal(self, host: str, reason: str) -> None:
        """End the refusal of this host, unless it has been refused for another reason since."""
        self.calls.swap(job_keys.refused(host), reason, "")
        logger.info("host %s may come back", host)

    def join_late(self, host: str, round_: int, limit: int) -> Decision | None:
        """Count that this host joined the running job with this round, and decide on it. None: that cannot be counted.

        The host of the store cannot come and go: the store would go with it. A store that no agent hosts outlives them all. In
        it a late join looks like a new start of the whole job, and there may be nobody who keeps the time.
        """
        if self._hosts or not self.calls.read(job_keys.HOST):
            return None
        while True:
            text, record = self._late_joins()
            after, decided = late_joins.joined(record, host, round_, limit)
            if self._swap_late_joins(text, record, after):
                return decided

    def end_late_joins(self, joins: int, refusals: int) -> None:
        """Forget the late joins up to the round `joins`, and end the refusals that they led to, up to the round `refusals`."""
        while True:
            text, record = self._late_joins()
            after = late_joins.passed(record, joins, refusals)
            if self._swap_late_joins(text, record, after):
                break
        for each in set(record.refused) - set(after.refused):
            logger.info("host %s may come back", printable(each.host))

    def _late_joins(self) -> tuple[str, LateJoins]:
        """Return the text of the record, and the record; an empty one if it is missing or unreadable."""
        text = self.calls.read(job_keys.LATE_JOINS)
        record = self._reader.read(LateJoins, text, job_keys.LATE_JOINS, job_keys.SCHEMA) if text else None
        return text, record or LateJoins()

    def _swap_late_joins(self, text: str, before: LateJoins, after: LateJoins) -> bool:
        """Write the record, unless nothing changes. Return False if another node has changed it since it was this text."""
        if after == before:
            return True
        wanted = json.dumps({"schema": job_keys.SCHEMA, **asdict(after)})
        return self.calls.swap(job_keys.LATE_JOINS, text, wanted) == wanted

    def leave(self) -> None:
        """Mark this agent as gone: `await_others` no longer waits for it."""
        self.calls.put(job_keys.gone(self._number), "")

    def await_others(self, timeout_s: float) -> None:
        """Wait until all other agents have left: what they read lives in this process."""
        agents = min(self.calls.add(job_keys.AGENTS, 0), MAX_AGENTS)
        self.calls.wait_all([job_keys.gone(agent) for agent in range(1, agents + 1) if agent != self._number], timeout_s)

    def _report(self, membership: Membership, report: str) -> None:
        """Write a report; "" if nothing has failed. A report that comes after the judgement has no effect."""
        record = NodeReport(self._node_id, self.calls.add(job_keys.ORDERS, 1), report)
        text = json.dumps({"schema": job_keys.SCHEMA, **asdict(record)})
        self.calls.swap(job_keys.report(membership.round, membership.rank), "", text)

    def _await(self, membership: Membership, timeout_s: float) -> tuple[Ledger, JobVerdict] | None:
        mine = job_keys.verdict(membership.round, membership.rank)
        self.calls.wait_all([mine], timeout_s)
        if (text := self.calls.read(mine)) == NOTHING:
            return None
        ledger, verdict = self.ledger(), self._reader.verdict(text, mine.encode())
        if verdict is None:  # another node has written it; the ledger is what holds
            verdict = next((each for each in ledger.verdicts[-1:] if each.round == membership.round), None)
        return (ledger, verdict) if verdict is not None else None

    def _judge(
        self, membership: Membership, report: Report, judge: Judge, settle_s: float, patience_s: float
    ) -> tuple[Ledger, JobVerdict]:
        reports = {self._node_id: report, **self._await_reports(membership, settle_s, patience_s)}
        host = self.calls.read(job_keys.HOST)
        while True:
            before = self.calls.read(job_keys.LEDGER)
            ledger = judging.ledger_of(before)
            if ledger.verdicts and ledger.verdicts[-1].round == membership.round:  # by a judge that was given up too early
                verdict = ledger.verdicts[-1]
                break
            ledger, verdict = judge(reports, self.ledger(), host)
            after = encode_ledger(ledger)
            if self.calls.swap(job_keys.LEDGER, before, after) == after:
                break
        self._publish(membership, verdict)
        return ledger, verdict

    def _await_reports(self, membership: Membership, settle_s: float, patience_s: float) -> dict[str, Report]:
        keys = [job_keys.report(membership.round, rank) for rank in range(membership.nodes)]

        def longer_s() -> float:
            reports = self._reports(keys)
            if patience_s <= settle_s or not all(report.waits_for_others for report in reports.values()):
                return 0.0
            logger.warning(
                "all failures reported so far follow from another one; waiting for the nodes that have not reported yet"
            )
            return patience_s - settle_s

        self.calls.wait_all(keys, settle_s, longer_s)
        return self._reports(keys)

    def _reports(self, keys: Sequence[str]) -> dict[str, Report]:
        """Return the failures reported so far, by node id."""
        texts = [(key, text) for key in keys if (text := self.calls.read(key)) not in ("", NOTHING)]
        records = [self._reader.read(NodeReport, text, key, job_keys.SCHEMA) for key, text in texts]
        return {each.node: judging.report_of(each.report, each.order) for each in records if each is not None and each.report}

    def _publish(self, membership: Membership, verdict: JobVerdict) -> None:
        """Write the verdict last: a node that knows it may read the rest."""
        text = encode_verdict(verdict)
        if verdict.decision.response is kinds.Response.REPLACE_NODE:
            self.calls.put(job_keys.refused(verdict.host), verdict.decision.reason)
        if verdict.ends_job:
            self.calls.put(job_keys.STOPPED, text)
        for rank in range(membership.nodes):
            self.calls.put(job_keys.verdict(membership.round, rank), text)


class RetryingJob:
    """Calls a StoreJob; if the store does not answer, calls it once more on new connections.

    The store may only have been slow, or something on the way may have dropped an idle connection. If the store's host is gone,
    the second try takes up to `store_calls.CALL_S`, or no time if the host refuses the connection.
    """

    def __init__(self, job_: StoreJob) -> None:
        self._job = job_
        self._lost = False

    def call(self, work: Callable[[StoreJob], T], again: bool = True) -> T | None:
        """Return what `work` returns; None if the store is lost.

        again: whether to try a second time. False: this node leaves; its answer may be lost because the store's host ends, too.
        """
        try:
            try:
                answer = work(self._job)
            except StoreLost as error:
                if not again:
                    raise
                if not self._lost:
                    logger.warning("the rendezvous store does not answer; trying again on new connections: %s", error)
                self._job.reconnect()
                answer = work(self._job)
        except StoreLost as error:
            if not again:
                logger.debug("the rendezvous store did not answer as this node left: %s", error)
            elif not self._lost:
                logger.warning("the rendezvous store is lost; from now on each node judges failures for itself: %s", error)
            self._lost = True
            return None
        self._lost = False
        return answer

    def end(self, timeout_s: float) -> None:
        """Prepare for the end of the process; see `RoundEvents.shut_down`."""
        self._job.calls.end(timeout_s)
