"""Who may commit: one generation for each group of workers that opens a directory of checkpoints. Only the newest may.

A marker is created exclusively, so that no two groups have the same. A group that was paused while another took its place finds
the other's marker before it commits or prunes. It may be paused between that look and the write; what it commits then lies in a
directory of its own generation, which counts as older than all of its successor's (manifest.py).
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

MARKERS = ".elastic_ext"
KEPT = 8  # newest markers; only the newest one decides, the others are for people

_MARKER = re.compile(r"generation-(\d{8,})")


class StaleGroup(ElasticExtError):
    """Another group of workers has opened the directory of checkpoints since: this one may write there no more."""


@dataclass(frozen=True)
class Opener:
    """Who opens. launch: the same for all restarts of one launch of the job, and for no other launch; "" if nobody tells.

    Restarts are compared within one launch only: a job that is queued again under its old name counts from 0 again.
    """

    run_id: str = ""
    restart: int = 0
    launch: str = ""


def newest_generation(storage: Storage) -> int:
    """The highest that was opened, by marker or by the name of a checkpoint; 0: none. Raises OSError."""
    return max([*_marked(storage), *(found[0] for entry in _entries(storage, "") if (found := order_of(entry)))], default=0)


def refuse_stale(storage: Storage, generation: int) -> None:
    """Raises StaleGroup where a newer group has opened the directory; OSError where that cannot be known."""
    newest = max(_marked(storage), default=0)
    if newest > generation:
        raise StaleGroup(
            f"generation {newest} has opened {storage.address}, this group of workers is generation {generation}: it was "
            "replaced while it stood still, and may not commit or prune; end it"
        )


def open_generation(storage: Storage, opener: Opener) -> int:
    """Take the next generation. Raises StaleGroup where a later restart of the same launch was here before; OSError."""
    while True:
        newest = newest_generation(storage)
        _refuse_older_restart(storage, newest, opener)
        generation = newest + 1
        try:
            storage.create(_name(generation), json.dumps(asdict(opener)).encode())
        except FileExistsError:
            continue  # another group was faster: look again at who that is
        refuse_stale(storage, generation)
        logger.info("checkpoints in %s: this group of workers is generation %s", storage.address, generation)
        for old in sorted(_marked(storage))[:-KEPT]:
            _remove(storage, old)
        return generation


def _refuse_older_restart(storage: Storage, newest: int, opener: Opener) -> None:
    if not opener.launch or newest not in _marked(storage):
        return
    try:
        found = json.loads(storage.read(_name(newest)))
        launch, restart = str(found["launch"]), int(found["restart"])
    except FileNotFoundError:
        return  # removed since: there are newer ones, and `refuse_stale` will see them
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("generation %s of %s has a marker that cannot be read: %s", newest, storage.address, error)
        return
    if launch == opener.launch and str(found.get("run_id")) == opener.run_id and restart > opener.restart:
        raise StaleGroup(
            f"restart {restart} of job {opener.run_id} has opened {storage.address}, this is restart {opener.restart}: "
            "these workers belong to a round that is over; end them"
        )


def _remove(storage: Storage, generation: int) -> None:
    try:
        storage.remove(_name(generation))
    except OSError as error:
        logger.info("old marker of generation %s of %s stays: %s", generation, storage.address, error)


def _name(generation: int) -> str:
    return f"{MARKERS}/generation-{generation:08d}"


def _marked(storage: Storage) -> list[int]:
    return [int(match[1]) for name in _entries(storage, MARKERS) if (match := _MARKER.fullmatch(name))]


def _entries(storage: Storage, child: str) -> list[str]:
    try:
        return [entry.name for entry in storage.entries(child)]
    except FileNotFoundError:
        return []
