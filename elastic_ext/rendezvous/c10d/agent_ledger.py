"""This agent's copy of the job's ledger, and judgements based on it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from elastic_ext.base import kinds
from elastic_ext.base.settings import Settings
from elastic_ext.failures import judgement
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report
from elastic_ext.rendezvous import judging
from elastic_ext.rendezvous.goodput_folder import GoodputFolder


class AgentLedger:
    """The ledger, kept in `ledger_file` if one is given.

    Attributes:
        max_restarts: the job's budget.
        goodput: what the job has spent its time on, kept beside that file.
    """

    def __init__(self, settings: Settings, run_id: str, min_nodes: int, host: str) -> None:
        """Raises UsageError if the path of `ledger_file` is not that of a file."""
        self.max_restarts = 0
        self._settings = settings
        self._min_nodes = min_nodes
        self._file = judging.LedgerFile(settings.ledger_file, run_id)
        self.goodput = GoodputFolder(settings.ledger_file, run_id, host)
        if self._file.job_ended:
            self.goodput.drop()
            self._file.write(Ledger())  # once is enough: an agent that comes later must not delete what this one keeps
        self._charged_at: list[float] = []  # monotonic; one per charged restart
        self.begin(self._file.ledger)

    @property
    def ledger(self) -> Ledger:
        """The ledger as this agent knows it; the job's store may have a newer one."""
        return self._file.ledger

    def begin(self, ledger: Ledger) -> None:
        """Start from this ledger. It does not say when a restart was charged, so each counts as charged now."""
        self._file.ledger = ledger
        self._charged_at = [time.monotonic()] * ledger.charged

    def judge(
        self,
        reports: Mapping[str, Report],
        ledger: Ledger,
        round_: int,
        nodes: int = 1,
        left: str | None = None,
        store_host: str = "",
    ) -> tuple[Ledger, JobVerdict]:
        """Return the ledger after the judgement, and the verdict.

        Args:
            reports: by node id.
            ledger: the one before the judgement.
            round_: number of the failed round.
            nodes: number of nodes in that round.
            left: the host that ended the round by leaving; None if none did.
            store_host: id of the node that hosts the job's store; "" if none does.
        """
        lost = (judgement.Lost(left, "has left"),) if left is not None else ()
        circumstances = judging.circumstances(
            self._settings, self.max_restarts, nodes=nodes, min_nodes=self._min_nodes, lost=lost
        )
        if self._settings.budget_window:
            begin = time.monotonic() - self._settings.budget_window
            self._charged_at = [at for at in self._charged_at if at > begin]
            circumstances = replace(circumstances, charges=len(self._charged_at))
        after, verdict = judgement.judge(reports, ledger, circumstances, round_)
        if verdict.decision.response is kinds.Response.REPLACE_NODE and verdict.node == store_host:
            # The store would go with the node, and no node could start again.
            after, verdict = judgement.judge(reports, ledger, replace(circumstances, min_nodes=nodes), round_)
        return after, verdict

    def adopt(self, ledger: Ledger, verdict: JobVerdict) -> None:
        """Keep a decision, whichever node made it."""
        self._file.write(ledger)
        if ledger.charged == verdict.decision.charged:  # all earlier charges were refunded
            self._charged_at.clear()
        if verdict.decision.charged:
            self._charged_at.append(time.monotonic())

    def forget(self) -> None:
        """Delete the file: the job has ended well."""
        self._file.forget()
