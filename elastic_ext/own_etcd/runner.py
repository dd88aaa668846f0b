"""The member that a keeper runs: its start, its end, and what to do when it ends by itself. For the keeper's one thread."""

from __future__ import annotations

import concurrent.futures
import logging
import socket
import ssl
from enum import Enum

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.own_etcd import folder as folders
from elastic_ext.own_etcd import member
from elastic_ext.own_etcd.certificates import Files
from elastic_ext.own_etcd.cluster import Call
from elastic_ext.own_etcd.job import KeeperJob
from elastic_ext.own_etcd.member import Member, Seat

logger = logging.getLogger(__name__)

# Whether the others already run: a member that serves answers a handshake in milliseconds. All hosts begin at the same time, so
# usually nobody is there yet; this is then the price. So for the handshake: a member listens from its start on, but answers
# only once there is a leader, which may need this very member.
PROBE_S = 0.3


class MemberFailed(ElasticExtError):
    """The member could not be started, or has ended by itself."""


class State(Enum):
    """What this host has of a member."""

    NONE = "none"
    STARTING = "starting"
    SERVES = "serves"


class MemberRunner:
    """At most one member.

    Attributes:
        state: of it.
        running: it, if it has been started.
        able: this host can run one: there is a program, and a member that was called here has not failed to serve.
    """

    def __init__(self, job: KeeperJob, files: Files) -> None:
        self.state = State.NONE
        self.running: Member | None = None
        self.able = job.program is not None
        self._job, self._files = job, files
        self._data = folders.data_of(job.folder)
        self._last: tuple[str, str, bool] | None = None  # name, initial cluster, whether that exists

    @property
    def has_data(self) -> bool:
        return (self._data / "member").exists()

    @property
    def client_url(self) -> str:
        return self._job.plan.client_url(self._job.own.name)

    @property
    def peer_url(self) -> str:
        return self._job.plan.peer_url(self._job.own.name)

    def start_new(self) -> None:
        """Start one of the members that the job begins with; or go on with the data that is there. Raises MemberFailed."""
        self._start(self._job.own.name, self._job.plan.initial_cluster, False)

    def join(self, call: Call) -> None:
        """Start a member that has been added to the cluster. Raises MemberFailed."""
        member.forget_data(self._data)
        self.able = False  # until it serves
        self._start(call.name, call.cluster, True)

    def start_again(self) -> None:
        """Start the member that has ended, with its data. Raises MemberFailed."""
        assert self._last is not None
        self._start(*self._last)

    def _start(self, name: str, initial_cluster: str, existing: bool) -> None:
        job = self._job
        if job.program is None:
            raise MemberFailed("this host has no program etcd: `pip install 'elastic_ext[etcd]'`, or put etcd on PATH")
        self._last = (name, initial_cluster, existing)
        listen = job.own.address or (job.plan.loopback and "127.0.0.1") or ""
        seat = Seat(name, job.own.name, listen, job.plan.client_port, job.plan.peer_port, self._data, folders.run_of(job.folder))
        try:
            self._data.mkdir(mode=0o700, exist_ok=True)
            self.running = Member(member.command(job.program, seat, self._files, initial_cluster, existing), job.folder)
        except OSError as error:
            raise MemberFailed(f"etcd cannot be started: {error}") from error
        self.state = State.STARTING

    def note_ready(self) -> None:
        """Take its word that it serves."""
        assert self.running is not None
        self.running.note_ready()
        self.state, self.able = State.SERVES, True

    def take_end(self) -> str:
        """Clean up after a member that has ended by itself; return its last words."""
        assert self.running is not None
        words = self.running.last_words()
        self.stop()
        return words

    def stop(self) -> None:
        """Kill the member, if there is one."""
        if self.running is not None:
            self.running.end()
        self.running, self.state = None, State.NONE

    def forget_data(self) -> None:
        member.forget_data(self._data)

    def others_serve(self) -> bool:
        """Return whether another of the first members serves already."""
        others = [host for host in self._job.plan.hosts if host != self._job.own.name]
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
            return any(list(pool.map(self._serves, others)))

    def _serves(self, host: str) -> bool:
        context = ssl.create_default_context(cafile=self._files.ca)
        context.load_cert_chain(self._files.cert, self._files.key)
        try:
            with socket.create_connection((host, self._job.plan.client_port), PROBE_S) as plain:
                plain.settimeout(PROBE_S)
                with context.wrap_socket(plain, server_hostname=host):
                    return True
        except OSError:
            return False

    def silent_hosts(self) -> list[str]:
        """Return those of the first members whose peer port takes no connection; each is asked for PROBE_S."""
        silent = []
        for host in self._job.plan.hosts:
            try:
                socket.create_connection((host, self._job.plan.peer_port), PROBE_S).close()
            except OSError as error:
                silent.append(f"{host} ({error.strerror or error})")
        return silent
