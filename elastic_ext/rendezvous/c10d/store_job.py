"""A job's verdicts and its ledger in the store of torch's c10d rendezvous: `ext_c10d` over several nodes has no etcd.

Each node of a round that has failed puts its report there. Whoever is the first to claim it judges all of them together, once all
nodes of the round have told or the settle window is over; where all that was told follows from something else, the silent ones
are waited for longer: the cause may be theirs. The ledger is what is decided: it is swapped against the one that was judged upon,
and its last verdict is the verdict, so that of two judges (one was taken for lost and was not) only one is heard.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed import Store

from elastic_ext.base import kinds
from elastic_ext.base.printable import printable
from elastic_ext.base.records import Name
from elastic_ext.failures import ledger as job
from elastic_ext.rendezvous import judging
from elastic_ext.rendezvous.c10d.store_calls import NOTHING, StoreCalls
from elastic_ext.rendezvous.reader import RecordReader

logger = logging.getLogger(__name__)

SCHEMA = 1  # of `Told`
MOST_AGENTS = 2**16  # that are waited for at the end
JUDGING_S = 10.0  # that a judge may take when it need not wait any more before another one takes its place

# The reports, the ledger before, and the id of the node that hosts the store ("": none does).
Judge = Callable[[Mapping[str, job.Report], job.Ledger, str], tuple[job.Ledger, job.JobVerdict]]


@dataclass(frozen=True)
class Told:
    """What a node of a round tells. order: when the store learnt of it. report: a record of `job`; "": nothing has failed."""

    node: Name
    order: int
    report: str


@dataclass(frozen=True)
class Part:
    """One node's place in a round of so many nodes."""

    round: int
    rank: int
    nodes: int


class StoreJob:
    """One agent's view of it. Raises StoreLost from each method; after it each may be called again once `reconnect` has been.

    Keys: N/report/R and N/verdict/R of the node of rank R in round N, N/judge, ledger, ledger.before (of an earlier agent's
    ledger_file), stopped (the verdict that ended the job), refused/HOST, host, first (id of the node that came in first), agents,
    gone/NUMBER, orders.
    """

    def __init__(self, store: Store, run_id: str, node_id: str, hosts: bool, ledger: job.Ledger) -> None:
        """hosts: the store lives in this process. ledger: what this node knows of earlier failures."""
        self.calls = StoreCalls(store, f"elastic_ext/{run_id}/")
        self._node_id = node_id
        self._hosts = hosts
        self._known = ledger
        self._reader = RecordReader()
        self._first = ""
        self._number = 0  # of this agent; 0: it has not come in

    def come_in(self) -> job.Ledger:
        """Before all else. Returns the ledger of the job."""
        if not self.calls.connected:
            self.calls.connect()
        self._first = self.calls.swap("first", "", self._node_id)
        if self._hosts:
            self.calls.put("host", self._node_id)
        if self._known != job.Ledger():
            self.calls.swap("ledger.before", "", job.encode_ledger(self._known))
        self._number = self._number or self.calls.add("agents", 1)
        return self.ledger()

    def reconnect(self) -> None:
        """Ask again. Raises StoreLost, too, where another store listens there now: that of the agent that was started in place of
        the lost one. It knows nothing of this job's rounds, and what is told there would be taken for news of its own.
        """
        self.calls.connect()
        if self._number == 0:
            self.come_in()
        elif self.calls.read("first") != self._first:
            raise self.calls.lose("another store has taken its place")

    def conclude(
        self, part: Part, report: job.Report, judge: Judge, settle_s: float, patience_s: float
    ) -> tuple[job.Ledger, job.JobVerdict]:
        """The workers of this node have failed. Return the one verdict of the job, and the ledger after it.

        Args:
            settle_s: how long nodes that have not told yet are waited for.
            patience_s: the same where no report names a cause. A host that has died holds up the job for so long.
        """
        self._tell(part, job.encode_report(report))
        judging_node = ""
        while True:
            before, judging_node = judging_node, self.calls.swap(f"{part.round}/judge", judging_node, self._node_id)
            if judging_node == self._node_id:
                return self._judge(part, report, judge, settle_s, patience_s)
            if before:
                logger.warning(
                    "the verdict on round %s did not come in time; now node %s judges", part.round, printable(judging_node)
                )
            if (told := self._await(part, max(settle_s, patience_s) + JUDGING_S)) is not None:
                return told

    def hear(self, part: Part, timeout_s: float) -> tuple[job.Ledger, job.JobVerdict] | None:
        """Nothing has failed here, but on another node. Return what `conclude` does there; None: nothing in time."""
        self._tell(part, "")
        return self._await(part, timeout_s)

    def ledger(self) -> job.Ledger:
        return judging.ledger_of(self.calls.read("ledger") or self.calls.read("ledger.before"))

    def stopped(self) -> job.JobVerdict | None:
        """The verdict that has ended the job for all nodes."""
        text = self.calls.read("stopped")
        return self._reader.verdict(text, b"stopped") if text else None

    def stop(self, verdict: job.JobVerdict) -> job.JobVerdict:
        """The job ends by what one node has judged alone: the others find it closed, and ask why. Returns what holds for all."""
        self.calls.swap("stopped", "", job.encode_verdict(verdict))
        return self.stopped() or verdict

    def refused(self, host: str) -> str:
        """Why this host may not come back yet; "": it may."""
        return printable(self.calls.read(f"refused/{host}"))

    def forgive(self, host: str, reason: str) -> None:
        """The time of this refusal is over. A store has no clock: the nodes that were there when it began keep the time."""
        self.calls.swap(f"refused/{host}", reason, "")
        logger.info("host %s may come back", host)

    def leave(self) -> None:
        self.calls.put(f"gone/{self._number}", "")

    def await_others(self, timeout_s: float) -> None:
        """Until all other agents have left: what they read lives in this process."""
        agents = min(self.calls.add("agents", 0), MOST_AGENTS)
        self.calls.wait_all([f"gone/{number}" for number in range(1, agents + 1) if number != self._number], timeout_s)

    def _tell(self, part: Part, report: str) -> None:
        """report: "" for nothing has failed. One that comes after the judgement is not heard."""
        told = Told(self._node_id, self.calls.add("orders", 1), report)
        self.calls.swap(f"{part.round}/report/{part.rank}", "", json.dumps({"schema": SCHEMA, **vars(told)}))

    def _await(self, part: Part, timeout_s: float) -> tuple[job.Ledger, job.JobVerdict] | None:
        mine = f"{part.round}/verdict/{part.rank}"
        self.calls.wait_all([mine], timeout_s)
        if (text := self.calls.read(mine)) == NOTHING:
            return None
        ledger, verdict = self.ledger(), self._reader.verdict(text, mine.encode())
        if verdict is None:  # somebody else has written it; the ledger is what holds
            verdict = next((each for each in ledger.verdicts[-1:] if each.round == part.round), None)
        return (ledger, verdict) if verdict is not None else None

    def _judge(
        self, part: Part, report: job.Report, judge: Judge, settle_s: float, patience_s: float
    ) -> tuple[job.Ledger, job.JobVerdict]:
        reports = {self._node_id: report, **self._await_reports(part, settle_s, patience_s)}
        host = self.calls.read("host")
        while True:
            before = self.calls.read("ledger")
            ledger = judging.ledger_of(before)
            if ledger.verdicts and ledger.verdicts[-1].round == part.round:  # of a judge that was taken for lost
                verdict = ledger.verdicts[-1]
                break
            ledger, verdict = judge(reports, self.ledger(), host)
            after = job.encode_ledger(ledger)
            if self.calls.swap("ledger", before, after) == after:
                break
        self._publish(part, verdict)
        return ledger, verdict

    def _await_reports(self, part: Part, settle_s: float, patience_s: float) -> dict[str, job.Report]:
        keys = [f"{part.round}/report/{rank}" for rank in range(part.nodes)]

        def longer_s() -> float:
            reports = self._reports(keys)
            if patience_s <= settle_s or not all(report.waits_for_others for report in reports.values()):
                return 0.0
            logger.warning(
                "what failed so far followed from something else, and not all nodes have told yet; they are waited for"
            )
            return patience_s - settle_s

        self.calls.wait_all(keys, settle_s, longer_s)
        return self._reports(keys)

    def _reports(self, keys: Sequence[str]) -> dict[str, job.Report]:
        """Those that are there, by id of the node."""
        texts = [(key, text) for key in keys if (text := self.calls.read(key)) not in ("", NOTHING)]
        found = [self._reader.read(Told, text, key, SCHEMA) for key, text in texts]
        return {told.node: judging.report_of(told.report, told.order) for told in found if told is not None and told.report}

    def _publish(self, part: Part, verdict: job.JobVerdict) -> None:
        """What others may read once they know of the verdict comes before it."""
        text = job.encode_verdict(verdict)
        if verdict.decision.response is kinds.Response.REPLACE_NODE:
            self.calls.put(f"refused/{verdict.host}", verdict.decision.reason)
        if verdict.ends_job:
            self.calls.put("stopped", text)
        for rank in range(part.nodes):
            self.calls.put(f"{part.round}/verdict/{rank}", text)
