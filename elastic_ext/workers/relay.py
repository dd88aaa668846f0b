"""The stderr relay: a process beside the agent that copies the workers' stderr to the console and keeps its last bytes.

The agent starts it as `python -I -S relay.py` (standard library only); see `logs.py` for the agent's side.

Wire protocol
    The relay's fd 2 is the console. Its standard input is one end of a SOCK_SEQPACKET socket pair; the agent has the other end.
    Each packet is one message. From the agent:

        b"source 1" + (pipe, ring)   copy this pipe to the console and keep its last bytes in this ring
        b"source 0" + (pipe, ring)   only keep its last bytes in this ring
        b"forget"                    close the pipes that no worker has opened
        b"flush N"                   empty the pipes, then answer

    From the relay, once the bytes that were in the pipes are in the rings and on the console:

        b"N K"                       the answer to flush N; K pipes are still open

    A ring is shared memory of HEADER_BYTES + RING_BYTES, with the layout that the constants below define. It outlives the relay:
    the next relay gets the same ring and writes to the console what its predecessor had read but not yet written.
    Where the relay cannot run, the agent does the work in a thread.

Guarantees
    - Bytes pass unchanged, in order of arrival, and at once: the relay does not wait for whole lines.
    - A full console blocks the workers, as it would without a relay: the relay reads nothing while bytes wait to be written. Only
      a flush still reads, two reads per pipe at most.
    - A console that is gone costs the output but never the worker: the relay still reads the pipes into the rings.
    - If the relay is killed, only the piece that it was reading at that moment can be lost, and one piece can be written twice.
    - The end of the agent closes the socket. The relay ends when the last writer has ended and everything is written, so
      processes that the agent left running on purpose can still write.
"""

import errno
import mmap
import os
import select
import socket
import stat
from collections import deque

SOURCE, FORGET, FLUSH = b"source", b"forget", b"flush"  # the first word of a message

# The ring: a header of native 64-bit words at the indices below, then the bytes.
HEADER_BYTES = 64
RING_BYTES = 64 * 1024
TOTAL = 0  # bytes appended in total; byte number n is at n % RING_BYTES
CONNECTED = 1  # 1: the pipe has had a writer
WRITTEN = 2  # how many of TOTAL are on the console

READ_BYTES = 64 * 1024  # a whole pipe, so that a read never splits a write of PIPE_BUF or less
PIECE_BYTES = select.PIPE_BUF  # a pipe that polls as writable takes this much without blocking
GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)


class Ring:
    """The last RING_BYTES of a stream, in memory shared by two processes. Only one of them writes."""

    def __init__(self, descriptor: int) -> None:
        """Map the file `descriptor` of HEADER_BYTES + RING_BYTES; the caller may then close it."""
        self._map = mmap.mmap(descriptor, HEADER_BYTES + RING_BYTES)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("Q")
        self._bytes = memoryview(self._map)[HEADER_BYTES:]

    @property
    def connected(self) -> bool:
        """Return whether the pipe has had a writer."""
        return bool(self._words[CONNECTED])

    def mark_connected(self) -> None:
        self._words[CONNECTED] = 1

    def append(self, data: bytes) -> None:
        last = data[-RING_BYTES:]
        at = (self._words[TOTAL] + len(data) - len(last)) % RING_BYTES
        head = last[: RING_BYTES - at]
        self._bytes[at : at + len(head)] = head
        self._bytes[: len(last) - len(head)] = last[len(head) :]
        self._words[TOTAL] += len(data)  # last, so that a reader that sees the count sees the bytes

    def mark_written(self, count: int) -> None:
        self._words[WRITTEN] += count

    def take_unwritten(self) -> bytes:
        """Return the unwritten bytes that the ring still holds; count the lost ones as written."""
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
    """Writes as much to a descriptor as it takes without blocking, and queues the rest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: deque[tuple[memoryview, Ring]] = deque()
        self._gone = False
        self.bytes_in = 0  # queued in total
        self.bytes_out = 0  # written in total, or dropped because no process can read them
        try:
            self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError:
            self._is_file, self._gone = False, True

    @property
    def pending(self) -> int:
        """Return how many bytes wait to be written."""
        return self.bytes_in - self.bytes_out

    def put(self, data: bytes, ring: Ring) -> None:
        """Queue bytes. ring: the ring to mark once they are written."""
        self.bytes_in += len(data)
        self._queue.append((memoryview(data), ring))

    def write(self) -> None:
        while self._queue:
            data, _ = self._queue[0]
            if self._gone:
                self._advance(len(data))
                continue
            if not _is_ready(self._descriptor, select.POLLOUT):
                return
            piece = data if self._is_file else data[: _whole_lines(data)]
            try:
                self._advance(os.write(self._descriptor, piece))
            except BlockingIOError:  # a process that shares the descriptor has made it non-blocking
                return
            except OSError as error:
                self._gone = error.errno in GONE
                self._advance(len(piece))  # there may be room for later pieces, on a full disk for example

    def _advance(self, count: int) -> None:
        self.bytes_out += count
        data, ring = self._queue.popleft()
        ring.mark_written(count)
        if count < len(data):
            self._queue.appendleft((data[count:], ring))


def _whole_lines(data: memoryview) -> int:
    """Return how many bytes to write at once: whole lines if possible, so that other writers' output comes between lines."""
    if len(data) <= PIECE_BYTES:
        return len(data)
    return bytes(data[:PIECE_BYTES]).rfind(b"\n") + 1 or PIECE_BYTES


def _is_ready(descriptor: int, event: int) -> bool:
    """Return whether the descriptor is ready for `event` now, or its stream has ended."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(0))


class Relay:
    """Copies the pipes to the console. run() returns when the agent's socket and all pipes have ended and all is written."""

    def __init__(self, control: socket.socket, console: int) -> None:
        """Start without pipes. control: the socket to the agent; its end only ends the messages. console: a descriptor."""
        self._control: socket.socket | None = control
        self._console_fd = console
        self._console = Console(console)
        self._sources: dict[int, tuple[Ring, bool]] = {}  # by the pipe's descriptor: its ring, and whether it is shown
        self._flushes: deque[tuple[bytes, int]] = deque()  # number, and the console's bytes_out at which to answer it

    def run(self) -> None:
        while self._control is not None or self._sources or self._console.pending:
            ready = self._wait()
            self._console.write()
            for pipe in [pipe for pipe in self._sources if pipe in ready]:
                if self._console.pending:
                    break
                self._sources[pipe] = self._sources.pop(pipe)  # to the end of the queue: every pipe gets its turn
                self._read(pipe, ready=True)
                self._console.write()
            if self._control is not None and self._control.fileno() in ready:
                self._receive(self._control)
            self._answer_flushes()

    def _wait(self) -> "set[int]":
        """Block until there is something to do; return the descriptors that are ready."""
        poll = select.poll()
        if self._control is not None:
            poll.register(self._control, select.POLLIN)
        if self._console.pending:
            poll.register(self._console_fd, select.POLLOUT)
        else:
            for pipe in self._sources:
                poll.register(pipe, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll()}

    def _read(self, pipe: int, ready: bool, forget: bool = False) -> None:
        """Read the pipe once.

        ready: poll reports the pipe. An empty read then means that its last writer has ended; otherwise, perhaps no worker has
        opened the pipe yet. forget: also close a pipe that no worker has opened.
        """
        ring, shown = self._sources[pipe]
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            ring.mark_connected()
            return
        if data or ready:
            ring.mark_connected()
        if data:
            ring.append(data)
            if shown:
                self._console.put(data, ring)
        elif ready or forget:
            del self._sources[pipe]
            os.close(pipe)

    def _receive(self, control: socket.socket) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 256, 2)
        except OSError:
            message, descriptors = b"", []
        kind, _, argument = message.partition(b" ")
        if kind == SOURCE and len(descriptors) == 2:
            self._add(descriptors[0], descriptors[1], shown=argument == b"1")
        elif kind == FORGET:
            self._read_all(forget=True)
        elif kind == FLUSH:
            self._read_all()
            self._flushes.append((argument, self._console.bytes_in))
            self._console.write()
        elif not message:
            self._read_all(forget=True)
            control.close()
            self._control = None

    def _add(self, pipe: int, ring_fd: int, shown: bool) -> None:
        ring = Ring(ring_fd)
        os.close(ring_fd)
        self._sources[pipe] = ring, shown
        if shown and (unwritten := ring.take_unwritten()):  # left behind by a relay that was killed
            self._console.put(unwritten, ring)

    def _read_all(self, forget: bool = False) -> None:
        """Read what is in the pipes now, even if the console is full. Reads each twice: a writer may never stop."""
        for _ in range(2):
            for pipe in list(self._sources):
                self._read(pipe, _is_ready(pipe, select.POLLIN), forget)

    def _answer_flushes(self) -> None:
        while self._flushes and self._flushes[0][1] <= self._console.bytes_out:
            number, _ = self._flushes.popleft()
            if self._control is not None:
                try:
                    self._control.send(b"%s %d" % (number, len(self._sources)), socket.MSG_DONTWAIT)
                except OSError:
                    pass  # the agent no longer listens


if __name__ == "__main__":
    # The agent has closed everything else: this process has only the console and the socket.
    Relay(socket.socket(fileno=0), 2).run()
