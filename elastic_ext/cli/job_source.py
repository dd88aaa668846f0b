"""How a command reaches a job: a client of its etcd or store, and its status, from there or from any of its agents."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus

from elastic_ext.base import records, settings
from elastic_ext.base.errors import UsageError
from elastic_ext.base.tls import trusting
from elastic_ext.etcd import EtcdClient
from elastic_ext.status import job_status

logger = logging.getLogger(__name__)

Read = Callable[[], job_status.Document]

ENDPOINT = "as for torchrun: the etcd servers of the job, job:..., or HOST:PORT of its own store (ext_c10d)"
TIMEOUT_S = 5.0  # for one answer, from the name's resolution to the last byte


class _SamePage(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the user has named an agent."""

    def redirect_request(self, *args: object) -> None:
        return None


class AgentUrl:
    def __init__(self, args: argparse.Namespace) -> None:
        """args: see `add_arguments`. Raises UsageError."""
        url, ca, cert = args.url, args.ca, args.cert
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url: expected a URL such as http://localhost:9401, got {url}")
        self._url = url.rstrip("/")
        try:
            context = trusting(ca)
            if cert is not None:
                context.load_cert_chain(cert)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise UsageError(f"{cert or ca}: expected PEM: {error}") from error
        # No proxy: an agent's port is inside the cluster.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _SamePage
        )

    def read(self) -> job_status.Document:
        """Return the document now. Raises UsageError: no whole answer within TIMEOUT_S; RecordError: it is of another version.

        Another thread asks: a time limit of a connection is for each of its reads, and an agent may send byte by byte.
        """
        answers: queue.SimpleQueue[bytes | UsageError] = queue.SimpleQueue()
        threading.Thread(target=self._ask, args=(answers,), name="elastic_ext-ask", daemon=True).start()
        try:
            answer = answers.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise UsageError(f"the agent at {self._url}: no whole answer within {TIMEOUT_S:g} s") from None
        if isinstance(answer, UsageError):
            raise answer
        return records.read(job_status.Document, answer, self._url, job_status.SCHEMA)

    def _ask(self, answers: queue.SimpleQueue[bytes | UsageError]) -> None:
        try:
            with self._opener.open(f"{self._url}/job.json", timeout=TIMEOUT_S) as answer:
                answers.put(answer.read(records.MAX_BYTES + 1))
        except urllib.error.HTTPError as error:
            hint = ": is this an agent of elastic_ext, with metrics on?" if error.code == HTTPStatus.NOT_FOUND else ""
            answers.put(UsageError(f"the agent at {self._url}: HTTP {error.code} {error.reason}{hint}"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            answers.put(UsageError(f"the agent at {self._url}: {reason}"))


def add_job(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", required=True, help=ENDPOINT)
    command.add_argument("--rdzv-id", metavar="ID", required=True, help="run id of the job")


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


@contextlib.contextmanager
def job_client(rdzv_endpoint: str, run_id: str) -> Iterator[EtcdClient]:
    """Yield a client of a job's etcd, also where the job has started it (`--rdzv-endpoint=job:`), or of its own store.

    TLS and user come from the settings, as for an agent: ELASTIC_EXT_ETCD_CA and so on.

    Raises UsageError: etcd cannot be used; the message says why.
    """
    # Imported here: commands on files and --url need none of it, and gRPC takes long to import.
    from elastic_ext.embedded.hosting import has_secret, store_visitor
    from elastic_ext.own_etcd import cluster, endpoint, launch
    from elastic_ext.rendezvous.running_job import connect

    known = settings.read({}, os.environ)
    with contextlib.ExitStack() as stack:
        if endpoint.is_job(rdzv_endpoint):
            endpoints, with_tls = stack.enter_context(launch.visitor(rdzv_endpoint, run_id, known))
            client = stack.enter_context(connect(endpoints, with_tls))
            if (now := client.get(cluster.ENDPOINTS).kv) is not None:  # members were replaced
                client.follow(now.value.decode())
            yield client
            return
        store: EtcdClient | None = None
        if has_secret(known):  # the certificates of a job's own store follow from it
            of_store = stack.enter_context(store_visitor(run_id, known))
            try:
                store = connect(rdzv_endpoint, of_store)
            except UsageError as error:
                logger.debug("%s is not a store with this secret: %s", rdzv_endpoint, error)
        yield stack.enter_context(store if store is not None else connect(rdzv_endpoint, known))


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", default="", help=ENDPOINT)
    command.add_argument("--rdzv-id", metavar="ID", default="", help="run id of the job")
    command.add_argument(
        "--url", metavar="http://HOST:PORT", default="", help="instead: any agent of the job; the only way for a job on one node"
    )
    web = command.add_argument_group("for --url, if the agent has a metrics_certfile")
    web.add_argument("--ca", metavar="FILE", help="CA that signed the agent's certificate, unless the system trusts it")
    web.add_argument("--cert", metavar="FILE", help="your certificate and its key, if the agent requires one")


def check_web(args: argparse.Namespace, command: str) -> None:
    """Raise UsageError if what only an agent may ask for is given without one."""
    if not args.url and (args.ca or args.cert):
        raise UsageError(f"{command}: --ca and --cert belong to --url; etcd's are settings, as for torchrun")


def agent_of(args: argparse.Namespace, command: str) -> AgentUrl | None:
    """Return the agent to ask; None: etcd. Raises UsageError unless the user has named one job, in a way that can be."""
    of_etcd = (args.rdzv_endpoint, args.rdzv_id)
    if bool(args.url) == any(of_etcd) or any(of_etcd) != all(of_etcd):
        raise UsageError(f"{command}: expected a job with --rdzv-endpoint and --rdzv-id, or --url of an agent")
    check_web(args, command)
    return AgentUrl(args) if args.url else None


@contextlib.contextmanager
def reader(args: argparse.Namespace, agent: AgentUrl | None, again: bool = False) -> Iterator[Read]:
    """Yield what reads the job once. again: it is read more than once. Raises UsageError: etcd does not answer."""
    if agent is not None:
        yield agent.read
        return
    from elastic_ext.embedded.plan import BUILD
    from elastic_ext.rendezvous import running_job
    from elastic_ext.rendezvous.contract import C10D, ETCD

    ages = job_status.ReportAges()

    def read() -> job_status.Document:
        status, now = running_job.read(client, args.rdzv_id), time.monotonic()
        ages.read(status, now)
        return job_status.build(job_status.Sources(status, backend, seen_s=lambda id_: ages.age_s(id_, now) if again else None))

    with job_client(args.rdzv_endpoint, args.rdzv_id) as client:
        backend = C10D if client.status().version.endswith(BUILD) else ETCD
        yield read
