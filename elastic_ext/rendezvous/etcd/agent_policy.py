"""The answers of the leader's agent to the leader: whether nodes may join now, and the verdict on a failure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from elastic_ext.base.errors import UsageError
from elastic_ext.base.kinds import Response
from elastic_ext.base.settings import Settings
from elastic_ext.failures import judgement, ledger
from elastic_ext.rendezvous import drains, judging
from elastic_ext.rendezvous.etcd.verdict import Judgement, RoundReports
from elastic_ext.rendezvous.round_records import State

logger = logging.getLogger(__name__)


class AgentPolicy:
    """A `verdict.LeaderPolicy`, from the settings of this agent.

    Attributes:
        max_restarts: the job's budget; our agent sets it before the first round.
    """

    def __init__(self, settings: Settings, min_nodes: int, newest_checkpoint: Callable[[], str | None]) -> None:
        """newest_checkpoint: finds the newest complete checkpoint in `checkpoint_dir`; called on the rendezvous thread."""
        self.max_restarts = 0
        self._settings = settings
        self._min_nodes = min_nodes
        self._newest_checkpoint = newest_checkpoint
        self._first_seen: tuple[int, str | None] | None = None  # a round, and the newest checkpoint when it was first asked about

    def may_grow(self, round_: int) -> bool:
        """Return whether waiting nodes may join: now, or once there is a checkpoint that did not exist when they came."""
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

    def judge(self, reports: RoundReports, ledger_text: str) -> Judgement:
        """Return one judgement for all nodes."""
        given = {id_: judging.report_of(text, reports.orders[id_]) for id_, text in reports.texts.items()}
        lost = tuple(judgement.Lost(drains.host_of(id_), how, id_) for id_, how in reports.lost.items())
        rules = replace(self._circumstances(reports.nodes), min_nodes=self._min_nodes, lost=lost, reaches=reports.reaches)
        window_s = self._settings.budget_window or 0
        if window_s:
            rules = replace(rules, charges=reports.charges)
        before = judging.ledger_of(ledger_text)
        after, verdict = judgement.judge(given, before, rules, reports.round)
        if verdict.decision.response is Response.REPLACE_NODE and verdict.node in reports.needed:
            after, verdict = judgement.judge(given, before, replace(rules, min_nodes=reports.nodes), reports.round)
        return Judgement(
            State.CLOSED if verdict.ends_job else State.BROKEN,
            verdict.decision.reason,
            ledger.encode_verdict(verdict),
            ledger.encode_ledger(after),
            charged=verdict.decision.charged,
            refunded=reports.charges > 0 and after.charged == verdict.decision.charged,
            window_s=window_s,
            refused=verdict.host if verdict.decision.response is Response.REPLACE_NODE else "",
            refused_s=self._settings.refuse_node,
        )

    def judge_alone(self, node_id: str, report: ledger.Report, round_: int, left_behind: bool) -> ledger.JobVerdict:
        """Return the verdict of a node that does not get the job's verdict.

        left_behind: the job has gone on without this node, which was lost. So its workers failed because the others' were gone.
        """
        behind = judgement.Lost(report.host, "was cut off, and the job has gone on without it", node_id)
        rules = replace(self._circumstances(1), lost=(behind,) if left_behind else ())
        _, verdict = judgement.judge({node_id: report}, ledger.Ledger(), rules, round_)
        return verdict

    def _circumstances(self, nodes: int) -> judgement.Circumstances:
        return judging.circumstances(self._settings, self.max_restarts, nodes=nodes)
