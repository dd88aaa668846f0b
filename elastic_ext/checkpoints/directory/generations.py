"""The fence of a directory of checkpoints: each group of workers that opens it gets a generation, and only the newest may commit.

A generation is a marker file, `.elastic_ext/generation-NNNNNNNN`, that holds the JSON of an `Opener`. It is created exclusively,
so no two groups have the same generation. A group that was paused and replaced finds its successor's marker before it commits or
prunes. If it is paused again between that check and the write, it commits to a directory of its own generation, which counts as
older than all of its successor's (`formats/manifest.py`).
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass

from elastic_ext.base.errors import ElasticExtError
from elastic_ext.checkpoints.directory.layout import MARKERS
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

KEPT_MARKERS = 8  # the newest decides; the others are for people

_MARKER = re.compile(r"generation-(\d{8,})")


class StaleGroup(ElasticExtError):
    """Another group of workers has opened the directory since, so this one must no longer write there."""


@dataclass(frozen=True)
class Opener:
    """The group of workers that opens the directory.

    Attributes:
        run_id: the job's run ID.
        restart: number of restarts before this group, within one launch of the job.
        launch: an ID that all restarts of one launch share; "" if unknown. Restarts are compared only within one launch, because
            a requeued job of the same name counts from 0 again.
    """

    run_id: str = ""
    restart: int = 0
    launch: str = ""


def newest_generation(storage: Storage) -> int:
    """Return the newest generation among markers and checkpoint names, or 0. Raises OSError."""
    by_name = [order[0] for name in _names(storage, "") if (order := order_of(name))]
    return max([*_marked(storage), *by_name], default=0)


def refuse_stale(storage: Storage, generation: int) -> None:
    """Raise StaleGroup if a newer group has opened the directory. Raises OSError if the storage does not answer."""
    newest = max(_marked(storage), default=0)
    if newest > generation:
        raise StaleGroup(
            f"generation {newest} has opened {storage.address}, this group of workers is generation {generation}: it was "
            "replaced while it was paused, and must not commit or prune; end its processes"
        )


def open_generation(storage: Storage, opener: Opener) -> int:
    """Take and return the next generation. Raises StaleGroup if a later restart of this launch has opened one; OSError."""
    while True:
        newest = newest_generation(storage)
        _refuse_older_restart(storage, newest, opener)
        generation = newest + 1
        try:
            storage.create(_marker(generation), json.dumps(asdict(opener)).encode())
        except FileExistsError:
            continue  # another group was faster; check which one
        refuse_stale(storage, generation)
        logger.info("checkpoints in %s: this group of workers is generation %s", storage.address, generation)
        for old in sorted(_marked(storage))[:-KEPT_MARKERS]:
            _remove_marker(storage, old)
        return generation


def _refuse_older_restart(storage: Storage, newest: int, opener: Opener) -> None:
    if not opener.launch or newest not in _marked(storage):
        return
    try:
        found = json.loads(storage.read(_marker(newest)))
        launch, restart = str(found["launch"]), int(found["restart"])
    except FileNotFoundError:
        return  # removed since, so there are newer markers, which `refuse_stale` finds
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("generation %s of %s has a marker that cannot be read: %s", newest, storage.address, error)
        return
    if launch == opener.launch and str(found.get("run_id")) == opener.run_id and restart > opener.restart:
        raise StaleGroup(
            f"restart {restart} of job {opener.run_id} has opened {storage.address}, this is restart {opener.restart}: "
            "these workers belong to a round that is over; end them"
        )


def _remove_marker(storage: Storage, generation: int) -> None:
    try:
        storage.remove(_marker(generation))
    except OSError as error:
        logger.info("cannot remove the old marker of generation %s of %s: %s", generation, storage.address, error)


def _marker(generation: int) -> str:
    return f"{MARKERS}/generation-{generation:08d}"


def _marked(storage: Storage) -> list[int]:
    return [int(match[1]) for name in _names(storage, MARKERS) if (match := _MARKER.fullmatch(name))]


def _names(storage: Storage, child: str) -> list[str]:
    try:
        return [entry.name for entry in storage.entries(child)]
    except FileNotFoundError:
        return []
