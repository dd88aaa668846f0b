"""Which member of the job's etcd is replaced, and by which host. Pure.

A member's data is in memory, so a host that is lost is lost with its data, and comes back as a new member. A host is lost when
the lease of its keeper has expired, or when another keeper of its name says that it holds no member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostRecord:
    """What the keeper of a host says of it, under its lease.

    Attributes:
        peer, client: URLs of the member that it has or could have; peer "": it cannot run one.
        member: it has one.
        agents: number of agents on it.
    """

    peer: str
    client: str
    member: bool
    agents: int


@dataclass(frozen=True)
class Replacement:
    """The next step. remove: id of a member; add: host that is to have one; one of them is missing (0, ""). reason: to log."""

    remove: int
    add: str
    reason: str


@dataclass(frozen=True)
class KnownMember:
    """A member by etcd's own list. started: etcd has its name. seen: a keeper has said once that it serves."""

    member_id: int
    peer: str
    started: bool
    seen: bool


def decide(
    size: int, members: Sequence[KnownMember], hosts: Mapping[str, HostRecord], order: Sequence[str], patient: bool
) -> Replacement | None:
    """Return the next step; None if there is nothing to do.

    Invariants: a majority of the members lives, before and after each step; a cluster of one is never touched; a lost member
    stays in the list until a host can take its place.

    Args:
        size: number of members that the job began with.
        hosts: by name.
        order: names; hosts are chosen in this order, then by name.
        patient: the job has only just begun: a member that nobody has seen may still come.
    """
    if size < 2:
        return None
    living = {record.peer for record in hosts.values() if record.member}
    free = [name for name, record in hosts.items() if not record.member and record.peer]
    away = [each for each in members if each.peer not in living]
    if any(not each.started and each.peer == hosts[name].peer for each in away for name in free):
        return None  # a host has been called and is on its way: a second step meanwhile could cost the majority
    candidates = sorted(free, key=lambda name: (order.index(name) if name in order else len(order), name))
    if not candidates:
        return None
    if not away and len(members) < size:
        return Replacement(0, candidates[0], f"{len(members)} of {size} members are left")
    lost = [each for each in away if each.seen or not each.started or not patient]
    if lost and len(members) - len(away) > len(members) // 2:
        return Replacement(lost[0].member_id, "", f"the member {lost[0].peer} is lost, and {candidates[0]} can take its place")
    return None
