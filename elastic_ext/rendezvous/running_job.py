"""A running job, as its store has it: connecting to that, its state, requests that a node leave. Without torch."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from elastic_ext.base import errors, printable, records, waits
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import Delete, EtcdClient, EtcdError, Get, KeyValue, Tls, TlsError, Unavailable
from elastic_ext.failures.ledger import Ledger
from elastic_ext.rendezvous import drains, header_record, tasks
from elastic_ext.rendezvous.drains import Admission, Answer, DrainRequest
from elastic_ext.rendezvous.job_records import SharedSettings, nodes_in
from elastic_ext.rendezvous.job_status import JobStatus, NodeText
from elastic_ext.rendezvous.keys import ROOT, JobKeys, checked
from elastic_ext.rendezvous.round_records import SCHEMA, Header, Node, RecordReader

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # after an answer that no process listens there


class NoAnswer(EtcdError):
    """No etcd has answered for as long as this node waits for one."""


class Unreachable(errors.UsageError):
    """A command has reached no etcd: nothing was asked and nothing changed."""


def connect(endpoint: str, settings: Settings, wait_s: float = 0.0, own: bool = False) -> EtcdClient:
    """Return a working client.

    Args:
        wait_s: how long to wait for an etcd that does not answer: it may be about to start, as may the name server.
        own: it is the job's own, so that one with other certificates is that of an earlier job, and about to end.

    Raises:
        UsageError: no endpoint, or etcd is unusable with these settings.
        Unreachable: without a wait, it does not answer.
        NoAnswer: it has not answered within wait_s.
    """
    if not endpoint.strip():
        raise errors.UsageError("ext_etcd needs --rdzv-endpoint=HOST:PORT[,HOST:PORT...]: the etcd servers")
    what = f"{'the store of the job' if own else 'etcd'} at {printable.redacted(endpoint)}"
    tls = None
    if settings.etcd_ca or settings.etcd_cert:
        tls = Tls(ca=settings.etcd_ca, cert=settings.etcd_cert, key=settings.etcd_key)
    try:
        client = EtcdClient(endpoint, tls=tls, user=settings.etcd_user, password=settings.etcd_password)
        _await_answer(client, what, wait_s, own)
    except NoAnswer:
        raise
    except EtcdError as error:
        kind = Unreachable if isinstance(error, Unavailable) and not isinstance(error, TlsError) else errors.UsageError
        raise kind(f"{what}: {error}") from error
    return client


def _await_answer(client: EtcdClient, what: str, wait_s: float, own: bool) -> None:
    """Read once, so that a user without permission learns of it now."""
    began = time.monotonic()
    deadline, warned, wait = began + wait_s, False, waits.Waiting(what, began)
    while True:
        try:
            client.get(ROOT)
            return
        except Unavailable as error:
            if wait_s <= 0 or (isinstance(error, TlsError) and not own):
                raise
            if (now := time.monotonic()) >= deadline:
                client.close()
                raise NoAnswer(f"{what} has not answered for {wait_s:g} s: {error}") from error
            if not warned:
                logger.warning("%s does not answer; trying for %g s: %s", what, wait_s, error)
                warned = True
            wait.say(now, deadline, "this node leaves (read_timeout)")
            threading.Event().wait(RETRY_S)


class NoSuchJob(errors.UsageError):
    """There are no records of such a job."""


def read(client: EtcdClient, run_id: str) -> JobStatus:
    """Return the state of a job. Raises NoSuchJob; UsageError: etcd does not answer."""
    keys = JobKeys(checked(run_id))
    try:
        kvs = client.get_prefix(keys.prefix).kvs
    except EtcdError as error:
        raise errors.UsageError(f"the job {run_id}: {error}") from error
    if not kvs:
        raise NoSuchJob(f"no job with --rdzv-id={run_id} in this store: it never ran there, or it ended successfully")
    faults: list[str] = []
    reader = RecordReader(faults.append)
    by_key = {kv.key: kv for kv in kvs}
    found, judged = by_key.get(keys.header.encode()), by_key.get(keys.ledger.encode())
    header = (reader.header(found) if found is not None else None) or Header()
    ledger = (reader.ledger(judged) if judged is not None else None) or Ledger()
    assignments, nodes = reader.assignments(keys.assignments, kvs), nodes_in(kvs, keys, reader)
    refused = {host: kv.text for host, kv in reader.named(keys.refusals, kvs).items()}
    reports = {id_: NodeText(kv.text, kv.mod_revision) for id_, kv in reader.named(keys.reports, kvs).items()}
    spent = {host: kv.text for host, kv in reader.named(keys.goodput, kvs).items()}
    for drain in (each for each in header.drains if not each.released):  # the refusal stands for a released one, until --undo
        refused.setdefault(drain.host, f"to leave at the next checkpoint: {drain.reason}")
    return JobStatus(run_id, header, nodes, assignments, ledger, refused, tuple(faults), reports, spent)


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
            taken = f" but for {printable.counted(len(leaving), 'node')} that is to leave before" if leaving else ""
            return f"no spare waits{taken}; nothing was changed"
        reasons = {**{each.host: each.reason for each in self.header.drains}, **self.refused}
        before = [other for other, why in reasons.items() if other != host and because in why]
        return f"{min(before)} has left for the same before; nothing was changed" if before else ""


class RunningJob:
    """The records of a job, read and written. All methods raise EtcdError and RecordError."""

    def __init__(self, client: EtcdClient, run_id: str) -> None:
        self.client, self.keys = client, JobKeys(checked(run_id))
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
        return header_record.swap(self.client, self.keys, header, over=over, puts=others).succeeded

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
                raise tasks.LostRace("the job's header kept changing; nothing was changed, try again")
