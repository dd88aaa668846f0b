"""The fence of a directory of checkpoints: each group of workers that opens it gets a generation, and only the newest may commit.

A generation is a marker file, `.elastic_ext/generation-NNNNNNNN`, that holds the JSON of an `Opener`. It is created exclusively,
so no two groups have the same generation. A group that was replaced, for instance while it was paused, finds its successor's
marker before it commits or prunes. If it is paused between that check and the write, it commits to a directory of its own
generation, which counts as older than all of its successor's (`own_files`).
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import asdict, dataclass

from elastic_ext.base import errors, records
from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.formats.candidates import order_of
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

KEPT_MARKERS = 8  # the newest decides; the others are for people

_MARKER = re.compile(r"generation-(\d{8,})")


class StaleGroup(errors.ElasticExtError):
    """Another group of workers has opened the directory since, so this one must no longer write there."""


@dataclass(frozen=True)
class Opener:
    """The group of workers that opens the directory."""

    run_id: str = ""  # the job's run ID
    restart: int = 0  # number of restarts before this group, within one launch of the job
    # An ID that all restarts of one launch share; "" if unknown. Restarts are compared only within one launch, because a requeued
    # job of the same name counts from 0 again.
    launch: str = ""


def refuse_stale(storage: Storage, generation: int) -> None:
    """Raise StaleGroup if a newer group has opened the directory. Raises OSError if the storage does not answer."""
    newest = max(_marked(storage), default=0)
    if newest > generation:
        ours, theirs, saved = None, None, False
        with suppress(OSError):
            ours, theirs = _opener(storage, generation), _opener(storage, newest)
        with suppress(OSError):
            saved = newest in _saved(storage)
        raise StaleGroup(
            f"{_taken_by(ours, theirs, saved)}: generation {newest} has opened {storage.address}, this "
            f"group of workers is generation {generation} and must not commit or prune there"
        )


def _taken_by(ours: Opener | None, theirs: Opener | None, saved: bool) -> str:
    """Return who has opened the directory, and what to do. saved: whether they have begun a checkpoint there, rather
    than just loaded one; False if that is not known. Pure.

    `failures.rules` knows the sentence about another launch that saves.
    """
    if ours is None or theirs is None:
        return "others, perhaps of this launch, have opened the directory; end these processes if they were replaced"
    if not theirs.launch:
        return "workers without an agent have opened the directory; let no two save to one"
    if ours.launch == theirs.launch:
        return f"restart {theirs.restart} of this launch has taken the place of these workers; end them"
    job = "this job" if ours.run_id == theirs.run_id else f"job {theirs.run_id}"
    if not saved:
        return f"another launch, of {job}, has opened the directory and saved nothing there yet; let no two save to one"
    return f"another launch, of {job}, saves to the directory; give each its own, or let only one run"


def open_generation(storage: Storage, opener: Opener) -> int:
    """Take and return the next generation. Raises StaleGroup if a later restart of this launch has opened one; OSError."""
    while True:
        newest = max([*_marked(storage), *_saved(storage)], default=0)
        _refuse_older_restart(storage, newest, opener)
        generation = newest + 1
        try:
            storage.create(_marker(generation), json.dumps(asdict(opener)).encode())
        except FileExistsError:
            continue  # another group was faster; check which one
        refuse_stale(storage, generation)
        logger.info("checkpoints in %s: this group of workers is generation %s", storage.address, generation)
        for old in sorted(_marked(storage))[:-KEPT_MARKERS]:
            try:
                storage.remove(_marker(old))
            except OSError as error:
                logger.info("cannot remove the old marker of generation %s of %s: %s", old, storage.address, error)
        return generation


def _refuse_older_restart(storage: Storage, newest: int, opener: Opener) -> None:
    if not opener.launch or newest not in _marked(storage):
        return
    found = _opener(storage, newest)  # None: perhaps removed since; then there are newer markers, which `refuse_stale` finds
    if found is None or (found.launch, found.run_id) != (opener.launch, opener.run_id):
        return
    if found.restart > opener.restart:
        raise StaleGroup(
            f"restart {found.restart} of job {opener.run_id} has opened {storage.address}, this is restart {opener.restart}: "
            "these workers belong to a round that is over; end them"
        )


def _opener(storage: Storage, generation: int) -> Opener | None:
    """Return who has opened a generation; None if its marker is gone or cannot be read as one. Raises OSError."""
    data = storage.read_if_there(_marker(generation))
    try:
        return None if data is None else records.build(Opener, json.loads(data), "the marker")
    except (ValueError, records.RecordError) as error:
        logger.warning("generation %s of %s has a marker that cannot be read: %s", generation, storage.address, error)
        return None


def _marker(generation: int) -> str:
    return f"{MARKERS}/generation-{generation:08d}"


def _marked(storage: Storage) -> list[int]:
    return [int(match[1]) for entry in storage.listed(MARKERS) if (match := _MARKER.fullmatch(entry.name))]


def _saved(storage: Storage) -> list[int]:
    """Return the generations of the checkpoints there, complete or not."""
    return [order[0] for entry in storage.listed() if (order := order_of(entry.name))]
