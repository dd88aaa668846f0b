"""`elastic-ext timeline`: a picture of a job's life."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.cli import job_source
from elastic_ext.cli.terminal import print_error
from elastic_ext.observe.timeline import clocks, outline, picture, story, told
from elastic_ext.observe.timeline.story import Story
from elastic_ext.observe.timeline.told import Told

MOST_FAULTS = 5  # lines that could not be read, named one by one
EX_UNAVAILABLE = 69


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add this command to `elastic-ext`."""
    timeline = commands.add_parser("timeline", help="draw the life of a job: its nodes, rounds, failures and checkpoints")
    timeline.description = (
        "Draw the life of a job, live or ended, as PNG, SVG or HTML. From the files of events_file of its agents it shows every "
        "node, step and checkpoint; from the job's status only rounds and verdicts. Changes nothing."
    )
    timeline.epilog = (
        "Exit codes: 0: drawn; 69: no such job, or neither etcd nor the agent answers; 78: wrong usage, or no event in the files."
    )
    timeline.add_argument("events", nargs="*", metavar="EVENTS", help="files of events_file, from any number of agents; -: stdin")
    job_source.add_arguments(timeline)
    timeline.add_argument("--output", "-o", metavar="FILE", required=True, help="its ending decides: .png, .svg or .html")
    timeline.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw. Raises UsageError: wrong usage, nothing to draw, or the file cannot be written."""
    output = Path(args.output)
    kind = output.suffix[1:].lower()
    if kind not in picture.FORMATS:
        raise UsageError(f"timeline: expected --output to end in .png, .svg or .html, got {output.name}")
    if bool(args.events) == job_source.given(args):
        raise UsageError("timeline: expected files of events, or a job with --rdzv-endpoint and --rdzv-id, or --url of an agent")
    if args.events:
        found = _from_events(args.events)
    else:
        agent = job_source.agent_of(args, "timeline")
        try:
            with job_source.reader(args, agent) as read:
                found = outline.of_status(read(), time.time())
        except (UsageError, RecordError) as error:
            print_error(str(error))
            return EX_UNAVAILABLE
    _write(output, picture.draw(found, kind))
    print(f"{picture.title(found)}; trained {found.trained_share:.1%}; {output}")
    return 0


def _from_events(names: list[str]) -> Story:
    events: list[Told] = []
    faults: list[str] = []
    for name in names:
        reading = _read(name)
        events += reading.told
        faults += reading.faults
    for fault in faults[:MOST_FAULTS]:
        print_error(fault)
    if len(faults) > MOST_FAULTS:
        print_error(f"and {len(faults) - MOST_FAULTS} more lines that are no events")
    if not events:
        raise UsageError(f"timeline: no event in {', '.join(names)}: expected files that agents wrote with events_file=FILE")
    if len(jobs := {each.run_id for each in events}) > 1:
        raise UsageError(f"timeline: expected the events of one job, got {len(jobs)}: {', '.join(sorted(jobs)[:5])}")
    return story.tell(clocks.align(events))


def _read(name: str) -> told.Reading:
    try:
        with contextlib.nullcontext(sys.stdin) if name == "-" else open(name, encoding="utf-8", errors="replace") as file:
            return told.read(file, name)
    except OSError as error:
        raise UsageError(f"timeline: {error}") from error


def _write(output: Path, data: bytes) -> None:
    """Write the whole file or none."""
    partial = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"timeline: {error}") from error
