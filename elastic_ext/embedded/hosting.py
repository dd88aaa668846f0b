"""The agent's side: who hosts the store of a job on `ext_c10d`, and the store's process beside the agent of that host."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import os
import queue
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from elastic_ext.base import errors, files
from elastic_ext.base.helper_process import Helper, HelperConnection, HelperFailed, Message, text_of
from elastic_ext.base.printable import printable
from elastic_ext.base.settings import Settings, torch_number
from elastic_ext.embedded.plan import StoreEndpoint, StorePlan, socket_of
from elastic_ext.embedded.snapshot import check_ledger_path
from elastic_ext.etcd import EtcdClient
from elastic_ext.failures import slurm
from elastic_ext.own_etcd import certificates
from elastic_ext.rendezvous import address

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

logger = logging.getLogger(__name__)

NAME = "the embedded store"
OWNER = ".owner"  # the lock in an agent's folder, see `files.own`
DEFAULT_PORT = 29400  # torch's for c10d
START_S = 60.0  # for the name of the endpoint to be known, and then for the store to answer: torch's default for `read_timeout`
TAKEN_S = 10.0  # for the store's process to take this agent
LOOK_UP_S = 0.5  # between two look-ups: nothing reports that a name server has learned of a name
ALL_ADDRESSES = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
_ENDPOINT = re.compile(
    r"(?:\[(?P<bracketed>[0-9a-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]+))(?::(?P<port>\d*))?|(?P<bare>[0-9a-f]*:[0-9a-f]*:[0-9a-f:.]*)",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True)
class Hosting:
    """Whether this node hosts the store. reason: for the log."""

    here: bool
    reason: str


def parse(text: str, local_addr: str | None) -> StoreEndpoint:
    """Return the endpoint of a job of several nodes. Raises UsageError if they could not meet there."""
    example = "expected --rdzv-endpoint=HOST[:PORT], the same on all nodes: a name or an address of one of them"
    match = _ENDPOINT.fullmatch(text.strip())
    number = int(match["port"] or DEFAULT_PORT) if match is not None else 0
    if match is None or not 0 < number < 1 << 16:
        raise errors.UsageError(f"--rdzv-endpoint={printable(text)}: {example}, and a port from 1 to 65535")
    host = match["bracketed"] or match["name"] or match["bare"]
    if host in ("0.0.0.0", "::") and not local_addr:
        raise errors.UsageError(f"--rdzv-endpoint={printable(text)} with several nodes: {host} is no address to reach; {example}")
    return StoreEndpoint(host, number)


def own_address(endpoint: StoreEndpoint, local_addr: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the address by which other nodes reach this one, as --local-addr says; None: by the way to the endpoint.

    At the loopback, agents of one machine meet, as they do with torch's c10d.

    Raises UsageError: the job runs on several hosts.
    """
    if local_addr or not address.is_loopback(endpoint.host):
        return local_addr
    if (hosts := slurm.hosts(environ)) > 1:
        raise errors.UsageError(
            f"--rdzv-endpoint={endpoint} in a step on {hosts} hosts: {endpoint.host} is another machine on each of them; name "
            "one of the hosts, the same on all"
        )
    logger.warning("--rdzv-endpoint=%s: only agents on this machine can take part in this job", endpoint)
    return "127.0.0.1"


def decide(endpoint: StoreEndpoint, is_host: bool | None, resolved: Sequence[str], own: Sequence[str]) -> Hosting:
    """Return whether this node hosts the store.

    Never by the host's own name: it may lead nowhere, and another host may have the same one. A name that leads to the loopback
    is this host's: Debian gives 127.0.1.1 to its own name.

    is_host: of --rdzv-conf. resolved: the addresses of the endpoint. own: the addresses of this machine's interfaces.

    Raises UsageError: the endpoint is several machines.
    """
    if is_host is not None:
        return Hosting(is_host, f"is_host={int(is_host)}")
    here = [each for each in resolved if each in own or address.is_loopback(each)]
    elsewhere = [each for each in resolved if each not in here and not each.startswith("fe80:")]
    if here and elsewhere:
        raise errors.UsageError(
            f"--rdzv-endpoint={endpoint}: names this host ({', '.join(here)}) and others ({', '.join(elsewhere)}); "
            "expected a name of one host, or is_host=1 in --rdzv-conf on one node and is_host=0 on the others"
        )
    if here:
        return Hosting(True, f"{endpoint.host} is this host, by its address {here[0]}")
    return Hosting(False, f"{endpoint.host} is another host: {', '.join(resolved) or 'it resolves to no address'}")


def await_addresses(host: str, timeout_s: float) -> list[str]:
    """Return the addresses of a name, which may be about to become known, as that of a pod is; none after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not (found := address.resolved(host)) and time.monotonic() < deadline:
        threading.Event().wait(LOOK_UP_S)
    return found


def torch_settings(conf: Mapping[str, str], settings: Settings) -> Settings:
    """Return the settings with what torch's keys for c10d say, where ours are not given.

    A node is dead after `keep_alive_max_attempt` (torch's default: 3) intervals of `keep_alive_interval` (5 s).

    Raises UsageError: a key has no time.
    """
    usual = Settings()
    changes: dict[str, float | int] = {}
    if ("keep_alive_interval" in conf or "keep_alive_max_attempt" in conf) and settings.lease_ttl == usual.lease_ttl:
        silent_s = torch_number(conf, "keep_alive_interval", 5) * torch_number(conf, "keep_alive_max_attempt", 3)
        changes["lease_ttl"] = max(2, math.ceil(silent_s))
    return dataclasses.replace(settings, **changes)  # type: ignore[arg-type]


def has_secret(settings: Settings) -> bool:
    """Return whether the traffic of the store is encrypted, and clients need the job's secret."""
    return settings.job_secret is not None or settings.job_secret_file is not None


@contextmanager
def store_visitor(run_id: str, settings: Settings) -> Iterator[Settings]:
    """Give the settings for a client of a job's store that hosts nothing. Raises UsageError: the secret cannot be used."""
    with tempfile.TemporaryDirectory() as folder:
        key = _secret(settings, Path(folder))
        yield _for_client(settings, certificates.write(key, run_id, ("visitor",), Path(folder)))


def _secret(settings: Settings, folder: Path) -> bytes:
    return certificates.job_secret(settings.job_secret, settings.job_secret_file, False, folder)


def _for_client(settings: Settings, found: certificates.CertificateFiles | None) -> Settings:
    """Return the settings with the certificates of the store, and nothing that is meant for etcd's own servers."""
    ca, cert, key = (found.ca, found.cert, found.key) if found is not None else (None, None, None)
    return dataclasses.replace(settings, etcd_ca=ca, etcd_cert=cert, etcd_key=key, etcd_user=None, etcd_password=None)


def _flag(params: RendezvousParameters, key: str) -> bool | None:
    try:
        return cast("bool | None", params.get_as_bool(key))
    except ValueError as error:
        raise errors.UsageError(f"--rdzv-conf={key}={printable(str(params.config[key]))}: expected 1 or 0") from error


class _Folder:
    """A private folder for this agent's certificates, locked while the agent lives. It outlives an agent that is killed, whose
    reaper needs the files to give its lease back; the next agent of this user removes it.
    """

    def __init__(self) -> None:
        beginning = f"elastic_ext_store_{os.geteuid()}_"
        files.remove_orphans(f"{tempfile.gettempdir()}/{beginning}*", OWNER, lambda folder: None)
        self.path = Path(tempfile.mkdtemp(prefix=beginning))
        self._lock: int | None = files.own(str(self.path), OWNER)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class EmbeddedStore:
    """This agent's part in the store of its job: its process if this node hosts it, and the certificates if there is a secret."""

    def __init__(self, params: RendezvousParameters, settings: Settings, environ: Mapping[str, str]) -> None:
        """Start the store if this node hosts it. Raises UsageError, HelperFailed."""
        if params.get("store_type", "tcp").strip().lower() != "tcp":
            raise errors.UsageError("--rdzv-conf=store_type: ext_c10d has one kind of store; expected tcp, or nothing")
        self._params, self._settings = copy.copy(params), torch_settings(params.config, settings)
        self.endpoint = parse(address.endpoint_of(params.endpoint, params.max_nodes, environ), params.local_addr)
        self._params.local_addr = own_address(self.endpoint, params.local_addr, environ)
        self._wait_s = torch_number(params.config, "read_timeout", START_S)
        self._folder: _Folder | None = None
        self._files: certificates.CertificateFiles | None = None
        self._connection: HelperConnection | None = None
        self._answer: queue.SimpleQueue[str] = queue.SimpleQueue()  # of the store's process: "", or what is wrong
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        if self._params.local_addr:  # before anything is started
            address.check_own(self._params.local_addr, self._params.local_addr)
        own = [each.address for each in address.addresses()]
        key = b""
        if has_secret(self._settings):
            self._folder = _Folder()
            key = _secret(self._settings, self._folder.path)
            names = sorted({*own, self.endpoint.host, "localhost"})
            self._files = certificates.write(key, self._params.run_id, names, self._folder.path)
        self._job = certificates.name_of(key, self._params.run_id)
        is_host = _flag(self._params, "is_host")
        resolved = await_addresses(self.endpoint.host, self._wait_s) if is_host is None else []
        self.hosting = decide(self.endpoint, is_host, resolved, own)
        if self.hosting.here:
            try:
                self._host()
            except HelperFailed as error:
                if is_host is not None:
                    raise
                # A proxy, or a port that is forwarded: the store is behind it, as torch assumes, too.
                self.hosting = Hosting(False, f"{self.hosting.reason}, but {error}")
        where = "here" if self.hosting.here else "elsewhere"
        logger.info("the job's store is at %s, %s: %s", self.endpoint, where, self.hosting.reason)

    def _host(self) -> None:
        ledger = self._settings.ledger_file or ""
        if ledger:
            check_ledger_path(ledger)
            ledger = os.path.abspath(ledger)
        host = ALL_ADDRESSES
        if address.is_loopback(self.endpoint.host) and address.is_loopback(self._params.local_addr or ""):
            host = "127.0.0.1" if self.endpoint.host.lower() == "localhost" else self.endpoint.host
        plan = StorePlan(host, self.endpoint.port, job=self._job, run_id=self._params.run_id, ledger_file=ledger)
        if self._files is not None:
            ca, cert, key = (Path(path).read_text() for path in (self._files.ca, self._files.cert, self._files.key))
            plan = dataclasses.replace(plan, ca=ca, cert=cert, key=key)
        helper = Helper(NAME, "elastic_ext.embedded.process", socket_of(plan.port), plan.dump(), job=plan.job)
        self._connection = HelperConnection(helper, self._take)
        try:
            failed = self._answer.get(timeout=TAKEN_S)
        except queue.Empty:
            failed = f"{NAME} on this host has not answered for {TAKEN_S:g} s"
        if failed:
            raise HelperFailed(failed)

    def _take(self, message: Message) -> None:
        say, text = text_of(message, "say"), text_of(message, "text")
        if say in ("taken", "failed"):
            self._answer.put(text)
        if say in ("warning", "failed"):
            logger.warning("%s", text)

    @property
    def hosted_here(self) -> bool:
        return self.hosting.here

    def access(self) -> tuple[RendezvousParameters, Settings]:
        """Return the parameters and settings of a rendezvous through this store."""
        params = copy.copy(self._params)
        params.endpoint = str(self.endpoint)
        return params, _for_client(self._settings, self._files)

    def trouble(self, seen: str) -> str:
        """Return the message for a store that does not answer. seen: what its client has seen."""
        return (
            f"the job's store at {self.endpoint} does not answer ({self.hosting.reason}): {seen}; expected an agent of this job "
            "on that host, the same job_secret on all nodes or none, and the port open between the hosts; "
            "--rdzv-conf=is_host=1 has a node host the store"
        )

    def follow(self, client: EtcdClient) -> None:
        """Have this client say whose store it is. It stays where it is."""
        where = "this" if self.hosted_here else "that"
        client.helped_by(f"the job's store is at {self.endpoint}; its agents on {where} host start it again")

    def close(self) -> None:
        """Leave. If the job is over, return when its store has ended. A second call does nothing."""
        try:
            if self._connection is not None:
                self._connection.close()
        finally:
            if self._folder is not None:
                self._folder.remove()
