"""`ext_etcd`: torch's rendezvous interface over a `Participant` on etcd v3. The loss of no single host ends the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch.distributed import PrefixStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE

from elastic_ext.base import errors, goodput, name_lookup, records
from elastic_ext.base.printable import printable
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import CallObserver, Compare, EtcdClient, EtcdError, Get, LeaseLost, Put, unchanged, values
from elastic_ext.failures.ledger import decode_verdict
from elastic_ext.rendezvous import (
    board,
    configuration,
    contract,
    drains,
    header_record,
    job_status,
    judging,
    leader,
    round_part,
    round_store,
    running_job,
    topics,
)
from elastic_ext.rendezvous.address import machine
from elastic_ext.rendezvous.configuration import WorkerProgram
from elastic_ext.rendezvous.keys import ROOT, JobKeys
from elastic_ext.rendezvous.place import NodesDiffer, take_place
from elastic_ext.rendezvous.round_records import Assignment, Drain, Header, LinkPort, Node, NodeHost, RecordReader, State

logger = logging.getLogger(__name__)


class OtherJob(errors.ElasticExtError):
    """The run id is another job's by now, or no job's."""


@dataclass(frozen=True)
class AgentPosition:
    """This agent in its job. job: see `Header.job`. rank: of the node, in this round, the last one that began."""

    job: str
    rank: int
    round: int = 1


@dataclass(frozen=True)
class _Own:
    """This host's record as this agent has read or written it last. revision: 0: there is none."""

    record: goodput.HostRecord
    revision: int = 0
    lease_id: int = 0


class EtcdGoodput:
    """The goodput of a job in etcd: a small record per host, which outlives its agents as the ledger does, and one of their sum.

    The agent of rank 0 adds the records up, and the others read its sum: else each of n agents would have n records to read.
    For one thread at a time.

    Invariant: a write compares the host's record with the one that it adds to; if that has changed, the run id must still be that
    of the agent's own job. So what an agent writes late does not count for the next job.
    """

    def __init__(self, client: EtcdClient, keys: JobKeys, host: str, position: Callable[[], AgentPosition]) -> None:
        self._client, self._keys, self._key, self._position = client, keys, keys.goodput + host, position
        self._reader = RecordReader(lambda fault: logger.warning("%s", fault))
        self._own: _Own | None = None  # None: to be read
        self._shared = False

    def share(self, spent: goodput.Spent) -> goodput.Shared:
        """Add what this agent has spent since its last call; return the sum over hosts, as rank 0 has made it last.

        Raises EtcdError, and OtherJob. If the answer of a write was lost, the same seconds may be added twice.
        """
        position, guard = self._position(), list[Compare]()
        while True:
            if self._own is None:
                self._own, guard = self._read_own(position.job)
            record = self._own.record.with_more(spent, time.time(), first=not self._shared)
            # An agent that is new in a running job reads all records, too: the sum may be older than the steps to repeat.
            new = not self._shared and position.round > 1
            shared = self._sum(record) if position.rank == 0 or new else None
            lease_id = leader.outliving_lease(self._client, self._own.lease_id)
            puts: list[values.Op] = [Put(self._key, goodput.encode(record), lease_id=lease_id)]
            if position.rank == 0 and shared is not None:
                puts.append(Put(self._keys.goodput_sum, goodput.encode(shared), lease_id=lease_id))
            else:
                puts.append(Get(self._keys.goodput_sum))
            try:
                written = self._client.txn([unchanged(self._key, self._own.revision), *guard], puts)
            except LeaseLost:  # it expired with the record
                written = None
            if written is not None and written.succeeded:
                break
            self._own = None
        self._own, self._shared = _Own(record, written.revision, lease_id), True
        return shared or self._as_written(written, record)

    def _read_own(self, job: str) -> tuple[_Own, list[Compare]]:
        """Return this host's record, and what must hold as long as the run id is this job's. Raises OtherJob."""
        own, header = (reading.kv for reading in self._client.txn([], [Get(self._key), Get(self._keys.header)]).readings)
        found = self._reader.header(header) if header is not None else None
        if header is None or found is None or found.job != job:
            seen = "no job" if found is None else f"job {printable(found.job)}"
            raise OtherJob(f"goodput of {self._key}: {seen} runs under this --rdzv-id by now, expected {job}")
        guard = [unchanged(self._keys.header, header.mod_revision)]
        return (_Own(self._record(own), own.mod_revision, own.lease_id) if own is not None else _Own(goodput.HostRecord())), guard

    def _sum(self, mine: goodput.HostRecord) -> goodput.Shared:
        found = {kv.key.decode(errors="replace"): self._record(kv) for kv in self._client.get_prefix(self._keys.goodput).kvs}
        found[self._key] = mine
        return goodput.Shared(goodput.total(found), len(found))

    def _as_written(self, written: values.TxnResult, mine: goodput.HostRecord) -> goodput.Shared:
        """Return the sum as rank 0 has written it; before that, what this host knows."""
        if (kv := written.readings[0].kv) is not None:
            try:
                return goodput.decode_sum(kv.value, self._keys.goodput_sum)
            except records.RecordError as error:
                self._reader.note_fault(str(error), kv)
        return goodput.Shared(mine.spent, 1)

    def _record(self, kv: values.KeyValue) -> goodput.HostRecord:
        """Return the record; a new one if it is unreadable, which is logged once."""
        try:
            return goodput.decode(kv.value, kv.key.decode(errors="replace"))
        except records.RecordError as error:
            self._reader.note_fault(f"{error}; it counts as no goodput", kv)
            return goodput.HostRecord()


REPLACE_TIMEOUT_S = 5.0  # for the header to stop changing
MOST_IDS = 3  # in a message


def alone_at_store(keys: Iterable[str], run_id: str, hosted_here: bool, endpoint: str) -> str:
    """Return why too few nodes came to a store that the job has brought, for people; "" if nothing in it says so. Pure.

    keys: all in the store. hosted_here: this node hosts it, or one of several.
    """
    found = sorted({(job, kind, name) for job, kind, name in (_parts_of(key) for key in keys) if kind == "nodes"})
    others = sorted({job for job, _, _ in found if job != run_id})
    if others:
        return (
            f"other nodes wait there under --rdzv-id={', '.join(map(printable, others[:MOST_IDS]))}: give all nodes the same id"
        )
    if hosted_here and len(found) == 1:
        return f"this node hosts the store at {printable(endpoint)}, and no other node came to it: name one host on all of them"
    return ""


def _parts_of(key: str) -> tuple[str, str, str]:
    """Return the run id, the kind of the record, and the rest of a key."""
    job, _, rest = key.removeprefix(ROOT).partition("/")
    kind, _, name = rest.partition("/")
    return job, kind, name


class OwnStore(Protocol):
    """A store that the job has brought: its etcd (`own_etcd.launch`), or the embedded one (`embedded.hosting`)."""

    @property
    def hosted_here(self) -> bool:
        """Return whether it would be lost with this node."""

    def follow(self, client: EtcdClient) -> None:
        """Keep this client's endpoints up to date, where members may be replaced, and what it says of them."""

    def close(self) -> None:
        """Leave; the store ends with the job."""


class EtcdRendezvous(contract.Base):
    """One agent's rendezvous; see `contract.Rendezvous`, which documents its attributes, and the methods without a docstring.

    `Place` holds what this node has in the job for as long as it takes part, `EtcdRound` its part in one round.

    Invariant: each round has its own store server, which listened before the round was sealed.
    """

    part: round_part.EtcdRound

    def __init__(
        self,
        params: rendezvous.RendezvousParameters,
        settings: Settings,
        newest_checkpoint: Callable[[], str | None] = lambda: None,
        own_store: OwnStore | None = None,
    ) -> None:
        """newest_checkpoint: see AgentPolicy. own_store: of a job that brings its own. Raises UsageError: see `take_place`."""
        super().__init__(params, settings)
        policy = judging.AgentPolicy(settings, newest_checkpoint)
        on_event, on_wait = lambda: self.hooks.on_event(), lambda: self.hooks.on_wait()
        self._place = place = take_place(params, settings, policy, on_event, on_wait, own_store is not None)
        context = place.participant.context
        self.node = contract.NodeIdentity(context.config.node_id, context.config.host, place.address)
        self._own_store = own_store
        if own_store is not None:
            own_store.follow(context.client)
        self._goodput = EtcdGoodput(context.client, context.keys, self.node.host, self._position)
        # For a node whose agent is not ours: such agents exchange their numbers of workers through the round's store.
        self._workers, self._role = 1, DEFAULT_ROLE
        self.part = round_part.EtcdRound(place, Header(), None, self._workers)
        self._timed_out = self._left = False

    @property
    def launch(self) -> str:
        return self._place.participant.header.job

    # A round begins.

    def prepare(self, program: WorkerProgram, hooks: contract.AgentHooks) -> None:
        super().prepare(program, hooks)
        self._workers, self._role = program.workers, program.role
        self._place.policy.max_restarts = program.max_restarts
        self._place.policy.rules = board.Rules((*topics.RULED, *hooks.topics))
        mine = configuration.of_node(self.settings, self.node.host, program)
        self._place.participant.registration.configuration = configuration.encode(mine)

    def trains_without_us(self) -> bool:
        context = self._place.participant.context
        try:
            found = context.client.get(context.keys.header).kv
        except EtcdError as error:
            logger.debug("whether the job trains is unknown: %s", error)  # as it enters, this node will have to say more
            return False
        header = context.reader.header(found) if found is not None else None
        return header is not None and header.state is State.RUNNING

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Wait for the next round; see `Place.await_round` for the exceptions."""
        contract.warn_other_agent(self)
        try:
            with contract.closed_by_verdict(self):
                while (info := self._next_round()) is None:
                    pass
                return info
        except NodesDiffer:
            self._timed_out = True
            raise
        except rendezvous.RendezvousTimeoutError as error:
            self._timed_out = True  # others may wait for longer, and more may come
            why = self._why_alone()
            raise rendezvous.RendezvousTimeoutError(f"{error}; {why}" if why else str(error)) from error

    def _why_alone(self) -> str:
        """Return how the job's own store explains that too few nodes came, for people; "" if it does not."""
        alive_until = self._place.alive_until()
        if self._own_store is None or alive_until is None or alive_until < time.monotonic():  # else it does not answer
            return ""
        try:
            keys = [kv.key.decode(errors="replace") for kv in self._place.participant.client.get_prefix(ROOT, keys_only=True).kvs]
        except EtcdError as error:
            logger.debug("what else is in the store is unknown: %s", error)
            return ""
        context = self._place.participant.context
        return alone_at_store(keys, context.config.run_id, self._own_store.hosted_here, self._place.params.endpoint)

    def _next_round(self) -> rendezvous.RendezvousInfo | None:
        """Wait for the next round; return None if it was over before this node entered it."""
        place, participant = self._place, self._place.participant
        cut = self.part.round if place.fence.closed else 0
        place.fence.watch(None)
        server = round_store.serve(self.node.address)
        name_lookup.ask(self.node.address)  # for the next connection: the name server may have gone or come back
        participant.ready(self._node(server.port, cut))
        header, assignment = place.await_round(self.part.round, self.hooks.on_verdict)
        self.part = part = self._part(header, assignment)
        if assignment.rank == 0 and header.port != server.port:
            # This node was frozen or lost its lease, and the round was sealed with its earlier record: that store is used up.
            part.break_off("the store of rank 0 is from an earlier attempt")
            return None
        part.server = server if assignment.rank == 0 else None
        store = part.server or place.stores.connect(header, part.over, part.break_off)
        if store is None:
            return None
        # First: what was said of earlier rounds must not end this one.
        place.links.follow(assignment.neighbors, participant.registration.created)
        place.fence.watch(round_store.RoundStore(header.address, header.port, assignment.rank, header.nodes))
        place.late_joins.entered(header.round, participant.tasks)
        address = rendezvous.RendezvousStoreInfo(header.address, header.port)
        return rendezvous.RendezvousInfo(PrefixStore("elastic_ext", store), assignment.rank, header.nodes, address)

    def _part(self, header: Header, assignment: Assignment) -> round_part.EtcdRound:
        return round_part.EtcdRound(self._place, header, assignment, self._workers, self.part.continues)

    def _node(self, port: int, cut: int) -> Node:
        return Node(
            after=self.part.round,
            workers=self._workers,
            role=self._role,
            address=self.node.address,
            port=port,
            local=self.settings.local_dir is not None or self.settings.copies_to_memory,
            cut=cut,
            # Without a reaper the workers may outlive a killed agent. Then only the lease counts.
            link=LinkPort(self._place.links.port if self.hooks.reaper_runs() else 0, self._place.links.key),
            silent=self._place.stores.silent(self.part.round),
            host=NodeHost(self.settings.topology or "", machine(), self._own_store is not None and self._own_store.hosted_here),
        )

    # While this node is in the job.

    def num_nodes_waiting(self) -> int:
        """Return 1 once the round is over, for any reason: agents ask this to learn of a new round."""
        return 0 if self.part.over() is None else 1

    @property
    def drain(self) -> Drain | None:
        return drains.of_node(self._place.participant.header, self.node.id)

    def replace_host(self, host: str, reason: str, because: str) -> drains.Admission:
        request = drains.DrainRequest(host, reason, self.settings.refuse_node)
        job = running_job.RunningJob(self._place.participant.client, self.get_run_id())
        return job.admit(request, REPLACE_TIMEOUT_S, because)[0]

    def share_goodput(self, spent: goodput.Spent) -> goodput.Shared:
        return self._goodput.share(spent)

    def _position(self) -> AgentPosition:
        part = self.part  # of one moment: this is another thread
        assert part.assignment is not None, "before the first round"
        return AgentPosition(part.header.job, part.assignment.rank, part.round)

    @property
    def link_fds(self) -> tuple[int, ...]:
        return self._place.links.fds

    def observe_etcd(self, observer: CallObserver) -> Callable[[], float | None]:
        self._place.participant.client.observe(observer)
        return self._place.alive_until

    def show(self, report: str, last: bool) -> None:
        """Write it under this node's lease; if the job has ended, so that it outlives the node. Raises EtcdError."""
        participant = self._place.participant
        header = participant.header
        over = last and (header.ended or (bool(header.verdict) and decode_verdict(header.verdict).ends_job))
        lease_id = participant.header_record.lease_id if over else participant.registration.lease[0]
        if lease_id:  # else it is not in the job, or not any more
            key = participant.context.keys.report(self.node.id)
            participant.client.txn([], [Put(key, report, lease_id=lease_id)])

    def status(self) -> job_status.JobStatus:
        """Return the state of the job in etcd. Raises UsageError."""
        return running_job.read(self._place.participant.client, self.get_run_id())

    # The job ends, or this node's part in it.

    def is_closed(self) -> bool:
        return self._place.participant.header.ended

    def set_closed(self) -> None:
        """Close the job for all nodes, unless it is done or is to go on without this node."""
        drain = self.drain
        continues = self._timed_out or self.part.continues or (drain is not None and drain.released)
        if not continues:
            host, verdict, change = self.node.host, self.hooks.closing(), self._place.participant.change_header
            change(self.part.round, lambda header: header_record.closed(header, host, verdict), in_any_round=True)

    def shutdown(self) -> bool:
        if not self._left:
            self.set_closed()
        self.leave()
        return True

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self._place.leave()  # a signal may end it: the second call goes on from here
        if self._own_store is not None:  # last: the farewell went through it
            self._own_store.close()
        self.part.server = None
