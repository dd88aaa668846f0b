"""Asks a running job that a node leave: reads its records, lets `drains` decide, and writes the answer. Knows nothing of torch.

For `elastic-ext drain`, and for an agent whose `slow_node` is `replace`.
"""

import time
from dataclasses import dataclass

from elastic_ext.base import records
from elastic_ext.base.printable import counted
from elastic_ext.etcd import Delete, EtcdClient, Get
from elastic_ext.etcd.values import KeyValue
from elastic_ext.rendezvous import drains
from elastic_ext.rendezvous import run_id as run_ids
from elastic_ext.rendezvous.drains import Admission, Answer, DrainRequest
from elastic_ext.rendezvous.header_record import swap
from elastic_ext.rendezvous.job_records import SharedSettings, nodes_in
from elastic_ext.rendezvous.job_status import NoSuchJob
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import SCHEMA, Header, Node, RecordReader
from elastic_ext.rendezvous.tasks import LostRace


@dataclass(frozen=True)
class JobRecordsNow:
    """The records of a job at one revision. found: the header's own. members: ids of the nodes in the header's round."""

    header: Header
    found: KeyValue
    nodes: dict[str, Node]
    refused: dict[str, str]
    min_nodes: int
    members: frozenset[str]

    def spares(self, without: str) -> frozenset[str]:
        """Return the ids of the nodes that wait and may take part, on other hosts than this one."""
        hosts = {each.host for each in self.header.drains} | self.refused.keys() | {without}
        return frozenset(id_ for id_ in self.nodes if id_ not in self.members and drains.host_of(id_) not in hosts)

    def keeps(self, host: str, because: str) -> str:
        """Return why a host is not to be replaced by a spare now; "": it may be. because: how the reason for it begins.

        What is wrong on one host after another for the same reason is wrong with the job, and not with its hosts.
        """
        leaving = {each.node for each in self.header.drains if not each.released and each.host != host} & self.members
        if len(self.spares(host)) <= len(leaving):
            taken = f" but for {counted(len(leaving), 'node')} that is to leave before" if leaving else ""
            return f"no spare waits{taken}; nothing was changed"
        reasons = {**{each.host: each.reason for each in self.header.drains}, **self.refused}
        before = [other for other, why in reasons.items() if other != host and because in why]
        return f"{min(before)} has left for the same before; nothing was changed" if before else ""


class RunningJob:
    """The records of a job, read and written. All methods raise EtcdError and RecordError."""

    def __init__(self, client: EtcdClient, run_id: str) -> None:
        self.client, self.keys = client, JobKeys(run_ids.checked(run_id))
        self._run_id, self.reader = run_id, RecordReader(lambda fault: None)

    def read(self) -> JobRecordsNow:
        """Read what a decision needs. Raises NoSuchJob: none runs."""
        keys = self.keys
        gets = [Get(keys.header), Get(keys.job), Get(keys.nodes, prefix=True), Get(keys.refusals, prefix=True)]
        gets.append(Get(keys.assignments, prefix=True))
        header, job, nodes, refusals, assigned = self.client.txn([], gets).readings
        found = self.reader.header(header.kv) if header.kv is not None else None
        if header.kv is None or found is None or job.kv is None:
            raise NoSuchJob(f"the job {self._run_id} is not running: its store holds no round of it")
        if found.ended:
            raise NoSuchJob(f"the job {self._run_id} has ended: {found.reason}")
        shared = records.read(SharedSettings, job.kv.value, keys.job, SCHEMA)
        refused = {host: kv.text for host, kv in self.reader.named(keys.refusals, refusals.kvs).items()}
        assignments = self.reader.assignments(keys.assignments, assigned.kvs)
        members = frozenset(id_ for id_, assignment in assignments.items() if assignment.of(found))
        return JobRecordsNow(found, header.kv, nodes_in(nodes.kvs, keys, self.reader), refused, shared.min_nodes, members)

    def write(self, seen: JobRecordsNow, header: Header, *others: Delete) -> bool:
        """Write the header over the one that was read. Return False if another one has come meanwhile."""
        over = (seen.found.mod_revision, seen.found.lease_id)
        return swap(self.client, self.keys, header, over=over, puts=others).succeeded

    def admit(self, request: DrainRequest, timeout_s: float, because: str | None = None) -> tuple[Admission, JobRecordsNow]:
        """Write the request if it is admitted; return the answer, and the records that it was made for. Check and write are one
        decision, since every other drain changes the header. Raises LostRace.

        because: of a host that a spare is to replace, how the reason begins; if it is kept (see `keeps`), the answer is TOO_FEW.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.read()
            if because is not None and (why := seen.keeps(drains.host_of(request.name), because)):
                return Admission(Answer.TOO_FEW, why, seen.header), seen
            admission = drains.admit(request, seen.header, seen.nodes, seen.refused, seen.min_nodes)
            if admission.header is seen.header or self.write(seen, admission.header):
                return admission, seen
            if time.monotonic() >= deadline:
                raise LostRace("the job's header kept changing; nothing was changed, try again")
