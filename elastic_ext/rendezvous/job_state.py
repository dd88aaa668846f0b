"""What a rendezvous knows of a whole job at one moment. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_ext.base.errors import UsageError
from elastic_ext.failures.ledger import Ledger
from elastic_ext.rendezvous.round_records import Assignment, Header, Node


class NoSuchJob(UsageError):
    """There are no records of such a job."""


@dataclass(frozen=True)
class NodeText:
    """What a node tells of itself for people (`observe.node_report`), as it was read.

    version: another number means that the node has told it again; the same number, that it has not.
    """

    text: str
    version: int


@dataclass(frozen=True)
class JobStatus:
    """The state at one moment.

    Attributes:
        nodes, assignments: records and assignments, by node id.
        refused: the reason, by host.
        faults: one line for each unreadable record.
        reports: what each node tells of itself, by node id.
        goodput: the records of `base.goodput`, as they were read, by host.
        unknown: why, by what this rendezvous cannot know.
    """

    run_id: str
    header: Header
    nodes: dict[str, Node]
    assignments: dict[str, Assignment]
    ledger: Ledger
    refused: dict[str, str]
    faults: tuple[str, ...] = ()
    reports: dict[str, NodeText] = field(default_factory=dict)
    goodput: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    @classmethod
    def nothing(cls, run_id: str, why: str) -> JobStatus:
        """Return the state of a job of which nothing is known yet."""
        return cls(run_id, Header(), {}, {}, Ledger(), {}, unknown={"other nodes": why})
