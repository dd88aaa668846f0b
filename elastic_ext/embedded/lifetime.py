"""When an embedded store ends. Pure: takes what the process knows, and the time."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.own_etcd.lifetime import Lifetime

FIRST_AGENT_S = 30.0  # an agent that has started a store connects as soon as that listens
OVER_S = 1.0  # after the last node has left a job that is over: for one whose connection has just broken
LONELY_S = 60.0  # without a node: an agent that was killed may be started again, and finds its job
TOLD_S = 10.0  # told to end, as a container or a step of Slurm is: for agents of other hosts, which end at the same time


@dataclass(frozen=True)
class Situation:
    """What a store knows. Times are monotonic seconds.

    Attributes:
        started: since when it runs.
        streams: number of agents, on any host, that watch keys: those in a job do.
        nodes: number of nodes with a record. One that leaves by itself has none any more, one that is cut off has.
        agents: number of agents of this host that are connected.
        had_agents: there has been one.
        orderly: the last agent of this host has left by itself, and was not killed.
        over: there is a job, and all jobs here have ended.
        quiet: since when there is no stream; None: there is one.
        told: since when it has been told to end, by a signal; None: it has not.
    """

    started: float
    streams: int
    nodes: int
    agents: int
    had_agents: bool
    orderly: bool
    over: bool
    quiet: float | None
    told: float | None = None


def decide(seen: Situation, now: float) -> Lifetime:
    """Return whether the store ends. While a node is in a job it never does, unless it is told to."""
    limits: list[tuple[float, str]] = []
    if seen.told is not None:
        limits.append((seen.told + TOLD_S, "told to end"))
    if seen.quiet is not None and not seen.agents:
        if not seen.had_agents:
            limits.append((seen.started + FIRST_AGENT_S, "no agent has come"))
        elif seen.over or (not seen.nodes and (seen.orderly or seen.told is not None)):
            limits.append((seen.quiet + OVER_S, "the job is over" if seen.over else "all have left"))
        else:
            limits.append((seen.quiet + LONELY_S, "all agents are gone"))
    return Lifetime.until_first(limits, now, "nodes are in the job")
