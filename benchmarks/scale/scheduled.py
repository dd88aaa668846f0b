"""A job under a schedule of failures, with the times that a real one has measured: what `benchmarks/compressed.py` compares.

The schedule says how long after training has begun again the next failure comes. So each failure meets both jobs in training.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_ext.failures.evidence import RaisedException
from elastic_ext.failures.joint_evidence import NO_RANK
from elastic_ext.failures.ledger import JobVerdict
from scale.causes import Look, Shows, Truth
from scale.job import BACKOFF, CONTROL, WAITING, Fault, Job, Setup
from scale.sides import Copies, Scale, Side

KILLED, RAISES, BAD_NODE, NODE_GONE = "a worker is killed", "a worker raises", "a worker reports a bad node", "a node is gone"
LOOKS: Mapping[str, tuple[Look, Truth]] = {
    KILLED: (Look(1.0, {"signal": "SIGKILL"}), Truth.PASSES),
    RAISES: (Look(1.0, {"exit_code": 1, "exception": RaisedException("RuntimeError", "flaky")}), Truth.PASSES),
    BAD_NODE: (Look(1.0, {"exit_code": 201}), Truth.NODE),
    NODE_GONE: (Look(1.0, {}, Shows.GONE), Truth.GONE),
}
RESTART = "restart"  # from a failure until training begins again, without pauses
SIDE = Side("as measured", judges=True)


@dataclass(frozen=True)
class Planned:
    """A failure of the schedule. gap_s: since training has begun again. victim: rank of the node that it hits."""

    gap_s: float
    kind: str
    victim: int


@dataclass(frozen=True)
class Measured:
    """What a real job has measured, in seconds.

    Attributes:
        step_s: a step, without a save. stalled: share of the running time for which saves hold it up.
        save_s: running time from one save to the next. ready_s: until it can be used.
        restart_s: from a failure until training begins again, by kind.
    """

    step_s: float
    stalled: float
    save_s: float
    ready_s: float
    restart_s: Mapping[str, float]


class Scheduled(Job):
    """One job, with one worker on each node and a spare at any time."""

    def __init__(self, nodes: int, schedule: Sequence[Planned], tail_s: float, measured: Measured) -> None:
        """tail_s: for how long it trains after the last failure."""
        scale = Scale(8 * nodes, step_s=measured.step_s, disk_every_s=measured.save_s)
        super().__init__(Setup(scale, plain=True), SIDE, seed=0)
        self._copies = Copies((), 0.0, 0.0, measured.save_s, measured.ready_s, measured.stalled)
        self._left, self._tail_s, self._measured = deque(schedule), tail_s, measured
        self._hosts, self._kind = [f"node {number}" for number in range(nodes)], ""

    def play(self) -> None:
        """Run through the whole schedule."""
        self._train()
        while self._events:
            at, _, action = heapq.heappop(self._events)
            self._pass(at)
            action()
        self._settle(lost=0.0)

    @property
    def verdicts(self) -> list[JobVerdict]:
        return list(self._leader.ledger.verdicts)

    def _train(self) -> None:
        super()._train()
        if self._left:
            planned = self._left.popleft()
            self._in(planned.gap_s, lambda: self._fails_as(planned))
        else:
            self._in(self._tail_s, lambda: None)

    def _fails_as(self, planned: Planned) -> None:
        look, truth = LOOKS[planned.kind]
        self._kind = planned.kind
        self._fails(Fault(planned.kind, look, truth, (self._hosts[planned.victim],)))

    def _leave(self, host: str) -> None:
        super()._leave(host)
        self._hosts.remove(host)
        self._hosts.append(f"node {next(self._numbers)}")  # those that stay keep their order, and the spare comes last

    def _recover(self, phases: list[tuple[str, float]], counts_as: str) -> None:
        kept = [phase for phase in phases if phase[0] in (BACKOFF, CONTROL, WAITING)]
        super()._recover([(RESTART, self._measured.restart_s[self._kind]), *kept], counts_as)


def decisions(verdicts: Sequence[JobVerdict]) -> list[str]:
    """Return what was decided on failures of workers, in order. The loss of a node ends its round, with a verdict or without."""
    return [f"{each.decision.rule}: {each.decision.word}" for each in verdicts if each.rank != NO_RANK]
