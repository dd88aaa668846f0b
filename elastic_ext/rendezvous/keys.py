"""Every key of a job in etcd: which record it holds, who writes it, who reads it, and which lease ends it.

All keys of a job lie under /elastic_ext/<run id>/. No other module spells a key.

    job             a job_records.SharedSettings. Lease: job.
                    Written by the first node of the job; if lost, by the leader, or after a while by any node.
                    Read by each node as it enters; watched by the leader.
    config          a configuration.Configuration: what the job runs with. Lease: job.
                    Written by the leader as it seals a round. Read by each node that comes later.
    configs/ID      a configuration.Configuration: what node ID runs with. Lease: node.
                    Written by that node as it registers. Read by the leader before the first round.
    round           a round_records.Header, written by header_record.swap only. Lease: job.
                    Written by the leader; by any node that ends the round; by the node of rank 0, with its choice of a
                    checkpoint; by `elastic-ext checkpoints save`; by `elastic-ext drain`, whose drains it holds. If lost, by the
                    leader, or after a while by any node.
                    Watched by every node; read by `elastic-ext`.
    nodes/ID        a round_records.Node. Lease: node.
                    Written by that node; deleted by the leader if somebody has overwritten it: then the node writes it again.
                    The leader watches all of them, each node the one created before it and deletes of its own. Read by its
                    neighbors in the round, as they link to it, and `elastic-ext`.
    doubts/ID       "doubt": does node ID live? Or "dead CREATED": its record of that create revision was deleted.
                    Lease: node, of the node that doubts.
                    Written by a node whose link to node ID has ended. Deleted by node ID, which watches it. See `links`.
    last            the id of the node that was created last, as text. Lease: node.
                    Written and read by each node as it registers, so that it need not search for its predecessor.
    assign/ID       a round_records.Assignment. Lease: job.
                    Written by the leader as it seals a round; if lost, by that node.
                    Watched by that node; a new leader and `elastic-ext explain` read all of them.
    offers/SEAL/RANK  what the node of this rank could resume from on its own disk, as `checkpoints` wrote it. Lease: node.
                    Written by that node. Read by the node of rank 0.
    ledger          a failures.ledger.Ledger. Lease: its own, of leader.LEDGER_TTL_S: it outlives the job.
                    Written by the leader with each verdict, and by `elastic-ext drain --undo` (`given_back`). Read by the leader
                    and `elastic-ext explain`.
    goodput/HOST    a base.goodput.HostRecord: what the agents on that host have spent. Lease: its own, of leader.LEDGER_TTL_S.
                    Written by these agents, all together about ten times a second. Read by rank 0's agent, by one that is new in
                    a running job, and by `elastic-ext status`.
    goodput_sum     a base.goodput.Shared: the sum of these. Lease: that of rank 0's host among them.
                    Written by the agent of rank 0, in the same transaction as its own. Read by all agents as they write.
    charges/NUMBER  empty; while it exists, one restart counts against the budget. Lease: its own, of the setting
                    `budget_window`.
                    Written by the leader with the verdict, and counted by the leader.
    reports/ID      a status.job_status.NodeReport, for people. Lease: node; of a job that has ended: job.
                    Written by that node when its state changes, else every 15 s. Read by any agent that serves the status.
    joins/HOST/ROUND  empty: with this round, that host joined a job that was under way. Lease: its own, of rounds.JOIN_WINDOW_S.
                    Written and counted by that host's nodes.
    refused/HOST    why that host was asked to leave, as text. Lease: its own, of the setting `refuse_node`.
                    Written by the leader with the verdict, or as it lets a drained node go, and by a node of a host that comes
                    and goes; deleted by `elastic-ext drain --undo`. Read by that host's nodes as they enter, and `elastic-ext
                    explain`.

Leases:

    node    one for each agent, of `lease_ttl` seconds. Revoked by the node when it leaves, by another node if its agent is
            killed (`links`).
    job     one for each job, three times as long, renewed by the leader.

The first node of a new job deletes what an ended job left under its run id (`JobRecords`). JSON records carry the version
`round_records.SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import NO_RUN_IDS, printable
from elastic_ext.base.records import MAX_NAME, is_name

ROOT = "/elastic_ext/"


def checked(run_id: str) -> str:
    """Return the run id if no other job can share its keys: those of a job `a/nodes` would lie among the nodes of job `a`.

    Raises UsageError if one could, or if the run id is too long.
    """
    if is_name(run_id):
        return run_id
    seen = f"{len(run_id)} characters" if len(run_id) > MAX_NAME else f"'{printable(run_id)}'"
    raise UsageError(f"--rdzv-id: expected 1 to {MAX_NAME} printable characters without a /, got {seen}; choose another one")


def checked_given(run_id: str) -> str:
    """Return the run id of a job on etcd. Raises UsageError: see `checked`; or the user has given none."""
    if run_id in NO_RUN_IDS:
        raise UsageError(
            "ext_etcd needs --rdzv-id: without one, two jobs would share their state; give each job its own (on Kubernetes "
            "PET_RDZV_ID from the UID of the Job or JobSet, see entrypoints/kubernetes)"
        )
    return checked(run_id)


class JobKeys:
    """The keys of one job. Attributes with plural names are prefixes and end in a slash."""

    def __init__(self, run_id: str) -> None:
        """run_id: must have passed `checked`; otherwise two jobs could share keys."""
        self.prefix = f"{ROOT}{run_id}/"
        self.job = self.prefix + "job"
        self.header = self.prefix + "round"
        self.nodes = self.prefix + "nodes/"
        self.last_node = self.prefix + "last"
        self.assignments = self.prefix + "assign/"
        self.ledger = self.prefix + "ledger"
        self.goodput = self.prefix + "goodput/"
        self.goodput_sum = self.prefix + "goodput_sum"
        self.charges = self.prefix + "charges/"
        self.refusals = self.prefix + "refused/"
        self.reports = self.prefix + "reports/"

    @property
    def outliving(self) -> tuple[str, ...]:
        """What outlives the job, for the next launch."""
        return self.ledger, self.charges, self.refusals, self.goodput, self.goodput_sum

    def node(self, node_id: str) -> str:
        return self.nodes + node_id

    @property
    def configuration(self) -> str:
        return self.prefix + "config"

    @property
    def configurations(self) -> str:
        return self.prefix + "configs/"

    def configuration_of(self, node_id: str) -> str:
        return self.configurations + node_id

    def doubt(self, node_id: str) -> str:
        return f"{self.prefix}doubts/{node_id}"

    def assignment(self, node_id: str) -> str:
        return self.assignments + node_id

    def offers(self, seal: str) -> str:
        """Return the prefix of the offers of one round. seal: of its header."""
        return f"{self.prefix}offers/{seal}/"

    def offer(self, seal: str, rank: int) -> str:
        return f"{self.offers(seal)}{rank}"

    def charge(self, number: int) -> str:
        return f"{self.charges}{number}"

    def charge_numbers(self, keys: Iterable[str]) -> list[int]:
        """Return the numbers of the charges among these keys. The next one is the greatest plus 1: not the round, for the next
        launch of the job begins again with round 1, and charges outlive a launch."""
        names = [key.removeprefix(self.charges) for key in keys]
        return [int(name) for name in names if name.isdigit()]

    def joins(self, host: str) -> str:
        """Return the prefix of the joins of one host."""
        return f"{self.prefix}joins/{host}/"

    def join(self, host: str, round_: int) -> str:
        return f"{self.joins(host)}{round_}"

    def refusal(self, host: str) -> str:
        return self.refusals + host

    def report(self, node_id: str) -> str:
        return self.reports + node_id
