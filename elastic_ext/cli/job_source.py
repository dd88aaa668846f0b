"""Where a command reads the status of a job: in its etcd, or from any of its agents."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator

from elastic_ext.base.errors import UsageError
from elastic_ext.cli.agent_url import AgentUrl
from elastic_ext.observe import job_status
from elastic_ext.observe.job_document import Document
from elastic_ext.observe.job_status import Sources
from elastic_ext.observe.sightings import Sightings

Read = Callable[[], Document]

ENDPOINT = "as for torchrun: the etcd servers of the job, job:..., or HOST:PORT of its own store (ext_c10d)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that name a job."""
    command.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", default="", help=ENDPOINT)
    command.add_argument("--rdzv-id", metavar="ID", default="", help="the job")
    command.add_argument(
        "--url", metavar="http://HOST:PORT", default="", help="instead: any of its agents; the only way for a job on one node"
    )
    web = command.add_argument_group("for --url, if the agent has a metrics_web_config")
    web.add_argument("--ca", metavar="FILE", help="the authority of its certificate, if the system does not know it")
    web.add_argument("--cert", metavar="FILE", help="your certificate and its key, if it asks for one")
    web.add_argument("--user", metavar="NAME", help="your name, if it asks for one")
    web.add_argument("--password-file", metavar="FILE", help="its first line is the password; else you are asked")


def check_web(args: argparse.Namespace, command: str) -> None:
    """Raise UsageError if what only an agent may ask for is given without one."""
    if not args.url and any(_web(args)):
        raise UsageError(
            f"{command}: --ca, --cert, --user and --password-file belong to --url; etcd's are settings, as for torchrun"
        )


def _web(args: argparse.Namespace) -> tuple[str | None, str | None, str | None, str | None]:
    return args.ca, args.cert, args.user, args.password_file


def agent_of(args: argparse.Namespace, command: str) -> AgentUrl | None:
    """Return the agent to ask; None: etcd. Raises UsageError unless the user has named one job, in a way that can be."""
    of_etcd = (args.rdzv_endpoint, args.rdzv_id)
    if bool(args.url) == any(of_etcd) or any(of_etcd) != all(of_etcd):
        raise UsageError(f"{command}: expected a job with --rdzv-endpoint and --rdzv-id, or --url of an agent")
    check_web(args, command)
    return AgentUrl(args.url, *_web(args)) if args.url else None


@contextlib.contextmanager
def reader(args: argparse.Namespace, agent: AgentUrl | None, again: bool = False) -> Iterator[Read]:
    """Yield what reads the job once. again: it is read more than once. Raises UsageError: etcd does not answer."""
    if agent is not None:
        yield agent.read
        return
    with _from_etcd(args, again) as read:
        yield read


@contextlib.contextmanager
def _from_etcd(args: argparse.Namespace, again: bool) -> Iterator[Read]:
    """Yield what reads the job once. Raises UsageError: etcd does not answer."""
    from elastic_ext.cli.job_client import job_client  # not needed for --url
    from elastic_ext.embedded.plan import BUILD
    from elastic_ext.rendezvous import job_status as in_etcd
    from elastic_ext.rendezvous.contract import C10D, ETCD

    sightings = Sightings()

    def read() -> Document:
        status, now = in_etcd.read(client, args.rdzv_id), time.monotonic()
        sightings.read(status, now)
        seen_s = (lambda id_: sightings.age_s(id_, now)) if again else (lambda id_: None)
        return job_status.build(Sources(status, backend, seen_s=seen_s))

    with job_client(args.rdzv_endpoint, args.rdzv_id) as client:
        backend = C10D if client.status().version.endswith(BUILD) else ETCD
        yield read
