"""A gRPC proxy before a real etcd, which holds or refuses some calls and passes all others on the same connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

_STREAMS = frozenset({"LeaseKeepAlive", "Watch"})
_PASSED = frozenset({"token", "hasleader"})  # of the metadata; gRPC adds its own


class CallProxy(grpc.GenericRpcHandler):
    """Calls go by their names, as in "Range".

    Attributes:
        holding: set when a call is held.
    """

    def __init__(self, target_port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{target_port}")
        self._server = grpc.server(ThreadPoolExecutor(16), handlers=(self,))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._held = ""
        self._released = threading.Event()
        self._refused: dict[str, tuple[grpc.StatusCode, str]] = {}
        self._peer = ""
        self._refused_peers: dict[str, tuple[grpc.StatusCode, str]] = {}
        self._late_peer = ""
        self.holding = threading.Event()

    def __enter__(self) -> CallProxy:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
        self._server.stop(None).wait()
        self._channel.close()

    def hold(self, name: str) -> None:
        """Pass no call of this name on until `release`."""
        self._held = name

    def release(self) -> None:
        self._released.set()

    def refuse_one(self, name: str, code: grpc.StatusCode, text: str) -> None:
        """Answer the next call of this name with an error."""
        self._refused[name] = (code, text)

    def refuse_connection(self, code: grpc.StatusCode, text: str) -> None:
        """Answer each call with an error, on the connection of the last call. A load balancer may have a bad member behind it."""
        self._refused_peers[self._peer] = (code, text)

    def refuse_late(self, code: grpc.StatusCode, text: str) -> None:
        """The same, but not before `release`."""
        self._late_peer = self._peer
        self.refuse_connection(code, text)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method.rpartition("/")[2]
        metadata = [(key, value) for key, value in details.invocation_metadata if key in _PASSED]

        def one(request: bytes, context: grpc.ServicerContext) -> bytes:
            self._delay(name, context)
            try:
                return self._channel.unary_unary(details.method)(request, context.time_remaining(), metadata)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
                raise AssertionError from None

        def many(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self._delay(name, context)
            return self._channel.stream_stream(details.method)(requests, context.time_remaining(), metadata)

        if name in _STREAMS:
            return grpc.stream_stream_rpc_method_handler(many)
        return grpc.unary_unary_rpc_method_handler(one)

    def _delay(self, name: str, context: grpc.ServicerContext) -> None:
        self._peer = peer = context.peer()
        if peer == self._late_peer:
            self._released.wait()
        if (refusal := self._refused_peers.get(peer) or self._refused.pop(name, None)) is not None:
            context.abort(*refusal)
        if name == self._held:
            self.holding.set()
            self._released.wait()
