"""The states that the nodes of a round tell each other in its store, for `fence`. No call holds the fence up.

Torch's own deadlines do not cover a call on a connection whose other end is cut off or frozen. So each call has a thread of its
own, and one that gives no answer in time is given up, with its connection.

Invariant: what a call that was given up may still write does not stay: until such calls have ended (`settled`), the fence goes on
writing its state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore

logger = logging.getLogger(__name__)

WELL, TROUBLE, BACK = "0", "1", "2"
_STATES = {state.encode(): state for state in (WELL, TROUBLE, BACK)}  # anything else counts as WELL, which excuses nobody
_KEYS = "elastic_ext/trouble/"
_MOST_CALLS = 3  # that give no answer: a frozen host accepts connections, and each further call would hang as well


@dataclass(frozen=True)
class RoundStore:
    """The store through which the nodes of a round exchange their states. rank: this node's. nodes: number in the round."""

    host: str
    port: int
    rank: int
    nodes: int


class NodeStates:
    """The states in the store of one round after another. One thread uses it."""

    def __init__(self, connect_s: float) -> None:
        """connect_s: limit for a new connection."""
        self._connect_s = connect_s
        self._round: RoundStore | None = None  # of the last call
        self._store: TCPStore | None = None  # of that round: after the first call, until one fails
        self._calls: list[threading.Thread] = []  # of that round

    @property
    def settled(self) -> bool:
        """Whether no call of the last round is under way."""
        self._calls = [call for call in self._calls if call.is_alive()]
        return not self._calls

    def swap(self, round_: RoundStore, state: str, timeout_s: float) -> Sequence[str] | None:
        """Write this node's state; return the others' states. None: the store has not answered in time."""
        if round_ != self._round:
            self._round, self._store, self._calls = round_, None, []  # what hangs in another store does no harm here
        if not self.settled and len(self._calls) >= _MOST_CALLS:
            return None
        known, self._store = self._store, None
        answer: Future[tuple[TCPStore, list[str]]] = Future()

        def call() -> None:
            try:
                store = known if known is not None else self._connect(round_)
                answer.set_result((store, _swap(store, round_, state)))
            except Exception as error:  # noqa: BLE001 - top of the thread; the caller of result() gets it
                answer.set_exception(error)

        thread = threading.Thread(target=call, name="elastic_ext-node-states", daemon=True)
        try:
            thread.start()  # RuntimeError, too: no more threads
            self._calls.append(thread)
            self._store, others = answer.result(timeout_s)
        except (RuntimeError, ValueError, NotInTime) as error:  # torch raises the first two for a store that does not answer
            logger.debug("the store of the round at %s:%s does not answer: %s", round_.host, round_.port, error or "in time")
            return None
        self._calls.pop().join()
        return others

    def _connect(self, round_: RoundStore) -> TCPStore:
        timeout = timedelta(seconds=self._connect_s)
        return TCPStore(round_.host, round_.port, is_master=False, wait_for_workers=False, timeout=timeout)


def _swap(store: TCPStore, round_: RoundStore, state: str) -> list[str]:
    store.set(f"{_KEYS}{round_.rank}", state)
    keys = [f"{_KEYS}{other}" for other in range(round_.nodes) if other != round_.rank]
    return [_STATES.get(store.get(key), WELL) if store.check([key]) else WELL for key in keys]
