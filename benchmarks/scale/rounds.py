"""One failure through the real state machine of rounds, with all nodes of a job, and what that costs the processor of its leader.

In the simulated jobs the time of a round comes from a fit. Here `rendezvous.rounds` decides what a leader does, from the views
that it would have, with records of all nodes: the round runs, a node is lost, the others report, a verdict, all wait, a seal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from elastic_ext.rendezvous import rounds
from elastic_ext.rendezvous.round_records import Header, Node, RoundReport, State
from elastic_ext.rendezvous.rounds import Conclude, End, Limits, Seal, View


@dataclass(frozen=True)
class Pass:
    """One pass of a leader. decisions: in order. cpu_s: of all of them, and of sealing the next round."""

    decisions: tuple[str, ...]
    cpu_s: float
    ranks: tuple[int, ...]


def one_loss(nodes: int, spares: int = 1) -> Pass:
    """Let a job of this number of nodes lose one, and return what its leader decided."""
    limits = Limits(nodes, nodes, 2.0)
    records = {
        f"n{number}#1": Node(int(number >= nodes), 8, "default", f"10.0.0.{number}", 29500) for number in range(nodes + spares)
    }
    joined = {id_: number for number, id_ in enumerate(records)}
    members = {f"n{number}#1": number for number in range(nodes)}
    header = Header(1, State.RUNNING, nodes, 8 * nodes, "10.0.0.0", 29500, "", "seal1", job="job")
    view = View(header, records, joined, members, frozenset(), last_arrival=0.0)
    began, decisions = time.process_time(), []

    def decide(seen: View, now: float) -> rounds.Action:
        action = rounds.next_action(seen, limits, now)
        decisions.append(type(action).__name__)
        return action

    decide(view, 10.0)
    lost = f"n{nodes // 2}#1"
    view = replace(view, nodes={id_: node for id_, node in records.items() if id_ != lost})
    end = decide(view, 11.0)
    assert isinstance(end, End)
    view = replace(view, header=replace(header, state=State.BROKEN, reason=end.reason, lost=end.lost))
    failed = {id_: replace(view.nodes[id_], report=RoundReport(1, "{}"), after=1) for id_ in members if id_ != lost}
    view = replace(view, nodes={**view.nodes, **failed}, reported_at=11.0)
    assert isinstance(decide(view, 11.2), Conclude)
    view = replace(view, header=replace(view.header, verdict="{}"))
    seal = decide(view, 11.3)
    assert isinstance(seal, Seal)
    following, assignments = rounds.seal(view, seal, limits, "seal2")
    spent_s = time.process_time() - began
    assert following.nodes == nodes
    return Pass(tuple(decisions), spent_s, tuple(sorted(each.rank for each in assignments.values())))
