"""Calls to a torch store, each with our own deadline: a store whose host is gone or cut off holds up nobody forever.

Torch's own deadlines do not cover every call, and torch writes a warning to stderr when one ends a call. So each call has its
own thread, and we end a wait by setting the key it waits for.

A call that was given up may still be carried out, and it holds its connection until then. So a second try uses new connections,
and every call made here may be repeated without harm.
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
from typing import Any, TypeVar, cast

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from elastic_ext.base.errors import ElasticExtError

CALL_S = 5.0
CHECK_S = 0.1  # between two checks during a wait; torch's rendezvous, which a check asks, has no events
CONNECT_S = 12.0  # covers name resolution; after a dropped packet a resolver retries its name server after 5 s
NOTHING = "-"  # a wait that ends without an answer leaves this in the unset keys
WAIT = timedelta(days=365)  # a store's wait needs some limit
# Exceptions of torch and of a socket if a store does not answer.
STORE_ERRORS = (RuntimeError, ValueError, OSError, RendezvousConnectionError)

T = TypeVar("T")


class StoreLost(ElasticExtError):
    """The store does not answer. Either its host is gone, and a store has no replica; or it is slow and may come back."""


class StoreCalls:
    """The calls of one thread.

    Each raises StoreLost within CALL_S, and from then on at once, until `connect` is called again.

    Invariant: no call uses the connection of the store passed in, and no call waits for another call's wait.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        """prefix: of all keys."""
        self._connect = lambda: PrefixStore(prefix, _clone(store))
        self._threads: list[threading.Thread] = []
        self._lost: str | None = "not connected yet"
        self._calls: PrefixStore
        self._waits: PrefixStore

    @property
    def connected(self) -> bool:
        return self._lost is None

    def connect(self) -> None:
        """Open new connections, at the start and after StoreLost. Takes at most CONNECT_S."""
        self._lost = None
        calls, waits = (self._start(self._connect) for _ in range(2))
        self._calls, self._waits = self._answer(calls, CONNECT_S), self._answer(waits, CONNECT_S)

    def read(self, key: str) -> str:
        """Return the value of the key; "" if it is absent. Non-UTF-8 bytes become surrogates, which `swap` turns back."""
        return self.run(lambda: _text(self._calls.get(key)) if self._calls.check([key]) else "")

    def put(self, key: str, value: str) -> None:
        """Set the key. Once this returns, all others can read the value. Torch's `set` alone gets no answer."""
        self.run(lambda: (self._calls.set(key, value), self._calls.check([key])))

    def add(self, key: str, amount: int) -> int:
        return self.run(lambda: cast(int, self._calls.add(key, amount)))

    def swap(self, key: str, before: str, after: str) -> str:
        """Set the key if its value is `before` ("": absent or empty). Return its value after that."""
        # As bytes, which torch also accepts: a stranger's value may not be text.
        expected: Any = before.encode(errors="surrogateescape")
        return self.run(lambda: _text(self._calls.compare_set(key, expected, after)))

    def wait_all(
        self,
        keys: Sequence[str],
        timeout_s: float,
        longer_s: Callable[[], float] = lambda: 0.0,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all keys exist. Set those that do not appear in time to NOTHING.

        Args:
            longer_s: called after timeout_s; returns how many more seconds to wait.
            check: called every CHECK_S; an exception from it ends the wait.
        """
        waiting = self._start(lambda: self._waits.wait(list(keys), WAIT))
        try:
            if not self._in_time(waiting, timeout_s, check):
                wait([waiting], longer_s())
            waiting.result(0.0)
        except NotInTime:
            self._end_wait(keys)
        except STORE_ERRORS as error:
            raise self.mark_lost(str(error)) from error
        except BaseException:  # a signal, or an exception from longer_s(); StoreLost must not replace it
            with suppress(StoreLost):
                self._end_wait(keys)
            raise

    @staticmethod
    def _in_time(waiting: Future[None], timeout_s: float, check: Callable[[], None] | None) -> bool:
        if check is None:
            return bool(wait([waiting], timeout_s).done)
        deadline = time.monotonic() + timeout_s
        while not wait([waiting], max(0.0, min(CHECK_S, deadline - time.monotonic()))).done:
            if time.monotonic() >= deadline:
                return False
            check()
        return True

    def _end_wait(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.swap(key, "", NOTHING)

    def run(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Make any other call; it must not use a connection of ours. timeout_s: CALL_S by default."""
        return self._answer(self._start(work), CALL_S if timeout_s is None else timeout_s)

    def _answer(self, answer: Future[T], timeout_s: float) -> T:
        try:
            return answer.result(timeout_s)
        except NotInTime:
            raise self.mark_lost(f"no answer in {timeout_s:g} s") from None
        except STORE_ERRORS as error:
            raise self.mark_lost(str(error)) from error

    def end(self, timeout_s: float) -> None:
        """Prepare for the end of the process; see `RoundEvents.shut_down`."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def mark_lost(self, reason: str) -> StoreLost:
        """Make no more calls. Return the exception to raise."""
        self._lost = reason.partition("\n")[0]
        return StoreLost(self._lost)

    def _start(self, work: Callable[[], T]) -> Future[T]:
        if self._lost is not None:
            raise StoreLost(self._lost)
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - top of the thread; the caller of result() gets it
                answer.set_exception(error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=run, name="elastic_ext-store", daemon=True))
        self._threads[-1].start()
        return answer


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape")


def _clone(store: Store) -> Store:
    """Open another connection. Torch would try for minutes to reach a port without a listener, so probe the port first."""
    if isinstance(store, TCPStore):
        socket.create_connection((store.host, store.port), CALL_S).close()
    return store.clone()
