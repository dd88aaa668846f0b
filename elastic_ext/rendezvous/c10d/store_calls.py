"""Calls to a store of torch's, each with a deadline of ours: a store whose host is gone, or cut off, holds up nobody for ever.

Torch's own deadlines do not hold for every call, and one that they end writes a warning to stderr. So each call has a thread, and
a wait is ended by giving it what it waits for.

A call that is given up may yet be carried out, and it holds its connection until then. Who asks again does so on new connections,
and all that is asked here may be asked twice.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.base.errors import ElasticExtError

CALL_S = 5.0
LOOK_S = 0.1  # between two looks while a wait lasts: torch's rendezvous, which is asked then, tells of no change
CONNECT_S = 12.0  # torch looks up the name of the address, too, and a name server that drops a question is asked again after 5 s
NOTHING = "-"  # what a wait that ends without an answer leaves in the keys that nobody has set
WAIT = timedelta(days=365)  # a store's wait needs some limit
# What torch and a socket raise where a store does not answer.
FAILS = (RuntimeError, ValueError, OSError, RendezvousConnectionError)

T = TypeVar("T")


class StoreLost(ElasticExtError):
    """The store does not answer. Its host has gone, and a store has no second one; or it was slow, and may yet be there."""


class StoreCalls:
    """The calls of one thread. Raises StoreLost from each of them, after CALL_S at most, then at once until it is connected anew.

    Invariant: none of them uses the connection of the store that it was made from, and a wait keeps no call waiting.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._connect = lambda: PrefixStore(prefix, _clone(store))
        self._threads: list[threading.Thread] = []
        self._lost: str | None = "not connected yet"
        self._calls: PrefixStore
        self._waits: PrefixStore

    @property
    def connected(self) -> bool:
        return self._lost is None

    def connect(self) -> None:
        """At the start, and to ask again after StoreLost: on new connections. Takes CONNECT_S at most."""
        self._lost = None
        calls, waits = (self._start(self._connect) for _ in range(2))
        self._calls, self._waits = self._answer(calls, CONNECT_S), self._answer(waits, CONNECT_S)

    def read(self, key: str) -> str:
        """What is there; "" for nothing. Of what is not UTF-8 `swap` can make the same again."""
        return self.run(lambda: _text(self._calls.get(key)) if self._calls.check([key]) else "")

    def put(self, key: str, value: str) -> None:
        """When this returns all others can read it; torch's set alone is not answered."""
        self.run(lambda: (self._calls.set(key, value), self._calls.check([key])))

    def add(self, key: str, amount: int) -> int:
        return self.run(lambda: self._calls.add(key, amount))

    def swap(self, key: str, before: str, after: str) -> str:
        """Set it if it is `before` ("": not there, or empty); return what it is then."""
        # As bytes, which torch takes as well: what somebody else has put there may be no text.
        expected: Any = before.encode(errors="surrogateescape")
        return self.run(lambda: _text(self._calls.compare_set(key, expected, after)))

    def wait_all(
        self,
        keys: Sequence[str],
        timeout_s: float,
        longer_s: Callable[[], float] = lambda: 0.0,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all of them are there. Those that are not in time are set to NOTHING.

        longer_s: asked when the time is over: for how much longer. look: called every LOOK_S; what it raises ends the wait.
        """
        waiting = self._start(lambda: self._waits.wait(list(keys), WAIT))
        try:
            if not self._in_time(waiting, timeout_s, look):
                wait([waiting], longer_s())
            waiting.result(0.0)
        except NotInTime:
            self._end_wait(keys)
        except FAILS as error:
            raise self.lose(str(error)) from error
        except BaseException:  # a signal, or what longer_s() raises; nothing may take its place
            with suppress(StoreLost):
                self._end_wait(keys)
            raise

    @staticmethod
    def _in_time(waiting: Future[None], timeout_s: float, look: Callable[[], None] | None) -> bool:
        if look is None:
            return bool(wait([waiting], timeout_s).done)
        deadline = time.monotonic() + timeout_s
        while not wait([waiting], max(0.0, min(LOOK_S, deadline - time.monotonic()))).done:
            if time.monotonic() >= deadline:
                return False
            look()
        return True

    def _end_wait(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.swap(key, "", NOTHING)

    def run(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Any other call; it must not use a connection of ours. timeout_s: CALL_S where none is given."""
        return self._answer(self._start(work), CALL_S if timeout_s is None else timeout_s)

    def _answer(self, answer: Future[T], timeout_s: float) -> T:
        try:
            return answer.result(timeout_s)
        except NotInTime:
            raise self.lose(f"no answer in {timeout_s:g} s") from None
        except FAILS as error:
            raise self.lose(str(error)) from error

    def end(self, timeout_s: float) -> None:
        """The process is about to end; see `RoundNews.end`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def lose(self, why: str) -> StoreLost:
        """What to raise; no call is made any more."""
        self._lost = why.partition("\n")[0]
        return StoreLost(self._lost)

    def _start(self, work: Callable[[], T]) -> Future[T]:
        if self._lost is not None:
            raise StoreLost(self._lost)
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - top of the thread; it is raised where the answer is awaited
                answer.set_exception(error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=run, name="elastic_ext-store", daemon=True))
        self._threads[-1].start()
        return answer


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape")


def _clone(store: Store) -> Store:
    """On a connection of its own. Where nobody listens torch would try again for minutes, and its thread could not be ended."""
    if isinstance(store, TCPStore):
        socket.create_connection((store.host, store.port), CALL_S).close()
    return store.clone()
