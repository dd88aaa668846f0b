"""`elastic-ext status`: the status of a whole job, live or ended, from its etcd or from any of its agents."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from dataclasses import replace
from typing import Any

from elastic_ext.base.errors import EX_UNAVAILABLE, UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.cli import job_source, job_text
from elastic_ext.cli.job_text import Terminal
from elastic_ext.cli.terminal import print_error
from elastic_ext.observe import job_document
from elastic_ext.observe.job_document import Document
from elastic_ext.rendezvous.job_status import NoSuchJob

WATCH_S = 2.0  # between two looks
LOST_S = 60.0  # without an answer, after which `--watch` gives up: longer than an election in etcd
MOST_NODES = 40  # rows on a terminal; those that do not run come first
EX_INTERRUPTED = 130
# By the state of the job.
EXIT_CODES = {"running": 0, "succeeded": 0, "failed": 1, "recovering": 2, "starting": 2, "forming": 2, "ended": 3}
MEANINGS = {
    0: "the job runs, or has succeeded",
    1: "the job has failed",
    2: "its workers do not run now: it starts, recovers from a failure, or waits for nodes",
    3: "no agent is in it any more, and nothing tells how it ended",
    EX_UNAVAILABLE: "no such job, or neither etcd nor the agent answers",
    78: "wrong usage",
    EX_INTERRUPTED: "interrupted with Ctrl-C",
}


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add this command to `elastic-ext`."""
    status = commands.add_parser("status", help="show the state of a job: nodes, rounds, failures, checkpoints, stragglers")
    status.description = "Show a job, live or ended. Changes nothing."
    status.epilog = "Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in MEANINGS.items()) + "."
    job_source.add_arguments(status)
    status.add_argument("--json", action="store_true", help="print the document, one line of JSON for each look")
    status.add_argument("--watch", action="store_true", help=f"look every {WATCH_S:g} s until the job has ended, or Ctrl-C")
    status.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the job; return the exit code of its state at the last look. Raises UsageError: wrong usage."""
    agent = job_source.agent_of(args, "status")
    try:
        with job_source.reader(args, agent, again=args.watch) as read:
            return _watch(read, args.json) if args.watch else _show(read(), args.json)
    except (UsageError, RecordError) as error:
        print_error(str(error))
        return EX_UNAVAILABLE
    except KeyboardInterrupt:
        return EX_INTERRUPTED


def _watch(read: job_source.Read, as_json: bool) -> int:
    """Show the job again and again until it has ended, or nobody answers any more. Raises what the first `read` raises."""
    document, read_at, fault = read(), time.monotonic(), ""
    code = _show(document, as_json, again=True)
    while document.job.state not in job_document.ENDED_STATES:
        time.sleep(WATCH_S)
        try:
            document, read_at, fault = read(), time.monotonic(), ""
        except NoSuchJob as error:
            document = replace(document, job=replace(document.job, state="ended", reason=str(error)), nodes=(), unknown=())
        except (UsageError, RecordError) as error:
            if time.monotonic() - read_at >= LOST_S:
                raise
            if str(error) != fault:
                fault, left_s = str(error), read_at + LOST_S - time.monotonic()
                ago = job_text.age(time.monotonic() - read_at)
                print_error(f"{fault}; the job as it was {ago} ago is above; asking again for {job_text.age(left_s)} at most")
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
