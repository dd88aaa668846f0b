"""`elastic-ext checkpoints`: ls, verify, pin, unpin, prune, quarantine, cp, save."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import counted, shown
from elastic_ext.checkpoints import verifying
from elastic_ext.checkpoints.choice import decisions, hints, listing
from elastic_ext.checkpoints.directory import catalogue, own_files, upkeep
from elastic_ext.checkpoints.storage import Storage, open_storage
from elastic_ext.cli import Commands, job_source, print_error, print_line, requests

EX_DAMAGED = 1  # `verify` or `cp` found damage
SAVE_TIMEOUT_S = 600.0
BAR_WIDTH = 30  # characters
SHOW_EVERY_S = 0.1  # seconds between two updates of the bar


def add_command(commands: Commands) -> None:
    options = commands.add_parser("checkpoints", help="list, verify, mark, prune and copy checkpoints")
    options.description = "DIR is a path or a URL (s3://, gs://, ...). The exit code for wrong usage or input is 78."
    actions = options.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=type(options))
    ls = _action(actions, "ls", _ls, "list all checkpoints, and mark the one that a job would resume from")
    check = _action(
        actions, "verify", _verify, "compare checkpoints with their checksums; the exit code is 1 if one is damaged", "*"
    )
    check.add_argument(
        "--all", action="store_true", help="verify all complete checkpoints; default: the one that a job would resume from"
    )
    check.add_argument("--sampled", action="store_true", help="check the sizes of all files and the content of some")
    check.add_argument("--threads", type=_count, help="number of files to read at once; default: one per core")
    pin = _action(actions, "pin", _pin, "protect checkpoints from pruning", "+")
    unpin = _action(actions, "unpin", _unpin, "allow pruning again", "+")
    prune = _action(actions, "prune", _prune, "show which checkpoints would be removed; with --yes, remove them", "*")
    prune.epilog = "Without a NAME, only what the record of saves or a manifest shows to be the job's own is removed."
    prune.add_argument(
        "--keep-last", type=_count, default=3, metavar="N", help="number of complete checkpoints to keep; default 3, at least 1"
    )
    prune.add_argument(
        "--keep-every", type=_count, default=0, metavar="STEPS", help="also keep one checkpoint for every STEPS steps"
    )
    prune.add_argument("--yes", action="store_true", help="remove the checkpoints")
    bad = _action(actions, "quarantine", _quarantine, "never resume from these checkpoints; nothing is removed", "+")
    bad.add_argument("--lift", action="store_true", help="lift the quarantine")
    for parser in (pin, bad):
        parser.add_argument("--reason", default="", help="a note for other users")
    copying = "copy checkpoints to another directory and compare checksums; repeat the command to resume an interrupted copy"
    cp = _action(actions, "cp", _cp, copying, "+")
    cp.add_argument("--to", required=True, metavar="DIR", help="the directory to copy to")
    for parser in (ls, check):
        parser.add_argument("--json", action="store_true", help="print one JSON object for each checkpoint")
    for parser in (ls, check, pin, unpin, prune, bad, cp):
        parser.add_argument("--pattern", default="", help="pattern of the checkpoint names, like the setting checkpoint_pattern")
    _add_save(actions)


def _action(
    actions: Commands, name: str, run: Callable[[argparse.Namespace], int], what: str, names: str = ""
) -> argparse.ArgumentParser:
    """Add an action on a directory. names: argparse's nargs for the checkpoint names that it takes, or "" for none."""
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("directory", metavar="DIR")
    if names:
        parser.add_argument("names", metavar="NAME", nargs=names, help="name of a checkpoint, as shown by ls")
    parser.set_defaults(run=lambda args: _storage_errors_named(run, args))
    return parser


def _add_save(actions: Commands) -> None:
    save = actions.add_parser("save", help="make a running job save a checkpoint now, all ranks at the same step")
    save.description = (
        "Ask a job for a checkpoint, wait until it is complete, and print its step. The exit code "
        "is 69 if no such job runs, and 75 if its round ends first or the checkpoint is not complete in time."
    )
    job_source.add_job(save)
    save.add_argument(
        "--timeout", type=job_source.seconds, metavar="S", default=SAVE_TIMEOUT_S, help="seconds to wait; default: %(default)g"
    )
    save.set_defaults(run=_save)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _storage_errors_named(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        _refuse_absent(args.directory)
        return run(args)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"{args.directory}: the storage has failed: {error}") from error


def _refuse_absent(directory: str) -> None:
    """Raise UsageError for a directory that does not exist: to a job it is only empty, but here it is a wrong name."""
    try:
        next(iter(open_storage(directory).entries()), None)
    except FileNotFoundError as error:
        raise UsageError(f"{directory} does not exist, expected a directory of checkpoints: check its name") from error
    except (NotADirectoryError, PermissionError):
        pass  # `list_entries` names these


def _ls(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    with ProgressBar("checking") as bar:
        rows = catalogue.list_checkpoints(storage, args.pattern, bar.counts)
    choice, unknown = None, ""
    try:
        choice = listing.newest_complete(args.directory, listing.Wanted(pattern=args.pattern))
    except (OSError, UsageError) as error:  # the rows say what cannot be read
        unknown = f"which one a job would resume from is unknown: {error}"
    chosen = choice.resume.path if choice is not None and choice.resume is not None else None
    for row in rows if args.json else ():
        record = {key: value for key, value in asdict(row).items() if key not in _UNSHOWN}
        print(json.dumps({"name": row.name, "path": row.entry.path, **record, "resume": row.entry.path == chosen}))
    if not args.json:
        for line in _columns(rows, chosen):
            print(line)
        if choice is not None:
            print(f"\n{_resumes_from(choice, storage, args.pattern)}")
    if unknown:
        print_error(unknown)
    return 0


def _resumes_from(choice: decisions.Choice, storage: Storage, pattern: str) -> str:
    if choice.resume is not None:
        return f"* a job would resume from this one: {shown(choice.resume.reason)}"
    if choice.all_bad:
        return "nothing to resume from: none of the complete checkpoints is usable"
    seen = choice.question or hints.seen_in(storage, pattern)
    return "nothing to resume from" + (f": {shown(seen)}; {hints.FROM_SCRATCH}" if seen else "")


_UNSHOWN = ("entry", "family", "together", "apart", "compared")
PASSED_OVER = "passed over: no save of it is recorded, as of a copy that somebody made"
HEADER = ("", "name", "step", "epoch", "gen", "ranks", "size", "format", "known", "marks", "state")


def _columns(rows: Sequence[catalogue.ListedCheckpoint], chosen: str | None) -> list[str]:
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        marks = " ".join(word for word, is_so in (("pinned", row.pinned), ("quarantined", row.quarantined)) if is_so)
        numbers = ["-" if value is None else str(value) for value in (row.step, row.epoch, row.generation, row.ranks)]
        size = "-" if row.size is None else format_size(row.size)
        star, name, state = "*" if row.entry.path == chosen else "", shown(row.name), shown(row.state)
        if row.foreign and row.complete and not star:
            state += f"; {PASSED_OVER}"
        lines.append((star, name, *numbers, size, row.format, row.known.value, marks or "-", state))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip() for line in lines
    ]


def _verify(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    rows = catalogue.list_checkpoints(storage, args.pattern)
    if args.names:
        chosen = _selected(rows, args.names, storage)
    elif args.all:
        chosen = [row for row in rows if row.complete]
    else:
        choice = listing.newest_complete(args.directory, listing.Wanted(pattern=args.pattern))
        chosen = [row for row in rows if choice.resume is not None and row.entry.path == choice.resume.path]
    if not chosen:
        raise UsageError(f"{args.directory} holds no complete checkpoint to verify")
    damaged = 0
    for row in chosen:
        with ProgressBar(row.name) as bar:
            mode = verifying.Mode.SAMPLED if args.sampled else verifying.Mode.FULL
            found = verifying.verify(storage, row.entry, mode, args.threads or None, bar.bytes)
        damaged += not found.sound or not row.complete
        _show(row, found, args.json)
    return EX_DAMAGED if damaged else 0


def _show(row: catalogue.ListedCheckpoint, found: verifying.Verification, as_json: bool) -> None:
    if as_json:
        sound = found.sound and row.complete
        record = {key: value for key, value in asdict(found).items() if key != "unreadable"}  # a fault says it
        print(json.dumps({"name": row.name, "sound": sound, "state": row.state, **record}), flush=True)
        return
    if not row.complete:
        print_line(f"{row.name}: not complete: {row.state}")
    for fault in found.faults:
        print_line(f"{row.name}: DAMAGED {fault.file}: {fault.reason}")
    for note in found.notes:
        print_line(f"{row.name}: {note.file}: {note.reason}")
    if found.sound and row.complete:
        print_line(f"{row.name}: sound, {counted(found.files, 'file')}, {format_size(found.size)} read")


def _pin(args: argparse.Namespace) -> int:
    return _mark(args, own_files.pin, args.reason)


def _unpin(args: argparse.Namespace) -> int:
    return _remove_marks(args, own_files.unpin, "pinned")


def _quarantine(args: argparse.Namespace) -> int:
    if args.lift:
        return _remove_marks(args, own_files.lift_quarantine, "quarantined")
    return _mark(args, own_files.quarantine, args.reason or "by hand")


def _mark(args: argparse.Namespace, mark: Callable[[Storage, str, str, str], object], reason: str) -> int:
    storage = open_storage(args.directory)
    for row in _selected(catalogue.list_checkpoints(storage, args.pattern), args.names, storage):
        mark(storage, row.name, reason, getpass.getuser())
    return 0


def _remove_marks(args: argparse.Namespace, lift: Callable[[Storage, str], None], state: str) -> int:
    """Remove marks, even from checkpoints that are gone."""
    storage = open_storage(args.directory)
    for name in args.names:
        try:
            lift(storage, name)
        except FileNotFoundError as error:
            raise UsageError(f"{name} is not {state} in {args.directory}") from error
    return 0


def _prune(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    rows = {row.name: row for row in catalogue.list_checkpoints(storage, args.pattern)}
    choices = [listing.newest_in(storage, listing.Wanted(pattern=pattern)) for pattern in {args.pattern, ""}]
    resumed = [row.name for row in rows.values() for each in choices if each.resume and each.resume.path == row.entry.path]
    named = {row.name for row in _selected(rows.values(), args.names, storage)}
    candidates = [replace(row.prune_candidate, own=row.own or row.name in named) for row in rows.values()]
    plan = upkeep.plan_prune(candidates, args.keep_last, args.keep_every, resumed)
    for each in plan:
        print_line(f"{'remove' if each.remove else 'keep'}  {each.name}: {each.reason}")
    doomed = [each.name for each in plan if each.remove]
    sizes = [rows[name].size for name in doomed]
    total = f"{len(doomed)} of {len(plan)}, {format_size(sum(filter(None, sizes)))}{' or more' if None in sizes else ''}"
    if not args.yes:
        print(f"\nnothing was removed; --yes removes {total}")
        return 0
    with ProgressBar("removing") as bar:
        # The oldest first, so that an interrupted prune keeps the newest.
        for done, name in enumerate(reversed(doomed), 1):
            upkeep.delete_entry(storage, rows[name].entry)
            bar.counts(done, len(doomed))
    print(f"\nremoved {total}")
    return 0


def _cp(args: argparse.Namespace) -> int:
    source, target = open_storage(args.directory), open_storage(args.to)
    for row in _selected(catalogue.list_checkpoints(source, args.pattern), args.names, source):
        if not row.complete:
            raise UsageError(f"{row.name} is not complete: {row.state}; nothing was copied")
        try:
            with ProgressBar(row.name) as bar:
                sent = upkeep.copy(source, target, row.entry, bar.bytes)
        except (upkeep.CopyError, own_files.ManifestError) as error:
            print_line(f"{row.name}: DAMAGED {error}")
            return EX_DAMAGED
        print_line(f"{target.path(row.name)}: {format_size(sent)} sent")
    return 0


def _save(args: argparse.Namespace) -> int:
    with job_source.job_client(args.rdzv_endpoint, args.rdzv_id) as client:
        done = requests.save(client, args.rdzv_id, args.timeout)
    if done.step is None:
        print_error(f"no save: {done.reason}")
        return done.code
    print(done.step)
    return 0


def _selected(
    rows: Iterable[catalogue.ListedCheckpoint], names: Sequence[str], storage: Storage
) -> list[catalogue.ListedCheckpoint]:
    found = {name: row for row in rows for name in (row.name, *(part.name for part in row.entry.parts))}
    missing = [name for name in names if name.rstrip("/") not in found]
    if missing:
        shown = ", ".join(list(dict.fromkeys(row.name for row in found.values()))[:10]) or "none"
        raise UsageError(f"no checkpoint {missing[0]} in {storage.address}; found: {shown}")
    return list(dict.fromkeys(found[name.rstrip("/")] for name in names))


# What a terminal shows.


def format_size(count: float) -> str:
    """Return a number of bytes for people to read: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class ProgressBar:
    """A progress bar on stderr, shown only on a terminal. Leaving the context removes it."""

    def __init__(self, title: str) -> None:
        self._title, self._on, self._shown_at, self._began = shown(title), os.isatty(2), 0.0, time.monotonic()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown_at:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def counts(self, done: int, total: int) -> None:
        self._draw(done, total, f"{done}/{total}")

    def bytes(self, done: int, total: int) -> None:
        seconds = max(time.monotonic() - self._began, 1e-3)
        self._draw(done, total, f"{format_size(done)}/{format_size(total)} {format_size(done / seconds)}/s")

    def _draw(self, done: int, total: int, figures: str) -> None:
        now = time.monotonic()
        if not self._on or now - self._shown_at < SHOW_EVERY_S:
            return
        self._shown_at = now
        filled = BAR_WIDTH * done // total if total else BAR_WIDTH
        sys.stderr.write(f"\r\033[K{self._title} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {figures}")
        sys.stderr.flush()
