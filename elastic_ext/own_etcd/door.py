"""Where the agents of a host come in to its keeper; see `base.helper_process`. For one thread."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from elastic_ext.base import helper_process
from elastic_ext.base.helper_process import Lines, Message, text_of

BACKLOG = 64
SEND_S = 1.0  # an agent that is stopped does not read; it misses what it could have read


class Door:
    """The listening socket and what has come in.

    Attributes:
        had_agents: there has been one.
        orderly: the last one has left by itself.
    """

    def __init__(self, path: Path) -> None:
        """Listen at this path. It is there only once connections are taken."""
        self.had_agents = self.orderly = False
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        part = path.with_name("socket.part")
        part.unlink(missing_ok=True)
        self._listener.bind(str(part))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        os.rename(part, path)
        self._agents: dict[int, tuple[socket.socket, Lines]] = {}  # by descriptor; those that are in
        self._known: set[int] = set()  # descriptors of those that have said hello
        self._leaving: list[socket.socket] = []
        self._said: list[Message] = []  # what everybody must hear, also who comes later

    @property
    def agents(self) -> int:
        return len(self._agents)

    @property
    def descriptors(self) -> list[int]:
        """What to wait for."""
        return [self._listener.fileno(), *self._agents]

    def serve(self, descriptor: int) -> None:
        """Take what has arrived on one of `descriptors`."""
        if descriptor == self._listener.fileno():
            self.accept()
        elif descriptor in self._agents:
            self._read(descriptor)

    def accept(self) -> None:
        """Take in all who wait outside."""
        try:
            while True:
                self._take_in(self._listener.accept()[0])
        except BlockingIOError:
            return

    def _take_in(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_S)
        self._agents[connection.fileno()] = (connection, Lines(connection))
        for message in self._said:
            helper_process.send(connection, message)

    def _read(self, descriptor: int) -> None:
        connection, lines = self._agents[descriptor]
        received = lines.read()
        said = {text_of(message, "say") for message in received}
        if "hello" in said:
            self.had_agents = True
            self._known.add(descriptor)
        if any(message.get("version", helper_process.VERSION) != helper_process.VERSION for message in received):
            text = "the keeper of the job's etcd on this host is of another version of elastic_ext: use the same one on a host"
            helper_process.send(connection, {"say": "failed", "text": text})
            lines.ended = True
        if "leaves" not in said and not lines.ended:
            return
        del self._agents[descriptor]
        if descriptor in self._known:  # not one that only looked whether somebody listens
            self._known.remove(descriptor)
            self.orderly = "leaves" in said
        if lines.ended:
            connection.close()
        else:
            self._leaving.append(connection)

    def say(self, message: Message) -> None:
        """Tell all agents; and those that come later, but for warnings. What is said again is kept once."""
        if message["say"] != "warning":
            kept = [each for each in self._said if each["say"] == "info" or each["say"] != message["say"]]
            self._said = [*(each for each in kept if each != message), message]
        for connection, _ in self._agents.values():
            helper_process.send(connection, message)

    def stays(self, text: str) -> None:
        """Let those that leave go: this keeper goes on."""
        for connection in self._leaving:
            helper_process.send(connection, {"say": "stays", "text": text})
            connection.close()
        self._leaving.clear()

    def stop_listening(self) -> None:
        """Take in nobody any more. Those that have left wait for the end of this process."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for connection, _ in self._agents.values():
            connection.close()
        self._agents.clear()
