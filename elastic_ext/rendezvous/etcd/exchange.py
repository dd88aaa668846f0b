"""Lets the nodes of a round on etcd agree on what to resume from, by offers under the nodes' leases and a choice in the header.

The round's store is not used: torch's TCPStore takes writes from anybody who reaches its port, and every rank would load what is
chosen there. Usually the choice costs one transaction, and each node learns of it through its watch on the header.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elastic_ext.base.errors import RoundOver
from elastic_ext.etcd import Batch, EtcdError, KeyValue, Snapshot
from elastic_ext.rendezvous.etcd.condition import InterruptibleCondition
from elastic_ext.rendezvous.etcd.participant import Participant
from elastic_ext.rendezvous.etcd.tasks import RETRY_S
from elastic_ext.rendezvous.handler import RoundEnd
from elastic_ext.rendezvous.round_records import Assignment, Header, State


class EtcdExchange:
    """One node's side of one round; see `base.exchange`. For the agent's thread.

    Invariant: only what was written for this round is read: headers are compared by number and seal, and the keys of offers
    hold the seal.
    """

    def __init__(
        self,
        participant: Participant,
        header: Header,
        assignment: Assignment,
        changed: InterruptibleCondition,
        over: Callable[[], RoundEnd | None],
    ) -> None:
        """changed: notified when the participant or `over` has changed. over: why the round is over; None: it runs."""
        self._participant, self._header, self._assignment = participant, header, assignment
        self._changed, self._over = changed, over

    def offer(self, text: str) -> None:
        if self._header.local:
            self._participant.offer(self._assignment.seal, self._assignment.rank, text)

    def offers(self, timeout_s: float) -> list[str] | None:
        if not self._header.local:
            return None
        deadline = time.monotonic() + timeout_s
        folder = self._participant.offers_of(self._assignment.seal)
        keys = [f"{folder}{rank}".encode() for rank in range(self._header.nodes)]
        found: dict[bytes, str] = {}
        events = threading.Event()
        with self._participant.client.watch_with_snapshot(folder, on_item=lambda: self._wake(events)) as watch:
            while any(key not in found for key in keys):
                events.clear()
                again_s = timeout_s
                try:
                    while (item := watch.get(timeout_s=0)) is not None:
                        for kv in _written(item):
                            found[kv.key] = kv.value.decode(errors="replace")
                except EtcdError:  # the snapshot could not be read; the next `get` tries again
                    again_s = RETRY_S
                if all(key in found for key in keys):
                    break
                if (left_s := deadline - time.monotonic()) <= 0:
                    return None
                self._wait(events, min(again_s, left_s))
        return [found[key] for key in keys]

    def publish(self, text: str) -> None:
        self._participant.chosen(self._header.round, text)
        self._await(lambda header: header.resume == text, float("inf"))

    def choice(self, timeout_s: float) -> str:
        return self._await(lambda header: header.resume != "", time.monotonic() + timeout_s).resume

    def _await(self, there: Callable[[Header], bool], deadline: float) -> Header:
        with self._changed:
            while True:
                header = self._participant.header
                if self._assignment.of(header) and header.state is State.RUNNING and there(header):
                    return header
                self._check_round()
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise RoundOver("rank 0 did not choose a checkpoint in time")
                self._changed.wait(left_s)

    def _wake(self, events: threading.Event) -> None:
        with self._changed:
            events.set()
            self._changed.notify_all()

    def _wait(self, events: threading.Event, timeout_s: float) -> None:
        """Wait until there are events. Raises RoundOver."""
        with self._changed:
            self._check_round()
            if not events.is_set():
                self._changed.wait(timeout_s)

    def _check_round(self) -> None:
        header = self._participant.header
        if not self._assignment.of(header):
            raise RoundOver(f"the job has moved on to round {header.round}")
        if (why := self._over()) is not None:
            raise RoundOver(why.reason)


def _written(item: Snapshot | Batch) -> list[KeyValue]:
    return list(item.kvs) if isinstance(item, Snapshot) else [event.kv for event in item.events if event.kind == "put"]
