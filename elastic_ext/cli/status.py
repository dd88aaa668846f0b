"""`elastic-ext status`: the status of a whole job, live or ended, from its etcd or from any of its agents."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from elastic_ext.base import settings
from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.cli import job_text
from elastic_ext.cli.agent_url import AgentUrl
from elastic_ext.cli.job_text import Terminal
from elastic_ext.cli.terminal import print_error
from elastic_ext.observe import job_document, job_status
from elastic_ext.observe.job_document import Document
from elastic_ext.observe.job_status import Sources
from elastic_ext.observe.sightings import Sightings
from elastic_ext.rendezvous.job_state import NoSuchJob

WATCH_S = 2.0  # between two looks
LOST_S = 60.0  # without an answer, after which `--watch` gives up: longer than an election in etcd
MOST_NODES = 40  # rows on a terminal; those that do not run come first
EX_UNAVAILABLE, EX_INTERRUPTED = 69, 130
# By the state of the job.
EXIT_CODES = {"running": 0, "succeeded": 0, "failed": 1, "recovering": 2, "starting": 2, "forming": 2, "ended": 3}
MEANINGS = {
    0: "the job runs, or has succeeded",
    1: "the job has failed",
    2: "its workers do not run now: it starts, recovers from a failure, or waits for nodes",
    3: "it has ended, and nothing tells how any more",
    EX_UNAVAILABLE: "no such job, or neither etcd nor the agent answers",
    78: "wrong usage",
    EX_INTERRUPTED: "interrupted with Ctrl-C",
}

Read = Callable[[], Document]


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add this command to `elastic-ext`."""
    status = commands.add_parser("status", help="show the state of a job: nodes, rounds, failures, checkpoints, stragglers")
    status.description = "Show a job, live or ended. Changes nothing."
    status.epilog = "Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in MEANINGS.items()) + "."
    status.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", default="", help="the etcd servers of the job")
    status.add_argument("--rdzv-id", metavar="ID", default="", help="the job")
    status.add_argument("--url", metavar="http://HOST:PORT", default="", help="instead: any of its agents; for ext_c10d")
    web = status.add_argument_group("for --url, if the agent has a metrics_web_config")
    web.add_argument("--ca", metavar="FILE", help="the authority of its certificate, if the system does not know it")
    web.add_argument("--cert", metavar="FILE", help="your certificate and its key, if it asks for one")
    web.add_argument("--user", metavar="NAME", help="your name, if it asks for one")
    web.add_argument("--password-file", metavar="FILE", help="its first line is the password; else you are asked")
    status.add_argument("--json", action="store_true", help="print the document, one line of JSON for each look")
    status.add_argument("--watch", action="store_true", help=f"look every {WATCH_S:g} s until the job has ended, or Ctrl-C")
    status.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the job; return the exit code of its state at the last look. Raises UsageError: wrong usage."""
    of_etcd = (args.rdzv_endpoint, args.rdzv_id)
    if bool(args.url) == any(of_etcd) or any(of_etcd) != all(of_etcd):
        raise UsageError("status: expected a job with --rdzv-endpoint and --rdzv-id, or --url of an agent")
    web = (args.ca, args.cert, args.user, args.password_file)
    if not args.url and any(web):
        raise UsageError("status: --ca, --cert, --user and --password-file belong to --url; etcd's are settings, as for torchrun")
    agent = AgentUrl(args.url, *web) if args.url else None
    try:
        with contextlib.nullcontext(agent.read) if agent is not None else _from_etcd(args) as read:
            return _watch(read, args.json) if args.watch else _show(read(), args.json)
    except (UsageError, RecordError) as error:
        print_error(str(error))
        return EX_UNAVAILABLE
    except KeyboardInterrupt:
        return EX_INTERRUPTED


@contextlib.contextmanager
def _from_etcd(args: argparse.Namespace) -> Iterator[Read]:
    """Yield what reads the job once. Raises UsageError: etcd does not answer."""
    from elastic_ext.rendezvous.etcd import job_status as in_etcd  # not needed for --url
    from elastic_ext.rendezvous.etcd.connect import connect

    sightings = Sightings()

    def read() -> Document:
        status, now = in_etcd.read(client, args.rdzv_id), time.monotonic()
        sightings.read(status, now)
        seen_s = (lambda id_: sightings.age_s(id_, now)) if args.watch else (lambda id_: None)
        return job_status.build(Sources(status, "ext_etcd", seen_s=seen_s))

    with connect(args.rdzv_endpoint, settings.read({}, os.environ)) as client:
        yield read


def _watch(read: Read, as_json: bool) -> int:
    """Show the job again and again until it has ended, or nobody answers any more. Raises what the first `read` raises."""
    document, read_at = read(), time.monotonic()
    code = _show(document, as_json, again=True)
    while document.job.state not in job_document.ENDED_STATES:
        time.sleep(WATCH_S)
        try:
            document, read_at = read(), time.monotonic()
        except NoSuchJob as error:
            document = replace(document, job=replace(document.job, state="ended", reason=str(error)), nodes=(), unknown=())
        except (UsageError, RecordError) as error:
            if time.monotonic() - read_at >= LOST_S:
                raise
            print_error(f"{error}; the job as it was {job_text.age(time.monotonic() - read_at)} ago is above")
            continue
        code = _show(document, as_json, again=True)
    return code


def _show(document: Document, as_json: bool, again: bool = False) -> int:
    """Show the document. again: in place of what was shown before, on a terminal."""
    if as_json:
        print(job_document.encode(document), flush=True)
    else:
        terminal = _terminal(again)
        found = [job_text.text(line, terminal) for line in job_text.lines(document, terminal)]
        if again and sys.stdout.isatty():
            sys.stdout.write("\033[H\033[2J")
        print("\n".join(found), flush=True)
    return EXIT_CODES.get(document.job.state, 3)


def _terminal(whole_screen: bool) -> Terminal:
    """Return what standard output is. whole_screen: the nodes get what the rest leaves of it, at least a few rows."""
    if not sys.stdout.isatty():
        return Terminal()
    size = shutil.get_terminal_size()
    colors = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(colors, size.columns, min(MOST_NODES, max(4, size.lines - 20)) if whole_screen else MOST_NODES)
