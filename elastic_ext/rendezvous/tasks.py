"""The rendezvous thread, which runs the work of a node. An error leads to a retry, or ends this node's part in the job."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.etcd import EtcdClient, EtcdError, LeaseLost, LeaseSession, QuotaExceeded, TlsError, Unavailable
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import RecordReader
from elastic_ext.rendezvous.rounds import Limits

logger = logging.getLogger(__name__)

CLOSE_S = 10.0  # twice the longest duration of an etcd call (EtcdClient.timeout_s)


Task = Callable[[], None]


class Dispatcher:
    """The thread and its queue. An agent has one runner on it, its participant's; a simulation has many.

    It is also the clock of its runners, so that a test can have them all live by a clock of its own.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[TaskRunner, Task] | None] = queue.SimpleQueue()
        self._due: dict[TaskRunner, float] = {}
        # A heap: a time, and a task to post then, or None for `on_timer`, which is void where it contradicts `_due`.
        self._order: list[tuple[float, int, TaskRunner, Task | None]] = []
        self._numbers = itertools.count()  # runners themselves cannot be ordered
        self._thread = threading.Thread(target=self._run, name="elastic_ext-rendezvous", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Return the monotonic time, in seconds."""
        return time.monotonic()

    def post(self, runner: TaskRunner, task: Task) -> None:
        """Run a task after those posted before it. Any thread may call this; it returns at once."""
        self._queue.put((runner, task))

    def wake_at(self, runner: TaskRunner, at: float | None) -> None:
        """Call `on_timer` of the runner at this monotonic time; None: do not call it. Only from the dispatcher's thread."""
        if at is None:
            self._due.pop(runner, None)
        elif self._due.get(runner) != at:
            self._due[runner] = at
            heapq.heappush(self._order, (at, next(self._numbers), runner, None))

    def run_at(self, runner: TaskRunner, at: float, task: Task) -> None:
        """Run a task at this monotonic time. Only from the dispatcher's thread."""
        heapq.heappush(self._order, (at, next(self._numbers), runner, task))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Run the waiting tasks, then end. After timeout_s seconds, abandon the thread, even in a call."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.debug("abandoned the rendezvous thread, which is stuck in a call")

    def _run(self) -> None:
        while True:
            at = self._run_due(self.now())
            try:
                item = self._queue.get(timeout=None if at is None else max(0.0, at - self.now()))
            except queue.Empty:
                continue
            if item is None:
                return
            runner, task = item
            runner.run(task)

    def _run_due(self, now: float) -> float | None:
        """Run what is due; return the time of what comes next."""
        due: list[tuple[TaskRunner, Task]] = []
        while self._order:
            at, _, runner, task = self._order[0]
            holds = task is not None or self._due.get(runner) == at
            if holds and at > now:
                break
            heapq.heappop(self._order)
            if holds and task is None:
                del self._due[runner]
            if holds:
                due.append((runner, task or runner.on_timer))
        for runner, task in due:
            runner.run(task)
        return self._order[0][0] if self._order else None  # maybe of a void entry: then the next look is only too early


RETRY_S = 0.5  # after a call that no endpoint answered (its own deadline has passed by then), or that a full etcd refused


class LostRace(ElasticExtError):
    """Another node wrote first: the task is retried on what etcd then holds."""


class HostRefused(ElasticExtError):
    """This host was asked to leave the job and may not come back yet: the node's part ends."""


class TaskRunner:
    """Runs one node's tasks. Any thread may read `failure` and `refusal`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        node_id: str,
        *,
        in_job: Callable[[], bool],
        on_lease_lost: Task,
        on_timer: Task,
        on_failure: Task,
    ) -> None:
        """
        Args:
            in_job: whether the node has registered.
            on_lease_lost: work to run after a write has failed because its lease is gone.
            on_timer: work to run at the time given to `wake_at`.
            on_failure: called when `failure` is set.
        """
        self.failure: Exception | None = None  # why this node can no longer take part in the job; None while it can
        # The error of an etcd that is full, or refuses a certificate, and so holds up work of this node; None while it does not.
        self.refusal: QuotaExceeded | TlsError | None = None
        self._dispatcher = dispatcher
        self._node_id = node_id
        self._in_job = in_job
        self._on_lease_lost = on_lease_lost
        self.on_timer = on_timer
        self._on_failure = on_failure
        self._retried: set[Task] = set()  # tasks that wait for their retry
        self._held_up: set[Task] = set()  # tasks whose last try was refused so

    def now(self) -> float:
        """Return the monotonic time by which this node lives. Any thread may call this."""
        return self._dispatcher.now()

    def post(self, task: Task) -> None:
        """Run a task on the rendezvous thread. Any thread may call this; it returns at once."""
        self._dispatcher.post(self, task)

    # Everything below is for the rendezvous thread only.

    def wake_at(self, at: float | None) -> None:
        """Run `on_timer` at this monotonic time; None: do not run it."""
        self._dispatcher.wake_at(self, at)

    def run(self, task: Task) -> None:
        """Run a task now. Retry it later if etcd cannot do it now; end this node's part if etcd never can.

        For a node in the job a full etcd counts as the first: somebody will make room, a leader must not be absent until then.
        For a node that enters, it counts as the second.
        """
        if self.failure is not None:
            return
        try:
            task()
            self._note_done(task)
        except LeaseLost:
            self.post(self._on_lease_lost)
            self.retry(task)
        except LostRace as error:
            logger.debug("rendezvous: %s", error)
            self.retry(task)
        except (EtcdError, RecordError, HostRefused, UsageError) as error:
            if not isinstance(error, (Unavailable, QuotaExceeded) if self._in_job() else Unavailable):
                self._fail(error)
                return
            logger.debug("rendezvous: %s", error)
            if isinstance(error, (QuotaExceeded, TlsError)):
                self._note_refusal(error, task)
            self.retry(task)
        except Exception as error:  # top of the rendezvous thread: the agent must learn of it
            logger.exception("the rendezvous of node %s failed", self._node_id)
            self._fail(error)

    def retry(self, task: Task, after_s: float = RETRY_S) -> None:
        """Run a task after these seconds. One that already waits (such as the leader's look, for each event) waits once."""
        if task in self._retried:
            return
        self._retried.add(task)
        self._dispatcher.run_at(self, self.now() + after_s, lambda: self._run_again(task))

    def _run_again(self, task: Task) -> None:
        self._retried.discard(task)
        self.run(task)

    def _note_refusal(self, error: QuotaExceeded | TlsError, task: Task) -> None:
        """Log one line when the trouble begins; `_note_done` logs one when it ends."""
        if self.refusal is None:
            logger.warning(
                "%s; the running round continues, but no new round can form until the store accepts writes again", error
            )
        self.refusal = error
        self._held_up.add(task)

    def _note_done(self, task: Task) -> None:
        self._held_up.discard(task)
        if self.refusal is not None and not self._held_up:
            logger.info("the job's store accepts writes again")
            self.refusal = None

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._on_failure()


@dataclass(frozen=True)
class NodeConfig:
    """The identity of a node and of the job that it enters."""

    run_id: str
    node_id: str  # unique within the job, fit to be part of a key
    limits: Limits
    lease_ttl_s: int  # after this many seconds without a renewal, etcd drops the node
    host: str = ""  # name by which a verdict may refuse this machine; "" if it has none
    loopback: str = ""  # the network of this machine, if the other nodes are to reach this one at the loopback; else ""
    own_store: bool = False  # the job has brought its store, which ends with it: a node that comes after its end is too late


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
        return self.keys.node(self.config.node_id)

    @property
    def own_assignment_key(self) -> str:
        return self.keys.assignment(self.config.node_id)


# gRPC takes up to 5 s to find a server again (min_reconnect_backoff_ms and a pause); the rest is for the node's write.
RETURN_S = 8.0


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
