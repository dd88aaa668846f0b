"""The rounds of a job: a pure state machine that decides what the leader does next. Standard library only, no I/O, no clock.

A round is one set of nodes with one numbering. It runs until a node is lost, leaves or requests its end (broken), or until the
workers of all its nodes have finished (done). The next round is sealed from the waiting nodes.

Invariants, kept here and checked by the tests on every path:
    ranks in a round are unique and contiguous, over nodes and over workers, with one world size;
    every node of a sealed round has its assignment, and was alive and waiting when the round was sealed;
    a round number is used once, and a round that is over never runs again;
    a living node is in the round or waits for the next one.

The records of a job may be lost while its nodes live: etcd was unreachable for longer than their leases, or somebody deleted
them. A node's memory of the header is then as good as the record: `precedes` finds the older of two headers, and the newest is
written again. A leader that knows of such an outage gives missing members time to come back (View.returning_until) before it
counts them as lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from elastic_ext.base.printable import counted
from elastic_ext.failures.joint_evidence import Reach
from elastic_ext.rendezvous import board, drains
from elastic_ext.rendezvous.round_records import Assignment, EndKind, Header, Node, State

GROW_POLL_S = 5.0  # how often a leader looks for a new checkpoint while nodes wait to join (grow_at=checkpoint)
ASSIGNMENTS_POLL_S = 1.0  # how often a leader looks for missing assignments


@dataclass(frozen=True)
class Limits:
    min_nodes: int
    max_nodes: int
    last_call_s: float  # once there are enough nodes, how long the first round waits for more after the last one came
    # How long after the first report of a failure the leader waits for the remaining reports, once a report names a cause.
    settle_s: float = 0.5
    # How long the job waits for lost nodes once fewer than min_nodes are left; None: until these leave.
    rejoin_s: float | None = None


@dataclass(frozen=True)
class View:
    """The leader's knowledge."""

    header: Header
    nodes: Mapping[str, Node]  # all living nodes, by id
    joined: Mapping[str, int]  # order of joining (any increasing number), by id
    members: Mapping[str, int]  # rank in header.round, by id; includes lost nodes
    done: frozenset[str]  # members whose workers have finished the round (`done`)
    last_arrival: float  # when the last new node came, in seconds of the leader's monotonic clock
    may_grow: bool = True  # waiting nodes may join now; False: only after a checkpoint
    # When the last node whose workers have finished reported that, on the same clock; None if no node has.
    finished_at: float | None = None
    # When the first report about the end of this round came, on the same clock; None if none did.
    reported_at: float | None = None
    # etcd was unreachable or has lost records: until this time, on the same clock, missing members and members without
    # assignments may come back. None: no member is expected back.
    returning_until: float | None = None
    # Since when as few nodes wait as now, with all workers stopped, on the same clock; None: unknown.
    few_since: float | None = None
    rulings: tuple[board.Ruling, ...] = ()  # what the rules of the board have found in the running round
    leaves: str = ""  # id of a node of the round that a verdict has leave; "": none
    moves: str = ""  # id of a node of the round whose ranks are to move to another one (`policy.Decision.moves_ranks`); "": none


@dataclass(frozen=True)
class Wait:
    """Do nothing until something happens, or until `until` on the same clock."""

    reason: str
    until: float | None = None


@dataclass(frozen=True)
class Seal:
    """Start the next round with these nodes, in the order of their ranks."""

    order: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class End:
    """End the running round: `state` is BROKEN or DONE. kind: how, where the state alone does not say it. lost: see Header."""

    state: State
    reason: str
    kind: EndKind | None = None
    lost: str = ""


@dataclass(frozen=True)
class Conclude:
    """Find one verdict for all nodes from the reports of these nodes; without any, the job ends as too few nodes are left."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Release:
    """Let these nodes, which an operator drains, leave the job, and refuse their hosts."""

    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Amend:
    """Write this header: what it says of drained nodes has changed, or what holds for all nodes of the round."""

    header: Header
    reason: str


Action = Wait | Seal | End | Conclude | Release | Amend


def next_action(view: View, limits: Limits, now: float) -> Action:
    """Return the leader's next action."""
    if view.header.state is State.RUNNING:
        return _while_running(view, limits, now)
    if view.header.ended:
        return Wait(f"the job is over: {view.header.reason}")
    return _between_rounds(view, limits, now)


def before_first(header: Header, action: Action, differ: Callable[[Sequence[str]], str]) -> Action:
    """Return the action before the first round. Nodes that differ in what decides for the job never come to be in one round.

    The header says so: each node shows it, and leaves once it has waited for long enough. One that is started again may agree.

    Args:
        action: from `next_action`.
        differ: returns in what these nodes differ; only a round that would begin now asks.
    """
    differs = differ(action.order) if isinstance(action, Seal) else ""
    if differs != header.differs:
        return Amend(replace(header, differs=differs), differs or "the nodes do not differ any more in what must be alike")
    return Wait(differs) if differs else action


def waiting(view: View) -> list[str]:
    """Return the ids of the nodes that wait for the next round."""
    return [id_ for id_, node in view.nodes.items() if id_ not in view.members or node.after >= view.header.round]


def reports(view: View) -> tuple[str, ...]:
    """Return the ids of the members of this round that report a failure in it."""
    of = {id_: node.report for id_, node in view.nodes.items() if id_ in view.members}
    return tuple(id_ for id_, report in of.items() if report.round == view.header.round and report.failure)


def lost(view: View) -> dict[str, str]:
    """Return what became of the members of the round that are gone, were released, or have stopped as they were cut off, by id.

    Also of one that is back: the round has ended because it was gone.
    """
    number, released = view.header.round, drains.released(view.header)
    became = {id_: "was asked to leave" for id_ in view.members if id_ in released}
    became |= {
        id_: "was cut off from the job's store" for id_, node in view.nodes.items() if id_ in view.members and node.cut == number
    }
    gone = [id_ for id_ in view.members if id_ not in view.nodes or id_ == view.header.lost]
    return {**dict.fromkeys(gone, "was lost"), **became}


def addressed(view: View) -> dict[str, Reach]:
    """Return the members' addresses, by id: some have nothing to report of a round in which others missed them.

    A node whose workers have finished has none: its connections ended with them.
    """
    nodes = {id_: view.nodes[id_] for id_ in view.members if id_ in view.nodes}
    return {id_: Reach((node.address,)) for id_, node in nodes.items() if node.done < view.header.round}


def done(round_: int, members: Collection[str], nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the ids of the members whose workers have finished the round without a failure. The leader counts once a look."""
    return frozenset(id_ for id_ in members if id_ in nodes and nodes[id_].done >= round_)


def members(view: View) -> board.RoundMembers:
    """Return the nodes of the running round, for the rules of the board."""
    there = [id_ for id_ in sorted(view.members, key=view.members.__getitem__) if id_ in view.nodes]
    return board.RoundMembers(tuple(there), view.done, view.finished_at, view.header.agreed)


T = TypeVar("T")
_OVER = 3
_STAGES = {State.FORMING: 0, State.RUNNING: 0, State.BROKEN: 1, State.DONE: _OVER, State.CLOSED: _OVER}


def _age(header: Header) -> tuple[int, int, int, int]:
    """Return a key that grows with each new header of a job."""
    judged = header.state is State.BROKEN and bool(header.verdict)
    return header.round, _STAGES[header.state] + judged, header.agreed.made, header.drains_made


def precedes(found: Header, known: Header) -> bool:
    """Return whether the found header is an older one of the same job: a node that missed events brought it back.

    Of two rounds with one number, or of two jobs, the one in the store counts: nothing shows which is older.
    """
    if found.job != known.job or (found.round == known.round and found.seal != known.seal):
        return False
    return _age(found) < _age(known)


def needs_restoring(found: Header | None, known: Header) -> bool:
    """Return whether a node that knows this header must write it again. found: the header in the store; None if it is missing.

    The end of a job is not written again if the header is missing: the next job of this run id may have begun.
    """
    if found is None:
        return known.round > 0 and _STAGES[known.state] < _OVER
    return precedes(found, known)


def incomplete(view: View) -> bool:
    """Return whether assignments of the round are unknown because their records were lost."""
    return len(view.members) < view.header.nodes


def _awaits_members(view: View, now: float) -> Wait | None:
    """After an outage, wait for missing members and assignments; not for the member whose loss has ended the round."""
    until = view.returning_until
    if until is None or now >= until:
        return None
    if incomplete(view):
        missing = f"the assignments of {counted(view.header.nodes - len(view.members), 'node')} in round {view.header.round}"
        return Wait(f"{missing} are being written again", min(until, now + ASSIGNMENTS_POLL_S))
    absent = [id_ for id_ in view.members if id_ not in view.nodes and id_ != view.header.lost]
    return Wait(f"{_named(absent)} may come back after the outage", until) if absent else None


def _while_running(view: View, limits: Limits, now: float) -> Action:
    number = view.header.round
    gone = [id_ for id_ in view.members if id_ not in view.nodes]
    awaits = _awaits_members(view, now)
    if gone and awaits is None:
        return End(State.BROKEN, f"lost {_named(gone)}", lost=gone[0])
    left = [id_ for id_ in view.members if id_ in view.nodes and view.nodes[id_].after >= number]
    if left:
        return End(State.BROKEN, f"{_named(left)} left the round to wait for the next one")
    if failed := reports(view):
        return End(State.BROKEN, f"workers of {_named(failed)} failed", EndKind.FAILED)
    if (amended := _agreed(view)) is not None:
        return amended
    if awaits is not None:
        return awaits
    if incomplete(view):
        return End(State.BROKEN, f"the assignments of {counted(view.header.nodes - len(view.members), 'node')} are lost")
    if (ruling := board.ending(view.rulings)) is not None:
        return Wait(ruling.reason, ruling.until) if ruling.end is None else End(State.BROKEN, ruling.reason, ruling.end)
    if len(view.done) == len(view.members):
        return End(State.DONE, "all workers have finished")
    if view.done:
        return Wait("running")
    if (drained := _drains(view, limits, view.members)) is not None:
        return drained
    room = limits.max_nodes - len(view.members)
    leaving = drains.asked(view.header)
    joining = [id_ for id_ in waiting(view) if id_ not in leaving][: max(room, 0)]
    if not joining:
        return Wait("running")
    if view.may_grow:
        return End(State.BROKEN, f"growing by {_named(joining)}")
    return Wait(f"{_named(joining)} will join at the next checkpoint", now + GROW_POLL_S)


def _agreed(view: View) -> Amend | None:
    """Return the header by which all nodes get what rules have found for them; None: they have it, or the round ends first."""
    ending, new = board.ending(view.rulings), [each for each in view.rulings if each.agreed is not None]
    agreed = board.agree(view.header.agreed, *(each.agreed for each in new if each.agreed is not None))
    if agreed is view.header.agreed or (ending is not None and ending.end is not None):
        return None
    return Amend(replace(view.header, agreed=agreed), "; ".join(each.reason for each in new))


def _drains(view: View, limits: Limits, running: Mapping[str, int]) -> Action | None:
    """Return what is to be done for nodes that an operator drains; None: nothing now. running: members whose workers run."""
    if not view.header.drains:
        return None
    if ids := drains.may_go(view.header, view.nodes, running, limits.min_nodes):
        return Release(ids, f"{_named(ids)} may leave: {_reasons(view.header, ids)}")
    if (after := drains.held(view.header, view.nodes, running, limits.min_nodes)) is not view.header:
        return Amend(after, _amended(after))
    going = [id_ for id_ in running if id_ in drains.released(view.header)]
    return End(State.BROKEN, f"{_named(going)} drained: {_reasons(view.header, going)}") if going else None


def _amended(header: Header) -> str:
    ids = [each.node for each in header.drains if each.held]
    if ids:
        return f"{_named(ids)} cannot be spared now, and will have to save again before leaving"
    return "a node that was to leave can be spared now: it saves again first"


def _reasons(header: Header, ids: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(each.reason for each in header.drains if each.node in ids))


def _between_rounds(view: View, limits: Limits, now: float) -> Action:
    if (awaits := _awaits_members(view, now)) is not None:
        return awaits
    ran = max((node.round for node in view.nodes.values()), default=0)
    if view.header.state is State.FORMING and ran and view.returning_until is not None and now < view.returning_until:
        return Wait(f"the header of round {ran} is lost; its nodes are writing it again", view.returning_until)
    failed = reports(view)
    if failed and not view.header.verdict:
        silent = [id_ for id_ in view.members if id_ in view.nodes and not _has_reported(view.nodes[id_], view.header.round)]
        if silent and all(view.nodes[id_].report.follows for id_ in failed):
            # Wait beyond the settle time: the next round needs these nodes anyway. A node may use up its workers' whole grace
            # before it reports the cause. If a node's host has died, the node is lost when its lease ends.
            return Wait(f"all failures reported so far follow from another one; no report yet from {_named(silent)}")
        settled = view.reported_at + limits.settle_s if view.reported_at is not None else now
        if silent and now < settled:
            return Wait(f"{_named(silent)} may have failed too", settled)
        return Conclude(failed, f"workers of {_named(failed)} failed")
    if (drained := _drains(view, limits, {})) is not None:
        return drained
    here = set(waiting(view))
    if view.leaves in here:  # nothing failed there, so it waits, and has yet to see the verdict
        return Wait(f"waiting for {_named([view.leaves])} to leave")
    coming = [id_ for id_ in view.members if id_ in view.nodes and id_ not in here]
    if coming:
        return Wait(f"waiting for {_named(coming)} to stop all workers")
    leaving = drains.released(view.header)
    present = [id_ for id_ in waiting(view) if id_ not in leaving]
    if len(present) < limits.min_nodes:
        return _with_too_few(view, present, limits, now)
    if len(present) < limits.max_nodes and view.header.state is State.FORMING:
        last_call = view.last_arrival + limits.last_call_s
        if now < last_call:
            return Wait(f"{len(present)} of at most {limits.max_nodes} nodes have joined; more may come", last_call)
    ranks = order(view, present, limits.max_nodes)
    moved = f"; the ranks of {_named([view.moves])} move" if _can_move(view, ranks) else ""
    return Seal(ranks, f"{counted(len(present), 'node')} joined{moved}")


def _with_too_few(view: View, present: Sequence[str], limits: Limits, now: float) -> Action:
    few = f"{len(present)} of at least {limits.min_nodes} nodes have joined"
    # Nodes of another launch, none of which was in this round, wait for each other as before a first round.
    survive = view.header.state is State.BROKEN and any(id_ in view.members for id_ in present)
    if limits.rejoin_s is None or view.few_since is None or not survive or not lost(view):
        return Wait(few)
    until = view.few_since + limits.rejoin_s
    return Wait(few, until) if now < until else Conclude((), f"{few}, and no lost one has come back in {limits.rejoin_s:g} s")


def _has_reported(node: Node, round_: int) -> bool:
    return node.report.round >= round_ or node.after >= round_


def order(view: View, present: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the nodes of the next round by rank: old members in their old order, then new ones by topology and time of joining.

    The order is stable, so that caches and shards stay where they are. Only a node that another one cannot reach is not first,
    and one whose ranks are to move changes places with the next. If there are too many nodes, the last to come wait.
    """
    rank = view.members
    chosen = sorted(present, key=lambda id_: (id_ not in rank, rank.get(id_, 0), view.joined[id_]))[:most]
    by_rank = sorted(chosen, key=lambda id_: (id_ not in rank, rank.get(id_, 0), view.nodes[id_].host.topology, view.joined[id_]))
    if _can_move(view, by_rank):
        place = by_rank.index(view.moves)
        other = place + 1 if place + 1 < len(by_rank) else place - 1
        by_rank[place], by_rank[other] = by_rank[other], by_rank[place]
    # The first one serves the store of the round, which all must reach.
    silent = {address for id_ in chosen for address in view.nodes[id_].silent}
    first = next((id_ for id_ in by_rank if view.nodes[id_].address not in silent), by_rank[0])
    return (first, *(id_ for id_ in by_rank if id_ != first))


def _can_move(view: View, ids: Sequence[str]) -> bool:
    return view.moves in ids and len(ids) > 1


def seal(view: View, action: Seal, limits: Limits, name: str = "") -> tuple[Header, dict[str, Assignment]]:
    """Return the header of the next round and each node's assignment, by id. limits: of the job. name: the seal.

    The round number exceeds that of any round that a node has been in, even if the header of that round is lost.
    """
    nodes = [view.nodes[id_] for id_ in action.order]
    number = 1 + max(view.header.round, *(max(node.after, node.round) for node in view.nodes.values()))
    role_world: dict[str, int] = {}
    for node in nodes:
        role_world[node.role] = role_world.get(node.role, 0) + node.workers
    assignments, base, role_base = {}, 0, dict.fromkeys(role_world, 0)
    for rank, (id_, node) in enumerate(zip(action.order, nodes, strict=True)):
        near = neighbors(rank, action.order)
        assignments[id_] = Assignment(number, rank, base, role_base[node.role], role_world[node.role], name, near)
        base += node.workers
        role_base[node.role] += node.workers
    first = nodes[0]
    header = Header(number, State.RUNNING, len(nodes), base, first.address, first.port, action.reason, name)
    local = all(node.local for node in nodes)
    left = drains.remaining(view.header, view.nodes)
    made = view.header.drains_made
    header = replace(header, local=local, job=view.header.job or name, drains=left, drains_made=made)
    return replace(header, min_nodes=limits.min_nodes, max_nodes=limits.max_nodes), assignments


def neighbors(rank: int, order: Sequence[T]) -> tuple[T, ...]:
    """Return the ids of the nodes that the node of this rank keeps links to: the next one, and one half of the job away.

    Two, so that a node is missed although another one dies with it; far apart, because neighbors by rank share a rack.
    """
    places = {(rank + distance) % len(order): None for distance in (1, max(2, len(order) // 2))}
    return tuple(order[place] for place in places if place != rank)


def _named(ids: Sequence[str]) -> str:
    host = drains.host_of(ids[0])
    return f"node {host}" if len(ids) == 1 else f"{len(ids)} nodes (including {host})"


# How often a host joins a job under way. Each time costs all nodes a restart, so a host that comes and goes is refused.
# `job_records.LateJoins` counts.
JOIN_WINDOW_S = 3600
# Joins of a host within that time. Each restarts all nodes: a host that comes every three minutes costs more than it gives.
MAX_JOINS = 20


class JoinAnswer(Enum):
    """What follows from a join."""

    NOTHING = "nothing"
    REFUSE = "refuse"  # the host stays, but once it has left it may not come back yet
    LEAVE = "leave"  # the host is refused, and has to leave: its agent has outlived the time when it was away


@dataclass(frozen=True)
class JoinDecision:
    """joins: how often the host has joined within JOIN_WINDOW_S. reason: for people."""

    answer: JoinAnswer
    joins: int
    reason: str

    @property
    def level(self) -> int:
        """The level of the log line: a host that joins once is nothing to worry about."""
        return logging.INFO if self.answer is JoinAnswer.NOTHING and self.joins == 1 else logging.WARNING

    def line(self, refused_s: int) -> str:
        """Return what the agent of the host says. refused_s: the setting `refuse_node`."""
        if self.answer is JoinAnswer.NOTHING:
            return f"this host was not in the round before: {self.reason}"
        refused = f"this host may not come back for {refused_s} s: {self.reason}"
        return f"once it has left, {refused}" if self.answer is JoinAnswer.REFUSE else refused


def is_late(round_: int, last: int) -> bool:
    """Return whether a node that enters this round joins a job under way. last: its round before; 0 if this is its first."""
    return round_ > 1 and last != round_ - 1


def after_join(joins: int, limit: int = MAX_JOINS, ambiguous: bool = False) -> JoinDecision:
    """Decide on a host after a join.

    Args:
        joins: in JOIN_WINDOW_S, this one included.
        limit: the most of them.
        ambiguous: other machines have its name, and may have joined in its place.
    """
    times = "once" if joins == 1 else f"{joins} times"
    reason = f"it has joined the running job {times} within {JOIN_WINDOW_S // 60} minutes"
    reason = f"{reason}; {limit} are allowed"
    if joins <= limit:
        return JoinDecision(JoinAnswer.NOTHING, joins, reason)
    if ambiguous:
        why = "but several machines of the job have its name, so none is refused: give each a name of its own (node_name)"
        return JoinDecision(JoinAnswer.NOTHING, joins, f"{reason}, {why}")
    answer = JoinAnswer.REFUSE if joins == limit + 1 else JoinAnswer.LEAVE
    return JoinDecision(answer, joins, f"{reason}, which restarts all nodes each time")
