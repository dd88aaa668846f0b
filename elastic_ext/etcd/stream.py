"""The stream that all watches of a client share: opened again whatever breaks it, each watch from where it stood."""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from elastic_ext.etcd import calls, errors
from elastic_ext.etcd.errors import AuthError, ClientClosed, Compacted, EtcdError, Kind, Meaning, Unavailable
from elastic_ext.etcd.messages import etcdrpc

if TYPE_CHECKING:
    from elastic_ext.etcd.calls import Tokens
    from elastic_ext.etcd.client import EtcdClient
    from elastic_ext.etcd.endpoints import Connection, Endpoints
    from elastic_ext.etcd.watch import Watch

logger = logging.getLogger(__name__)

_JOIN_S = 2.0
_STEADY_S = 1.0  # a stream that lasted longer was a good one: its end is no reason to wait


class _Broken(Exception):
    """The stream must be opened again; what it was about is in the failure."""

    def __init__(self, failure: Meaning) -> None:
        super().__init__(failure.text)
        self.failure = failure


class WatchStream:
    """The one stream of a client; its thread starts with the first watch.

    Invariant: creates are answered in the order they were sent, so the n-th `created` belongs to the n-th create. That is the
    only way to tell which watch was refused: the server then answers with the id -1.
    """

    def __init__(self, client: EtcdClient, endpoints: Endpoints, tokens: Tokens, closed: threading.Event) -> None:
        self._client = client
        self._endpoints = endpoints
        self._tokens = tokens
        self._closed = closed
        self._ids = itertools.count(1)
        self._watches: dict[int, Watch] = {}
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._call: Any = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._created: deque[Watch] = deque()  # creates sent, not answered
        self._refused: Watch | None = None  # was refused with the token before: once more, and it is final
        self._failures = 0  # in a row, of streams that did not last
        self._opened_at = math.inf
        self._trouble: str | None = None
        endpoints.observe(self._on_silent)

    def add(self, watch: Watch) -> None:
        with self._changed:
            if self._closed.is_set():
                raise ClientClosed("watch: the etcd client is closed")
            watch.watch_id = next(self._ids)
            self._watches[watch.watch_id] = watch
            if self._call is not None:
                self._create(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, watch: Watch) -> None:
        with self._changed:
            if self._watches.pop(watch.watch_id, None) is not None and self._call is not None:
                rpc = etcdrpc()
                self._requests.put(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=watch.watch_id)))

    def close(self) -> None:
        """After the client was marked closed."""
        with self._changed:
            self._changed.notify()
            self._cancel()
            watches = list(self._watches.values())
            self._watches.clear()
        for watch in watches:
            watch.end(ClientClosed("watch: the etcd client was closed"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _create(self, watch: Watch) -> None:
        self._created.append(watch)
        self._requests.put(watch.request())

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _on_silent(self, connection: Connection) -> None:
        """A call on our endpoint got no answer: move now, gRPC's pings would take 13 s to notice."""
        with self._changed:
            if self._connection is connection:
                self._cancel()

    # The thread

    def _run(self) -> None:
        try:
            while self._await_work():
                try:
                    self._serve()
                except _Broken as broken:
                    self._after(broken.failure)
                except EtcdError as error:
                    if not isinstance(error, Unavailable):
                        self._end_all(error)
                    self._pause()
        except Exception as error:
            logger.exception("the thread of the etcd watches failed")
            with self._changed:
                self._thread = None  # the next watch gets a new one
            self._end_all(EtcdError(f"the thread of the etcd watches failed: {error!r}"))

    def _await_work(self) -> bool:
        with self._changed:
            while not self._watches and not self._closed.is_set():
                self._changed.wait()
            return not self._closed.is_set()

    def _serve(self) -> None:
        """Open the stream and hand out what it brings; ends with an exception, or without when the client is closed."""
        import grpc  # type: ignore[import-untyped]

        connection = self._endpoints.current()
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        token: list[tuple[str, str]] = []
        try:
            calls.prove(connection, self._client.timeout_s / len(self._endpoints), again=self._failures > 0)
            token = self._tokens.metadata(connection, self._client.timeout_s)
            stub = etcdrpc().WatchStub(connection.channel)
            call = stub.Watch(iter(requests.get, None), metadata=[*token, calls.HAS_LEADER])
            self._open(call, requests, connection)
            for response in call:
                self._handle(response, connection)
            raise _Broken(Meaning(Kind.UNSURE, connection.name, "the server ended the stream"))
        except calls.CallFailed as error:
            failure = error.failure
        except grpc.RpcError as error:
            failure = errors.classify(error.code().name, error.details() or "", connection.name)
        except _Broken as broken:
            failure = broken.failure
        except ValueError:
            if not self._closed.is_set():  # gRPC's "Cannot invoke RPC on closed channel!"
                raise
            return
        finally:
            requests.put(None)  # ends gRPC's thread that reads the requests
            self._shut()
        if failure.kind is Kind.TOKEN:
            self._tokens.drop(token)
        elif failure.kind is not Kind.AUTH:
            self._endpoints.failed(connection, silent=False)
        raise _Broken(failure)

    def _open(self, call: Any, requests: queue.SimpleQueue[Any], connection: Connection) -> None:
        with self._changed:
            if self._closed.is_set():
                call.cancel()
            self._call, self._requests, self._connection = call, requests, connection
            self._opened_at = time.monotonic()
            for watch in self._watches.values():
                self._create(watch)

    def _shut(self) -> None:
        with self._changed:
            self._cancel()
            self._call = self._connection = None
            self._created.clear()
            for watch in self._watches.values():
                watch.live = False

    def _handle(self, response: Any, connection: Connection) -> None:
        connection.answered_at = time.monotonic()
        with self._changed:
            watch = self._created.popleft() if response.created else self._watches.get(response.watch_id)
            if watch is None or watch.watch_id not in self._watches:
                return  # closed meanwhile
        if response.canceled:
            self._canceled(watch, response, connection)
        elif response.created:
            if self._refused is watch:
                self._refused = None
            self._check_history(watch, response.header.revision)
            watch.began(response.header.revision)
            watch.live = not watch.closed
            self._note_recovery(connection)
        else:
            watch.take(response)

    def _canceled(self, watch: Watch, response: Any, connection: Connection) -> None:
        reason = errors.telling(response.cancel_reason) or "no reason given"
        if response.compact_revision:
            self._end(watch, _compacted(watch, f"compacted up to {response.compact_revision}", response.compact_revision))
        elif not response.created:
            raise _Broken(Meaning(Kind.UNSURE, connection.name, f"the server ended a watch: {reason}"))
        elif self._tokens.user is not None and self._refused is not watch:
            # Some versions say "permission denied" where they mean that the token has expired.
            self._refused = watch
            raise _Broken(Meaning(Kind.TOKEN, connection.name, f"the server refused a watch: {reason}"))
        else:
            self._refused = None
            who = f"user {self._tokens.user.name!r}" if self._tokens.user else "no user given"
            seen = f"watch {watch.key!r}: etcd at {connection.name} refused it: {reason} ({who})"
            self._end(watch, AuthError(f"{seen}; give the right user, with a role that may read these keys"))

    def _check_history(self, watch: Watch, revision: int) -> None:
        """A server that was set up anew or restored has fewer revisions than we saw; the watch would wait for them in silence.

        A member that lags behind looks the same at first, so the cluster is asked.
        """
        if revision >= watch.next_revision - 1:
            return
        try:
            now = self._client.revision(watch.key)
        except AuthError as error:
            self._end(watch, error)
            return
        if now < watch.next_revision - 1:
            self._end(watch, _compacted(watch, f"lost, the server's revision is {now} now: it was set up anew or restored", 0))

    def _end(self, watch: Watch, error: EtcdError) -> None:
        self.remove(watch)
        watch.end(error)

    def _end_all(self, error: EtcdError) -> None:
        with self._changed:
            watches = list(self._watches.values())
        for watch in watches:
            self._end(watch, error)

    # Trouble

    def _after(self, failure: Meaning) -> None:
        if self._closed.is_set():
            return
        user = self._tokens.user.name if self._tokens.user else None
        if failure.kind in (Kind.AUTH, Kind.VERSION) or (failure.kind is Kind.TOKEN and user is None):
            self._end_all(errors.fatal_error(failure, "watch", user))
            return
        if failure.kind is not Kind.TOKEN and self._trouble is None:
            logger.warning("etcd watch stream to %s broke, resuming: %s", failure.endpoint, failure.text)
            self._trouble = failure.text
        self._pause()

    def _pause(self) -> None:
        if time.monotonic() - self._opened_at > _STEADY_S:
            self._failures = 0
        self._opened_at = math.inf
        tour, self._failures = self._failures // len(self._endpoints), self._failures + 1
        if tour > 0 or len(self._endpoints) == 1:
            self._closed.wait(calls.pause_s(tour))

    def _note_recovery(self, connection: Connection) -> None:
        if self._trouble is not None:
            logger.info("etcd watch stream is open again, to %s", connection.name)
            self._trouble = None


def _compacted(watch: Watch, what: str, revision: int) -> Compacted:
    return Compacted(
        f"watch {watch.key!r}: the history from revision {watch.next_revision} on is {what}; read the keys again, then watch",
        revision,
    )
