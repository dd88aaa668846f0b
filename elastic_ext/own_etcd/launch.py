"""`--rdzv-endpoint=job:`, from the agent's options to an etcd that serves; and the same for `elastic-ext`, which starts none.

An agent attaches to the keeper of its host. Beside what every helper says (`base.helper_process`), a keeper says:

keeper   {"say": "ready", "endpoints": ..., "ca": ..., "cert": ..., "key": ...}  again after each change of the members
keeper   {"say": "silent", "text": ...}                 the hosts for which all wait
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastic_ext.base import settings as settings_module
from elastic_ext.base import waits
from elastic_ext.base.errors import ElasticExtError, UsageError
from elastic_ext.base.helper_process import Helper, HelperConnection, HelperFailed, Message, text_of
from elastic_ext.base.printable import printable
from elastic_ext.base.settings import Settings
from elastic_ext.etcd import EtcdClient, EtcdError
from elastic_ext.failures import slurm
from elastic_ext.own_etcd import certificates, folder, job
from elastic_ext.own_etcd.endpoint import Plan, early_options, is_job, make_plan
from elastic_ext.rendezvous.address import address_towards, chosen
from elastic_ext.rendezvous.keys import checked_given

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """What a client needs. endpoints: as for `--rdzv-endpoint`."""

    endpoints: str
    files: certificates.CertificateFiles


class Attachment:
    """One agent's connection to the keeper. `await_access`, then `follow` with the client, and at the end `close`."""

    def __init__(self, keeper_job: job.KeeperJob) -> None:
        """Connect to the keeper of this host, and start it if it does not run. Raises HelperFailed if it cannot be started."""
        self._job = keeper_job
        self._changed = threading.Condition()
        self._access: Access | None = None
        self._silent = self._failed = ""
        self._client: EtcdClient | None = None
        self._unsaid: list[tuple[int, str]] | None = []  # for the log, which is not set up before somebody waits
        self._held: int | None = None  # see `folder.hold`
        folder.make(keeper_job.folder)
        keeper = Helper(
            "the keeper of the job's etcd",
            "elastic_ext.own_etcd.keeper",
            str(keeper_job.folder / "socket"),
            keeper_job.dump(),
            f"{keeper_job.folder}/log",
        )
        self._connection = HelperConnection(keeper, self._take, lambda: self._hold(folder.hold(keeper_job.folder)))

    def await_access(self, timeout_s: float) -> Access:
        """Return what a client needs, once etcd serves.

        Raises HelperFailed: it does not within timeout_s, or cannot; the message names the hosts that do not answer.
        """
        with self._changed:
            for level, text in self._unsaid or ():
                logger.log(level, "%s", text)
            self._unsaid = None
            now = time.monotonic()
            deadline, wait = now + timeout_s, waits.Waiting("the job's etcd to serve", now)
            while self._access is None and not self._failed and now < deadline:
                wait.say(now, deadline, "this node leaves (join_timeout)")
                self._changed.wait(wait.pause_s(now, deadline))
                now = time.monotonic()
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
                files = certificates.CertificateFiles(text_of(message, "ca"), text_of(message, "cert"), text_of(message, "key"))
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


_begun: dict[tuple[str, str], Attachment] = {}  # by endpoint and run id; see `begin_early`


def begin(endpoint: str, run_id: str, local_addr: str | None, settings: Settings, environ: Mapping[str, str]) -> Attachment:
    """Attach to the keeper of this host, unless that was done early. Args and errors: see `attach`."""
    found = _begun.pop((endpoint, run_id), None)
    while _begun:  # what was begun early was a misunderstanding
        _begun.popitem()[1].close()
    given = local_addr or chosen(settings.address)
    return found or attach(endpoint, checked_given(run_id), given, settings, environ)


def begin_early(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Start the keeper of a command line of torchrun before torch is imported. What is wrong with it is reported later."""
    options = early_options(argv, environ)
    if options is None or not is_job(options.endpoint):
        return
    with suppress(ElasticExtError, OSError):
        known = settings_module.read(options.rdzv_conf, environ)
        _begun[options.endpoint, options.run_id] = begin(options.endpoint, options.run_id, options.local_addr, known, environ)


def attach(endpoint: str, run_id: str, address: str | None, settings: Settings, environ: Mapping[str, str]) -> Attachment:
    """Connect to the keeper of this host, which is started if it does not run. Returns before etcd serves.

    run_id: checked. address: by which the other hosts reach this one, if the user has said so.

    Raises:
        UsageError: bad hosts, no secret, no etcd, or the library `cryptography` is missing.
        HelperFailed: no keeper can be started.
    """
    _refuse_foreign(settings)
    certificates.check_library()
    plan = make_plan(endpoint, run_id, slurm.hostnames(environ))
    own = job.own_host(plan, environ, address or address_towards(plan.hosts[0]))
    place = folder.folder_of(run_id, plan.hosts, own.name, environ)
    program = _program(own.name in plan.hosts, plan, settings, environ)
    ledger_file = _with_directory(settings.ledger_file) if settings.ledger_file else None
    key = certificates.job_secret(settings.job_secret, settings.job_secret_file, plan.loopback, place)
    return Attachment(job.KeeperJob(plan, own, place, key, program, ledger_file))


def _with_directory(ledger_file: str) -> str:
    """Make the directory of `ledger_file`, if it is not there; return the file's full path. Raises UsageError."""
    path = os.path.abspath(ledger_file)
    expected = "expected a file in a directory to write to"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    except OSError as error:
        raise UsageError(f"ledger_file={printable(ledger_file)}: {error.strerror}; {expected}") from error
    if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        why = "this is a directory" if os.path.isdir(path) else "this user may not write there"
        raise UsageError(f"ledger_file={printable(ledger_file)}: {why}; {expected}")
    return path


def outlook(endpoint: str, settings: Settings, environ: Mapping[str, str]) -> tuple[job.Program | None, str]:
    """Return etcd's program, and one line on what `attach` would do here. Starts and makes nothing. Raises UsageError."""
    _refuse_foreign(settings)
    plan = make_plan(endpoint, "?", slurm.hostnames(environ))
    own = job.own_host(plan, environ, address_towards(plan.hosts[0]))
    certificates.check_library()
    if settings.job_secret is None and settings.job_secret_file is None:
        certificates.check_unneeded(plan.loopback)
    first = own.name in plan.hosts
    program = _program(first, plan, settings, environ)
    here = f"this host is {own.name}: {program}" if first else f"this host, {own.name}, has no member at first"
    return program, f"brought by the job, on {', '.join(plan.hosts)}; {here}"


def _refuse_foreign(settings: Settings) -> None:
    for name in ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password"):
        if getattr(settings, name) is not None:
            raise UsageError(f"{name} has no effect with --rdzv-endpoint=job:, whose etcd has its own certificates: remove it")


def _program(first: bool, plan: Plan, settings: Settings, environ: Mapping[str, str]) -> job.Program | None:
    """Return etcd's program; None: this host can get no member later. first: it has one of the first. Raises UsageError."""
    try:
        program = job.find_program(environ)
        job.check_safe(program, plan, settings.unsafe_etcd)
    except UsageError:
        if first:
            raise
        return None  # the job does without a member here, as long as it has enough others
    return program


def with_access(settings: Settings, access: Access) -> Settings:
    return dataclasses.replace(settings, etcd_ca=access.files.ca, etcd_cert=access.files.cert, etcd_key=access.files.key)


@contextmanager
def visitor(endpoint: str, run_id: str, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Give the endpoints and settings for a client that starts nothing, on any host of the job. Raises UsageError."""
    plan = make_plan(endpoint, run_id, slurm.hostnames(os.environ))
    own = job.own_host(plan, os.environ, plan.hosts[0])
    place = folder.folder_of(run_id, plan.hosts, own.name, os.environ)
    if settings.job_secret is None and settings.job_secret_file is None and not (place / "secret").exists():
        raise UsageError(
            f"no job of this user with --rdzv-id={run_id} and --rdzv-endpoint={endpoint} runs on this host; elsewhere, give the "
            "job's job_secret_file or ELASTIC_EXT_JOB_SECRET"
        )
    key = certificates.job_secret(settings.job_secret, settings.job_secret_file, plan.loopback, place)
    with tempfile.TemporaryDirectory() as scratch:
        files: certificates.CertificateFiles = certificates.write(key, run_id, ("visitor",), Path(scratch))
        yield plan.endpoints, with_access(settings, Access(plan.endpoints, files))
