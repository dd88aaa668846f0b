"""A TCP proxy that a test puts between client and server: it passes, is slow, holds back, goes deaf, or is not there."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

from tests.ports import free_port


class Proxy:
    """Listens on a port of its own, the same over `stop` and `start`."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self._target_port = target_port
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host = host
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._delay_s = 0.0
        self._deaf = self._resets = False
        self._stopped = threading.Event()
        self.accepted = 0  # connections so far
        self._held: Callable[[int], bool] = lambda number: False
        self._released = threading.Condition()
        self.port = free_port()
        self.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def start(self) -> None:
        self._stopped.clear()
        self._deaf = False
        self._listener = socket.create_server((self._host, self.port), family=self._family)
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Close all connections and refuse new ones."""
        self._stopped.set()
        self.release()
        assert self._listener is not None
        self._close(self._listener)
        with self._lock:
            sockets, self._sockets = self._sockets, []
            threads, self._threads = self._threads, []
        for each in sockets:
            self._close(each)
        for thread in threads:
            thread.join()

    def refuse(self) -> None:
        """Refuse new connections until `start`; those there are go on."""
        assert self._listener is not None
        self._close(self._listener)

    def reset(self) -> None:
        """Like `stop`, but each connection ends as something on the way ends it, not as the other side does."""
        self._resets = True
        with self._lock:
            for each in self._sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stop()
        self._resets = False

    def delay(self, seconds: float) -> None:
        """Hold back each piece of data, in both directions, for so long."""
        self._delay_s = seconds

    def hold(self, but: int, new: bool) -> None:
        """Hold back all data until `release`: of the connections there are, but for so many first ones, and of `new` ones."""
        there = range(but, self.accepted)
        with self._released:
            self._held = lambda number: number in there or (new and number >= there.stop)
            self._released.notify_all()

    def release(self) -> None:
        with self._released:
            self._held = lambda number: False
            self._released.notify_all()

    def deaf(self) -> None:
        """Accept and swallow all, in both directions; what was swallowed is gone, so only `stop` and `start` end it."""
        self._deaf = True

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _close(self, each: socket.socket) -> None:
        try:
            # Wakes the thread that is blocked in it, which close() does not. After SHUT_RDWR there would be nothing to reset.
            each.shutdown(socket.SHUT_RD if self._resets else socket.SHUT_RDWR)
        except OSError:
            pass
        each.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target_port))
            except ConnectionRefusedError:
                self._close(near)
                continue
            except OSError:
                return
            with self._lock:
                self._sockets += [near, far]
            number = self.accepted
            self.accepted += 1  # before anything passes: who has an answer is among those that `hold` holds
            self._spawn(self._pump, near, far, number)
            self._spawn(self._pump, far, near, number)

    def _pump(self, source: socket.socket, sink: socket.socket, number: int) -> None:
        try:
            while data := source.recv(65536):
                if self._delay_s:
                    self._stopped.wait(self._delay_s)
                with self._released:
                    self._released.wait_for(lambda: not self._held(number))
                if not self._deaf:
                    sink.sendall(data)
        except OSError:
            pass
        self._close(source)
        self._close(sink)
