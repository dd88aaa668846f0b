"""`ext_c10d` on one machine: there is no node to wait for and no shared store. Each round has its own store server."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic import rendezvous

from elastic_ext.base import contracts, goodput, name_lookup, round_store
from elastic_ext.base.printable import printable
from elastic_ext.base.records import RecordError
from elastic_ext.base.settings import Settings
from elastic_ext.embedded.keyspace import Keyspace
from elastic_ext.etcd import messages, values
from elastic_ext.failures import judgement
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report, encode_ledger
from elastic_ext.rendezvous import address, board, contract, drains, job_status, judging, keys, round_records, topics
from elastic_ext.rendezvous.configuration import WorkerProgram
from elastic_ext.rendezvous.round_records import Header, State
from elastic_ext.rendezvous.round_store import serve

if TYPE_CHECKING:
    from elastic_ext.embedded.snapshot import SnapshotFile
    from elastic_ext.etcd import CallObserver

logger = logging.getLogger(__name__)

FORGET_S = 1.0
ME = "this node"  # on the board

V = TypeVar("V")


class JobFile:
    """The ledger, charges and goodput of a job, in the keys and the file of an embedded store, but within this process.

    Invariant: at any instant the file holds the whole old state or the whole new one.
    """

    def __init__(self, path: str | None, run_id: str, host: str) -> None:
        """Raise UsageError if the path names something other than a file."""
        self._path = Path(path) if path else None
        self._keys, self._own = keys.JobKeys(run_id), keys.JobKeys(run_id).goodput + host
        self._keyspace, self._lock = Keyspace(), threading.Lock()
        self._snapshot = _snapshot(self._keyspace, run_id, path) if path else None
        self._shared = self._over = False
        if self._snapshot is not None:
            self._snapshot.restore(time.monotonic())
        # A new one, if the file held that of a job that ended for good: somebody has looked at that job then.
        self.ledger = judging.ledger_of(self._value(self._keys.ledger))
        if self.ledger.verdicts and not self.ledger.verdicts[-1].keeps_ledger:
            self.ledger = Ledger()
            for prefix in self._keys.outliving:
                self._delete(prefix)

    def charges(self) -> int:
        """Return how many restarts were charged within the window that each of them was given."""
        with self._lock:
            return len(self._charges())

    def judged(self, ledger: Ledger, charged_s: int, refunded: bool) -> None:
        """Replace the ledger. charged_s: one more restart counts for so long; 0: none. refunded: no earlier one counts."""
        with self._lock:
            self.ledger = ledger
            self._keyspace.put(self._keys.ledger, encode_ledger(ledger).encode())
            if refunded:
                self._delete(self._keys.charges)
            if charged_s:
                number = max(self._charges(), default=0) + 1
                self._keyspace.put(self._keys.charge(number), b"", charged_s, time.monotonic())
            self._save()

    def share(self, spent: goodput.Spent) -> goodput.Shared:
        """Add what this agent has spent since its last call; return the sum of the job."""
        with self._lock:
            record = self._record(self._value(self._own)).with_more(spent, time.time(), first=not self._shared)
            self._keyspace.put(self._own, goodput.encode(record).encode())
            self._shared = True
            # The verdicts of another agent must not be lost for that: the next launch may have begun before this one has ended.
            if self._snapshot is None or not self._snapshot.is_foreign:
                self._save()
            records = {key: self._record(value) for key, value in self._read(self._keys.goodput).items()}
            return goodput.Shared(goodput.total(records), len(records))

    def forget(self) -> None:
        """Delete the file: the job has ended well. Its failures can still be asked for.

        The file system may hang in a write: then its thread deletes the file, and the end of the job does not wait for it.
        """
        self._over = True
        if self._lock.acquire(timeout=FORGET_S):
            try:
                self._remove()
            finally:
                self._lock.release()

    def _remove(self) -> None:
        self._snapshot = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _record(self, text: str) -> goodput.HostRecord:
        try:
            return goodput.decode(text, str(self._path)) if text else goodput.HostRecord()
        except RecordError as error:
            logger.warning("goodput in %s does not count, because it cannot be read: %s", self._path, printable(str(error)))
            return goodput.HostRecord()

    def _charges(self) -> list[int]:
        return self._keys.charge_numbers(self._read(self._keys.charges))

    def _value(self, key: str) -> str:
        return self._read(key).get(key, "")

    def _read(self, prefix: str) -> dict[str, str]:
        self._keyspace.expire(time.monotonic())
        kvs = self._keyspace.under(prefix)
        return {kv.key.decode(errors="replace"): kv.value.decode(errors="replace") for kv in kvs}

    def _delete(self, prefix: str) -> None:
        self._keyspace.txn(messages.etcdrpc().TxnRequest(success=[values.Delete(prefix, prefix=True).message()]))

    def _save(self) -> None:
        if self._snapshot is not None:
            self._snapshot.look()
            self._snapshot.write_now()
            if self._over:
                self._remove()
        self._keyspace.compact(self._keyspace.revision)  # there are no watches


def _snapshot(keyspace: Keyspace, run_id: str, path: str) -> SnapshotFile:
    """Return the keys in a file. Raises UsageError: the path names something other than a file."""
    from elastic_ext.embedded.snapshot import SnapshotFile, check_ledger_path

    check_ledger_path(path)
    return SnapshotFile(keyspace, run_id, path, lambda line: logger.warning("%s", line))


class OneRound:
    """See `contract.RoundPart`, which documents the methods without a docstring."""

    def __init__(self, round_: int, job: OneMachine) -> None:
        self.round = round_
        # Not kept alive by its part: torch's next job gets the stock agent once this one's rendezvous is gone (`install_agent`).
        self._job = cast("OneMachine", weakref.proxy(job))
        self._posts, self._agreed = round_records.Posts(), round_records.Agreed()
        self._rules = board.Rules((*topics.RULED, *job.hooks.topics))
        self._over: contract.RoundEnd | None = None
        self._warned = False

    def workers(self) -> None:
        """Return None: torch works the ranks out through its store."""

    @property
    def exchange(self) -> contracts.Exchange:
        return contracts.SingleNode()

    def over(self) -> contract.RoundEnd | None:
        return self._over

    def stop_by(self) -> float | None:
        """Return None: the workers always get the usual grace."""
        return None

    def break_off(self, reason: str, failed: bool = False, signal: str = "") -> None:
        """Do nothing: there is no other node."""

    def post(self, topic: board.Topic[V], value: V | None) -> None:
        """There is one node, which leads, too: the same rules hold."""
        self._posts = board.posted(self._posts, self.round, topic, value)
        if topic.rule is None:
            return
        members = board.RoundMembers((ME,), agreed=self._agreed)
        for ruling in self._rules.rulings({ME: self._posts}, self.round, members, time.monotonic()):
            if ruling.end is not None and self._over is None:
                self._over = contract.RoundEnd(ruling.end, ruling.reason)
                self._job.hooks.on_event()
            elif ruling.agreed is not None:
                self._agreed = board.agree(self._agreed, ruling.agreed)
                self._job.hooks.on_event()
            elif ruling.warns and not self._warned:
                self._warned = True
                logger.warning("elastic_ext: %s", ruling.reason)

    def agreed(self, topic: board.Topic[V]) -> V | None:
        return topic.agreed(self._agreed)

    def conclude(self, report: Report) -> JobVerdict:
        return self._job.judge(report)

    def await_all_done(self) -> bool:
        self._job.finished()
        return True


class OneMachine(contract.Base):
    """A `contract.Rendezvous`, which documents the attributes and the methods without a docstring.

    Invariant: two rounds never share a store.
    """

    part: OneRound

    def __init__(self, params: rendezvous.RendezvousParameters, settings: Settings) -> None:
        """Raises UsageError if the run id, the address of this node or the path of the ledger cannot be used."""
        keys.checked(params.run_id)
        if params.local_addr:
            address.checked_address(params.local_addr)
        own = address.own_address(params.local_addr, address.host_of(params.endpoint), params.max_nodes)
        address.check_own(params.local_addr, own)
        super().__init__(params, settings)
        name = address.own_name(settings)
        self.node = contract.NodeIdentity(name, name, own)
        name_lookup.ask(own)
        self.part = OneRound(0, self)
        self.launch = secrets.token_hex(8)
        self._max_restarts = 0
        self._file = JobFile(settings.ledger_file, params.run_id, name)
        self._server: TCPStore | None = None
        self._done = self._closed = False

    # For torch

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        contract.warn_other_agent(self)
        if self._closed:
            raise rendezvous.RendezvousClosedError(f"the job {self.get_run_id()} is over: this agent closed it")
        self.part = OneRound(self.part.round + 1, self)
        self._server = serve(self.node.address)
        name_lookup.ask(self.node.address)
        store = PrefixStore(round_store.PREFIX, self._server)
        return rendezvous.RendezvousInfo(store, 0, 1, rendezvous.RendezvousStoreInfo(self.node.address, self._server.port))

    def num_nodes_waiting(self) -> int:
        """Return 0; 1 once the round is over, for an agent that is not ours: that is all it wants to know."""
        return int(self.part.over() is not None and not self.attached)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._closed = True
        return True

    # For our agent

    def prepare(self, program: WorkerProgram, hooks: contract.AgentHooks) -> None:
        super().prepare(program, hooks)
        self._max_restarts = program.max_restarts

    def trains_without_us(self) -> bool:
        return False

    def judge(self, report: Report) -> JobVerdict:
        window_s = self.settings.budget_window or 0
        circumstances = replace(
            judging.circumstances(self.settings, self._max_restarts),
            nodes=1,
            min_nodes=1,
            charges=self._file.charges() if window_s else None,
        )
        ledger, verdict = judgement.judge({self.node.id: report}, self._file.ledger, circumstances, self.part.round)
        charged = verdict.decision.charged
        self._file.judged(ledger, window_s if charged else 0, refunded=ledger.charged == charged)
        return verdict

    def finished(self) -> None:
        """Note that the job has ended well: nothing is kept for its next start."""
        self._done = True
        self._file.forget()

    def share_goodput(self, spent: goodput.Spent) -> goodput.Shared:
        return self._file.share(spent)

    @property
    def drain(self) -> None:
        """Return None: the only node cannot leave the job."""

    @property
    def link_fds(self) -> tuple[int, ...]:
        return ()

    def observe_etcd(self, observer: CallObserver) -> None:
        """Return None: there is no etcd."""

    def replace_host(self, host: str, reason: str, because: str) -> drains.Admission:
        return drains.Admission(drains.Answer.TOO_FEW, "there is one node only", Header())

    def show(self, report: str, last: bool) -> None:
        """Do nothing: there is nowhere to show it; the agent has its own page."""

    def status(self) -> job_status.JobStatus:
        state = State.FORMING if not self.part.round else State.DONE if self._done else State.RUNNING
        header = Header(self.part.round, state, job=self.launch)
        return job_status.JobStatus(self.get_run_id(), header, {}, {}, self._file.ledger, {}, unknown={})

    def leave(self) -> None:
        """Do nothing: there are no other nodes."""
