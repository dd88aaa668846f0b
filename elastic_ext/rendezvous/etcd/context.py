"""State shared by all parts of one node's rendezvous, from the node's start to its end."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.tasks import TaskRunner
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.rounds import Limits


@dataclass(frozen=True)
class NodeConfig:
    """The identity of a node and of the job that it enters.

    Attributes:
        node_id: unique within the job, fit to be part of a key.
        lease_ttl_s: after this many seconds without a renewal, etcd drops the node.
        host: name by which a verdict may refuse this machine; "" if it has none.
    """

    run_id: str
    node_id: str
    limits: Limits
    lease_ttl_s: int
    host: str = ""


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
