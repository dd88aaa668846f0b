"""`elastic-ext status`: the status of a whole job, live or ended, from its etcd or from any of its agents."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from elastic_ext.base import records, settings
from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.cli.terminal import print_error, print_line
from elastic_ext.observe import job_status
from elastic_ext.observe.job_status import Document, NodeStatus, Sources

WATCH_S = 2.0  # between two looks
URL_TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20  # of a document: 512 nodes take about 0.2 MiB
EX_UNAVAILABLE = 69
# By the state of the job.
EXIT_CODES = {"running": 0, "succeeded": 0, "failed": 1, "recovering": 2, "forming": 2, "ended": 3}
MEANINGS = {
    0: "the job runs, or has succeeded",
    1: "the job has failed",
    2: "its workers do not run now: it recovers from a failure, or waits for nodes",
    3: "it has ended, and nothing tells how any more",
    EX_UNAVAILABLE: "no such job, or neither etcd nor the agent answers",
    78: "wrong usage",
}
COLUMNS = ("rank", "node", "state", "workers", "step", "steps/s", "last step", "checkpoint", "standbys", "heard")

Read = Callable[[], Document]


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add this command to `elastic-ext`."""
    status = commands.add_parser("status", help="show the state of a job: nodes, rounds, failures, checkpoints, stragglers")
    status.description = "Show a job, live or ended. Changes nothing."
    status.epilog = "Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in MEANINGS.items()) + "."
    status.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", default="", help="the etcd servers of the job")
    status.add_argument("--rdzv-id", metavar="ID", default="", help="the job")
    status.add_argument("--url", metavar="http://HOST:PORT", default="", help="instead: any of its agents; for ext_c10d")
    status.add_argument("--json", action="store_true", help="print the document, one line of JSON for each look")
    status.add_argument("--watch", action="store_true", help=f"look every {WATCH_S:g} s until the job has ended, or Ctrl-C")
    status.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the job; return the exit code of its state at the last look. Raises UsageError: wrong usage."""
    of_etcd = (args.rdzv_endpoint, args.rdzv_id)
    if bool(args.url) == any(of_etcd) or any(of_etcd) != all(of_etcd):
        raise UsageError("status: expected a job with --rdzv-endpoint and --rdzv-id, or --url of an agent")
    if args.url and not args.url.startswith(("http://", "https://")):
        raise UsageError(f"status: expected a URL such as http://localhost:9401, got {args.url}")
    try:
        with _reader(args) as read:
            return _watch(read, args.json) if args.watch else _show(read(), args.json)
    except (UsageError, RecordError) as error:
        print_error(str(error))
        return EX_UNAVAILABLE
    except KeyboardInterrupt:
        return 130


@contextlib.contextmanager
def _reader(args: argparse.Namespace) -> Iterator[Read]:
    """Yield what reads the job once. Raises UsageError: nobody answers."""
    if args.url:
        yield lambda: _from_agent(args.url.rstrip("/"))
        return
    from elastic_ext.rendezvous.etcd import job_status as in_etcd  # not needed for --url
    from elastic_ext.rendezvous.etcd.connect import connect

    with connect(args.rdzv_endpoint, settings.read({}, os.environ)) as client:
        yield lambda: job_status.build(Sources(in_etcd.read(client, args.rdzv_id), "ext_etcd"))


def _from_agent(url: str) -> Document:
    try:
        with urllib.request.urlopen(url + "/job.json", timeout=URL_TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UsageError(f"the agent at {url}: {reason}") from error
    return records.read(Document, text, url, job_status.SCHEMA)


def _watch(read: Read, as_json: bool) -> int:
    """Show the job again and again until it has ended."""
    clear = not as_json and sys.stdout.isatty()
    while True:
        document = read()
        if clear:
            sys.stdout.write("\033[H\033[2J\033[3J")
        code = _show(document, as_json)
        if document.job.state in job_status.ENDED_STATES:
            return code
        time.sleep(WATCH_S)


def _show(document: Document, as_json: bool) -> int:
    if as_json:
        print(job_status.encode(document), flush=True)
    else:
        for line in lines(document):
            print_line(line)
    return EXIT_CODES.get(document.job.state, 3)


def lines(document: Document) -> Iterator[str]:
    """Return the document for a terminal."""
    job = document.job
    limit = f" of {job.restarts_limit}" if job.restarts_limit is not None else ""
    yield f"job {job.run_id} ({job.backend}): {job.state}, round {job.round}"
    if job.reason:
        yield f"  because: {job.reason}"
    yield f"  {job.nodes} nodes, {job.world_size} workers; restarts charged: {job.restarts_charged}{limit}"
    if total := sum(each.seconds for each in document.goodput):
        parts = sorted(document.goodput, key=lambda each: -each.seconds)
        yield "  goodput: " + ", ".join(f"{each.state} {each.seconds / total:.1%}" for each in parts)
    yield from _table([COLUMNS, *(_row(each) for each in document.nodes)] if document.nodes else [])
    for straggler in document.stragglers:
        yield f"straggler: rank {straggler.rank} on {straggler.node}, {straggler.skew:.2f} times the median of its node"
    for span in document.rounds[-5:]:
        ended = f", ended {age(span.ended_s)} ago" if span.ended_s is not None else ", runs"
        yield f"round {span.round}: began {age(span.began_s)} ago{ended}{f': {span.why}' if span.why else ''}"
    for failure in document.failures[-5:]:
        code = f", exit code {failure.exit_code}" if failure.exit_code is not None else ""
        yield f"{failure.at} round {failure.round}: {failure.kind}, {failure.decision}{code}: {failure.reason}".lstrip()
    yield from (f"{each.host} may not come back yet: {each.why}" for each in document.refused)
    yield from (f"not known: {each.what}: {each.why}" for each in document.unknown)


def _row(node: NodeStatus) -> tuple[str, ...]:
    saved = f"step {node.saved_step}, {age(node.saved_s)} ago" if node.saved_step is not None else ""
    return (
        str(node.node_rank) if node.node_rank >= 0 else "-",
        node.name or node.id,
        node.state,
        str(node.workers),
        "" if node.step is None else str(node.step),
        "" if node.steps_per_s is None else f"{node.steps_per_s:.2f}",
        age(node.last_step_s),
        saved,
        str(node.standbys or ""),
        "here" if node.seen_s == 0 else age(node.seen_s),
    )


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Return the rows with their columns under each other; a column without content is left out."""
    used = [number for number in range(len(COLUMNS)) if any(row[number] for row in rows[1:])]
    widths = {number: max(len(row[number]) for row in rows) for number in used}
    for row in rows:
        yield "  ".join(row[number].ljust(widths[number]) for number in used).rstrip()


def age(seconds: float | None) -> str:
    """Return an age for people: 90 -> "90 s", 7200 -> "2.0 h"; "" if unknown."""
    if seconds is None:
        return ""
    for most, unit, name in ((10.0, 1.0, "s"), (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < most:
            return f"{seconds / unit:.{0 if most in (100.0, 6000.0) else 1}f} {name}"
    return f"{seconds / 86400:.1f} d"
