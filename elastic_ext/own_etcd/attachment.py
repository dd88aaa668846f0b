"""An agent's place with the keeper of its host: it starts the keeper if there is none, and again if it is killed."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import threading
from dataclasses import dataclass

from elastic_ext.base import isolated
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.etcd import EtcdClient, EtcdError
from elastic_ext.own_etcd import folder, locks, messages
from elastic_ext.own_etcd.certificates import Files
from elastic_ext.own_etcd.job import KeeperJob
from elastic_ext.own_etcd.messages import BUSY, UP, Lines, Message, text_of

logger = logging.getLogger(__name__)

KEEPER = "elastic_ext.own_etcd.keeper"
STARTS = 5  # of keepers by one agent: one that is always killed is not started for ever
END_S = 12.0  # for the keeper to leave nothing behind: milliseconds, or the lease of a host that was lost just before the end
ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LANG", "PYTHONHOME")  # nothing by which a reaper would find it


class NoEtcd(ElasticExtError):
    """The job's etcd does not come up: members do not answer, or this host's own cannot run."""


@dataclass(frozen=True)
class Access:
    """What a client needs. endpoints: as for `--rdzv-endpoint`."""

    endpoints: str
    files: Files


class Attachment:
    """One agent's connection to the keeper. `await_access`, then `follow` with the client, and at the end `close`."""

    def __init__(self, job: KeeperJob) -> None:
        """Come in, and start a keeper if there is none. Raises NoEtcd: none can be started."""
        self._job = job
        self._changed = threading.Condition()
        self._access: Access | None = None
        self._silent = self._failed = ""
        self._client: EtcdClient | None = None
        self._leaving = False
        self._unsaid: list[tuple[int, str]] | None = []  # for the log, which is not set up before somebody waits
        self._keepers: list[subprocess.Popen[bytes]] = []  # those that this agent has started
        self._held: int | None = None  # see `locks.hold`
        self._connection = self._enter()
        self._thread = threading.Thread(target=self._run, name="elastic_ext own etcd", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def await_access(self, timeout_s: float) -> Access:
        """Return what a client needs, once etcd serves.

        Raises:
            NoEtcd: it does not within timeout_s, or cannot; the message names the hosts that do not answer.
        """
        with self._changed:
            for level, text in self._unsaid or ():
                logger.log(level, "%s", text)
            self._unsaid = None
            self._changed.wait_for(lambda: self._access is not None or self._failed, timeout_s)
            if self._access is not None:
                return self._access
            if self._failed:
                raise NoEtcd(self._failed)
            who = self._silent or "its members"
            raise NoEtcd(
                f"the job's etcd does not serve after {timeout_s:g} s (join_timeout): no answer from {who}; expected an agent of "
                f"this job on each of {', '.join(self._job.plan.hosts)}, and ports {self._job.plan.client_port} and "
                f"{self._job.plan.peer_port} open between the hosts"
            )

    @property
    def own_address(self) -> str | None:
        """The address by which the other hosts of the job reach this one; None: what the route to them says."""
        plan, own = self._job.plan, self._job.own
        if plan.loopback:
            return "127.0.0.1"
        return own.address or (own.name if own.name in plan.hosts + plan.others else None)

    def follow(self, client: EtcdClient) -> None:
        """Keep this client's endpoints up to date."""
        with self._changed:
            self._client = client
            if self._access is not None:
                client.follow(self._access.endpoints)

    def close(self) -> None:
        """Leave. If the job is over, return when the keeper has left nothing behind. A second call does nothing."""
        with self._changed:
            if self._leaving:
                return
            self._leaving, self._client = True, None
        atexit.unregister(self.close)
        messages.send(self._connection, {"say": "leaves"})
        self._thread.join(END_S)
        self._connection.close()
        self._hold(None)
        self._reap()

    # Entering: on the thread of the constructor, then on our own.

    def _enter(self) -> socket.socket:
        """Return a connection to the keeper. Raises NoEtcd."""
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._job.folder / "socket"))
            except OSError:
                connection.close()
                self._start()
            else:
                messages.send(connection, {"say": "hello", "version": messages.VERSION})
                self._hold(locks.hold(self._job.folder))
                return connection

    def _hold(self, descriptor: int | None) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = descriptor

    def _start(self) -> None:
        """Start a keeper, and return when it, or another one, listens. Raises NoEtcd."""
        if len(self._keepers) >= STARTS:
            raise NoEtcd(f"the keeper of the job's etcd on this host was started {STARTS} times and is gone again")
        folder.make(self._job.folder)
        keeper = subprocess.Popen(
            isolated.command(KEEPER),
            cwd="/",
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # what ends the agent's process group does not end it
        )
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        with keeper.stdin as stdin, keeper.stdout as stdout:
            try:
                stdin.write(self._job.dump())
                stdin.close()
            except BrokenPipeError:
                pass
            word = stdout.readline()
        self._keepers.append(keeper)
        if word == BUSY:
            keeper.wait()
        elif word != UP:
            raise NoEtcd(
                f"the keeper of the job's etcd cannot be started: exit code {keeper.wait()}; its log was {self._job.folder}/log"
            )

    def _run(self) -> None:
        """Take what the keeper says; come in again if it is gone."""
        while True:
            lines = Lines(self._connection)
            while not lines.ended:
                for message in lines.read():
                    self._take(message)
            with self._changed:
                if self._leaving or self._failed:
                    return
            logger.warning("the keeper of the job's etcd on this host is gone; starting another")
            self._connection.close()
            try:
                self._connection = self._enter()
            except (ElasticExtError, OSError) as error:
                logger.error("%s", error)
                self._take({"say": "failed", "text": str(error)})
                return
            self._reap()

    def _reap(self) -> None:
        """Let no keeper that has ended stay as a zombie for as long as this agent runs."""
        for keeper in self._keepers:
            keeper.poll()

    def _take(self, message: Message) -> None:
        say, text = text_of(message, "say"), text_of(message, "text")
        with self._changed:
            if say in ("info", "warning"):
                self._log(logging.WARNING if say == "warning" else logging.INFO, text)
            elif say == "ready":
                files = Files(text_of(message, "ca"), text_of(message, "cert"), text_of(message, "key"))
                self._access = Access(text_of(message, "endpoints"), files)
                self._follow(self._access)
            elif say == "silent":
                self._silent = text
            elif say == "failed":
                self._failed = text
                if self._access is not None:
                    logger.error("%s", text)
            self._changed.notify_all()

    def _log(self, level: int, text: str) -> None:
        if self._unsaid is None:
            logger.log(level, "%s", text)
        else:
            self._unsaid.append((level, text))

    def _follow(self, access: Access) -> None:
        if self._client is None:
            return
        try:
            self._client.follow(access.endpoints)
        except EtcdError as error:
            logger.warning("the new members of the job's etcd cannot be used: %s", error)
