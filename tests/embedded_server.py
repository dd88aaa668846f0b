"""The embedded store as a server for tests: its process, as an agent starts it. Agents find it there, and start no other."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

from elastic_ext.base import isolated
from elastic_ext.base.helper_process import UP, VERSION, send
from elastic_ext.embedded.plan import StorePlan, socket_of
from elastic_ext.own_etcd.certificates import CertificateFiles
from tests.etcd_server import ServerProcess
from tests.ports import free_port


@dataclass
class EmbeddedServer(ServerProcess):
    """One store. Its port stays the same over restarts; its data does not."""

    client_port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"  # where it listens
    files: int | None = None  # how many it may open; None: as many as this process
    tls: CertificateFiles | None = None  # with it, clients need a certificate of its CA
    process: subprocess.Popen[bytes] | None = None
    _agent: socket.socket | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def options(self) -> list[str]:
        """Of torchrun, beside the endpoint. All agents are on this machine."""
        return ["--rdzv-backend=ext_c10d"]

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        command = isolated.command("elastic_ext.embedded.process")
        if self.files is not None:
            command = ["sh", "-c", f'ulimit -n {self.files} && exec "$0" "$@"', *command]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.process.stdin as stdin, self.process.stdout as stdout:
            stdin.write(self._plan().dump())
            stdin.close()
            assert stdout.readline() == UP
        self._agent = socket.socket(socket.AF_UNIX)  # without an agent it ends by itself
        self._agent.connect(socket_of(self.client_port).encode())
        send(self._agent, {"say": "hello", "version": VERSION})

    def _plan(self) -> StorePlan:
        plan = StorePlan(self.host, self.client_port)
        if self.tls is None:
            return plan
        ca, cert, key = (Path(path).read_text() for path in (self.tls.ca, self.tls.cert, self.tls.key))
        return replace(plan, ca=ca, cert=cert, key=key)

    def kill(self) -> None:
        if self._agent is not None:
            self._agent.close()
        super().kill()

    def restart(self) -> None:
        self.kill()
        self.start()
