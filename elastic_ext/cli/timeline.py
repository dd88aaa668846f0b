"""`elastic-ext timeline`: writes the life of a job, from the events of its agents, as a trace or a picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_ext.base import files
from elastic_ext.base.errors import EX_CONFIG, UsageError
from elastic_ext.base.printable import counted
from elastic_ext.cli import Commands, print_error, print_line
from elastic_ext.timeline import events, spans, svg, trace

MAX_BYTES = 512 << 20  # of one file: 512 nodes write about 1 MB in a round with a failure
STDIN = "-"
WRITERS = {".json": trace.trace, ".svg": svg.svg}
MOST_FAULTS = 20  # lines named; the rest is counted


def add_command(commands: Commands) -> None:
    timeline = commands.add_parser("timeline", help="show the life of a job: what each node did when, failures, checkpoints")
    timeline.description = (
        "Write the life of a job, live or ended, from the events of its agents (setting events_file): as a trace for "
        "ui.perfetto.dev and other viewers (.json), or as a picture (.svg). If the files hold several jobs, --rdzv-id "
        "chooses one. Changes nothing."
    )
    timeline.epilog = (
        "Exit codes: 0; 78: wrong usage or input. A line that is not an event is reported, the others are shown, and the exit "
        "code is 78."
    )
    timeline.add_argument("files", nargs="+", metavar="EVENTS", help="files with events, of any number of agents; - for stdin")
    timeline.add_argument("-o", "--output", required=True, metavar="FILE", help="a name that ends with .json or .svg")
    timeline.add_argument("--rdzv-id", metavar="ID", default="", help="run id of the job")
    timeline.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the timeline of a job; return the exit code. Raises UsageError: wrong usage, or nothing to show."""
    write = WRITERS.get(Path(args.output).suffix.lower())
    if write is None:
        raise UsageError(f"timeline: --output {args.output}: expected a name that ends with {' or '.join(WRITERS)}")
    found, faults = _events(args.files)
    for fault in faults[:MOST_FAULTS]:
        print_error(fault)
    if len(faults) > MOST_FAULTS:
        print_error(f"{len(faults) - MOST_FAULTS} more lines are not events")
    jobs = sorted({each.run_id for each in found})
    if len(jobs) > 1 and not args.rdzv_id:
        shown = ", ".join(jobs[:5]) + (", ..." if len(jobs) > 5 else "")
        raise UsageError(f"timeline: events of {len(jobs)} jobs: {shown}; choose one with --rdzv-id")
    found = [each for each in found if args.rdzv_id in ("", each.run_id)]
    if not found:
        of = f" of a job {args.rdzv_id}" if args.rdzv_id and jobs else ""
        raise UsageError(f"timeline: no events{of} in {', '.join(args.files)}: expected what the setting events_file makes")
    made = spans.timeline(found)
    try:
        files.write_whole(Path(args.output), write(made))
    except OSError as error:
        raise UsageError(f"timeline: {args.output} cannot be written: {error}") from error
    counts = (
        (made.rows, "row"),
        ([each for each in made.interruptions if not each.is_change], "failure"),
    )
    saved = counted(len(made.saved), "checkpoint") if made.saved else "no checkpoint reported"
    print_line(f"{args.output}: {', '.join([*(counted(len(each), what) for each, what in counts), saved])}")
    return EX_CONFIG if faults else 0


def _events(paths: Sequence[str]) -> tuple[list[events.TimelineEvent], list[str]]:
    """Return the events in the files, and the faults of the other lines. Raises UsageError: a file cannot be read."""
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
    return found, faults


def _stdin() -> str:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES >> 20} MB")
    return data.decode("utf-8")
