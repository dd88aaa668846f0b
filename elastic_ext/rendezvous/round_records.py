"""The records by which the nodes of a job form its rounds, as JSON with a schema: the values of keys in etcd (`etcd.keys`).

A record of another schema is refused. A field may be added within a schema if it has a default: older records lack it, and older
versions pass over it. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, TypeVar

from elastic_ext.base import records
from elastic_ext.base.records import Count, Name, Port, RecordError, Within

SCHEMA = 1  # of the records below; a record of another one is refused
MOST_WORKERS = 2**16  # of a node
MOST_SAVES = 10**6  # on demand, in one round
MOST_ROUNDS = 10**9  # that a node may say it has been in: the next one's number must still be one


class State(str, Enum):
    """The state of a job."""

    FORMING = "forming"  # before the first round
    RUNNING = "running"
    BROKEN = "broken"
    DONE = "done"
    CLOSED = "closed"  # the job is over, for good


class EndKind(str, Enum):
    """How a round ends while its workers run. Code decides on this, never on the reason, which is for people."""

    STALLED = "stalled"  # no worker of the job makes progress any more
    BROKEN = "broken"  # a node's workers failed, a node was lost or goes, or nodes wait to join
    CUT_OFF = "cut_off"  # this node is the one that can take no further part
    CLOSED = "closed"  # the job is over


@dataclass(frozen=True)
class Node:
    """A node's record: what it says about itself.

    Attributes:
        after: it waits for a round later than this one. Its workers of that round, if it was in it, have been stopped.
        workers: how many it runs.
        port: of a store server of this node that already listens and has never been used.
        done: the last round that its workers have finished without a failure; 0: none.
        reported: the last round about whose end it has reported; its workers of that round have been stopped.
        report: what failed here in that round (a record of `failures.ledger`); "": nothing.
        follows: see `failures.ledger.Report.waits_for_others`.
        saved: number of the last save on demand of its round that is complete; saved_step: its step.
        stalled: the round in which all its workers stall now; 0: they do not.
        local: it saves to a disk of its own first, and may resume from there.
        round: the round that its workers were in when it had to register again; 0: it never had to.
        cut: the round in which it stopped its workers because it was cut off from etcd; 0: none. That explains the failures of
            other nodes.
    """

    after: Count
    workers: Annotated[int, Within(1, MOST_WORKERS)]
    role: str
    address: Name
    port: Port
    done: Count = 0
    topology: str = ""
    reported: Count = 0
    report: str = ""
    follows: bool = False
    saved: Count = 0
    saved_step: Annotated[int, Within(0, 2**63 - 1)] = 0
    stalled: Count = 0
    local: bool = False
    round: Annotated[int, Within(0, MOST_ROUNDS)] = 0
    cut: Count = 0


@dataclass(frozen=True)
class Header:
    """The state of the job that every node watches: small, whatever the number of nodes.

    Attributes:
        round: number of the round that runs, or of the last one; 0 before the first.
        nodes, world: how many nodes and how many workers are in it.
        address, port: the store of this round, at the node of rank 0.
        reason: why it is in this state, for people.
        seal: a name unique to one act of sealing. A leader may be lost, or its view may change, after it wrote the parts of a
            round and before it wrote this header; the parts left by that must not count as parts of the round that came to be.
        verdict: what all nodes do about the failures that ended this round (a record of `failures.ledger`); "": nothing has been
            judged.
        save: number of the last save on demand that was asked for in this round; 0: none.
        local: all nodes may resume from disks of their own, and offer the node of rank 0 what they have there.
        resume: what all nodes resume from (a record of `checkpoints.resolution`), written by the node of rank 0 once it has
            chosen; "": it has not yet. A new round begins with "", so that no choice outlives its round.
        job: names the job from its first round to its end, and no other job of the same run id; "": before the first round.
        end: how the round ended; None: as `state` says. Older versions do not write it.
    """

    round: Count = 0
    state: State = State.FORMING
    nodes: Count = 0
    world: Count = 0
    address: str = ""
    port: Port = 0
    reason: str = ""
    seal: str = ""
    verdict: str = ""
    save: Annotated[int, Within(0, MOST_SAVES)] = 0
    local: bool = False
    resume: str = ""
    job: str = ""
    end: EndKind | None = None


@dataclass(frozen=True)
class Assignment:
    """One node's part in a round.

    Attributes:
        rank: of the node.
        base_rank, base_role_rank: of its first worker, among all workers and among those of its role.
        role_world: how many workers have its role.
        seal: see Header.
    """

    round: Count
    rank: Count
    base_rank: Count
    base_role_rank: Count
    role_world: Count
    seal: str = ""

    def of(self, header: Header) -> bool:
        """Whether this is a part in the header's round, and not in another attempt to form it."""
        return (self.round, self.seal) == (header.round, header.seal)


Record = TypeVar("Record", Node, Header, Assignment)

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: a leader of thousands of nodes writes as many records


def encode(record: Node | Header | Assignment) -> bytes:
    """Return the record as JSON, with its schema."""
    return _ENCODER.encode({"schema": SCHEMA, **vars(record)}).encode()


def decode(kind: type[Record], value: bytes, key: str) -> Record:
    """Read a record. key: for messages.

    Raises:
        RecordError: it has another schema, or is not a record of this kind.
    """
    data = records.parse(value, key, SCHEMA)
    if kind is Header and "state" not in data:
        raise RecordError(f"{key} holds no header of elastic_ext: the state is missing")
    return records.build(kind, data, key)
