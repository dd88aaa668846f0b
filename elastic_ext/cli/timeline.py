"""`elastic-ext timeline`: draws the life of a job, from the events of its agents or from its status."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_ext.base import files, records
from elastic_ext.base.errors import EX_CONFIG, EX_UNAVAILABLE, UsageError
from elastic_ext.base.printable import counted
from elastic_ext.cli import Commands, job_source, print_error, print_line
from elastic_ext.timeline import builder, events, model

MAX_BYTES = 512 << 20  # of one file: 512 nodes write about 1 MB in a round with a failure
STDIN = "-"
KINDS = (".png", ".svg", ".html")
MOST_FAULTS = 20  # lines named; the rest is counted
MISSING = "timeline: drawing needs matplotlib: pip install 'elastic_ext[timeline]'"


def add_command(commands: Commands) -> None:
    timeline = commands.add_parser("timeline", help="draw the life of a job: what each node did when, failures, checkpoints")
    timeline.description = (
        "Draw a job, live or ended, as a picture. The events of its agents (setting events_file) show most; its status, "
        "from etcd or from an agent, only rounds and failures. If the files hold several jobs, --rdzv-id chooses one. "
        "Needs matplotlib. Changes nothing."
    )
    timeline.epilog = (
        "Exit codes: 0; 69: no such job, or neither etcd nor the agent answers; 78: wrong usage or input. A line that is not "
        "an event is reported, the others are drawn, and the exit code is 78."
    )
    timeline.add_argument("files", nargs="*", metavar="EVENTS", help="files with events, of any number of agents; - for stdin")
    timeline.add_argument("-o", "--output", required=True, metavar="FILE", help="the picture: .png, .svg or .html")
    job_source.add_arguments(timeline)
    timeline.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw a job; return the exit code. Raises UsageError: wrong usage, or nothing to draw."""
    _check(args)
    agent = None if args.files else job_source.agent_of(args, "timeline")
    draw = _drawing(args.output)
    faults: list[str] = []
    if args.files:
        drawn, faults = _of_files(args.files, args.rdzv_id)
    else:
        try:
            with job_source.reader(args, agent) as read:
                drawn = builder.from_status(read(), time.time())
        except (UsageError, records.RecordError) as error:
            print_error(str(error))
            return EX_UNAVAILABLE
    try:
        files.write_whole(Path(args.output), draw(drawn))
    except OSError as error:
        raise UsageError(f"timeline: {args.output} cannot be written: {error}") from error
    found = (drawn.rows, "row"), (drawn.interruptions, "failure"), (drawn.saved, "checkpoint")
    print_line(f"{args.output}: {', '.join(counted(len(each), what) for each, what in found)}")
    return EX_CONFIG if faults else 0


def _check(args: argparse.Namespace) -> None:
    sources = [bool(args.files), bool(args.rdzv_endpoint), bool(args.url)]
    if sum(sources) != 1 or (args.rdzv_endpoint and not args.rdzv_id) or (args.url and args.rdzv_id):
        raise UsageError("timeline: expected files of events, or --rdzv-endpoint and --rdzv-id of a job, or --url of an agent")
    job_source.check_web(args, "timeline")
    if Path(args.output).suffix.lower() not in KINDS:
        raise UsageError(f"timeline: --output {args.output}: expected a name that ends with {', '.join(KINDS)}")


def _of_files(paths: Sequence[str], run_id: str) -> tuple[model.Timeline, list[str]]:
    """Return the timeline of the events in the files, and the lines that are not events. Raises UsageError."""
    found: list[events.TimelineEvent] = []
    faults: list[str] = []
    for file in paths:
        try:
            text = _stdin() if file == STDIN else files.read_text(file, MAX_BYTES)
        except (OSError, ValueError) as error:
            raise UsageError(f"timeline: {file} cannot be read: {error}") from error
        parsed, wrong = events.parse(text, file)
        found += parsed
        faults += wrong
    for fault in faults[:MOST_FAULTS]:
        print_error(fault)
    if len(faults) > MOST_FAULTS:
        print_error(f"{len(faults) - MOST_FAULTS} more lines are not events")
    jobs = sorted({each.run_id for each in found})
    if run_id:
        found = [each for each in found if each.run_id == run_id]
    elif len(jobs) > 1:
        shown = ", ".join(jobs[:5]) + (", ..." if len(jobs) > 5 else "")
        raise UsageError(f"timeline: events of {len(jobs)} jobs: {shown}; choose one with --rdzv-id")
    if not found:
        of = f" of a job {run_id}" if run_id and jobs else ""
        raise UsageError(f"timeline: no events{of} in {', '.join(paths)}: expected what the setting events_file makes")
    return builder.from_events(found), faults


def _stdin() -> str:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES >> 20} MB")
    return data.decode("utf-8")


def _drawing(output: str) -> Callable[[model.Timeline], bytes]:
    """Return what draws for this file. Raises UsageError: matplotlib is missing, which is said before a long file is read."""
    try:
        import matplotlib  # noqa: F401 - nothing else needs it
    except ImportError as error:
        raise UsageError(MISSING) from error
    from elastic_ext.timeline import picture

    return {
        ".png": picture.png,
        ".svg": lambda drawn: picture.svg(drawn).encode(),
        ".html": lambda drawn: picture.html(drawn).encode(),
    }[Path(output).suffix.lower()]
