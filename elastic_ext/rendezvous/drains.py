"""Drains: an operator has nodes leave a running job without losing work. Decisions over plain values, standard library only.

A drain is a record in the job's header (`round_records.Drain`), so that its check and its write are one compare-and-swap, and it
outlives a leader, a round, and records that etcd has lost. `admit` makes it, for `elastic-ext drain`. The node reports a
checkpoint that was published since (`topics.READY`). The leader then releases it (`may_go`): the host is refused, the round
ends, and no later round has the node, which leaves when it sees this.

Invariant: a node is released only while at least min_nodes others are there; else it stays, and so does the drain (`held`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from elastic_ext.base.printable import counted
from elastic_ext.rendezvous import topics
from elastic_ext.rendezvous.round_records import Drain, Header, Node

NO_REASON = "by an operator"
_ID = re.compile(r"(.+)-[0-9]+-[0-9a-f]{6}")  # HOST-PID-RANDOM


class Answer(Enum):
    """The answer to a request."""

    ADMITTED = "admitted"
    ASKED = "asked before"  # the same drain is under way
    LEFT = "left"  # the node has left already, and is refused
    TOO_FEW = "too few"
    UNKNOWN = "unknown"  # no such node
    AMBIGUOUS = "ambiguous"  # several machines have this name


@dataclass(frozen=True)
class DrainRequest:
    """A drain to be. name: a host, or the id of a node on it. See Drain for the rest."""

    name: str
    reason: str
    refused_s: int
    now: bool = False


@dataclass(frozen=True)
class Admission:
    """The answer to a request. nodes: ids of the host's nodes. header: to be written; the same one if nothing is to be."""

    answer: Answer
    reason: str
    header: Header
    nodes: tuple[str, ...] = ()


def host_of(node_id: str) -> str:
    """Return the host of a node's id, which `take_place` made."""
    found = _ID.fullmatch(node_id)
    return found[1] if found is not None else node_id


def ambiguous_hosts(nodes: Mapping[str, Node]) -> frozenset[str]:
    """Return the host names that several machines have in common. One that has just booted again has another id, not address."""
    machines: dict[str, dict[str, str]] = {}
    for id_, node in nodes.items():
        if node.host.machine:
            machines.setdefault(host_of(id_), {})[node.host.machine] = node.address
    return frozenset(host for host, found in machines.items() if len(set(found.values())) > 1)


def nodes_on(host: str, nodes: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(id_ for id_ in nodes if host_of(id_) == host))


def admit(
    asked: DrainRequest, header: Header, nodes: Mapping[str, Node], refused: Mapping[str, str], min_nodes: int
) -> Admission:
    """Decide on a request.

    Args:
        nodes: all current nodes, running or waiting.
        refused: why, by host that may not come back.
    """
    host = host_of(asked.name)
    if host in ambiguous_hosts(nodes):
        where = ", ".join(sorted({nodes[id_].address for id_ in nodes_on(host, nodes)}))
        why = (
            f"several machines of the job are called {host} ({where}), and all of them would have to leave; nothing was changed: "
            "send SIGTERM to the agent on the one that is to leave, or start them with names of their own (ELASTIC_EXT_NODE_NAME)"
        )
        return Admission(Answer.AMBIGUOUS, why, header)
    named = nodes_on(host, {*nodes, *(each.node for each in header.drains if not each.released)})
    if not named:
        if host in refused:
            return Admission(Answer.LEFT, f"{host} has left the job before: {refused[host]}", header)
        there = ", ".join(sorted({host_of(id_) for id_ in nodes})) or "none"
        return Admission(Answer.UNKNOWN, f"no node {asked.name} in the job; its nodes: {there}", header)
    known = {each.node: each for each in header.drains}
    new = [id_ for id_ in named if id_ not in known]
    hastened = [id_ for id_ in named if id_ in known and asked.now and not (known[id_].now or known[id_].released)]
    remain = [id_ for id_ in nodes if id_ not in known and id_ not in named and host_of(id_) not in refused]
    count = counted(len(remain), "node")
    least = f"the job takes at least {min_nodes}"
    if new and len(remain) < min_nodes:
        return Admission(Answer.TOO_FEW, f"{count} would remain, and {least}; nothing was changed", header, named)
    if not new and not hastened:
        return Admission(Answer.ASKED, f"{host} was asked to leave before", header, named)
    made = header.drains_made + 1
    kept = [replace(each, now=each.now or each.node in hastened) for each in header.drains]
    added = [Drain(id_, host, made, asked.reason or NO_REASON, max(1, asked.refused_s), asked.now) for id_ in new]
    after = replace(header, drains=(*kept, *added), drains_made=made)
    return Admission(Answer.ADMITTED, f"others: {count}, and {least}", after, named)


def withdrawn(header: Header, host: str) -> Header:
    """Return the header without the drains of this host that have not begun; the same one if there are none."""
    kept = tuple(each for each in header.drains if each.host != host or each.released)
    if len(kept) == len(header.drains):
        return header
    return replace(header, drains=kept, drains_made=header.drains_made + 1)


def of_node(header: Header, node_id: str) -> Drain | None:
    """Return the drain of this node; None if it has none."""
    return next((each for each in header.drains if each.node == node_id), None)


def of_host(header: Header, host: str) -> Drain | None:
    """Return a drain of this host that has not begun: a node that starts there now is not to join."""
    return next((each for each in header.drains if each.host == host and not each.released), None)


def released(header: Header) -> frozenset[str]:
    """Return the ids of the nodes that were released."""
    return frozenset(each.node for each in header.drains if each.released)


def asked(header: Header) -> frozenset[str]:
    """Return the ids of all nodes that are to leave, released or not."""
    return frozenset(each.node for each in header.drains)


def may_go(header: Header, nodes: Mapping[str, Node], running: Collection[str], min_nodes: int) -> tuple[str, ...]:
    """Return the ids of the nodes to release now: they are gone, or have published a checkpoint, or need none.

    Args:
        nodes: all current nodes.
        running: ids of those whose workers run.
    """
    staying = set(nodes) - released(header)
    chosen = []
    for drain in header.drains:
        id_ = drain.node
        if drain.released:
            continue
        if id_ not in nodes:
            chosen.append(id_)  # it has already left: the host is refused all the same
        elif len(staying) > min_nodes and (
            drain.now or id_ not in running or (_ready(drain, header, nodes) is not None and not drain.held)
        ):
            staying.discard(id_)
            chosen.append(id_)
    return tuple(chosen)


def _ready(drain: Drain, header: Header, nodes: Mapping[str, Node]) -> topics.ReadyToLeave | None:
    """Return what the node has published since it was asked; None: nothing."""
    found = topics.READY.of(nodes[drain.node].board, header.round) if drain.node in nodes else None
    return found if found is not None and found.number == drain.number else None


def held(header: Header, nodes: Mapping[str, Node], running: Collection[str], min_nodes: int) -> Header:
    """Return the header in which running nodes that are ready are held, if the job cannot spare them; and in which those that
    were held are asked again, under a new number, if it can: their checkpoint is old by then. The same one: nothing changes.

    Call after `may_go`, which lets go all that can. Args: see there.
    """
    spare = len(set(nodes) - released(header)) - min_nodes
    concerned = [each for each in header.drains if not each.released and each.node in running]
    hold = {each.node for each in concerned if not each.held and spare <= 0 and _ready(each, header, nodes) is not None}
    promised = sum(not each.held for each in concerned)  # to nodes that are saving
    again = [each.node for each in concerned if each.held][: max(0, spare - promised)]
    if not hold and not again:
        return header
    made = header.drains_made + 1

    def changed(drain: Drain) -> Drain:
        if drain.node in again:
            return replace(drain, held=False, number=made)
        return replace(drain, held=True) if drain.node in hold else drain

    return replace(header, drains=tuple(map(changed, header.drains)), drains_made=made)


def release(header: Header, ids: Collection[str], nodes: Mapping[str, Node]) -> Header:
    """Return the header in which these nodes are released."""

    def let_go(drain: Drain) -> Drain:
        ready = _ready(drain, header, nodes)
        return replace(drain, released=True, step=ready.step if ready is not None else topics.NO_STEP)

    drains = tuple(let_go(each) if each.node in ids else each for each in header.drains)
    return replace(header, drains=drains, drains_made=header.drains_made + 1)


def remaining(header: Header, nodes: Collection[str]) -> tuple[Drain, ...]:
    """Return the drains that the next round's header keeps: of nodes that are still there."""
    return tuple(each for each in header.drains if each.node in nodes)
