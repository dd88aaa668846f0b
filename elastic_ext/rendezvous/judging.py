"""How an agent judges a failure for the job: other nodes' records, the rules from its settings, and its answers to the leader."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastic_ext.base.diagnosis import Response
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.failures import evidence, history, joint_evidence, judgement, policy
from elastic_ext.failures.classify import classify
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report, decode_ledger, decode_report, encode_ledger, encode_verdict
from elastic_ext.rendezvous import board, drains, round_records, topics

logger = logging.getLogger(__name__)


def circumstances(settings: Settings, max_restarts: int) -> judgement.Circumstances:
    """Return the current circumstances of a judgement, without those of the round."""
    return judgement.Circumstances(
        max_restarts,
        settings.exit_codes,
        at=time.strftime("%Y-%m-%d %H:%M:%S%z"),
        backoff=policy.Backoff(settings.backoff),
        jitter=random.random(),
    )


def report_of(text: str, order: int) -> Report:
    """Decode a node's report. An unreadable one is an unknown failure: the job must not wait forever for a verdict."""
    try:
        return decode_report(text, order)
    except RecordError as error:
        logger.warning("a node's failure report cannot be read, so the failure counts as unknown: %s", printable(str(error)))
        return Report("", replace(classify(evidence.Evidence(rank=-1)), order=order))


def ledger_of(text: str) -> Ledger:
    """Decode a job's ledger; return a new one if it is missing or unreadable."""
    try:
        return decode_ledger(text) if text else Ledger()
    except RecordError as error:
        logger.warning("the job's ledger cannot be read; starting a new one: %s", printable(str(error)))
        return Ledger()


@dataclass(frozen=True)
class RoundReports:
    """The nodes' reports about the end of a round."""

    round: int
    texts: Mapping[str, str]  # records of `failures.ledger`, by node id; none if the job is to end as too few nodes are left
    orders: Mapping[str, int]  # etcd's revision of each, by node id
    lost: Mapping[str, str]  # what became of members of the round that are gone, by id
    nodes: int  # the current number of nodes, spares included
    reaches: Mapping[str, joint_evidence.Reach]  # see `judgement.Circumstances`
    needed: frozenset[str] = frozenset()  # ids of nodes without which the job cannot go on: its store is there
    ambiguous: frozenset[str] = frozenset()  # names that several machines have in common
    charges: int = 0  # restarts that count against the budget and have not expired (see `Judgement.window_s`)
    members: int = 0  # number of nodes of the round, lost ones included; 0: unknown
    min_nodes: int = 1  # as few may be in a round


@dataclass(frozen=True)
class Judgement:
    """The judgement of the leader's agent on the reports."""

    state: round_records.State  # of the job after it: BROKEN if the job goes on, else CLOSED
    reason: str
    # verdict, ledger: records of `failures.ledger`.
    verdict: str
    ledger: str
    charged: bool = False  # the restart counts against the budget, for `window_s` seconds (0: without end)
    refunded: bool = False  # no earlier restart counts any more
    window_s: int = 0
    refused: str = ""  # host that may not come back for `refused_s` seconds; "" if none
    refused_s: int = 0


class AgentPolicy:
    """What an agent answers by its own settings: as the leader, on the rendezvous thread, and if it gets no verdict."""

    def __init__(self, settings: Settings, newest_checkpoint: Callable[[], str | None]) -> None:
        """newest_checkpoint: finds the newest complete checkpoint in `checkpoint_dir`; called on the rendezvous thread."""
        # the job's budget, and what the leader rules; our agent sets them before the first round
        self.max_restarts, self.rules = 0, board.Rules(topics.RULED)
        self._settings = settings
        self._newest_checkpoint = newest_checkpoint
        self._first_seen: tuple[int, str | None] | None = None  # a round, and the newest checkpoint when it was first asked about

    def may_grow(self, round_: int) -> bool:
        """Return whether waiting nodes may join this running round now; else once there is a checkpoint that did not exist when
        they came.
        """
        if self._settings.grow_at == "now" or self._settings.checkpoint_dir is None:
            return True
        try:
            path = self._newest_checkpoint()
        except (OSError, UsageError) as error:  # the storage does not answer, or not this user: the next look may work
            logger.debug("waiting nodes do not join now, as the newest checkpoint is unknown: %s", error)
            return False
        if self._first_seen is None or self._first_seen[0] != round_:
            self._first_seen = (round_, path)
        return path != self._first_seen[1]

    def judge(self, reports: RoundReports, ledger: str) -> Judgement:
        """Return one judgement for all nodes. ledger: the job's; "": a new one."""
        before, window_s = ledger_of(ledger), self._settings.budget_window or 0
        given = {id_: report_of(text, reports.orders[id_]) for id_, text in reports.texts.items()}
        rules = replace(
            circumstances(self._settings, self.max_restarts),
            nodes=reports.nodes,
            members=reports.members,
            min_nodes=reports.min_nodes,
            lost=tuple(judgement.Lost(drains.host_of(id_), how, id_) for id_, how in reports.lost.items()),
            charges=reports.charges if window_s else None,
            reaches=reports.reaches,
            hosts={id_: drains.host_of(id_) for id_ in reports.reaches},
        )
        if not given:
            kept, left = judgement.too_few_left(before, rules, reports.round)
            return Judgement(round_records.State.CLOSED, left.decision.reason, encode_verdict(left), encode_ledger(kept))
        after, verdict = judgement.judge(given, before, rules, reports.round)
        # Its failures were counted over several nodes of one name.
        counted = verdict.decision.rule == history.BAD_NODE and verdict.host in reports.ambiguous
        if verdict.decision.response is Response.REPLACE_NODE and (verdict.node in reports.needed or counted):
            after, verdict = judgement.judge(given, before, replace(rules, min_nodes=reports.nodes), reports.round)
        leaves = verdict.decision.response is Response.REPLACE_NODE
        return Judgement(
            round_records.State.CLOSED if verdict.ends_job else round_records.State.BROKEN,
            verdict.decision.reason,
            encode_verdict(verdict),
            encode_ledger(after),
            charged=verdict.decision.charged,
            refunded=reports.charges > 0 and after.charged == verdict.decision.charged,
            window_s=window_s,
            refused=verdict.host if leaves and verdict.host not in reports.ambiguous else "",
            refused_s=self._settings.refuse_node,
        )

    def judge_alone(self, node_id: str, report: Report, round_: int, left_behind: bool) -> JobVerdict:
        """Return the verdict of a node that does not get the job's verdict.

        left_behind: the job has gone on without this node, which was lost. So its workers failed because the others' were gone.
        """
        behind = judgement.Lost(report.host, "was cut off, and the job has gone on without it", node_id)
        rules = replace(circumstances(self._settings, self.max_restarts), nodes=1, lost=(behind,) if left_behind else ())
        return judgement.judge({node_id: report}, Ledger(), rules, round_)[1]
