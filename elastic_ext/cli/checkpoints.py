"""`elastic-ext checkpoints`: ls, verify, pin, unpin, prune, quarantine, cp, save."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from elastic_ext.base import settings
from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import shown
from elastic_ext.checkpoints.choice import discovery, listing
from elastic_ext.checkpoints.choice.listing import ListedCheckpoint
from elastic_ext.checkpoints.directory import marks, pruning, transfer
from elastic_ext.checkpoints.formats.manifest import ManifestError
from elastic_ext.checkpoints.formats.verify import Mode, Verification, verify
from elastic_ext.checkpoints.storage import Storage, open_storage

EX_DAMAGED = 1  # `verify` has found damage, or `cp` has
EX_NO_SAVE = 75  # sysexits.h, EX_TEMPFAIL: trying again may help
SAVE_TIMEOUT_S = 600.0
BAR = 30  # characters
SHOW_EVERY = 0.1  # seconds between two pictures of the bar


def add(commands: Any) -> None:
    """Add the command to those of `elastic-ext`."""
    options = commands.add_parser("checkpoints", help="list, verify, mark, prune and copy checkpoints")
    options.description = "DIR is a path or a URL (s3://, gs://, ...). The exit code is 78 for wrong usage or input."
    actions = options.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=type(options))

    def action(name: str, run: Callable[[argparse.Namespace], int], what: str, several: bool | None = None) -> Any:
        parser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        parser.add_argument("directory", metavar="DIR")
        if several is not None:
            parser.add_argument("names", metavar="NAME", nargs="*" if several else "+", help="of checkpoints, as ls shows them")
        parser.set_defaults(run=lambda args: _told(run, args))
        return parser

    ls = action("ls", _ls, "list all checkpoints, and which one a job would resume from")
    check = action("verify", _verify, "read checkpoints and compare with their checksums; exit code 1 for damage", True)
    check.add_argument("--all", action="store_true", help="every complete one; default: the one that would be resumed from")
    check.add_argument("--sampled", action="store_true", help="the sizes of all files, the content of some")
    check.add_argument("--threads", type=_count, help="files read at once; default: one for each core")
    pin = action("pin", _pin, "never prune these", False)
    unpin = action("unpin", _unpin, "let these be pruned again", False)
    prune = action("prune", _prune, "show which checkpoints would be removed; with --yes remove them")
    prune.add_argument("--keep-last", type=_count, default=3, metavar="N", help="complete ones that stay; default 3, 1 at least")
    prune.add_argument("--keep-every", type=_count, default=0, metavar="STEPS", help="and those of every so many steps")
    prune.add_argument("--yes", action="store_true", help="remove them")
    bad = action("quarantine", _quarantine, "never resume from these; nothing is removed", False)
    bad.add_argument("--lift", action="store_true", help="trust them again")
    for parser in (pin, bad):
        parser.add_argument("--reason", default="", help="for the next one who wonders")
    cp = action("cp", _cp, "copy checkpoints to another directory, with their checksums; a copy that was cut off goes on", False)
    cp.add_argument("--to", required=True, metavar="DIR", help="the other directory")
    for parser in (ls, check):
        parser.add_argument("--json", action="store_true", help="one JSON object for each on stdout")
    for parser in (ls, check, pin, unpin, prune, bad, cp):
        parser.add_argument("--pattern", default="", help="as the setting checkpoint_pattern")

    save = actions.add_parser("save", help="have a running job save now, all ranks at one step")
    save.description = (
        "Ask a job with the rendezvous ext_etcd for a checkpoint and wait until it is complete: its step is printed, the exit "
        "code is 0. It is 75 where it is not complete in time, the job does not run or its round ends before."
    )
    save.add_argument("--rdzv-endpoint", metavar="HOST:PORT[,...]", required=True, help="the etcd servers of the job")
    save.add_argument("--rdzv-id", metavar="ID", required=True, help="the job")
    save.add_argument("--timeout", type=_seconds, metavar="S", default=SAVE_TIMEOUT_S, help="default: %(default)g seconds")
    save.set_defaults(run=_save)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _told(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    try:
        return run(args)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"{args.directory}: the storage does not do it: {error}") from error


# ls


def _ls(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    with Bar("checking") as bar:
        rows = listing.list_checkpoints(storage, args.pattern, bar.counts)
    choice = discovery.newest_complete(args.directory, discovery.Wanted(pattern=args.pattern))
    chosen = choice.resume.path if choice.resume else None
    if args.json:
        for row in rows:
            print(json.dumps(_as_json(row, row.entry.path == chosen)))
        return 0
    for line in _columns(rows, chosen):
        print(line)
    if choice.resume is not None:
        print(f"\n* would be resumed from: {shown(choice.resume.reason)}")
    else:
        print("\nnothing to resume from" + (": none of the finished ones may be used" if choice.all_bad else ""))
    return 0


def _as_json(row: ListedCheckpoint, chosen: bool) -> dict[str, Any]:
    record = {key: value for key, value in asdict(row).items() if key not in ("entry", "family")}
    return {"name": row.name, "path": row.entry.path, **record, "resume": chosen}


HEADER = ("", "name", "step", "epoch", "gen", "size", "format", "marks", "state")


def _columns(rows: Sequence[ListedCheckpoint], chosen: str | None) -> list[str]:
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        marks = " ".join(word for word, is_so in (("pinned", row.pinned), ("quarantined", row.quarantined)) if is_so)
        numbers = ["-" if value is None else str(value) for value in (row.step, row.epoch, row.generation)]
        size = "-" if row.size is None else size_of(row.size)
        star, name, state = "*" if row.entry.path == chosen else "", shown(row.name), shown(row.state)
        lines.append((star, name, *numbers, size, row.format, marks or "-", state))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip() for line in lines
    ]


def size_of(count: float) -> str:
    """1536 -> 1.5 KiB"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# The others.


def _verify(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    rows = listing.list_checkpoints(storage, args.pattern)
    if args.names:
        chosen = _named(rows, args.names, storage)
    elif args.all:
        chosen = [row for row in rows if row.complete]
    else:
        choice = discovery.newest_complete(args.directory, discovery.Wanted(pattern=args.pattern))
        chosen = [row for row in rows if choice.resume is not None and row.entry.path == choice.resume.path]
    if not chosen:
        raise UsageError(f"{args.directory} holds no complete checkpoint to verify")
    damaged = 0
    for row in chosen:
        with Bar(row.name) as bar:
            found = verify(storage, row.entry, Mode.SAMPLED if args.sampled else Mode.FULL, args.threads or None, bar.bytes)
        damaged += not found.sound or not row.complete
        _show(row, found, args.json)
    return EX_DAMAGED if damaged else 0


def _show(row: ListedCheckpoint, found: Verification, as_json: bool) -> None:
    if as_json:
        sound = found.sound and row.complete
        print(json.dumps({"name": row.name, "sound": sound, "state": row.state, **asdict(found)}), flush=True)
        return
    if not row.complete:
        _say(f"{row.name}: not complete: {row.state}")
    for fault in found.faults:
        _say(f"{row.name}: DAMAGED {fault.file}: {fault.reason}")
    for note in found.notes:
        _say(f"{row.name}: {note.file}: {note.reason}")
    if found.sound and row.complete:
        _say(f"{row.name}: sound, {found.files} files, {size_of(found.size)} read")


def _pin(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    for row in _named(listing.list_checkpoints(storage, args.pattern), args.names, storage):
        marks.pin(storage, row.name, args.reason, getpass.getuser())
    return 0


def _unpin(args: argparse.Namespace) -> int:
    return _lift(args, marks.unpin, "pinned")


def _quarantine(args: argparse.Namespace) -> int:
    if args.lift:
        return _lift(args, marks.lift_quarantine, "quarantined")
    storage = open_storage(args.directory)
    for row in _named(listing.list_checkpoints(storage, args.pattern), args.names, storage):
        marks.quarantine(storage, row.name, args.reason or "by hand", getpass.getuser())
    return 0


def _lift(args: argparse.Namespace, lift: Callable[[Storage, str], None], state: str) -> int:
    """The checkpoint itself need not be there any more."""
    storage = open_storage(args.directory)
    for name in args.names:
        try:
            lift(storage, name)
        except FileNotFoundError as error:
            raise UsageError(f"{name} is not {state} in {args.directory}") from error
    return 0


def _prune(args: argparse.Namespace) -> int:
    storage = open_storage(args.directory)
    plan = pruning.plan_prune(
        (row.prune_candidate for row in listing.list_checkpoints(storage, args.pattern)), args.keep_last, args.keep_every
    )
    for each in plan:
        _say(f"{'remove' if each.remove else 'keep'}  {each.name}: {each.reason}")
    doomed = [each.name for each in plan if each.remove]
    if not args.yes:
        print(f"\nnothing was removed; --yes removes {len(doomed)} of {len(plan)}")
        return 0
    with Bar("removing") as bar:
        # From the oldest: a prune that is cut off has kept the newer ones.
        for done, name in enumerate(reversed(doomed), 1):
            pruning.delete(storage, name)
            bar.counts(done, len(doomed))
    return 0


def _cp(args: argparse.Namespace) -> int:
    source, target = open_storage(args.directory), open_storage(args.to)
    for row in _named(listing.list_checkpoints(source, args.pattern), args.names, source):
        if not row.complete:
            raise UsageError(f"{row.name} is not complete: {row.state}; nothing was copied")
        try:
            with Bar(row.name) as bar:
                sent = transfer.copy(source, target, row.entry, bar.bytes)
        except (transfer.CopyError, ManifestError) as error:
            _say(f"{row.name}: DAMAGED {error}")
            return EX_DAMAGED
        _say(f"{target.path(row.name)}: {size_of(sent)} sent")
    return 0


def _save(args: argparse.Namespace) -> int:
    """TLS and user come from the settings, as for an agent: ELASTIC_EXT_ETCD_CA and so on."""
    from elastic_ext.rendezvous.etcd.connect import connect
    from elastic_ext.rendezvous.etcd.save_request import save

    with connect(args.rdzv_endpoint, settings.read({}, os.environ)) as client:
        done = save(client, args.rdzv_id, "elastic-ext checkpoints save", args.timeout)
    if done.step is None:
        print(f"elastic-ext: no save: {shown(done.reason)}", file=sys.stderr)
        return EX_NO_SAVE
    print(done.step)
    return 0


def _say(line: str) -> None:
    """Names of files and what is in them are whoever's that may write there."""
    print(shown(line), flush=True)


def _named(rows: Iterable[ListedCheckpoint], names: Sequence[str], storage: Storage) -> list[ListedCheckpoint]:
    found = {row.name: row for row in rows}
    missing = [name for name in names if name.rstrip("/") not in found]
    if missing:
        shown = ", ".join(list(found)[:10]) or "none"
        raise UsageError(f"no checkpoint {missing[0]} in {storage.address}; there are: {shown}")
    return [found[name.rstrip("/")] for name in names]


class Bar:
    """A progress bar on stderr where that is a terminal, else nothing; gone when the work is done."""

    def __init__(self, what: str) -> None:
        self._what, self._on, self._shown, self._began = shown(what), os.isatty(2), 0.0, time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def counts(self, done: int, total: int) -> None:
        self._draw(done, total, f"{done}/{total}")

    def bytes(self, done: int, total: int) -> None:
        seconds = max(time.monotonic() - self._began, 1e-3)
        self._draw(done, total, f"{size_of(done)}/{size_of(total)} {size_of(done / seconds)}/s")

    def _draw(self, done: int, total: int, figures: str) -> None:
        now = time.monotonic()
        if not self._on or now - self._shown < SHOW_EVERY:
            return
        self._shown = now
        filled = BAR * done // total if total else BAR
        sys.stderr.write(f"\r\033[K{self._what} [{'#' * filled}{'.' * (BAR - filled)}] {figures}")
        sys.stderr.flush()
