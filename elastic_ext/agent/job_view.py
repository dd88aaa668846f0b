"""The whole job's status on this agent: a thread that tells the job of this node, and reads of the others when somebody asks.

The agent's loop only notes its state here. A rendezvous that does not answer delays neither it nor a scrape.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import zlib
from dataclasses import replace

from elastic_ext.agent.goodput import AccountedMetrics
from elastic_ext.agent.own_node import OwnNode, Place
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.observe import job_status, status_records
from elastic_ext.observe.job_status import ReportAges, Sources
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.rendezvous.job_status import JobStatus

logger = logging.getLogger(__name__)

REPORT_S = 15.0  # between two reports of a node whose state does not change: 34 small writes a second from 512 nodes
SETTLE_S = 1.0  # from a change of state to its report: a recovery changes it several times, and its own writes come first
CHANGES_PER_S = 100.0  # reports of a change that all nodes make at once; 5 s for 512 nodes
CACHED_S = 1.0  # many viewers cost one read of the job in this time
ANSWER_S = 0.2  # that the HTTP server waits for a read; who asks next gets what comes later


def settle_s(node_id: str, nodes: int) -> float:
    """Return the seconds from a change of state to its report: always the same for a node, and spread over this many nodes."""
    share = zlib.crc32(node_id.encode()) / 2**32
    return SETTLE_S + share * nodes / CHANGES_PER_S


class JobView:
    """Works from construction to `close`. `document` is for the server's thread, the other methods for the agent's loop."""

    def __init__(self, handler: Rendezvous, metrics: AccountedMetrics) -> None:
        self._handler = handler
        self._ages = ReportAges()
        self._changed = threading.Condition()
        self._status = JobStatus.nothing(handler.get_run_id(), "the rendezvous has not answered yet")
        self._read_at: float | None = None
        self._answer: tuple[float, bytes] | None = None
        self._wanted = self._closing = self._new_state = False
        self._fault = ""
        self._node = OwnNode(handler, metrics, self._on_state)
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="elastic_ext-status", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # a limit on threads
            logger.warning("status: other nodes are not shown here, nor this one there: %s", error)
            self._thread, self._fault = None, str(error)

    def joined(self, place: Place) -> None:
        """Note this node's place in the round that it has joined."""
        self._node.place = place

    def round_ended(self, why: str) -> None:
        """Note why the round is over."""
        self._node.round_ended(why)

    def workers_ended(self) -> None:
        """Keep how far the workers came."""
        self._node.now(time.monotonic())

    def close(self, left_s: float, last_look: bool = False) -> None:
        """Tell of this node for the last time, for at most left_s. last_look: somebody may still ask for the job."""
        with self._changed:
            self._wanted = self._wanted or (last_look and not self._closing)
            self._closing, self._fault = True, "this agent has left the job"
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(left_s)

    def document(self) -> bytes:
        """Return the job's status as JSON, at most CACHED_S old as far as the rendezvous answers.

        A rendezvous that does not answer holds up one call by ANSWER_S, and the calls after it not at all.
        """
        if self._answer is not None and time.monotonic() - self._answer[0] < CACHED_S:
            return self._answer[1]
        with self._changed:
            in_time = not (self._wanted or self._fault)  # the last time
            self._wanted = True
            self._changed.notify_all()
            if in_time:
                self._changed.wait_for(lambda: not self._wanted, ANSWER_S)
            status, fault, read_at = self._status, self._fault, self._read_at
        now = time.monotonic()
        read_s = round(now - read_at, 3) if read_at is not None else None
        backend, own = self._handler.get_backend(), self._node.now(now)
        built = job_status.build(Sources(status, backend, own, lambda id_: self._ages.age_s(id_, now), read_s, fault))
        self._answer = now, status_records.encode(built).encode()
        return self._answer[1]

    def _on_state(self) -> None:
        with self._changed:
            self._new_state = True
            self._changed.notify_all()

    # On the thread.

    def _run(self) -> None:
        try:
            self._tell_and_look()
        except Exception:  # the top of a thread
            logger.exception("status: the thread has failed, and the status of other nodes is no longer shown")
            with self._changed:
                self._fault = self._fault or "the thread that reads of them has failed: see the agent's log"
                self._wanted = False
                self._changed.notify_all()

    def _tell_and_look(self) -> None:
        due = time.monotonic() + random.uniform(SETTLE_S, REPORT_S)  # agents that start together write apart
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted or self._new_state, max(0.0, due - time.monotonic()))
                closing, wanted, new_state = self._closing, self._wanted, self._new_state
                self._new_state = False
            if new_state:
                due = min(due, time.monotonic() + self._settle_s())
            if closing:
                self._tell(last=True)
                if wanted:
                    self._look()
                return
            if wanted:
                self._look()
            if time.monotonic() >= due:
                told = self._tell(last=False)
                due = time.monotonic() + (REPORT_S if told else self._settle_s())

    def _settle_s(self) -> float:
        return settle_s(self._handler.node_id, self._node.place.nodes)

    def _tell(self, last: bool) -> bool:
        """Return whether it was written."""
        report = self._node.now(time.monotonic()).report
        told = report if report.node_rank == 0 else replace(report, rounds=())
        try:
            self._handler.show(status_records.encode_report(told), last)
        except (ElasticExtError, OSError) as error:
            logger.debug("status: this node's report was not written: %s", error)
            return False
        return True

    def _look(self) -> None:
        """Read of the job, for those who wait in `document`."""
        now = time.monotonic()
        status, fault = self._status, ""
        try:
            status = self._handler.status()
        except (ElasticExtError, OSError) as error:
            fault = str(error)
            if not self._fault:  # one line when the trouble begins
                logger.info("status: nothing new is known of the other nodes: %s", error)
        with self._changed:
            if not fault:
                self._ages.read(status, now)
                self._read_at = now
            if not self._closing:
                self._fault = fault
            self._status, self._wanted = status, False
            self._changed.notify_all()
