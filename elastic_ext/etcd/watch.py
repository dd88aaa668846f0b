"""Watches that survive failures of connections and servers: nothing is lost or delivered twice.

All watches of a client share one stream and one daemon thread (`WatchStream`). Each watch knows the revision it wants next;
if anything breaks the stream, it is reopened, on the next endpoint if need be, and each watch goes on from that revision.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from elastic_ext.etcd import calls, errors
from elastic_ext.etcd.endpoints import Connection
from elastic_ext.etcd.errors import AuthError, ClientClosed, Compacted, ErrorKind, EtcdError, RpcFailure, Unavailable
from elastic_ext.etcd.messages import Message, etcdrpc
from elastic_ext.etcd.values import Event, Key, KeyValue, Reading, range_of_prefix, to_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batch:
    """Events in order, of whole revisions: all changes that one transaction made to the watched keys come together."""

    revision: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Began:
    """The first item of a watch from FROM_NOW: everything written after `revision` is delivered.

    The caller reads what existed before. A reading at that revision or later misses nothing.
    """

    revision: int


Item: TypeAlias = Batch | Began | EtcdError

# start_revision of a watch that starts when the server has it. The server need not let such a watch catch up with the past, as
# it does for others only ten times a second.
FROM_NOW = 0


class WatchClient(Protocol):
    """The part of a client that watches need."""

    @property
    def watches(self) -> WatchStream: ...

    def get_prefix(self, prefix: Key, *, timeout_s: float | None = None) -> Reading: ...


class Watch:
    """The changes of a key, or of all keys with a prefix, from a revision on.

    Delivers `Batch`es, after a `Began` if it is FROM_NOW. If it ends before `close`, the last item is an error: `Compacted`
    (read again, then watch from there), `AuthError` (no permission), `UnsupportedVersion`, `ClientClosed`, or `EtcdError` if the
    thread failed. Trouble with connections and servers is not delivered; the watch waits it out, and `live` shows it.
    """

    def __init__(
        self,
        client: WatchClient,
        key: Key,
        *,
        start_revision: int,
        callback: Callable[[Item], None],
        prefix: bool = False,
        deletes_only: bool = False,
    ) -> None:
        """Start the watch, and return at once.

        Args:
            start_revision: the first revision to deliver: that of a reading or transaction + 1. FROM_NOW: from a `Began` on.
            callback: gets each item on the stream's thread, which serves all watches of the client, and must return at once.
            deletes_only: the server does not send puts.
        """
        self.key, self.range_end = range_of_prefix(key) if prefix else (to_bytes(key), b"")
        self.deletes_only = deletes_only
        self.next_revision = start_revision  # everything before it has been delivered
        self.watch_id = 0
        self.live = False  # a server with a leader now holds the watch; False while the stream is being reopened
        self._callback = callback
        self._stream = client.watches
        self._ended = threading.Event()
        self._stream.add(self)

    @property
    def closed(self) -> bool:
        """Whether it delivers nothing more."""
        return self._ended.is_set()

    def close(self) -> None:
        """Close the watch. Any thread may call this, any number of times."""
        self._stream.remove(self)
        self.end(None)

    # For the stream

    def began(self, revision: int) -> None:
        """Note that the server has the watch, from this revision on."""
        if self.next_revision == FROM_NOW:
            self.next_revision = revision + 1
            self._call(Began(revision))

    def request(self) -> Message:
        """Return the WatchRequest that creates this watch."""
        rpc = etcdrpc()
        create = rpc.WatchCreateRequest(
            key=self.key,
            range_end=self.range_end,
            start_revision=self.next_revision,
            filters=[rpc.WatchCreateRequest.NOPUT] if self.deletes_only else [],
            # After 10 minutes without events the server sends its revision: a quiet watch does not fall behind compaction.
            progress_notify=True,
            watch_id=self.watch_id,
        )
        return rpc.WatchRequest(create_request=create)

    def take(self, response: Message) -> None:
        """Take in events, or a progress notice without any."""
        events = tuple(Event.parse(event) for event in response.events if event.kv.mod_revision >= self.next_revision)
        if events:
            self.next_revision = events[-1].kv.mod_revision + 1
            self._call(Batch(events[-1].kv.mod_revision, events))
        elif not response.events:
            self.next_revision = max(self.next_revision, response.header.revision + 1)

    def end(self, error: EtcdError | None) -> None:
        """Deliver nothing more than this error. None: the caller has closed the watch."""
        if self._ended.is_set():
            return
        self.live = False
        self._ended.set()
        if error is not None:
            self._call(error)

    def _call(self, item: Item) -> None:
        try:
            self._callback(item)
        except Exception:  # foreign code on the thread of all watches
            logger.exception("the callback of the etcd watch on %r failed: this watch ends", self.key)
            self._stream.remove(self)
            self._ended.set()


# The stream shared by all watches of a client: if it breaks, it is reopened, and each watch resumes where it stood.

_JOIN_S = 2.0
_ids = itertools.count(1)  # of watches
_STEADY_S = 1.0  # a stream that lasted longer was good: its end is no reason to wait


class _Broken(Exception):
    """The stream must be opened again."""

    def __init__(self, failure: RpcFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class _OwnIds(_Broken):
    """The server ignores the ids of watches: their creates must be sent one by one."""


class _Call:
    """One call of etcd's Watch, from its opening until it breaks. Not thread-safe.

    Invariant: creates are answered in the order they were sent, so the n-th `created` belongs to the n-th create. Only this shows
    which watch was refused: the server then answers with the id -1. A server that takes no ids from clients, such as etcd's
    grpc-proxy, does not keep the order either: there each create waits until the one before is answered.
    """

    def __init__(self, connection: Connection, token: calls.Metadata, one_by_one: bool) -> None:
        self.connection = connection
        self._one_by_one = one_by_one
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._waiting: deque[Watch] = deque()  # whose creates are to be sent
        self._unanswered: deque[Watch] = deque()  # whose creates were sent
        self._by_id: dict[int, Watch] = {}  # as the server names them
        self._opened_at = time.monotonic()
        stub = etcdrpc().WatchStub(connection.channel)
        self.responses = stub.Watch(iter(self._requests.get, None), metadata=[*token, calls.HAS_LEADER])

    def create(self, watch: Watch) -> None:
        self._waiting.append(watch)
        self._send()

    def _send(self) -> None:
        while self._waiting and not (self._one_by_one and self._unanswered):
            self._unanswered.append(self._waiting.popleft())
            self._requests.put(self._unanswered[-1].request())

    def watch_of(self, response: Message) -> Watch | None:
        """Return the watch that a response belongs to; None: it is not served any more. Raises OwnIds."""
        if not response.created:
            return self._by_id.get(response.watch_id)
        watch = self._unanswered.popleft()
        if not response.canceled:
            if response.watch_id != watch.watch_id and not self._one_by_one:
                raise _OwnIds(RpcFailure(ErrorKind.UNSURE, self.connection.name, "the server gives watches ids of its own"))
            self._by_id[response.watch_id] = watch
        self._send()
        return watch

    def remove(self, watch: Watch) -> None:
        """Stop serving this watch; do nothing if it is not there. One that was not answered yet is removed when it is."""
        if watch in self._waiting:
            self._waiting.remove(watch)
        rpc = etcdrpc()
        for id_ in [id_ for id_, each in self._by_id.items() if each is watch]:
            del self._by_id[id_]
            self._requests.put(rpc.WatchRequest(cancel_request=rpc.WatchCancelRequest(watch_id=id_)))

    def cancel(self) -> None:
        self.responses.cancel()

    def close(self) -> None:
        self.cancel()
        self._requests.put(None)  # ends gRPC's thread that reads the requests

    @property
    def steady(self) -> bool:
        return time.monotonic() - self._opened_at > _STEADY_S


class WatchStream:
    """The one stream of a client. Its thread starts with the first watch."""

    def __init__(self, caller: calls.Caller, revision: Callable[[bytes], int]) -> None:
        """caller: the client's. revision: reads the store's revision; its argument is a key that the user may read."""
        self._caller = caller
        self._revision = revision
        self._watches: dict[int, Watch] = {}
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._call: _Call | None = None
        self._refused: Watch | None = None  # with the previous token; a second refusal is final
        self._stale: calls.Metadata | None = None  # what the server has last refused; see `Tokens.metadata`
        self._failures = 0  # consecutive streams that did not last
        self._one_by_one = False  # see `_Call`
        self._opened = False  # at least once
        self._trouble: str | None = None
        caller.endpoints.observe(self._on_silent)

    def add(self, watch: Watch) -> None:
        """Serve this watch from its next_revision on. Raises ClientClosed."""
        with self._changed:
            if self._caller.closed.is_set():
                raise ClientClosed("watch: the etcd client is closed")
            watch.watch_id = next(_ids)
            self._watches[watch.watch_id] = watch
            if self._call is not None:
                self._call.create(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, watch: Watch) -> None:
        with self._changed:
            if self._watches.pop(watch.watch_id, None) is not None and self._call is not None:
                self._call.remove(watch)

    def close(self) -> None:
        """Wake the thread and end the stream. Call this after the client was marked closed."""
        with self._changed:
            self._changed.notify()
            if self._call is not None:
                self._call.cancel()
            watches = list(self._watches.values())
            self._watches.clear()
        for watch in watches:
            watch.end(ClientClosed("watch: the etcd client was closed"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _on_silent(self, connection: Connection) -> None:
        """Break the stream if a call to its endpoint got no answer: gRPC's pings would take 13 s to notice."""
        with self._changed:
            if self._call is not None and self._call.connection is connection:
                self._call.cancel()

    # The thread

    def _run(self) -> None:
        try:
            while self._await_work():
                try:
                    self._serve()
                except _Broken as broken:
                    self._on_failure(broken.failure)
                except EtcdError as error:
                    if not isinstance(error, Unavailable):
                        self._end_all(error)
                    self._pause()
        except Exception as error:
            logger.exception("the thread of the etcd watches failed")
            with self._changed:
                self._thread = None  # the next watch gets a new thread
            self._end_all(EtcdError(f"the thread of the etcd watches failed: {error!r}"))

    def _await_work(self) -> bool:
        with self._changed:
            while not self._watches and not self._caller.closed.is_set():
                self._changed.wait()
            return not self._caller.closed.is_set()

    def _serve(self) -> None:
        """Open the stream and deliver what it brings. Raise an exception, or return: closed, or to begin again."""
        import grpc  # type: ignore[import-untyped]

        connection = self._caller.endpoints.current()
        token = self._stale
        try:
            calls.check_alive(connection, self._caller.timeout_s / len(self._caller.endpoints), again=self._failures > 0)
            token = self._caller.tokens.metadata(connection, self._caller.timeout_s, self._stale)
            call = _Call(connection, token, self._one_by_one)
            try:
                self._begin(call)
                for response in call.responses:
                    self._handle(response, call)
            finally:
                self._shut(call)
            raise _Broken(RpcFailure(ErrorKind.UNSURE, connection.name, "the server ended the stream"))
        except calls.CallFailed as error:
            failure = error.failure
        except grpc.RpcError as error:
            failure = errors.classify(error.code().name, error.details() or "", connection.name)
        except _OwnIds:
            self._one_by_one = True
            return
        except _Broken as broken:
            failure = broken.failure
        except ValueError as error:
            if not calls.closed_channel(error):
                raise
            return
        if failure.kind is ErrorKind.TOKEN:
            self._stale = token
        elif failure.kind is not ErrorKind.AUTH:
            connection.renew()
            self._caller.endpoints.failed(connection, silent=False)
        raise _Broken(failure)

    def _begin(self, call: _Call) -> None:
        with self._changed:
            if self._caller.closed.is_set():
                call.cancel()
            self._call = call
            if self._opened:
                self._caller.observer.reconnected()
            self._opened = True
            for watch in self._watches.values():
                call.create(watch)

    def _shut(self, call: _Call) -> None:
        with self._changed:
            call.close()
            self._call = None
            if call.steady:
                self._failures = 0
            for watch in self._watches.values():
                watch.live = False

    def _handle(self, response: Message, call: _Call) -> None:
        call.connection.answered_at = time.monotonic()
        with self._changed:
            watch = call.watch_of(response)
            if watch is None or watch.watch_id not in self._watches:
                if watch is not None:  # closed meanwhile
                    call.remove(watch)
                return
        if response.canceled:
            self._canceled(watch, response, call.connection)
        elif response.created:
            if self._refused is watch:
                self._refused = None
            self._check_history(watch, response.header.revision)
            watch.began(response.header.revision)
            watch.live = not watch.closed
            self._note_recovery(call.connection)
        else:
            watch.take(response)

    def _canceled(self, watch: Watch, response: Message, connection: Connection) -> None:
        reason = errors.short_text(response.cancel_reason) or "no reason given"
        user = self._caller.tokens.user
        if response.compact_revision:
            self._end(watch, _compacted(watch, f"compacted up to {response.compact_revision}"))
        elif not response.created:
            raise _Broken(RpcFailure(ErrorKind.UNSURE, connection.name, f"the server ended a watch: {reason}"))
        elif user is not None and self._refused is not watch:
            # Some versions say "permission denied" when the token has expired.
            self._refused = watch
            raise _Broken(RpcFailure(ErrorKind.TOKEN, connection.name, f"the server refused a watch: {reason}"))
        else:
            self._refused = None
            who = f"user {user.name!r}" if user else "no user given"
            seen = f"watch {watch.key!r}: etcd at {connection.name} refused it: {reason} ({who})"
            self._end(watch, AuthError(f"{seen}; check the user, and that it has a role that may read these keys"))

    def _check_history(self, watch: Watch, revision: int) -> None:
        """Detect a lost history: a new or restored server has fewer revisions than we saw, and the watch would wait silently.

        A member that lags behind looks the same at first, so the cluster is asked.
        """
        if revision >= watch.next_revision - 1:
            return
        try:
            now = self._revision(watch.key)
        except AuthError as error:
            self._end(watch, error)
            return
        if now < watch.next_revision - 1:
            self._end(watch, _compacted(watch, f"lost, the server's revision is {now} now: it was set up again or restored"))

    def _end(self, watch: Watch, error: EtcdError) -> None:
        self.remove(watch)
        watch.end(error)

    def _end_all(self, error: EtcdError) -> None:
        with self._changed:
            watches = list(self._watches.values())
        for watch in watches:
            self._end(watch, error)

    # Trouble

    def _on_failure(self, failure: RpcFailure) -> None:
        if self._caller.closed.is_set():
            return
        user = self._caller.tokens.user.name if self._caller.tokens.user else None
        if failure.kind in (ErrorKind.AUTH, ErrorKind.VERSION) or (failure.kind is ErrorKind.TOKEN and user is None):
            self._end_all(errors.fatal_error(failure, "watch", user))
            return
        if failure.kind is not ErrorKind.TOKEN and self._trouble is None:
            logger.warning("etcd watch stream to %s broke; resuming: %s", failure.endpoint, failure.text)
            self._trouble = failure.text
        self._pause()

    def _pause(self) -> None:
        endpoints = len(self._caller.endpoints)
        tour, self._failures = self._failures // endpoints, self._failures + 1
        if tour > 0 or endpoints == 1:
            self._caller.closed.wait(calls.pause_s(tour))

    def _note_recovery(self, connection: Connection) -> None:
        if self._trouble is not None:
            logger.info("etcd watch stream is open again, to %s", connection.name)
            self._trouble = None


def _compacted(watch: Watch, what: str) -> Compacted:
    return Compacted(
        f"watch {watch.key!r}: the history from revision {watch.next_revision} on is {what}; read the keys again, then watch"
    )


BEGAN_S = 0.1  # a watch usually begins within a millisecond


@dataclass(frozen=True)
class Snapshot:
    """All keys with the prefix as of `revision`. It replaces everything known before: a missing key is gone."""

    revision: int
    kvs: tuple[KeyValue, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        """Return a put for each key, for callers that take in a `Batch` the same way."""
        return tuple(Event("put", kv) for kv in self.kvs)


class SnapshotWatch:
    """A watch that gives a `Snapshot`, then `Batch`es of later changes; after a compaction a `Snapshot` again.

    Reading happens on the caller's thread, in `get`.
    """

    def __init__(
        self, client: WatchClient, prefix: Key, on_item: Callable[[], None] | None = None, began_s: float = BEGAN_S
    ) -> None:
        """
        Args:
            on_item: called on another thread when `get` has something to return; it must return at once.
            began_s: a reading waits this long for the watch to begin.
        """
        self._client = client
        self._prefix = prefix
        self._on_item = on_item
        self._began_s = began_s
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._watch: Watch | None = None
        self._due = False  # the keys must be read
        self._revision = 0  # of the last reading
        self._closed = False

    def __enter__(self) -> SnapshotWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def live(self) -> bool:
        """See `Watch.live`."""
        return self._watch is not None and self._watch.live

    def get(self, timeout_s: float | None = None) -> Snapshot | Batch | None:
        """Return the next item; None after timeout_s or if the watch is closed.

        timeout_s also limits the reading of a snapshot, where 0 stands for the client's default.

        Raises:
            EtcdError: the snapshot could not be read, and the next `get` tries again; or the watch ended for a reason other than
                compaction.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            if self._watch is None:
                self._watch = self._begin()
            if self._due:
                return self._read(timeout_s or None)
            try:
                item = self._items.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if isinstance(item, Batch):
                if (batch := self._since_reading(item)) is not None:
                    return batch
            elif isinstance(item, Began):
                self._due = item.revision > self._revision  # writes in between were neither read nor watched
            else:
                self._watch.close()
                if isinstance(item, Compacted):
                    self._watch = None
                elif isinstance(item, EtcdError):
                    self._items.put(item)  # every later `get` raises it again
                    raise item
        return None

    def _begin(self) -> Watch:
        """Watch from now on; the reading follows.

        etcd serves a watch from an older revision only ten times a second until it has caught up (syncWatchersLoop of
        mvcc/watchable_store.go). When many nodes came at once, that was most of the wait.
        """
        # Each watch has its own queue: items left from the previous one are older than the following reading.
        items = self._items = queue.SimpleQueue()

        def take(item: Item) -> None:
            items.put(item)
            if self._on_item is not None:
                try:
                    self._on_item()
                except Exception:  # foreign code; the item is queued in any case
                    logger.exception("on_item of the etcd watch on %r failed", self._prefix)

        self._due = True
        watch = Watch(self._client, self._prefix, prefix=True, start_revision=FROM_NOW, callback=take)
        if self._closed:
            watch.close()
        with contextlib.suppress(queue.Empty):  # it may begin later; if somebody writes before, the keys are read again
            if not isinstance(first := items.get(timeout=self._began_s), Began):
                items.put(first)  # the end of the watch; nothing follows it
        return watch

    def _read(self, timeout_s: float | None) -> Snapshot:
        reading = self._client.get_prefix(self._prefix, timeout_s=timeout_s)
        self._due, self._revision = False, reading.revision
        return Snapshot(reading.revision, reading.kvs)

    def _since_reading(self, batch: Batch) -> Batch | None:
        """Return the batch without the events that the last reading contains; None if none are left."""
        events = tuple(event for event in batch.events if event.kv.mod_revision > self._revision)
        return Batch(batch.revision, events) if events else None

    def close(self) -> None:
        """Close the watch and wake callers of `get`. Any thread may call this."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        self._items.put(None)
