"""Serves a `Keyspace` over gRPC, with the calls of `etcd.messages`. Everything runs on one event loop: no locks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc  # type: ignore[import-untyped, unused-ignore]
from grpc.aio import ServicerContext  # type: ignore[import-untyped, unused-ignore]

from elastic_ext.embedded.keyspace import Change, Keyspace, Refused, covers
from elastic_ext.embedded.plan import BUILD
from elastic_ext.etcd.messages import Message, calls, etcdrpc

RESPONSE_BYTES = 1 << 20  # about; gRPC's clients take 4 MiB


@dataclass
class _Watch:
    """create: the WatchCreateRequest. next_revision: everything before it has been sent, or does not concern this watch."""

    create: Message
    next_revision: int

    def wants(self, change: Change) -> bool:
        # The numbers of FilterType are those of EventType: NOPUT, NODELETE and PUT, DELETE.
        return change.event.type not in self.create.filters and covers(
            self.create.key, self.create.range_end, change.event.kv.key
        )


class Watches:
    """What one stream watches, and what it is to be sent.

    Invariant: a watch gets each change once, whole revisions together and in order; or it is canceled, and says from where on
    the history is left.
    """

    def __init__(self, keyspace: Keyspace) -> None:
        self._keyspace = keyspace
        self._rpc: Any = etcdrpc()
        self._watches: dict[int, _Watch] = {}
        self._answers: list[Message] = []  # to what the client has asked for
        self._free_ids = itertools.count(1 << 32)  # for a client that names none

    def take(self, request: Message) -> None:
        """Take a WatchRequest."""
        if request.WhichOneof("request_union") == "cancel_request":
            watch_id = request.cancel_request.watch_id
            if self._watches.pop(watch_id, None) is not None:
                self._answers.append(self._response(watch_id, canceled=True))
        elif request.WhichOneof("request_union") == "create_request":
            self._create(request.create_request)

    def _create(self, create: Message) -> None:
        watch_id = create.watch_id or next(self._free_ids)
        create.key = create.key or b"\0"  # as etcd
        reason = ""
        if create.range_end not in (b"", b"\0") and create.range_end <= create.key:
            reason = "mvcc: watcher range is empty"
        elif watch_id in self._watches:
            reason = "mvcc: duplicate watch ID provided on the WatchStream"
        if reason:
            self._answers.append(self._response(-1, created=True, canceled=True, cancel_reason=reason))
            return
        self._watches[watch_id] = _Watch(create, create.start_revision or self._keyspace.revision + 1)
        self._answers.append(self._response(watch_id, created=True))

    def due(self) -> Iterator[Message]:
        """Return what is to be sent now: WatchResponses."""
        # Together: events of a watch that is created while an answer is on its way must not come before its own answer.
        answers, self._answers, watches = self._answers, [], list(self._watches.items())
        yield from answers
        for watch_id, watch in watches:
            yield from self._news(watch_id, watch)

    def _news(self, watch_id: int, watch: _Watch) -> Iterator[Message]:
        # While a response is on its way the store may change and forget, and this watch may be canceled.
        while self._watches.get(watch_id) is watch and (response := self._next(watch_id, watch)) is not None:
            yield response

    def _next(self, watch_id: int, watch: _Watch) -> Message | None:
        if watch.next_revision <= self._keyspace.compacted:
            del self._watches[watch_id]
            reason = "etcdserver: mvcc: required revision has been compacted"
            return self._response(watch_id, canceled=True, cancel_reason=reason, compact_revision=self._keyspace.compacted)
        events: list[Message] = []
        size, until = 0, self._keyspace.revision
        changes = self._keyspace.since(watch.next_revision)
        for revision, together in itertools.groupby(filter(watch.wants, changes), key=lambda change: change.revision):
            for change in together:
                events.append(change.event)
                size += change.size
            if size >= RESPONSE_BYTES:
                until = revision
                break
        watch.next_revision = max(watch.next_revision, until + 1)
        return self._response(watch_id, events=events) if events else None

    def progress(self) -> Iterator[Message]:
        """Return a notice for each watch that has asked for them: it has had everything up to this revision."""
        for watch_id, watch in list(self._watches.items()):
            if watch_id in self._watches and watch.create.progress_notify and watch.next_revision > self._keyspace.revision:
                yield self._response(watch_id)

    def _response(self, watch_id: int, **fields: object) -> Message:
        return self._rpc.WatchResponse(header=self._keyspace.header(), watch_id=watch_id, **fields)


VERSION = f"3.5.0{BUILD}"  # the API that it speaks, and what it is
PROGRESS_S = 600.0  # between two notices to a quiet watch, as etcd
TICK_S = 0.5  # between two looks at the leases, as etcd
PAUSED_S = 0.5  # a look that is later by more: this process stood still
OPTIONS = (
    ("grpc.so_reuseport", 0),  # two stores must not share a port
    ("grpc.max_receive_message_length", 2 << 20),
    # A client whose host is gone ends its stream in 20 s; and one may ping as often as ours do.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


class Service:
    """The calls. For one event loop."""

    def __init__(
        self,
        keyspace: Keyspace,
        on_streams: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        on_call: Callable[[str], None] = lambda peer: None,
    ) -> None:
        """on_streams: called when `streams` has changed. on_change: after each change of a key. on_call: with its peer."""
        self.streams = 0  # number of open streams of watches; each agent has one while it is in a job
        self._on_streams, self._on_change, self._on_call = on_streams, on_change, on_call
        self._keyspace = keyspace
        self._rpc: Any = etcdrpc()
        self._wakes: set[asyncio.Event] = set()  # of the streams
        self._announced = keyspace.revision

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return gRPC's handlers of all services, and one that refuses other calls."""
        unary: dict[str, Callable[[Message], Message]] = {
            "Range": self._keyspace.range,
            "Put": self._put,
            "Txn": self._keyspace.txn,
            "LeaseGrant": lambda request: self._keyspace.grant(request, time.monotonic()),
            "LeaseRevoke": self._keyspace.revoke,
            "LeaseTimeToLive": lambda request: self._keyspace.time_to_live(request, time.monotonic()),
            "MemberList": self._members,
            "Alarm": lambda request: self._rpc.AlarmResponse(header=self._keyspace.header()),
            "Status": self._status,
        }
        streams: dict[str, Callable[[AsyncIterator[Message], ServicerContext], AsyncIterator[Message]]] = {
            "Watch": self._watch,
            "LeaseKeepAlive": self._keep_alive,
        }
        handlers = []
        for service, methods in calls().items():
            table = {}
            for method, request, response in methods:
                parse = getattr(self._rpc, request.lstrip("*")).FromString
                serialize = getattr(self._rpc, response.lstrip("*")).SerializeToString
                if method in streams:
                    table[method] = grpc.stream_stream_rpc_method_handler(streams[method], parse, serialize)
                elif method in unary:
                    table[method] = grpc.unary_unary_rpc_method_handler(self._unary(unary[method]), parse, serialize)
            handlers.append(grpc.method_handlers_generic_handler(f"etcdserverpb.{service}", table))
        return [*handlers, _Others()]

    async def look_after_leases(self) -> None:
        """End leases in time, for as long as the service runs."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - looked > TICK_S + PAUSED_S:
                self._keyspace.prolong(now - looked, now)
            looked = now
            self._keyspace.expire(now)
            self._announce()

    def _announce(self) -> None:
        """Wake the streams if something has changed."""
        if self._keyspace.revision != self._announced:
            self._announced = self._keyspace.revision
            for wake in self._wakes:
                wake.set()
            self._on_change()

    def _unary(self, answer: Callable[[Message], Message]) -> Callable[[Message, ServicerContext], Awaitable[Message]]:
        async def call(request: Message, context: ServicerContext) -> Message:
            self._on_call(context.peer())
            try:
                response = answer(request)
            except Refused as refused:
                await context.abort(grpc.StatusCode[refused.code], str(refused))
            self._announce()
            return response

        return call

    def _put(self, request: Message) -> Message:
        self._keyspace.txn(self._rpc.TxnRequest(success=[self._rpc.RequestOp(request_put=request)]))
        return self._rpc.PutResponse(header=self._keyspace.header())

    def _members(self, request: Message) -> Message:
        """Name one member without addresses: clients keep those that they have."""
        return self._rpc.MemberListResponse(header=self._keyspace.header(), members=[self._rpc.Member(ID=1, name="embedded")])

    def _status(self, request: Message) -> Message:
        header = self._keyspace.header()
        return self._rpc.StatusResponse(header=header, version=VERSION, dbSize=self._keyspace.size, leader=1, raftTerm=1)

    async def _keep_alive(self, requests: AsyncIterator[Message], context: ServicerContext) -> AsyncIterator[Message]:
        self._on_call(context.peer())
        async for request in requests:
            yield self._keyspace.keep_alive(request, time.monotonic())

    async def _watch(self, requests: AsyncIterator[Message], context: ServicerContext) -> AsyncIterator[Message]:
        self._on_call(context.peer())
        watches, wake = Watches(self._keyspace), asyncio.Event()
        reading = asyncio.ensure_future(_read(requests, watches, wake))
        self._wakes.add(wake)
        self.streams += 1
        self._on_streams()
        try:
            while not reading.done():
                wake.clear()
                for response in watches.due():
                    yield response
                try:
                    await asyncio.wait_for(wake.wait(), PROGRESS_S)
                except asyncio.TimeoutError:
                    for response in watches.progress():
                        yield response
        finally:
            self.streams -= 1
            self._on_streams()
            self._wakes.discard(wake)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading


async def _read(requests: AsyncIterator[Message], watches: Watches, wake: asyncio.Event) -> None:
    """Take what a client asks for until it closes its stream."""
    try:
        async for request in requests:
            watches.take(request)
            wake.set()
    finally:
        wake.set()


class _Others(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    """Refuses calls that only etcd's own servers take."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def refuse(request: bytes, context: ServicerContext) -> None:
            what = f"{details.method} is not served by the embedded store; for that use ext_etcd and etcd's own servers"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, what)

        return grpc.unary_unary_rpc_method_handler(refuse)
