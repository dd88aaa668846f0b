"""Carries the workers' stderr to the console and keeps the last of it: one process beside the agent, standard library only.

Started by `stderr_tail.StderrTails` as `python -I -S relay.py`; fd 2 is the console, standard input a socket to the agent:

    b"source 1" + (pipe, ring)   carry this pipe on to the console and keep its last bytes in this ring; "source 0": only keep
    b"forget"                    let go of the pipes that have no writer; their workers never came
    b"flush N"                   answered with b"N K" when what was in the pipes is in the rings and on the console; K are open

Bytes go on unchanged and at once, partial lines too, in the order of their arrival. The console's blocking is passed on: while it
takes nothing, the pipes are not read (a flush reads what is in them all the same), so no memory fills up. A relay that is killed
leaves in the ring what it had in hand, and the next one writes that: nothing is lost but what it was killed in the middle of
reading, and one piece may be written twice. A console that is gone costs the output and not the workers: their pipes are read on
into the rings.

The end of the agent is the end of its socket. This process ends when the last writer of the last pipe has ended and all is
written: what the agent left alive on purpose can speak on.
"""

import errno
import mmap
import os
import select
import socket
import stat
from collections import deque

RING_BYTES = 64 * 1024
HEADER_BYTES = 64  # native 64-bit words at the indices below; the rest is free
TOTAL = 0  # bytes ever written; the ring holds the last RING_BYTES of them, byte n at n % RING_BYTES
CONNECTED = 1  # 1: the pipe has had a writer
WRITTEN = 2  # how many of TOTAL the console has

READ_BYTES = 64 * 1024  # a whole pipe: so a read never cuts a write of PIPE_BUF or less
PIECE_BYTES = select.PIPE_BUF  # a pipe that polls writable takes so many without blocking
GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)


class Ring:
    """The last RING_BYTES of a stream, in memory that two processes share; one of them writes."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: a file of HEADER_BYTES + RING_BYTES; may be closed afterwards."""
        self._map = mmap.mmap(descriptor, HEADER_BYTES + RING_BYTES)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._bytes = memoryview(self._map)[HEADER_BYTES:]

    @property
    def connected(self) -> bool:
        return bool(self._words[CONNECTED])

    def connect(self) -> None:
        self._words[CONNECTED] = 1

    def append(self, data: bytes) -> None:
        last = data[-RING_BYTES:]
        at = (self._words[TOTAL] + len(data) - len(last)) % RING_BYTES
        head = last[: RING_BYTES - at]
        self._bytes[at : at + len(head)] = head
        self._bytes[: len(last) - len(head)] = last[len(head) :]
        self._words[TOTAL] += len(data)  # last: a reader that sees it sees the bytes

    def written(self, count: int) -> None:
        self._words[WRITTEN] += count

    def unwritten(self) -> bytes:
        """What the console has not got yet, as far as it is still here."""
        count = self._words[TOTAL] - self._words[WRITTEN]
        last = self.read()[-count:] if count else b""
        self._words[WRITTEN] = self._words[TOTAL] - len(last)
        return last

    def read(self) -> bytes:
        total = self._words[TOTAL]
        if total <= RING_BYTES:
            return bytes(self._bytes[:total])
        at = total % RING_BYTES
        return bytes(self._bytes[at:]) + bytes(self._bytes[:at])


class Console:
    """Writes to a descriptor as much as it takes without blocking; keeps the rest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: deque[tuple[memoryview, Ring]] = deque()
        self._gone = False
        self.bytes_in = 0  # ever put
        self.bytes_out = 0  # ever written, or dropped because there is nobody to read it
        try:
            self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError:
            self._is_file, self._gone = False, True

    @property
    def waiting(self) -> int:
        return self.bytes_in - self.bytes_out

    def put(self, data: bytes, ring: Ring) -> None:
        """ring: is told when it is written."""
        self.bytes_in += len(data)
        self._waiting.append((memoryview(data), ring))

    def write(self) -> None:
        while self._waiting:
            data, _ = self._waiting[0]
            if self._gone:
                self._advance(len(data))
                continue
            if not self._writable():
                return
            piece = data if self._is_file else data[: _whole_lines(data)]
            try:
                self._advance(os.write(self._descriptor, piece))
            except BlockingIOError:  # the descriptor was made non-blocking by whoever shares it
                return
            except OSError as error:
                self._gone = error.errno in GONE
                self._advance(len(piece))  # on a full disk, say, later pieces may find room

    def _writable(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(0))

    def _advance(self, count: int) -> None:
        self.bytes_out += count
        data, ring = self._waiting.popleft()
        ring.written(count)
        if count < len(data):
            self._waiting.appendleft((data[count:], ring))


def _whole_lines(data: memoryview) -> int:
    """How much of `data` to write at once: whole lines where there are any, so that what others write comes between lines."""
    if len(data) <= PIECE_BYTES:
        return len(data)
    return bytes(data[:PIECE_BYTES]).rfind(b"\n") + 1 or PIECE_BYTES


class Relay:
    """The pipes, the console and the agent's socket; run() carries until all have ended."""

    def __init__(self, control: socket.socket, console: int) -> None:
        """control: its end ends nothing but the orders. console: a descriptor."""
        self._control: socket.socket | None = control
        self._console_fd = console
        self._console = Console(console)
        self._sources: dict[int, tuple[Ring, bool]] = {}  # by descriptor: its ring, and whether it goes to the console
        self._flushes: deque[tuple[bytes, int]] = deque()  # number, and the console's bytes_out at which it is answered

    def run(self) -> None:
        while self._control is not None or self._sources or self._console.waiting:
            ready = self._wait()
            self._console.write()
            for descriptor in [descriptor for descriptor in self._sources if descriptor in ready]:
                if self._console.waiting:
                    break
                self._sources[descriptor] = self._sources.pop(descriptor)  # the others have their turn before it comes again
                self._take(descriptor, heard=True)
                self._console.write()
            if self._control is not None and self._control.fileno() in ready:
                self._obey(self._control)
            self._answer()

    def _wait(self) -> "set[int]":
        poll = select.poll()
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        if self._console.waiting:
            poll.register(self._console_fd, select.POLLOUT)
        else:
            for descriptor in self._sources:
                poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll()}

    def _take(self, descriptor: int, heard: bool, forget: bool = False) -> None:
        """Take what is in the pipe.

        heard: poll tells of it; without bytes that is the end, and not a pipe that nobody has opened yet.
        forget: let go of such a pipe too.
        """
        ring, shown = self._sources[descriptor]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            ring.connect()
            return
        if data or heard:
            ring.connect()
        if data:
            ring.append(data)
            if shown:
                self._console.put(data, ring)
        elif heard or forget:
            self._let_go(descriptor)

    def _let_go(self, descriptor: int) -> None:
        del self._sources[descriptor]
        os.close(descriptor)

    def _obey(self, control: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 256, 2)
        except OSError:
            message, descriptors = b"", []
        order, _, argument = message.partition(b" ")
        if order == b"source" and len(descriptors) == 2:
            pipe, ring_fd = descriptors
            ring = Ring(ring_fd)
            os.close(ring_fd)
            self._sources[pipe] = ring, argument == b"1"
            if argument == b"1" and (left := ring.unwritten()):  # by a relay that was killed
                self._console.put(left, ring)
        elif order == b"forget":
            self._take_all(forget=True)
        elif order == b"flush":
            self._take_all()
            self._flushes.append((argument, self._console.bytes_in))
            self._console.write()
        elif not message:
            self._take_all(forget=True)
            control.close()
            self._control = None

    def _take_all(self, forget: bool = False) -> None:
        """Take what is in the pipes now, however little the console takes: two pipes' worth at most, for a writer may go on."""
        for _ in range(2):
            for descriptor in list(self._sources):
                self._take(descriptor, _has_news(descriptor), forget)

    def _answer(self) -> None:
        while self._flushes and self._flushes[0][1] <= self._console.bytes_out:
            number, _ = self._flushes.popleft()
            if self._control is not None:
                try:
                    self._control.send(b"%s %d" % (number, len(self._sources)), socket.MSG_DONTWAIT)
                except OSError:
                    pass  # it does not listen any more


def _has_news(descriptor: int) -> bool:
    """Bytes, or the end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


if __name__ == "__main__":
    # Everything that was not meant for this process was closed by the agent; the console and the socket are all it has.
    Relay(socket.socket(fileno=0), 2).run()
