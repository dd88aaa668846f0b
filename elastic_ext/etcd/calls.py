"""One unary call and its auth token: sent to one endpoint after another until one answers in time, or over several at once."""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from elastic_ext.etcd import errors, messages, vendor
from elastic_ext.etcd.endpoints import Connection, Endpoints, Stubs, Tls
from elastic_ext.etcd.errors import ErrorKind, EtcdError, RpcFailure, Unavailable

logger = logging.getLogger(__name__)


class CallObserver(Protocol):
    """Hears how etcd answers. The calling thread waits for it, so it must be quick; it must not raise."""

    def called(self, seconds: float, answered: bool, endpoint: str, /) -> None:
        """Note an attempt of a call, which took `seconds` with all that it needed first (a token, a look whether a member lives).

        answered: the member has served it, if only by a refusal; else there was no answer, or none that helps. endpoint: the
        member's address.
        """

    def reconnected(self) -> None:
        """Note that the stream of all watches was opened again: its connection was lost."""


class NoObserver:
    """Hears nothing."""

    def called(self, seconds: float, answered: bool, endpoint: str, /) -> None:
        pass

    def reconnected(self) -> None:
        pass


T = TypeVar("T")
Metadata = list[tuple[str, str]]

# With this, a member without a leader (minority, election) answers UNAVAILABLE at once; otherwise the call would hang.
HAS_LEADER = ("hasleader", "true")

_RENEWALS_PER_CALL = 2
_MIN_ATTEMPT_S = 0.2
_PAUSE_S = (0.05, 1.0)  # between two passes over all endpoints: the first pause, and the longest
_CONNECT_S = 1.0  # for a connection, from the second pass on
_FRESH_S = 1.0  # a write goes out only to an endpoint that has answered within this time


@dataclass(frozen=True)
class User:
    """A user and password. The repr leaves the password out."""

    name: str
    password: str = field(repr=False)


class CallFailed(Exception):
    """One attempt failed; internal to this package. It does not refer to gRPC's error, which holds the request."""

    def __init__(self, failure: RpcFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class Tokens:
    """The user's token, shared by all threads.

    On each connection, one thread at a time authenticates, and others that need a new token wait for its result. Those on another
    connection do not: this one may stand still (see `race`). The first token counts.

    A token that one call was refused serves the others until they are refused it, too: another member may know it, and who asks
    for a new one may get no answer.
    """

    def __init__(self, user: User | None) -> None:
        self.user = user
        self._token: str | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Tokens({self.user!r})"

    def metadata(self, connection: Connection, timeout_s: float, refused: Metadata | None = None) -> Metadata:
        """Return the metadata of a call; empty without a user. Ask the server for a token if there is none yet.

        Args:
            timeout_s: for a new token.
            refused: what the server has refused this caller, who needs a new token, unless another thread already has one.

        Raises CallFailed: the server did not give one.
        """
        if self.user is None:
            return []
        old = None if refused is None else dict(refused).get("token", "")
        token = self._other_than(old)  # before any lock: a call that waits for a new token holds up no other
        if token is None:
            token = self._renewed(connection, self.user, old, timeout_s)
        return [("token", token)] if token else []

    def _other_than(self, old: str | None) -> str | None:
        token = self._token
        return token if token != old else None

    def _renewed(self, connection: Connection, user: User, old: str | None, timeout_s: float) -> str:
        end = time.monotonic() + timeout_s
        if not connection.authenticating.acquire(timeout=timeout_s):
            raise CallFailed(RpcFailure(ErrorKind.NOT_TAKEN, connection.name, "no token in time"))
        try:
            token = self._other_than(old)
            return token if token is not None else self._keep(self._authenticate(connection, user, left_s(end)), old)
        finally:
            connection.authenticating.release()

    def _keep(self, token: str, old: str | None) -> str:
        """Return the token that counts: this one, unless another connection gave one meanwhile."""
        with self._lock:
            kept = self._other_than(old)
            if kept is None:
                self._token = kept = token
            return kept

    @staticmethod
    def _authenticate(connection: Connection, user: User, timeout_s: float) -> str:
        rpc = messages.etcdrpc()
        request = rpc.AuthenticateRequest(name=user.name, password=user.password)
        try:
            # Not through etcd3: its constructor authenticates only once.
            token: str = translate_errors(
                connection, lambda: rpc.AuthStub(connection.channel).Authenticate(request, timeout_s).token
            )
        except CallFailed as error:
            if error.failure.kind is not ErrorKind.AUTH_OFF:
                raise
            logger.warning("etcd at %s does not use authentication; continuing without a token", connection.name)
            return ""
        logger.debug("etcd at %s gave a token to user %s", connection.name, user.name)
        return token


def translate_errors(connection: Connection, send: Callable[[], T]) -> T:
    """Return what `send` returns. Errors of gRPC and etcd3 become CallFailed."""
    import grpc  # type: ignore[import-untyped]

    try:
        return send()
    except ValueError as error:
        if not closed_channel(error):
            raise
        failure = RpcFailure(ErrorKind.NOT_TAKEN, connection.name, "the connection was closed")
    except (grpc.RpcError, vendor.etcd3().Etcd3Exception) as error:
        # etcd3 replaces some of gRPC's errors with its own, which have no text; gRPC's error is then the context.
        cause: Any = error if isinstance(error, grpc.RpcError) else error.__context__
        failure = errors.classify(cause.code().name, cause.details() or "", connection.name)
    raise CallFailed(failure)


def closed_channel(error: ValueError) -> bool:
    """Return whether this is gRPC's "Cannot invoke RPC on closed channel!"."""
    return "closed" in str(error)


def check_alive(connection: Connection, timeout_s: float, again: bool) -> None:
    """Raise CallFailed unless the server answers, and UnsupportedVersion if it is too old.

    So a write goes out only on a working connection: a dead host costs it a detour, and its outcome stays known.

    again: the endpoint has just failed, so wait a moment for the connection. Otherwise the call would fail at once while gRPC
    believes the endpoint is down; and old versions of gRPC (1.48, 1.62) connect only while a call waits.
    """
    rpc = messages.etcdrpc()
    stub = rpc.MaintenanceStub(connection.channel)
    limit = min(timeout_s, _CONNECT_S) if again else timeout_s
    try:
        status = translate_errors(connection, lambda: stub.Status(rpc.StatusRequest(), limit, wait_for_ready=again))
    except CallFailed as error:
        if error.failure.kind in errors.TRANSIENT:
            raise
        if error.failure.kind is ErrorKind.VERSION:
            raise errors.fatal_error(error.failure, "status", None) from None
        # Any other answer shows that the server is alive.
    else:
        errors.check_version(status.version, connection.name)
    connection.answered_at = time.monotonic()


class Threads:
    """The daemon threads that calls run on now. Each is forgotten once it has ended."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def start(self, run: Callable[[], None], name: str) -> None:
        """Call `run` on a new thread. Raises RuntimeError if there is none to be had."""

        def noted() -> None:
            # Here, not where it is started: a signal may interrupt that. One noted too late for `join` finds the client closed.
            thread = threading.current_thread()
            self._running.add(thread)
            try:
                run()
            finally:
                self._running.discard(thread)

        threading.Thread(target=noted, name=name, daemon=True).start()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads, together. Return whether they have ended."""
        end = time.monotonic() + timeout_s
        for thread in self._running.copy():
            thread.join(left_s(end))
        return not self._running


@dataclass(frozen=True)
class Alone:
    """The one connection that a call is to use, for all of its time."""

    connection: Connection
    # Called, on the thread of the call, with each transient failure of an attempt that is not silence.
    on_error: Callable[[RpcFailure], None]
    over: threading.Event  # once set, the call is not sent again


class Caller:
    """Gives every unary call its deadline, its endpoint and its token. Thread-safe."""

    def __init__(self, endpoints: Endpoints, tokens: Tokens, timeout_s: float, closed: threading.Event) -> None:
        self.endpoints = endpoints
        self.tokens = tokens
        self.timeout_s = timeout_s  # default for each call
        self.closed = closed  # set when the client is closed
        self.threads = Threads()  # those of calls that run on their own (see `race`)
        self.observer: CallObserver = NoObserver()  # hears of each attempt
        self.who_helps = ""  # see `errors.unavailable`

    def call(
        self,
        what: str,
        send: Callable[[Stubs], T],
        *,
        repeatable: bool,
        timeout_s: float | None = None,
        only: Alone | None = None,
        leader: bool = True,
    ) -> T:
        """Send the call until an endpoint answers.

        Args:
            what: the call, for messages, as in `get /a/b`.
            send: called with an etcd3 client that holds the deadline (`timeout`, seconds) and `metadata` of this attempt.
            repeatable: the call may be sent again even if it may have been carried out. A call that the server has certainly not
                taken is sent again in any case.
            timeout_s: for all attempts together. They share it among the endpoints not tried yet.
            only: the one connection to use.
            leader: whether to fail fast on a member without a leader.

        Raises EtcdError: see its subclasses.
        """
        timeout_s = timeout_s or self.timeout_s
        # A write is sent once, so it first looks for a connection that works, and each gets a share of the time. Of other calls,
        # the second connection to one address takes no time from the first, whose answer may be on the way: see `ask`.
        connections = 1 if only is not None else len(self.endpoints.endpoints if repeatable else self.endpoints)
        run = _Run(what, time.monotonic() + timeout_s, timeout_s, repeatable, only, connections)
        while True:
            if self.closed.is_set():
                raise errors.ClientClosed(f"{what}: the etcd client is closed")
            if only is not None and only.over.is_set():
                raise errors.Unavailable(f"{what}: the caller no longer waits for the answer")
            connection = self.endpoints.current() if only is None else only.connection
            try:
                answer = self._attempt(connection, send, run, leader)
                self.observer.called(time.monotonic() - run.began, True, connection.name)
                return answer
            except CallFailed as error:
                failed = error.failure
                if not self.closed.is_set():  # else it was canceled
                    self.observer.called(time.monotonic() - run.began, failed.kind not in errors.TRANSIENT, connection.name)
            self._on_failure(failed, connection, run)

    def _attempt(self, connection: Connection, send: Callable[[Stubs], T], run: _Run, leader: bool) -> T:
        run.sent = False
        run.began = time.monotonic()
        share = run.left() / (run.connections - run.tried % run.connections)
        end = min(run.deadline, run.began + max(_MIN_ATTEMPT_S, share))
        fresh_s = math.inf if run.repeatable else _FRESH_S
        if run.began - connection.answered_at >= fresh_s:
            check_alive(connection, left_s(end), again=run.tried >= run.connections)
        run.metadata = self.tokens.metadata(connection, left_s(end), run.refused[-1] if run.refused else None)
        if not run.repeatable:
            end = run.deadline  # no second attempt needs the time
        run.sent = True
        bound = connection.bound(left_s(end), [*run.metadata, HAS_LEADER] if leader else run.metadata)
        result = translate_errors(connection, lambda: send(bound))
        connection.answered_at = time.monotonic()
        return result

    def _on_failure(self, failure: RpcFailure, connection: Connection, run: _Run) -> None:
        """Return if the call is to be sent again; otherwise raise."""
        logger.debug("%s: %s: %s (%s)", run.what, failure.endpoint, failure.text, failure.kind.name)
        user = self.tokens.user.name if self.tokens.user else None
        if failure.kind is ErrorKind.TOKEN and self.tokens.user is not None and len(run.refused) < _RENEWALS_PER_CALL:
            run.refused.append(run.metadata)
            return
        if failure.kind not in errors.TRANSIENT:
            raise errors.fatal_error(failure, run.what, user)
        if self.closed.is_set():
            raise errors.ClientClosed(f"{run.what}: the etcd client was closed")
        if failure.silent and not run.sent:
            failure = run.failures.get(failure.endpoint, failure)  # no connection in time; an earlier attempt saw the reason
        connection.renew()
        if run.only is None:
            self.endpoints.failed(connection, silent=failure.silent)
        else:
            # No write goes out on it unchecked. (What may be repeated does: on a lossy link, each round trip counts.)
            connection.answered_at = min(connection.answered_at, time.monotonic() - _FRESH_S)
            if not failure.silent:
                run.only.on_error(failure)
        run.failures[failure.endpoint] = failure
        run.tried += 1
        maybe_applied = failure.kind is ErrorKind.UNSURE and run.sent and not run.repeatable
        addresses = 1 if run.only is not None else len(self.endpoints.endpoints)
        all_tls = len(run.failures) == addresses and all(seen.kind is ErrorKind.TLS for seen in run.failures.values())
        if maybe_applied or (all_tls and connection.renewed_at < run.began) or run.left() <= 0:
            found = list(run.failures.values())
            raise errors.unavailable(run.what, found, run.timeout_s, maybe_applied, self._tls_advice, self.who_helps)
        if run.tried % run.connections == 0:
            pause = pause_s(run.tried // run.connections - 1) - (time.monotonic() - run.began)
            self.closed.wait(max(0.0, min(pause, run.left())))

    def _tls_advice(self) -> str:
        return (self.endpoints.tls or Tls()).advice(time.time())


def left_s(end: float) -> float:
    """Return the seconds left, never 0: gRPC would not even try."""
    return max(0.001, end - time.monotonic())


@dataclass
class _Run:
    """The state of one call over its attempts. deadline, began (of the last one): monotonic seconds. connections: in a pass.

    refused: the metadata of each attempt whose token the server refused.
    """

    what: str
    deadline: float
    timeout_s: float
    repeatable: bool
    only: Alone | None
    connections: int
    began: float = 0.0
    sent: bool = False
    tried: int = 0
    metadata: Metadata = field(default_factory=list, repr=False)
    refused: list[Metadata] = field(default_factory=list, repr=False)
    failures: dict[str, RpcFailure] = field(default_factory=dict)

    def left(self) -> float:
        return self.deadline - time.monotonic()


def pause_s(tour: int) -> float:
    """Return how many seconds to wait after the unsuccessful pass `tour` (from 0): doubled each time, capped, with jitter."""
    first, last = _PAUSE_S
    pause: float = min(last, first * 2 ** min(tour, 16))
    return pause * random.uniform(0.5, 1.0)


# One call over several connections at once, for what must arrive while links lose packets, and for what may be asked twice.
#
# A connection that loses several packets in a row stands still: TCP doubles its pause with each (0.4, 0.8, 1.6, 3.2 s on a link
# of 200 ms). Nothing that is sent on it meanwhile gets through, so to cancel a call and send it again there only discards an
# answer that is on its way. Another connection is not held up. So every call below keeps its connection until its deadline, and
# the next connection is tried beside it.

_Answer = tuple[Connection, T | EtcdError | RpcFailure]

BESIDE_S = 1.0  # longer than a healthy etcd takes, also over a slow link that has lost one packet
GRACE_S = 0.2  # after a pause of etcd or this process, all answers arrive together, in any order

# Of the time of a call, after which the spare connection of a lone endpoint takes part if the first is silent. A call has 5 s by
# default, and gRPC takes 12 s to find that the first stands still (3 s just after an answer). Much earlier, what a busy etcd
# answers late would be asked twice.
SPARE_SHARE = 0.5


def ask(caller: Caller, what: str, send: Callable[[Stubs], T], *, timeout_s: float | None, leader: bool = True) -> T:
    """Return the answer to a call that may be carried out twice. Args and errors: see `Caller.call`.

    Several endpoints share its time one after the other. A lone one has all of it, on two of its connections.
    """
    if len(caller.endpoints.endpoints) > 1:
        return caller.call(what, send, repeatable=True, timeout_s=timeout_s, leader=leader)
    timeout_s = max(0.0, timeout_s or caller.timeout_s)
    return race(caller, what, send, timeout_s=timeout_s, beside_s=timeout_s * SPARE_SHARE, leader=leader)


def race(caller: Caller, what: str, send: Callable[[Stubs], T], *, timeout_s: float, beside_s: float, leader: bool = True) -> T:
    """Return the first answer. send, leader: see `Caller.call`; the call is carried out more than once.

    Args:
        timeout_s: for the whole race.
        beside_s: without an answer for this time, the next connection takes part. After an error, it does so at once.

    Raises EtcdError: like `Caller.call`; Unavailable only once all connections have failed.
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
        if not isinstance(answer, Unavailable):
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
