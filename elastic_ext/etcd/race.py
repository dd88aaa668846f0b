"""One call over several connections at once, for what must arrive while links lose packets, and for what may be asked twice.

A connection that loses several packets in a row stands still: TCP doubles its pause with each (0.4, 0.8, 1.6, 3.2 s on a link of
200 ms). Nothing that is sent on it meanwhile gets through, so to cancel a call and send it again there only discards an answer
that is on its way. Another connection is not held up. So every call here keeps its connection until its deadline, and the next
connection is tried beside it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from elastic_ext.etcd.calls import Alone, Caller, Threads, left_s
from elastic_ext.etcd.endpoints import Connection
from elastic_ext.etcd.errors import EtcdError, RpcFailure, TlsError, Unavailable

T = TypeVar("T")
_Answer = tuple[Connection, T | EtcdError | RpcFailure]

BESIDE_S = 1.0  # longer than a healthy etcd takes, also over a slow link that has lost one packet
GRACE_S = 0.2  # after a pause of etcd or this process, all answers arrive together, in any order

# Of the time of a call, after which the spare connection of a lone endpoint takes part if the first is silent. A call has 5 s by
# default, and gRPC takes 12 s to find that the first stands still (3 s just after an answer). Much earlier, what a busy etcd
# answers late would be asked twice.
SPARE_SHARE = 0.5


def ask(caller: Caller, what: str, send: Callable[[Any], T], *, timeout_s: float | None, leader: bool = True) -> T:
    """Return the answer to a call that may be carried out twice. Args and errors: see `Caller.call`.

    Several endpoints share its time one after the other. A lone one has all of it, on two of its connections.
    """
    if len(caller.endpoints.endpoints) > 1:
        return caller.call(what, send, repeatable=True, timeout_s=timeout_s, leader=leader)
    timeout_s = max(0.0, timeout_s or caller.timeout_s)
    return race(caller, what, send, timeout_s=timeout_s, beside_s=timeout_s * SPARE_SHARE, leader=leader)


def race(caller: Caller, what: str, send: Callable[[Any], T], *, timeout_s: float, beside_s: float, leader: bool = True) -> T:
    """Return the first answer. send, leader: see `Caller.call`; the call is carried out more than once.

    Args:
        timeout_s: for the whole race.
        beside_s: without an answer for this time, the next connection takes part. After an error, it does so at once.

    Raises:
        EtcdError: like `Caller.call`; Unavailable only once all connections have failed.
    """
    deadline = time.monotonic() + timeout_s
    answers: queue.SimpleQueue[_Answer[T]] = queue.SimpleQueue()
    over = threading.Event()

    def run(connection: Connection) -> None:
        answer: T | EtcdError = EtcdError(f"{what}: the thread of this call failed")
        reported = threading.Event()

        def on_error(failure: RpcFailure) -> None:
            if not reported.is_set():
                reported.set()
                answers.put((connection, failure))

        try:
            only = Alone(connection, on_error, over)
            answer = caller.call(what, send, repeatable=True, timeout_s=left_s(deadline), only=only, leader=leader)
        except EtcdError as error:
            answer = error
        finally:
            answers.put((connection, answer))

    try:
        return _first_answer(caller, run, answers, beside_s)
    finally:
        over.set()


def _first_answer(
    caller: Caller, run: Callable[[Connection], None], answers: queue.SimpleQueue[_Answer[T]], beside_s: float
) -> T:
    """Run it on one connection after another until one has an answer. run: puts its first error, if any, then its answer."""
    waiting = caller.endpoints.from_current()
    first, running = waiting[0], 0
    refused: set[Connection] = set()  # have answered with an error, and are still tried
    failed: dict[Connection, EtcdError] = {}
    while True:
        if waiting:
            running += _start(caller.threads, run, waiting.pop(0), in_place=running == 0)
        try:
            connection, answer = answers.get(timeout=beside_s if waiting else None)
        except queue.Empty:
            continue
        if isinstance(answer, RpcFailure):
            refused.add(connection)
            continue
        if not isinstance(answer, EtcdError):
            if connection is not first:
                well = False if first in refused else None if first in failed else _answers_soon(answers, first)
                if not well:
                    caller.endpoints.prefer(connection, instead_of=first, silent=well is None)
            return answer
        running -= 1
        failed[connection] = answer
        if not isinstance(answer, (Unavailable, TlsError)):
            raise answer
        if running == 0 and not waiting:
            answer = failed[first]  # which had all of the time
            # The next race begins with another connection.
            caller.endpoints.failed(first, silent=isinstance(answer, Unavailable) and answer.silent)
            raise answer


def _start(threads: Threads, run: Callable[[Connection], None], connection: Connection, in_place: bool) -> int:
    """Run it on a thread. Return how many run; if no thread can be started, that is 0, unless it ran in place."""
    try:
        threads.start(lambda: run(connection), "etcd-race")
    except RuntimeError:  # a limit on threads or processes
        if not in_place:
            return 0
        run(connection)
    return 1


def _answers_soon(answers: queue.SimpleQueue[_Answer[T]], first: Connection) -> bool | None:
    """Return whether the first connection answers well within GRACE_S, rather than with an error; None if it is silent."""
    end = time.monotonic() + GRACE_S
    while True:
        try:
            connection, answer = answers.get(timeout=left_s(end))
        except queue.Empty:
            return None
        if connection is first:
            return None if isinstance(answer, Unavailable) and answer.silent else not isinstance(answer, (EtcdError, RpcFailure))
