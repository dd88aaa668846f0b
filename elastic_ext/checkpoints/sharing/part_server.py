"""Serves one node's local directory to the other nodes of the round, read-only. `part_requests` has the wire protocol.

Only regular files below the directory are served, and none below `.elastic_ext/` but those of `held/` and `mirrored/`. What a
path leads to counts, not what it looks like: a link may lead to another file of the directory, and nowhere else.

Nobody holds the server up: connections are limited in number and time, and where all are taken, one that has proved nothing yet
makes room for the next.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from elastic_ext.base import helper_process, records, threads
from elastic_ext.base.printable import printable
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.sharing import catalogue
from elastic_ext.checkpoints.sharing.catalogue import Catalogue
from elastic_ext.checkpoints.sharing.part_requests import (
    MAX_LINE,
    MAX_TEXT,
    SCHEMA,
    TO_END,
    Asked,
    PartAnswer,
    PartGreeting,
    PartPlace,
    PartRequest,
    counting_key,
    is_same,
    line,
    new_key,
    proof_of_client,
    proof_of_server,
)
from elastic_ext.checkpoints.storage import LocalStorage

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 128  # at once, each with a thread
REQUEST_S = 10.0  # from connect to the end of the request
STALLED_S = 30.0  # without a byte that the client takes
BACKLOG = 256
CLOSE_S = 5.0  # for the threads to end
SERVED = (f"{MARKERS}/held/", f"{catalogue.MIRRORED}/")  # of what is hidden


class PartServer:
    """Serves from daemon threads until `close`. Clients never raise anything here."""

    def __init__(
        self,
        local: LocalStorage,
        host: str,
        secret: str = "",
        bind: str = "",
        port: int = 0,
        look: Callable[[LocalStorage], Catalogue] = catalogue.catalogue_of,
    ) -> None:
        """
        Args:
            host: name or address by which other nodes reach this one.
            secret: of the job; "": it has none.
            bind: address to listen on; "": on all.
            look: makes the catalogue of a directory.

        Raises OSError: it cannot listen, or no thread can be started.
        """
        self._local, self._key, self._look = local, new_key(), look
        self._counting = counting_key(self._key, secret)
        self._clients: dict[socket.socket, bool] = {}  # oldest first; whether it has proved itself
        self._changed = threading.Condition()  # held for these
        self._looking = threading.Lock()  # held while a catalogue is made
        self._closed = False
        self._socket = _listening(bind, port)
        self.place = PartPlace(host, self._socket.getsockname()[1], self._key)
        thread = threads.started(self._accept, "elastic_ext-parts", logger.warning, "cannot serve saves to other nodes: %s")
        if thread is None:
            self._socket.close()
            raise OSError(errno.EAGAIN, "no thread can be started to serve saves to other nodes")
        self._thread = thread

    def close(self) -> None:
        """Stop, and cut all connections. A second call does nothing."""
        with self._changed:
            self._closed = True
            for client in self._clients:
                _cut(client)
            self._changed.notify_all()
        _cut(self._socket)  # Linux: wakes accept at once
        self._thread.join(CLOSE_S)
        self._socket.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._clients, CLOSE_S)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError as error:
                if error.errno in helper_process.OUT_OF_RESOURCES:
                    logger.warning("no connections of other nodes are taken for %g s: %s", helper_process.ACCEPT_AGAIN_S, error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._closed, helper_process.ACCEPT_AGAIN_S)
                continue
            with self._changed:
                self._make_room()
                self._clients[client] = False
                if self._closed:
                    _cut(client)
            name = "elastic_ext-part"
            if threads.started(lambda each=client: self._serve(each), name, logger.warning, "cannot serve a save: %s") is None:  # type: ignore[misc]
                self._leave(client)

    def _make_room(self) -> None:
        """Wait until there is a place. One that has proved nothing gives up its own."""
        if len(self._clients) >= MAX_CONNECTIONS:
            stranger = next((client for client, proved in self._clients.items() if not proved), None)
            if stranger is not None:
                _cut(stranger)
            self._changed.wait_for(lambda: self._closed or len(self._clients) < MAX_CONNECTIONS)

    def _leave(self, client: socket.socket) -> None:
        with self._changed:
            client.close()
            self._clients.pop(client, None)
            self._changed.notify_all()

    def _serve(self, client: socket.socket) -> None:
        try:
            greeting = PartGreeting(new_key())
            client.settimeout(REQUEST_S)
            client.sendall(line(greeting))
            request = records.read(PartRequest, _line_of(client, time.monotonic() + REQUEST_S), "a request for a part", SCHEMA)
            if not is_same(request.proof, proof_of_client(self._counting, self.place, greeting, request)):
                logger.warning("a stranger asked for a save: it does not know the key, or the job has another secret there")
                return
            with self._changed:
                self._clients[client] = True
            client.settimeout(STALLED_S)
            self._answer(client, greeting, request)
        except (OSError, records.RecordError) as error:
            logger.debug("a connection of another node has ended: %s", error)
        finally:
            self._leave(client)

    def _answer(self, client: socket.socket, greeting: PartGreeting, request: PartRequest) -> None:
        """Raises OSError: the client has gone, or stalls."""

        def send(answer: PartAnswer) -> None:
            proof = proof_of_server(self._counting, self.place, greeting, request, answer)
            client.sendall(line(PartAnswer(answer.size, answer.whole, answer.number, answer.text, proof)))

        try:
            if request.asked is Asked.CATALOGUE:
                with self._looking:
                    data = catalogue.encode(self._look(self._local))
            else:
                file = open_served(self._local.address, request.name)
        except OSError as error:
            send(PartAnswer(number=error.errno or errno.EIO, text=printable(error.strerror or str(error))[:MAX_TEXT]))
            return
        if request.asked is Asked.CATALOGUE:
            send(PartAnswer(len(data), len(data)))
            client.sendall(data)
            return
        with file:
            whole = os.fstat(file.fileno()).st_size
            rest = max(0, whole - request.offset)
            size = rest if request.length == TO_END else min(rest, request.length)
            send(PartAnswer(size, whole))
            if size:
                client.sendfile(file, request.offset, size)


def open_served(directory: str, name: str) -> IO[bytes]:
    """Open a file that may be served. Raises OSError for any other.

    It is looked at before it is opened for reading: to open a device or a pipe may do something.
    """
    root = os.path.realpath(directory)
    handle = os.open(os.path.join(root, name), os.O_PATH | os.O_CLOEXEC)
    try:
        inside = os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), root)
        hidden = inside == MARKERS or (inside.startswith(f"{MARKERS}/") and not inside.startswith(SERVED))
        if inside.startswith("../") or hidden:
            raise PermissionError(errno.EACCES, "it is not below the directory that is served", name)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return open(f"/proc/self/fd/{handle}", "rb", buffering=0)
    finally:
        os.close(handle)


def _line_of(client: socket.socket, deadline: float) -> bytes:
    """Return a line. Raises OSError: it ends, is longer than MAX_LINE, or does not come in time."""
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no request within {REQUEST_S:g} s")
        client.settimeout(left)
        more = client.recv(MAX_LINE)
        data += more
        if not more or len(data) > MAX_LINE:
            raise ConnectionError("it has ended" if not more else f"a line of more than {MAX_LINE} bytes")
    return data


def _listening(bind: str, port: int) -> socket.socket:
    """Return a listening socket; on all addresses, of IPv4 and IPv6, for "". Raises OSError."""
    if not bind and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be turned off
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    family, _, _, _, address = socket.getaddrinfo(bind or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
