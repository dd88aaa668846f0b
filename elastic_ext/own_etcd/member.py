"""One running member of the job's etcd, a child of the keeper that dies with it; and its start, its end and what follows from
an end that no one asked for. For the keeper's one thread.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import logging
import os
import shutil
import signal
import socket
import subprocess
from enum import Enum
from pathlib import Path

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.tls import trusting
from elastic_ext.own_etcd import folder as folders
from elastic_ext.own_etcd.certificates import CertificateFiles
from elastic_ext.own_etcd.cluster import Call
from elastic_ext.own_etcd.endpoint import url
from elastic_ext.own_etcd.job import KeeperJob, Program, Version

logger = logging.getLogger(__name__)

CORRUPT_CHECK_TIME = "5m"
# etcd's defaults: training keeps the hosts busy, and a leader that is only late should keep its office. A member without peers
# sends no heartbeats; it only waits before it elects itself (0.1 s to start instead of 0.5 s, measured).
HEARTBEAT_MS, ELECTION_MS = 100, 1000
ALONE_HEARTBEAT_MS, ALONE_ELECTION_MS = 20, 100
END_S = 2.0  # after SIGKILL
LOG_LINES, LOG_BYTES = 5, 4096  # of its log, in our error
REMOVED = "exit code 0;"  # how `log_end` begins for a member that the others removed; a signal or an error has another code
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None, use_errno=True)


def _version_options(version: Version) -> list[str]:
    """Corruption checks; and a host with several addresses may come from another than its certificate names: its key will do."""
    if version >= (3, 6, 0):
        gate = "--feature-gates=InitialCorruptCheck=true"
        return [gate, f"--corrupt-check-time={CORRUPT_CHECK_TIME}", "--peer-skip-client-san-verification"]
    checks = ["--experimental-initial-corrupt-check", f"--experimental-corrupt-check-time={CORRUPT_CHECK_TIME}"]
    return [*checks, *(["--experimental-peer-skip-client-san-verification"] if version >= (3, 5, 0) else [])]


class RunningMember:
    """A member that has been started. `pidfd` is readable once it has ended; `ready` once it serves: then call `note_ready`."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        """Start it. folder: for its log and the socket by which it reports that it is ready. Raises OSError."""
        self._log = folder / "log"
        notify = folder / "notify"
        notify.unlink(missing_ok=True)
        self.ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ready.bind(str(notify))
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
        keeper = os.getpid()
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                arguments,
                env={**environment, "NOTIFY_SOCKET": str(notify), "GOMAXPROCS": "2"},  # it shares the host with the training
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _die_with(keeper),  # the keeper has one thread as it starts the first
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.served = False

    def note_ready(self) -> None:
        """Note that it serves: there is a leader."""
        self.ready.recv(100)
        self.served = True

    def end(self) -> None:
        """Kill it. Its data is consistent whenever it is killed; an orderly end would first hand over the lead."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S)
        os.close(self.pidfd)
        self.ready.close()

    def log_end(self) -> str:
        """Return how it ended, and the last lines of its log."""
        code = self.process.poll()
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return f"exit code {code}; the end of {self._log}: {' | '.join(lines[-LOG_LINES:])}"


def _die_with(keeper: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)


# Whether the others already run: a member that serves answers a handshake in milliseconds. All hosts begin at the same time, so
# usually none is there yet; this is then the price. So for the handshake: a member listens from its start on, but answers
# only once there is a leader, which may need this very member.
PROBE_S = 0.3


class MemberFailed(ElasticExtError):
    """The member could not be started, or has ended unasked."""


class MemberState(Enum):
    """What this host has of a member."""

    NONE = "none"
    STARTING = "starting"
    SERVES = "serves"


class MemberRunner:
    """At most one member."""

    def __init__(self, job: KeeperJob, files: CertificateFiles) -> None:
        self.state = MemberState.NONE  # of it
        self.running: RunningMember | None = None  # it, if it has been started
        # this host can run one: there is a program, and a member that was called here has not failed to serve
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
        self.forget_data()
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
        try:
            self._data.mkdir(mode=0o700, exist_ok=True)
            self.running = RunningMember(self._command(job.program, name, initial_cluster, existing), job.folder)
        except OSError as error:
            raise MemberFailed(f"etcd cannot be started: {error}") from error
        self.state = MemberState.STARTING

    def _command(self, program: Program, name: str, initial_cluster: str, existing: bool) -> list[str]:
        """Return etcd's command line. Data that is there wins.

        name: of the member, unique in the cluster for all time. existing: the cluster exists, and this member was added to it.
        """
        plan, own, files = self._job.plan, self._job.own, self._files
        everywhere = "::" if os.path.exists("/proc/net/if_inet6") else "0.0.0.0"
        listen = own.address or ("127.0.0.1" if plan.loopback else everywhere)
        alone = "," not in initial_cluster
        times = (ALONE_HEARTBEAT_MS, ALONE_ELECTION_MS) if alone else (HEARTBEAT_MS, ELECTION_MS)
        return [
            *(program.path, "--name", name, "--data-dir", str(self._data)),
            *("--listen-client-urls", url(listen, plan.client_port), "--advertise-client-urls", self.client_url),
            *("--listen-peer-urls", url(listen, plan.peer_port), "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", initial_cluster, "--initial-cluster-state", "existing" if existing else "new"),
            # Of the run: members of an earlier run of the job, on the same hosts, are another cluster's.
            *("--initial-cluster-token", folders.run_of(self._job.folder)),
            *("--cert-file", files.cert, "--key-file", files.key, "--client-cert-auth", "--trusted-ca-file", files.ca),
            *("--peer-cert-file", files.cert, "--peer-key-file", files.key, "--peer-client-cert-auth"),
            *("--peer-trusted-ca-file", files.ca),
            *(f"--heartbeat-interval={times[0]}", f"--election-timeout={times[1]}"),
            *("--logger=zap", "--log-outputs=stderr", "--log-level=warn", "--auto-compaction-mode=periodic"),
            *("--auto-compaction-retention=1h", *_version_options(program.version)),
        ]

    def note_ready(self) -> None:
        """Take its word that it serves."""
        assert self.running is not None
        self.running.note_ready()
        self.state, self.able = MemberState.SERVES, True

    def take_end(self) -> str:
        """Clean up after a member that has ended unasked; return how it ended."""
        assert self.running is not None
        words = self.running.log_end()
        self.stop()
        return words

    def stop(self) -> None:
        """Kill the member, if there is one."""
        if self.running is not None:
            self.running.end()
        self.running, self.state = None, MemberState.NONE

    def forget_data(self) -> None:
        """Remove the member's data, before it joins as a new one."""
        shutil.rmtree(self._data, ignore_errors=True)

    def others_serve(self) -> bool:
        """Return whether another of the first members serves already."""
        others = [host for host in self._job.plan.hosts if host != self._job.own.name]
        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
            return any(list(pool.map(self._serves, others)))

    def _serves(self, host: str) -> bool:
        context = trusting(self._files.ca)
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
