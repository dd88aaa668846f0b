"""Events among the agents of a round, through the round's store: a save on demand is requested, or the round is over.

Wire protocol: the N-th event of a round, from 1, is the key `base.round_store.event(N)`. It holds a `RoundEvent` as JSON, with
`SCHEMA`. A key is written once, by compare-and-set, so all agents read the same events in the same order. The first event other
than a save request ends the round; no event follows it. Readers skip a value that they cannot read.

Each agent waits in one blocking call on its own connection, and the store wakes all agents at once.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import Enum

from elastic_ext.base import round_store
from elastic_ext.base.records import NameOrEmpty
from elastic_ext.base.round_store import Store
from elastic_ext.failures.cuts import Reach
from elastic_ext.rendezvous.c10d.claim_sender import ClaimSender, StoodStill
from elastic_ext.rendezvous.c10d.claims import Claim, Claims
from elastic_ext.rendezvous.handler import EndKind, RoundEnd
from elastic_ext.rendezvous.reader import RecordReader
from elastic_ext.rendezvous.rounds import STALLED as NO_PROGRESS

logger = logging.getLogger(__name__)

SCHEMA = 1  # of `RoundEvent`
WAIT = timedelta(days=365)  # a store's wait needs some limit
NO_EVENT = "-"  # in place of an empty value
LEAVE_TIMEOUT_S = 3.0  # for the event of a leaving node


class EventKind(str, Enum):
    """The kinds of events. Code decides by this, never by the reason."""

    SAVE = "save"  # a save on demand is requested; all other kinds end the round
    FAILED = "failed"  # workers have failed
    STALLED = "stalled"  # no worker of the job makes progress any more
    LEFT = "left"  # a node was told to leave
    MOVED_ON = "moved_on"  # a node has moved on to the next round
    ALL_DONE = "all_done"  # the workers of all nodes have finished


@dataclass(frozen=True)
class RoundEvent:
    """reason: one line, for people. node: the host where the event occurred, if that matters."""

    kind: EventKind
    reason: str = ""
    node: NameOrEmpty = ""

    def encode(self) -> str:
        """Return the value for the store."""
        return json.dumps({"schema": SCHEMA, **asdict(self)})

    @property
    def end(self) -> RoundEnd:
        """The end of the round by this event."""
        return RoundEnd(EndKind.STALLED if self.kind is EventKind.STALLED else EndKind.BROKEN, self.reason)


SAVE = RoundEvent(EventKind.SAVE)
STALLED = RoundEvent(EventKind.STALLED, NO_PROGRESS)
MOVED_ON = RoundEvent(EventKind.MOVED_ON, "a node has moved on to the next round")
ALL_DONE = RoundEvent(EventKind.ALL_DONE, "all workers have finished")


class LocalEvents:
    """The events of a round in which no other node can be reached. See `RoundEvents`."""

    lost = ended_by_failure = ended_without_failure = all_done = False
    left_by: str | None = None

    def __init__(self, on_event: Callable[[], None]) -> None:
        self.ended_by: RoundEvent | None = None
        self.saves = 0
        self._on_event = on_event

    def stalled(self, stalled: bool) -> None:
        if stalled:
            self.ended_by = STALLED
            self._on_event()

    def quiet(self, reach: Reach | None) -> None:
        """Do nothing: there is no other node to reach."""

    def request_save(self) -> None:
        self.saves += 1
        self._on_event()

    def failed(self, reason: str, host: str) -> None:
        """Do nothing: there is nobody to tell."""

    def leaving(self, host: str) -> None:
        """Do nothing: there is nobody to tell."""

    def await_all_done(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def shut_down(self) -> None:
        """Do nothing: no thread is running."""


class RoundEvents:
    """One agent's view of the events of one round.

    Attributes:
        ended_by: the event that ended the round, unless this agent had moved on before; None while the round runs.
        saves: number of saves on demand requested so far.
    """

    def __init__(self, host: str, port: int, rank: int, nodes: int, on_event: Callable[[], None]) -> None:
        """Connect to the round's store at host and port.

        Args:
            rank: this node's group rank.
            nodes: number of nodes in the round.
            on_event: called from another thread whenever an attribute has changed.

        Raises:
            RuntimeError, ValueError: the store does not answer.
        """
        self.ended_by: RoundEvent | None = None
        self.saves = 0
        self._address = (host, port)
        self._nodes = nodes
        self._on_event = on_event
        self._reader = RecordReader()
        self._number = 1  # of the next event
        self._closed = False
        self._claims = Claims(rank, nodes, self._reader)
        self._sender = ClaimSender(self._claims, self._send_claims, self._run)
        self._finished = threading.Event()  # no more events come
        store = round_store.connect(host, port)
        listener = threading.Thread(target=self._listen, args=(store,), name="elastic_ext-events", daemon=True)
        self._threads = {listener}
        listener.start()

    def _listen(self, store: Store) -> None:
        ended_by: RoundEvent | None = None
        try:
            while ended_by is None:
                store.wait([round_store.event(self._number)], WAIT)
                event = self._read(self._number, _settled(store, self._number))
                self._number += 1
                if event is not None and event.kind is EventKind.SAVE:
                    self.saves += 1
                    self._on_event()
                else:
                    ended_by = event
        except (RuntimeError, ValueError) as error:  # the store's host is gone
            logger.debug("no more events in this round: %s", error)
        if ended_by is not None and not self._closed:
            self.ended_by = ended_by
            self._on_event()
        self._finished.set()
        self._sender.end()

    def _read(self, number: int, value: bytes) -> RoundEvent | None:
        return self._reader.read(RoundEvent, value.decode(errors="replace"), round_store.event(number), SCHEMA)

    @property
    def lost(self) -> bool:
        """Whether the store has stopped answering: the agent of rank 0, which hosts it, is gone."""
        return self._finished.is_set() and self.ended_by is None and not self._closed

    @property
    def ended_by_failure(self) -> bool:
        """Whether the round is over because workers have failed."""
        return self._ended_by(EventKind.FAILED, EventKind.STALLED)

    @property
    def ended_without_failure(self) -> bool:
        """Whether nodes have moved on or left without a failure, so they will not report one."""
        return self._ended_by(EventKind.MOVED_ON, EventKind.LEFT)

    @property
    def all_done(self) -> bool:
        """Whether the workers of all nodes have finished, as far as this node has heard."""
        return self._ended_by(EventKind.ALL_DONE)

    @property
    def left_by(self) -> str | None:
        """The host that ended the round by leaving; None if the round ended otherwise."""
        return self.ended_by.node if self.ended_by is not None and self.ended_by.kind is EventKind.LEFT else None

    def _ended_by(self, *kinds: EventKind) -> bool:
        return self.ended_by is not None and self.ended_by.kind in kinds

    def await_all_done(self, timeout_s: float) -> bool:
        """Tell the other nodes that this node's workers have finished, and wait for theirs.

        Returns:
            True if the workers of all nodes have finished, or if that cannot be known: the store is gone, or the timeout has
            passed. False if the round ended otherwise.
        """
        self._sender.change(lambda _: Claim(finished=True))
        self._start(self._count_done)
        self._finished.wait(timeout_s)
        if self.ended_by is None:
            logger.info("the workers of this node have finished; the state of those on the other nodes is unknown")
        return self.ended_by is None or self.ended_by.kind is EventKind.ALL_DONE

    def _count_done(self, store: Store) -> None:
        if store.add(round_store.DONE, 1) == self._nodes:
            self._publish(store, ALL_DONE)

    def stalled(self, stalled: bool) -> None:
        """Claim that all workers of this node stall, or withdraw the claim. The last node to claim it ends the round.

        A claim may be repeated: the workers of other nodes may have finished since.
        """
        self._sender.change(lambda claim: replace(claim, stalled=stalled))

    def quiet(self, reach: Reach | None) -> None:
        """Claim that all workers of this node are quiet, or withdraw the claim.

        If all nodes are quiet and two of them cannot reach each other, the last one to claim it ends the round.
        """
        self._sender.change(lambda claim: replace(claim, reach=reach))

    def _send_claims(self, prompt_s: float) -> None:
        """Send what this node claims, and end the round if the job hangs. Raises StoodStill if that took more than prompt_s."""
        began = time.monotonic()
        store = round_store.connect(*self._address)
        sent = self._claims.send(store)
        if sent.why is not None:
            if (took_s := time.monotonic() - began) > prompt_s:
                raise StoodStill(
                    f"the store took {took_s:.1f} s to answer, so withdrawals of other nodes may still be on their way"
                )
            self._publish(store, replace(STALLED, reason=sent.why))
        self._claims.told(sent.number)

    def failed(self, reason: str, host: str) -> None:
        """Tell all agents that workers of this host have failed; return at once."""
        self._tell(RoundEvent(EventKind.FAILED, reason, host))

    def leaving(self, host: str) -> None:
        """Tell all agents that this host leaves; wait until they can know it, for at most LEAVE_TIMEOUT_S."""
        self._tell(RoundEvent(EventKind.LEFT, f"{host} leaves", host)).join(LEAVE_TIMEOUT_S)

    def request_save(self) -> None:
        """Ask all agents of the round for a save on demand. Two simultaneous requests count as one."""
        number = self._number
        self._start(lambda store: self._publish(store, SAVE, number))

    def _tell(self, event: RoundEvent) -> threading.Thread:
        """Publish the event on a thread, so that a hanging store holds up nobody."""
        return self._start(lambda store: self._publish(store, event))

    def _publish(self, store: Store, event: RoundEvent, first: int = 1) -> None:
        """Write the event under the first free number, from `first` on, unless the round is over."""
        text = event.encode()
        for number in itertools.count(first):
            there = store.compare_set(round_store.event(number), "", text)
            found = event if there == text.encode() else self._read(number, there)
            if found is not None and (found == event or found.kind is not EventKind.SAVE):
                return

    def _start(self, call: Callable[[Store], None]) -> threading.Thread:
        return self._run(lambda: self._call(call))

    def _run(self, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name="elastic_ext-tell", daemon=True)
        thread.start()
        self._threads -= {each for each in self._threads.copy() if not each.is_alive()}  # in place: any thread may be here
        self._threads.add(thread)
        return thread

    def _call(self, call: Callable[[Store], None]) -> None:
        try:
            call(round_store.connect(*self._address))
        except (RuntimeError, ValueError) as error:
            logger.warning("could not tell the other nodes about an event of this round: %s", error)

    def close(self) -> None:
        """Move on from the round. This ends the waits of all its agents, unless they have ended already."""
        self._closed = True
        self._sender.end()
        if not self._finished.is_set():
            self._tell(MOVED_ON)

    def shut_down(self, timeout_s: float = 5.0) -> None:
        """Close, and wait for the threads: one that returns from torch's C++ code during process exit would abort the process.

        A thread that a cut link holds for longer than `timeout_s` never returns, so it does no harm.
        """
        self.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads.copy():
            thread.join(max(0.0, deadline - time.monotonic()))


def _settled(store: Store, number: int) -> bytes:
    """Return the final value of this event: nobody writes it after this call.

    A compare-and-set overwrites an empty value, which only a stranger leaves, as if the key were absent. Agents that had already
    skipped it would miss the event. So this function fills it first.
    """
    key = round_store.event(number)
    return store.get(key) or store.compare_set(key, "", NO_EVENT)
