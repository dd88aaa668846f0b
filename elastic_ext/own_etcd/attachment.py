"""An agent's place with the keeper of its host. Beside what every helper says (`base.helper_process`), a keeper says:

keeper   {"say": "ready", "endpoints": ..., "ca": ..., "cert": ..., "key": ...}  again after each change of the members
keeper   {"say": "silent", "text": ...}                 the hosts for which all wait
"""

import logging
import os
import threading
from dataclasses import dataclass

from elastic_ext.base.helper_process import Helper, HelperConnection, HelperFailed, Message, text_of
from elastic_ext.etcd import EtcdClient, EtcdError
from elastic_ext.own_etcd import folder
from elastic_ext.own_etcd.certificates import CertificateFiles
from elastic_ext.own_etcd.job import KeeperJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """What a client needs. endpoints: as for `--rdzv-endpoint`."""

    endpoints: str
    files: CertificateFiles


class Attachment:
    """One agent's connection to the keeper. `await_access`, then `follow` with the client, and at the end `close`."""

    def __init__(self, job: KeeperJob) -> None:
        """Come in, and start a keeper if there is none. Raises HelperFailed: none can be started."""
        self._job = job
        self._changed = threading.Condition()
        self._access: Access | None = None
        self._silent = self._failed = ""
        self._client: EtcdClient | None = None
        self._unsaid: list[tuple[int, str]] | None = []  # for the log, which is not set up before somebody waits
        self._held: int | None = None  # see `folder.hold`
        folder.make(job.folder)
        keeper = Helper(
            "the keeper of the job's etcd",
            "elastic_ext.own_etcd.keeper",
            str(job.folder / "socket"),
            job.dump(),
            f"{job.folder}/log",
        )
        self._connection = HelperConnection(keeper, self._take, lambda: self._hold(folder.hold(job.folder)))

    def await_access(self, timeout_s: float) -> Access:
        """Return what a client needs, once etcd serves.

        Raises HelperFailed: it does not within timeout_s, or cannot; the message names the hosts that do not answer.
        """
        with self._changed:
            for level, text in self._unsaid or ():
                logger.log(level, "%s", text)
            self._unsaid = None
            self._changed.wait_for(lambda: self._access is not None or self._failed, timeout_s)
            if self._access is not None:
                return self._access
            if self._failed:
                raise HelperFailed(self._failed)
            who = self._silent or "its members"
            raise HelperFailed(
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

    @property
    def hosted_here(self) -> bool:
        """Return False: a lost member is replaced."""
        return False

    def follow(self, client: EtcdClient) -> None:
        """Keep this client's endpoints up to date."""
        with self._changed:
            self._client = client
            if self._access is not None:
                client.follow(self._access.endpoints)

    def close(self) -> None:
        """Leave. If the job is over, return when the keeper has left nothing behind. A second call does nothing."""
        with self._changed:
            self._client = None
        self._connection.close()
        self._hold(None)

    def _hold(self, descriptor: int | None) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held = descriptor

    def _take(self, message: Message) -> None:
        say, text = text_of(message, "say"), text_of(message, "text")
        with self._changed:
            if say in ("info", "warning"):
                self._log(logging.WARNING if say == "warning" else logging.INFO, text)
            elif say == "ready":
                files = CertificateFiles(text_of(message, "ca"), text_of(message, "cert"), text_of(message, "key"))
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
