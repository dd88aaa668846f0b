"""`elastic-ext drain`: an operator takes a node out of a running job without losing work."""

from __future__ import annotations

import argparse
import contextlib
import os

from elastic_ext.base import settings
from elastic_ext.base.errors import EX_REFUSED, EX_TRY_AGAIN, EX_UNAVAILABLE
from elastic_ext.cli import Commands, print_error, print_line
from elastic_ext.cli.job_source import add_job, job_client, seconds

TIMEOUT_S = 600.0
MAX_REASON = 200  # characters: every node of the job reads it
MEANINGS = {
    0: "the node has left, and the job runs again or has finished; with --undo: the host may take part",
    EX_UNAVAILABLE: "no such job runs, or etcd does not answer",
    EX_TRY_AGAIN: "no checkpoint in time, and nothing was done; or the job did not run again in time (the message says which)",
    EX_REFUSED: "refused, nothing was changed: the job would have fewer nodes than it takes",
    78: "wrong usage or settings, no such node, or several machines of this name",
    130: "interrupted with Ctrl-C: the node still leaves, unless `--undo` withdraws that",
}


def add_command(commands: Commands) -> None:
    drain = commands.add_parser("drain", help="take a node out of a running job at its next checkpoint")
    drain.description = (
        "Take a node out of a job once a checkpoint is saved, and wait until the job runs without it: a spare steps "
        "in, or the job goes on smaller. No restart is charged. The host may not come back for `refuse_node` seconds."
    )
    drain.epilog = "Exit codes: " + "; ".join(f"{code}: {meaning}" for code, meaning in MEANINGS.items()) + "."
    drain.add_argument("node", metavar="NODE", help="a host, or the id of a node on it, as `elastic-ext status` shows them")
    add_job(drain)
    drain.add_argument("--reason", metavar="TEXT", default="", help="why: for logs, the status, and an agent started there again")
    drain.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        default=TIMEOUT_S,
        help="seconds to wait for the checkpoint, and then for the job to run; default: %(default)g",
    )
    how = drain.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="do not wait for a checkpoint: the steps since the last one are repeated")
    how.add_argument("--undo", action="store_true", help="withdraw a drain that has not begun, or let a repaired host come back")
    drain.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Drain, or undo it; return one of MEANINGS. Raises UsageError. TLS and user come from the settings, as for an agent."""
    from elastic_ext.cli import requests
    from elastic_ext.cli.requests import Ending
    from elastic_ext.rendezvous.drains import DrainRequest
    from elastic_ext.rendezvous.job_status import Unreachable

    with contextlib.ExitStack() as stack:
        try:
            client = stack.enter_context(job_client(args.rdzv_endpoint, args.rdzv_id))
            if args.undo:
                print_line(requests.undo(client, args.rdzv_id, args.node))
                return 0
        except Unreachable as error:
            print_error(str(error))
            return EX_UNAVAILABLE
        refused_s = settings.read({}, os.environ).refuse_node
        request = DrainRequest(args.node, " ".join(args.reason.split())[:MAX_REASON], refused_s, args.now)
        try:
            over = requests.drain(client, args.rdzv_id, request, args.timeout, print_line)
        except KeyboardInterrupt:
            print_error(f"the drain of {args.node} goes on; --undo withdraws it")
            return 130
    (print_line if over.ending is Ending.DRAINED else print_error)(over.reason)
    return over.ending.value
