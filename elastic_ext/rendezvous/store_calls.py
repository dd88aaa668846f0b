"""Calls to a store of torch's, each with a deadline of ours: a store whose host is gone, or cut off, holds up nobody for ever.

Torch's own deadlines do not hold for every call, and one that they end writes a warning to stderr. So each call has a thread, and
a wait is ended by giving it what it waits for.

A call that is given up may yet be carried out, and it holds its connection until then. Who asks again does so on new connections,
and all that is asked here may be asked twice.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.errors import ElasticExtError

CALL_S = 5.0
NOTHING = "-"  # what a wait that ends without an answer leaves in the keys that nobody has set
WAIT = timedelta(days=365)  # a store's wait needs some limit
FAILS = (
    RuntimeError,
    ValueError,
    OSError,
    RendezvousConnectionError,
)  # what torch and a socket raise where a store does not answer

T = TypeVar("T")


class StoreLost(ElasticExtError):
    """The store does not answer. Its host has gone, and a store has no second one; or it was slow, and may yet be there."""


class StoreCalls:
    """The calls of one thread. Raises StoreLost from each of them, after CALL_S at most, and from then on at once.

    Invariant: none of them uses the connection of the store that it was made from, and a wait keeps no call waiting.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._connect = lambda: PrefixStore(prefix, _clone(store))
        self._threads: list[threading.Thread] = []
        self.reconnect()

    def reconnect(self) -> None:
        """Ask again after StoreLost. The connections are made by the first calls that need them, within their deadlines."""
        self._lost: str | None = None
        self._calls, self._waits = functools.cache(self._connect), functools.cache(self._connect)

    def read(self, key: str) -> str:
        """What is there; "" for nothing."""
        return self.run(lambda: self._calls().get(key).decode() if self._calls().check([key]) else "")

    def put(self, key: str, value: str) -> None:
        """When this returns all others can read it; torch's set alone is not answered."""
        self.run(lambda: (self._calls().set(key, value), self._calls().check([key])))

    def add(self, key: str, amount: int) -> int:
        return self.run(lambda: self._calls().add(key, amount))

    def swap(self, key: str, before: str, after: str) -> str:
        """Set it if it is `before` ("": not there, or empty); return what it is then."""
        return self.run(lambda: self._calls().compare_set(key, before, after).decode())

    def wait_all(self, keys: Sequence[str], timeout_s: float) -> None:
        """Wait until all of them are there. Those that are not in time are set to NOTHING."""
        waits = self.run(self._waits)  # connected within the deadline of a call
        waiting = self._start(lambda: waits.wait(list(keys), WAIT))
        try:
            waiting.result(timeout_s)
        except NotInTime:
            self._end_wait(keys)
        except FAILS as error:
            raise self.lose(str(error)) from error
        except BaseException:  # a signal; nothing may take its place
            with suppress(StoreLost):
                self._end_wait(keys)
            raise

    def _end_wait(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.swap(key, "", NOTHING)

    def run(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Any other call; it must not use a connection of ours. timeout_s: CALL_S where none is given."""
        timeout_s = CALL_S if timeout_s is None else timeout_s
        answer = self._start(work)
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


def _clone(store: Store) -> Store:
    """On a connection of its own. Where nobody listens torch would try again for minutes, and its thread could not be ended."""
    if isinstance(store, TCPStore):
        socket.create_connection((store.host, store.port), CALL_S).close()
    return store.clone()
