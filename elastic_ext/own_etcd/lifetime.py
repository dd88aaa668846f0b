"""When the keeper of a host ends, and when its member begins anew. Pure: takes what it knows, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_AGENT_S = 30.0  # an agent that has started a keeper comes in as soon as that listens
NO_ETCD_S = 30.0  # without an agent here and without an answer of etcd
NO_MAJORITY_S = 60.0  # with an agent here: a host that was paused or cut off for longer is lost for the job as well
LAST_S = 10.0  # told to end: for the agents of other hosts, which end at the same time


@dataclass(frozen=True)
class Situation:
    """What a keeper knows. Times are monotonic seconds; None: it is not so.

    Attributes:
        started: since when it runs.
        agents: number of agents on this host that have come in and not left.
        had_agents: there has been one.
        is_member: it runs a member, or is about to.
        over: the job has ended, or none has begun.
        elsewhere: some host of the job has an agent.
        orderly: the last agent here has left by itself; one that was killed may be started again, and finds its job.
        silent: since when etcd has not answered.
        told: since when it has been told to end, by a signal.
    """

    started: float
    agents: int
    had_agents: bool
    is_member: bool
    over: bool
    elsewhere: bool
    orderly: bool
    silent: float | None = None
    told: float | None = None


@dataclass(frozen=True)
class Lifetime:
    """ends: now. look_again: when the answer may change by itself, monotonic; None: only by an event. reason: for the log."""

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


def begins_anew(seen: Situation, members: int, now: float) -> bool:
    """Return whether the member is to forget its data: it has had no majority for so long that the other members' data, which
    is in memory, is gone with their hosts. Else it would hold up those for ever: etcd takes nobody back without his data.

    Args:
        members: number that the job began with. One alone is its own majority.

    Where the others live on, and only this host is cut off, etcd does not let it in as it comes back, and it is replaced.
    """
    return members > 1 and seen.is_member and seen.agents > 0 and seen.silent is not None and now >= seen.silent + NO_MAJORITY_S


def decide(seen: Situation, now: float) -> Lifetime:
    """Return whether the keeper ends. It never does while an agent of this host is in."""
    if seen.agents:
        return Lifetime(False, "an agent of this host is in")
    if not seen.had_agents:
        first_by = seen.started + FIRST_AGENT_S
        return Lifetime(now >= first_by, "no agent has come in", first_by)
    if not seen.is_member:
        return Lifetime(True, "the last agent of this host has left")
    if not seen.elsewhere:
        for enough, reason in ((seen.over, "the job is over"), (seen.orderly, "all have left"), (seen.told, "told to end")):
            if enough:
                return Lifetime(True, reason)
    limits: list[tuple[float, str]] = []
    if seen.told is not None:
        limits.append((seen.told + LAST_S, "told to end"))
    if seen.silent is not None:
        limits.append((seen.silent + NO_ETCD_S, "no agent is left here, and etcd does not answer"))
    return Lifetime.until_first(limits, now, "other hosts need this member")
