"""`ext_etcd`: torch's rendezvous interface over a `Participant` on etcd v3. No single host of the job can end it."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, Worker, WorkerSpec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_ext.base.errors import NodeRefused, UsageError
from elastic_ext.base.exchange import Alone, Exchange
from elastic_ext.base.kinds import Response as Asked
from elastic_ext.base.last_will import LastWill
from elastic_ext.base.printable import shown
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import EtcdError, QuotaExceeded
from elastic_ext.failures import ledger as job
from elastic_ext.failures.ledger import JobStopped
from elastic_ext.rendezvous import judging, plain, run_id
from elastic_ext.rendezvous.address import check_own, host_of, own_address
from elastic_ext.rendezvous.etcd.connect import connect
from elastic_ext.rendezvous.etcd.dispatcher import Dispatcher
from elastic_ext.rendezvous.etcd.exchange import EtcdExchange
from elastic_ext.rendezvous.etcd.fence import Fence
from elastic_ext.rendezvous.etcd.job_records import Refused
from elastic_ext.rendezvous.etcd.leader import Judged, Reports
from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.handler import EndKind, RoundEnd
from elastic_ext.rendezvous.round_server import serve
from elastic_ext.rendezvous.rounds import STALLED, Assignment, Header, Limits, Node, State

logger = logging.getLogger(__name__)

BACKEND = "ext_etcd"
JOIN_TIMEOUT_S = 600.0  # torch's default for its own rendezvous
LEAVE_TIMEOUT_S = 3.0
QUIET_S = 10.0  # for a verdict; more than workers on other nodes take to end: then the log says what is waited for
LOOK_S = 1.0  # how often a main thread that waits for the others looks for a signal that was lost on its way
STORE_TRIES = 3  # of rounds in a row
CONNECT, STORE = timedelta(seconds=10), timedelta(seconds=300)  # to a store; for what is asked of it then, torch's default


class Changed(threading.Condition):
    """Whatever its waiter looks at has changed. A wait ends early now and then, so that `on_wait` is asked; it may raise.

    A signal ends a wait by the exception that its handler raises, unless somebody else catches that: logging, say.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        self._on_wait()
        return super().wait(LOOK_S if timeout is None else min(timeout, LOOK_S))


class EtcdRendezvous(RendezvousHandler):
    """One agent's place in the job. See `EmbeddedRendezvous` for what the supervisor reads from a handler.

    Invariant: each round has a store server of its own, which listened before the round was sealed.
    """

    is_elastic_ext = True
    poll_interval_s: float | None = None  # news are events here

    def __init__(self, params: RendezvousParameters, settings: Settings) -> None:
        """Raises UsageError: no run id, or etcd cannot be used as configured; the message says why."""
        if params.run_id in ("", "none"):
            raise UsageError("ext_etcd needs --rdzv-id: without one two jobs would share their state; give each job its own")
        run_id.checked(params.run_id)
        self.settings = settings
        self.torch_conf = dict(params.config)
        self.attached = False
        self.round = 0
        self.on_event: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None
        self._run_id = params.run_id
        self._join_timeout_s = float(params.config.get("join_timeout", JOIN_TIMEOUT_S))
        self._client = connect(params.endpoint, settings)
        tls = bool(settings.etcd_ca or settings.etcd_cert)
        self._endpoints = [
            each.strip() if "://" in each else f"http{'s' if tls else ''}://{each.strip()}" for each in params.endpoint.split(",")
        ]
        address = own_address(params.local_addr, host_of(params.endpoint.split(",")[0]), params.max_nodes)
        self._address = run_id.checked_address(address)
        check_own(params.local_addr, self._address)
        self._changed = Changed(lambda: self.on_wait())
        self._loop = Dispatcher()
        self.host = run_id.host_name(settings)
        self.node_id = f"{self.host}-{os.getpid()}-{secrets.token_hex(3)}"
        self._limits = limits = Limits(params.min_nodes, params.max_nodes, settings.last_call, settings.settle)
        self._participant = Participant(
            self._client, self._loop, params.run_id, self.node_id, limits, settings.lease_ttl, self._notify, self.host
        )
        self._participant.may_grow = self._may_grow
        self._participant.judge = self._judge
        self._max_restarts = 0
        self._newest_checkpoint: Callable[[], str | None] = lambda: None
        # Of a node whose agent is not ours: such agents tell each other how many workers they run through the round's store.
        self._workers, self._role = 1, DEFAULT_ROLE
        self._left = False
        self._stays_open = False  # this node leaves, the job goes on
        self._boundary: tuple[int, str | None] | None = None  # a round, and the newest checkpoint when its leader first looked
        self._fence = Fence(lambda: self._participant.lease, settings.lease_ttl, self._notify)
        self._part: tuple[Header, Assignment] | None = None
        self._server: TCPStore | None = None
        self._unreachable = 0  # stores of rounds in a row that did not answer

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        return True

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self.on_event()

    def _may_grow(self) -> bool:
        """Nodes wait to join: now, or once a checkpoint is there that was not there when they came?"""
        if self.settings.grow_at == "now" or self.settings.checkpoint_dir is None:
            return True
        path = self._newest_checkpoint()
        if self._boundary is None or self._boundary[0] != self._participant.header.round:
            self._boundary = (self._participant.header.round, path)
        return path != self._boundary[1]

    def prepare(self, spec: WorkerSpec, max_restarts: int, newest_checkpoint: Callable[[], str | None] = lambda: None) -> None:
        """What this node offers to a round, and the job's budget; the agent says it before the first one."""
        self._workers, self._role = spec.local_world_size, spec.role
        self._max_restarts = max_restarts
        self._newest_checkpoint = newest_checkpoint

    def next_rendezvous(self) -> RendezvousInfo:
        plain.note(self)
        with plain.closed_by_verdict(self):
            return self._next_round()

    def _next_round(self) -> RendezvousInfo:
        cut = self.round if self._fence.closed else 0
        self._fence.watch(None, 0, 0)
        server = serve(self._address)
        node = Node(
            after=self.round,
            workers=self._workers,
            role=self._role,
            address=self._address,
            port=server.port,
            topology=self.settings.topology or "",
            local=self.settings.local_dir is not None,
            cut=cut,
        )
        self._participant.ready(node)
        header, part = self._part = self._await_round()
        self.round = header.round
        if part.rank == 0 and header.port != server.port:
            # Sealed with what this node had said before it was ready again (frozen, or its lease lost): that store is used up.
            self.break_round("the store of rank 0 is not fresh")
            return self._next_round()
        self._server = server if part.rank == 0 else None
        store = server if part.rank == 0 else self._connect(header)
        if store is None:
            return self._next_round()
        self._fence.watch((header.address, header.port), part.rank, header.nodes)
        return RendezvousInfo(
            PrefixStore("elastic_ext", store), part.rank, header.nodes, RendezvousStoreInfo(header.address, header.port)
        )

    def _connect(self, header: Header) -> TCPStore | None:
        """To the store of the round; None: the round is over. Its host may have died just now, and torch tries for minutes."""
        answer: Future[TCPStore] = Future()

        def connect() -> None:
            try:
                store = TCPStore(header.address, header.port, is_master=False, wait_for_workers=False, timeout=CONNECT)
                store.set_timeout(STORE)
                answer.set_result(store)
            except (RuntimeError, ValueError) as error:  # what torch raises for a store that does not answer
                answer.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=connect, name="elastic_ext-connect", daemon=True).start()
        with self._changed:
            while not answer.done():
                if self.round_over() is not None:
                    return None
                self._changed.wait()
        if (error := answer.exception()) is not None:
            self._unreachable += 1
            if self._unreachable == STORE_TRIES:  # the others are better off without this node
                raise RendezvousConnectionError(
                    f"the stores of {STORE_TRIES} rounds in a row did not answer, the last one at {header.address}:{header.port}"
                    f": {error}; expected that this host reaches all others of the job"
                ) from error
            logger.warning("the store of round %s does not answer: %s", header.round, error)
            self.break_round("the store of rank 0 does not answer")
            return None
        self._unreachable = 0
        return answer.result()

    def _await_round(self) -> tuple[Header, Assignment]:
        participant = self._participant
        deadline = time.monotonic() + self._join_timeout_s
        with self._changed:
            while True:
                joined = participant.joined
                if joined is not None and joined[0].round > self.round:
                    return joined
                if participant.failure is not None:
                    raise self._as_torch(participant.failure)
                if (verdict := self._verdict_that_ends()) is not None:
                    raise JobStopped(verdict)
                if participant.header.state in (State.CLOSED, State.DONE):
                    raise RendezvousClosedError(f"the job {self._run_id} is over: {shown(participant.header.reason)}")
                left = deadline - time.monotonic()
                if left <= 0:
                    why = f": {participant.full}" if participant.full is not None else ""
                    raise RendezvousTimeoutError(f"no round was formed in {self._join_timeout_s:g} s (join_timeout){why}")
                # The join timeout is a deadline; the minute only bounds how long a main thread sleeps without signals.
                self._changed.wait(left)

    def _as_torch(self, failure: Exception) -> Exception:
        if isinstance(failure, QuotaExceeded) and self.round == 0:  # nothing has been started yet: an operator must act first
            return UsageError(str(failure))
        if isinstance(failure, Refused):
            return NodeRefused(str(failure))
        return RendezvousConnectionError(str(failure)) if isinstance(failure, EtcdError) else failure

    # Failures.

    def conclude(self, report: job.Report) -> job.JobVerdict:
        """The workers of this node have failed and been stopped. Return the one verdict of the whole job, once it is there.

        Where etcd does not answer for as long as a rendezvous may take, this node judges for itself.
        """
        participant = self._participant
        participant.report(self.round, job.encode_report(report), report.waits_for_others)
        now = time.monotonic()
        deadline, quiet_until = now + self._join_timeout_s, now + QUIET_S
        with self._changed:
            while True:
                header = participant.header
                if header.round == self.round and header.verdict:
                    verdict = job.decode_verdict(header.verdict)
                    break
                over = header.round != self.round or header.state in (State.CLOSED, State.DONE)
                now = time.monotonic()
                if over or participant.failure is not None or now >= deadline:
                    logger.warning("no verdict of the job on round %s: this node judges for itself", self.round)
                    _, verdict = job.judge({self.node_id: report}, job.Ledger(), self._rules(nodes=1), self.round)
                    break
                if now >= quiet_until:
                    logger.warning("the workers of round %s have failed, etcd has not told the job's verdict yet", self.round)
                    quiet_until = deadline
                self._changed.wait(min(deadline, quiet_until) - now)
        self._stays_open = not verdict.ends_job
        return verdict

    def _rules(self, **more: Any) -> job.Rules:
        return judging.rules(self.settings, self._max_restarts, **more)

    def _judge(self, reports: Reports, ledger: str) -> Judged:
        """On the leader: one verdict for all."""
        told = {id_: judging.report_of(text, reports.orders[id_]) for id_, text in reports.texts.items()}
        before = judging.ledger_of(ledger)
        rules = self._rules(nodes=reports.nodes, min_nodes=self._limits.min_nodes, lost=reports.lost)
        window_s = self.settings.budget_window or 0
        if window_s:
            rules = replace(rules, charges=reports.charges)
        after, verdict = job.judge(told, before, rules, reports.round)
        leaves = verdict.decision.verdict is Asked.REPLACE_NODE
        return Judged(
            State.CLOSED if verdict.ends_job else State.BROKEN,
            verdict.decision.reason,
            job.encode_verdict(verdict),
            job.encode_ledger(after),
            verdict.decision.charged,
            reports.charges > 0 and after.charged == verdict.decision.charged,
            window_s,
            verdict.host if leaves else "",
            self.settings.refuse_node,
        )

    def finished(self) -> None:
        """The job has ended well on all nodes; what it leaves in etcd has a lease, or goes when the run id is used again."""

    def _verdict_that_ends(self) -> job.JobVerdict | None:
        header = self._participant.header
        if header.state is not State.CLOSED or not header.verdict:
            return None
        # A job can also be closed between a verdict that lets it go on and the next round.
        verdict = job.decode_verdict(header.verdict)
        return verdict if verdict.ends_job else None

    def workers(self) -> list[Worker]:
        """The ranks of this node's workers: they are in the assignment, no store is asked."""
        assert self._part is not None
        header, part = self._part
        return [
            Worker(local, part.base_rank + local, part.base_role_rank + local, header.world, part.role_world)
            for local in range(self._workers)
        ]

    @property
    def exchange(self) -> Exchange:
        """By which the nodes of the current round agree what to resume from."""
        assert self._part is not None, "before the first round"
        header, part = self._part
        if header.nodes == 1:
            return Alone()
        return EtcdExchange(self._participant, header, part, self._changed, self.round_over)

    def round_over(self) -> RoundEnd | None:
        """Why the workers of the current round must stop; None while it runs."""
        header = self._participant.header
        if self._fence.closed:
            return RoundEnd(EndKind.CUT_OFF, "this node is cut off from etcd, and the others may go on without it")
        if (failure := self._participant.failure) is not None:
            # It may be the leader, and is one that the others would wait for: they go on without it when its workers are gone.
            return RoundEnd(EndKind.CUT_OFF, f"this node can take no further part in the job: {failure}")
        if header.state is State.CLOSED and header.round == self.round:
            return RoundEnd(EndKind.CLOSED, header.reason)
        if header.round != self.round or header.state is State.BROKEN or not self._of_this_round(header):
            return RoundEnd(EndKind.STALLED if header.reason == STALLED else EndKind.BROKEN, header.reason)
        return None

    def _of_this_round(self, header: Header) -> bool:
        """Two rounds may have one number: where all records were lost, and a node that never saw them began anew."""
        return self._part is None or self._part[0].seal == header.seal

    def stop_by(self) -> float | None:
        """Monotonic time by which the workers must be gone, dead if need be; None: they get the usual grace."""
        return self._participant.lease[1] if self._fence.closed else None

    def break_round(self, reason: str) -> None:
        """Tell all nodes that this round is over; returns at once."""
        self._participant.end_round(self.round, State.BROKEN, reason)

    @property
    def launch(self) -> str:
        return self._participant.header.job

    def stalled(self, stalled: bool) -> None:
        """Whether all workers of this node stall. When those of all nodes do, the round is over for the reason STALLED."""
        self._participant.stalled(self.round, stalled)

    def request_save(self, reason: str) -> None:
        """Ask all nodes of this round for a save on demand; returns at once."""
        self._participant.request_save(self.round, reason)

    @property
    def save_wanted(self) -> int:
        """Number of the last save on demand that was asked for in this round; 0: none."""
        header = self._participant.header
        return header.save if header.round == self.round else 0

    def saved(self, number: int, step: int) -> None:
        """That save is complete."""
        self._participant.saved(number, step)

    def leaving(self, reason: str) -> None:
        """This node was told to leave, its workers are still there: the others need not wait for them to end."""
        self.break_round(f"{self.host} leaves: {reason}")

    def await_all_done(self) -> bool:
        """This node's workers have finished. Return True when those of all nodes have; False if the round is over otherwise.

        Without a time limit, unlike torch's barrier: a node that left the round before its end would break it.
        """
        self._participant.done()
        with self._changed:
            while self._participant.header.state is not State.DONE:
                if self._participant.failure is not None:  # it could neither tell nor learn any more: no wait would end
                    raise self._as_torch(self._participant.failure)
                if self.round_over() is not None:
                    return False
                self._changed.wait()
        return True

    def last_will(self) -> LastWill | None:
        """What the reaper needs to take this node out when the agent is killed: no secrets go anywhere but through its pipe."""
        lease_id, _ = self._participant.lease
        if lease_id is None:
            return None
        settings = self.settings
        return {
            "endpoints": self._endpoints,
            "lease": lease_id,
            "ca": settings.etcd_ca,
            "cert": settings.etcd_cert,
            "key": settings.etcd_key,
            "user": settings.etcd_user,
            "password": settings.etcd_password,
        }

    def num_nodes_waiting(self) -> int:
        """1 once the round is over, for nodes that wait or for any other reason: agents ask this to learn of a new one."""
        return 0 if self.round_over() is None else 1

    def is_closed(self) -> bool:
        return self._participant.header.state in (State.CLOSED, State.DONE)

    def set_closed(self) -> None:
        if self._participant.header.state is not State.DONE and not self._stays_open:
            self._participant.end_round(self.round, State.CLOSED, "a node has given up")

    def shutdown(self) -> bool:
        """Close the job for all nodes, unless it is done, and leave it."""
        self.set_closed()
        self.leave()
        return True

    def leave(self) -> None:
        """Leave the job to the others; the end of an agent that was told to stop. More than once is as once."""
        if self._left:
            return
        self._left = True
        self._fence.close(LEAVE_TIMEOUT_S)
        self._participant.leave(LEAVE_TIMEOUT_S)
        self._client.close()  # before the loop, which may be in a call that nobody answers
        self._loop.close(LEAVE_TIMEOUT_S)
        self._server = None
