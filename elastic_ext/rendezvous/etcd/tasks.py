"""Runs the work of one node on the rendezvous thread. An error leads to a retry, or ends this node's part in the job."""

from __future__ import annotations

import logging
from collections.abc import Callable

from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.etcd import EtcdError, LeaseLost, QuotaExceeded, Unavailable
from elastic_ext.rendezvous.etcd.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

RETRY_S = 0.5  # after a call that no endpoint answered (its own deadline has passed by then), or that a full etcd refused

Task = Callable[[], None]


class LostRace(ElasticExtError):
    """Another node wrote first: the task is retried on what etcd then holds."""


class HostRefused(ElasticExtError):
    """This host was told to leave the job and may not come back yet: the node's part ends."""


class TaskRunner:
    """One node's `dispatcher.Runner`.

    Attributes (readable from any thread):
        failure: why this node can no longer take part in the job; None while it can.
        etcd_full: the error of an etcd that accepts no writes now and so holds up work of this node; None while it accepts them.
    """

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
        self.failure: Exception | None = None
        self.etcd_full: QuotaExceeded | None = None
        self._dispatcher = dispatcher
        self._node_id = node_id
        self._in_job = in_job
        self._on_lease_lost = on_lease_lost
        self._on_timer = on_timer
        self._on_failure = on_failure
        self._retried: set[Task] = set()  # tasks that wait for their retry
        self._held_up: set[Task] = set()  # tasks whose last try a full etcd refused

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

    def on_timer(self) -> None:
        self._on_timer()

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
            if isinstance(error, Unavailable):
                logger.debug("rendezvous: %s", error)
                self.retry(task)
            elif isinstance(error, QuotaExceeded) and self._in_job():
                self._note_full(error, task)
                self.retry(task)
            else:
                self._fail(error)
        except Exception as error:  # top of the rendezvous thread: the agent must learn of it
            logger.exception("the rendezvous of node %s failed", self._node_id)
            self._fail(error)

    def retry(self, task: Task) -> None:
        """Run a task in RETRY_S. A task that already waits (such as the leader's look, which each event requests) waits once."""
        if task in self._retried:
            return
        self._retried.add(task)
        self._dispatcher.run_at(self, self.now() + RETRY_S, lambda: self._run_again(task))

    def _run_again(self, task: Task) -> None:
        self._retried.discard(task)
        self.run(task)

    def _note_full(self, error: QuotaExceeded, task: Task) -> None:
        """Log one line when the trouble begins; `_note_done` logs one when it ends."""
        if self.etcd_full is None:
            logger.warning("%s; the running round continues, but no new round can form until etcd accepts writes again", error)
        self.etcd_full = error
        self._held_up.add(task)

    def _note_done(self, task: Task) -> None:
        self._held_up.discard(task)
        if self.etcd_full is not None and not self._held_up:
            logger.info("etcd accepts writes again")
            self.etcd_full = None

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._on_failure()
