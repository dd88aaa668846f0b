"""Serves a `Keyspace` over gRPC, with the calls of `etcd.messages`. Everything runs on one event loop: no locks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc  # type: ignore[import-untyped, unused-ignore]
import grpc.aio  # type: ignore[import-untyped, unused-ignore]

from elastic_ext.embedded.keyspace import Keyspace, Message, Refused
from elastic_ext.embedded.plan import BUILD
from elastic_ext.embedded.watches import Watches
from elastic_ext.etcd.messages import calls, etcdrpc

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
    """The calls. For one event loop.

    Attributes:
        streams: number of open streams of watches; each agent has one while it is in a job.
    """

    def __init__(
        self,
        keyspace: Keyspace,
        on_streams: Callable[[], None] = lambda: None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_streams: called when `streams` has changed. on_change: after each change of a key."""
        self.streams = 0
        self._on_streams, self._on_change = on_streams, on_change
        self._keyspace, self._clock = keyspace, clock
        self._rpc: Any = etcdrpc()
        self._wakes: set[asyncio.Event] = set()  # of the streams
        self._announced = keyspace.revision

    def handlers(self) -> list[Any]:
        """Return gRPC's handlers of all services, and one that refuses other calls."""
        unary: dict[str, Callable[[Message], Message]] = {
            "Range": self._keyspace.range,
            "Put": self._put,
            "Txn": self._keyspace.txn,
            "LeaseGrant": lambda request: self._keyspace.grant(request, self._clock()),
            "LeaseRevoke": self._keyspace.revoke,
            "LeaseTimeToLive": lambda request: self._keyspace.time_to_live(request, self._clock()),
            "MemberList": self._members,
            "Alarm": lambda request: self._rpc.AlarmResponse(header=self._keyspace.header()),
            "Status": self._status,
        }
        streams: dict[str, Callable[[AsyncIterator[Message], Any], AsyncIterator[Message]]] = {
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
        looked = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
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

    # Calls

    def _unary(self, answer: Callable[[Message], Message]) -> Callable[[Message, Any], Any]:
        async def call(request: Message, context: Any) -> Message:
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

    async def _keep_alive(self, requests: AsyncIterator[Message], context: Any) -> AsyncIterator[Message]:
        async for request in requests:
            yield self._keyspace.keep_alive(request, self._clock())

    async def _watch(self, requests: AsyncIterator[Message], context: Any) -> AsyncIterator[Message]:
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

    def service(self, details: Any) -> Any:
        async def refuse(request: bytes, context: Any) -> None:
            what = f"{details.method} is not served by the embedded store; for that use ext_etcd and etcd's own servers"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, what)

        return grpc.unary_unary_rpc_method_handler(refuse)
