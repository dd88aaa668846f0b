"""When the keeper of a host ends, when its member forgets its data, and which member is replaced, by which host. Pure.

A member's data is in memory, so a host that is lost is lost with its data, and comes back as a new member. A host is lost when
the lease of its keeper has expired, or when another keeper of its name says that it holds no member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FIRST_AGENT_S = 30.0  # an agent that has started a keeper comes in as soon as that listens
NO_ETCD_S = 30.0  # without an agent here and without an answer of etcd
NO_MAJORITY_S = 60.0  # with an agent here: a host that was paused or cut off for longer is lost for the job as well
LAST_S = 10.0  # after a signal: for the agents of other hosts, which end at the same time


@dataclass(frozen=True)
class Situation:
    """What a keeper knows. Times are monotonic seconds; None: it is not so."""

    started: float  # since when it runs
    agents: int  # number of agents on this host that have come in and not left
    had_agents: bool  # there has been one
    is_member: bool  # it runs a member, or is about to
    over: bool  # the job has ended, or none has begun
    elsewhere: bool  # some host of the job has an agent
    orderly: bool  # the last agent here has left on its own; one that was killed may be started again, and finds its job
    silent: float | None = None  # since when etcd has not answered
    signalled: float | None = None  # since when a signal has asked it to end


@dataclass(frozen=True)
class Lifetime:
    """ends: now. look_again: when the answer may change without an event, monotonic; None: only by one. reason: for the log."""

    ends: bool
    reason: str
    look_again: float | None = None

    @classmethod
    def until_first(cls, limits: Sequence[tuple[float, str]], now: float, otherwise: str) -> Lifetime:
        """Return what the first of these times, each with its reason, decides. otherwise: the reason to go on without any."""
        if not limits:
            return cls(False, otherwise)
        until, reason = min(limits)
        return cls(now >= until, reason, until)


def forgets_data(seen: Situation, members: int, now: float) -> bool:
    """Return whether the member is to forget its data: it has had no majority for so long that the other members' data, which
    is in memory, is gone with their hosts. Else it would hold up those for ever: etcd takes no member back without its data.

    members: number that the job began with. One alone is its own majority.

    Where the others live on, and only this host is cut off, etcd does not let it in as it comes back, and it is replaced.
    """
    return members > 1 and seen.is_member and seen.agents > 0 and seen.silent is not None and now >= seen.silent + NO_MAJORITY_S


def decide_end(seen: Situation, now: float) -> Lifetime:
    """Return whether the keeper ends. It never does while an agent of this host is in."""
    if seen.agents:
        return Lifetime(False, "an agent of this host is in")
    if not seen.had_agents:
        first_by = seen.started + FIRST_AGENT_S
        return Lifetime(now >= first_by, "no agent has attached", first_by)
    if not seen.is_member:
        return Lifetime(True, "the last agent of this host has left")
    if not seen.elsewhere:
        for enough, reason in ((seen.over, "the job is over"), (seen.orderly, "all have left"), (seen.signalled, "a signal")):
            if enough:
                return Lifetime(True, reason)
    limits: list[tuple[float, str]] = []
    if seen.signalled is not None:
        limits.append((seen.signalled + LAST_S, "a signal"))
    if seen.silent is not None:
        limits.append((seen.silent + NO_ETCD_S, "no agent is left here, and etcd does not answer"))
    return Lifetime.until_first(limits, now, "other hosts need this member")


@dataclass(frozen=True)
class KeeperRecord:
    """What the keeper of a host says of it, under its lease."""

    # peer, client: URLs of the member that it has or could have; peer "": it cannot run one
    peer: str
    client: str
    member: bool  # it has one
    agents: int  # number of agents on it


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


def next_step(
    size: int, members: Sequence[KnownMember], hosts: Mapping[str, KeeperRecord], order: Sequence[str], patient: bool
) -> Replacement | None:
    """Return the next step; None if there is nothing to do.

    Invariants: a majority of the members lives, before and after each step; a cluster of one is never touched; a lost member
    stays in the list until a host can take its place.

    size: number of members that the job began with. hosts: by name. order: names; hosts are chosen in this order, then by name.
    patient: the job has only just begun: a member that no node has seen may still come.
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
