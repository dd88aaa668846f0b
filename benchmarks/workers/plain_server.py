"""An HTTP server with one prebuilt answer: what the clients of a storm cost where no agent is asked.

    plain_server.py SIZE

Prints its port. Answers each request with SIZE bytes and ends the connection; ends one that sends more than a request may have.
Ends when its stdin does.
"""

import asyncio
import sys

LONGEST = 1 << 16  # bytes of a request
HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(b"\r\n\r\n") and self._received.startswith(b"GET "):
            self._transport.write(self._answer)
            self._transport.close()
        elif len(self._received) > LONGEST:
            self._transport.abort()


async def main() -> None:
    size = int(sys.argv[1])
    answer = HEAD % size + b"x" * size
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    server = await loop.create_server(lambda: Client(answer), "127.0.0.1", 0, backlog=128)
    print(server.sockets[0].getsockname()[1], flush=True)
    await ended.wait()


asyncio.run(main())
