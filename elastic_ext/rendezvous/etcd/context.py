"""What all parts of one node's rendezvous share, from the node's start to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.etcd import EtcdClient, LeaseSession
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.tasks import TaskRunner
from elastic_ext.rendezvous.round_records import RecordReader
from elastic_ext.rendezvous.rounds import Limits


@dataclass(frozen=True)
class NodeConfig:
    """The identity of a node and of the job that it enters.

    Attributes:
        node_id: unique within the job, fit to be part of a key.
        lease_ttl_s: after this many seconds without a renewal, etcd drops the node.
        host: name by which a verdict may refuse this machine; "" if it has none.
        loopback: the network of this machine, if the other nodes are to reach this one at the loopback; else "".
        own_store: the job has brought its store, which ends with it: whoever comes after its end has come too late.
    """

    run_id: str
    node_id: str
    limits: Limits
    lease_ttl_s: int
    host: str = ""
    loopback: str = ""
    own_store: bool = False


@dataclass(frozen=True)
class NodeContext:
    """The objects that the parts of one `Participant` share."""

    client: EtcdClient
    config: NodeConfig
    keys: JobKeys
    reader: RecordReader
    tasks: TaskRunner

    @property
    def own_key(self) -> str:
        """Key of this node's record."""
        return self.keys.node(self.config.node_id)

    @property
    def own_assignment_key(self) -> str:
        """Key of this node's assignment."""
        return self.keys.assignment(self.config.node_id)


RETURN_S = (
    8.0  # gRPC takes up to 5 to find a server again (min_reconnect_backoff_ms and a pause); the rest is for the node's write
)


def returning_s(ttl_s: float) -> float:
    """Return how many seconds a leader gives members to come back after an outage: longer than the fence lets them train on."""
    return max(ttl_s, RETURN_S)


class Outage:
    """The last outage that this node knows of. For the rendezvous thread."""

    def __init__(self, ttl_s: float, session: Callable[[], LeaseSession | None], now: Callable[[], float]) -> None:
        """session: returns the node's current lease, if any. now: returns the monotonic time."""
        self._ttl_s = ttl_s
        self._session = session
        self._now = now
        self._until: float | None = None

    def expect_members(self) -> None:
        """Start the wait: records are lost, or this node was cut off for long, and the others may have been as well."""
        self._until = self._now() + returning_s(self._ttl_s)

    @property
    def returning_until(self) -> float | None:
        """See `rounds.View`."""
        session = self._session()
        if session is not None and session.late:
            self.expect_members()
        elif session is not None and session.late_at is not None:
            until = session.late_at + returning_s(self._ttl_s)
            return until if self._until is None else max(until, self._until)
        return self._until
