"""What lies beside checkpoints and says which of them are whole: files in which a tool names its newest, and marks of saves.

DeepSpeed writes `latest`, Megatron `latest_checkpointed_iteration.txt`, nanotron `latest.txt`, detectron2 and mmengine
`last_checkpoint`, each once the save is done. NeMo 2 keeps a file NAME-unfinished beside a checkpoint until then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from elastic_ext.checkpoints.directory import UNFINISHED
from elastic_ext.checkpoints.formats.manifest import order_of
from elastic_ext.checkpoints.formats.names import family_of, numbers_of, step_of
from elastic_ext.checkpoints.storage import Entry, Storage

MAX_TRACKER = 4096  # bytes: a path, or a number
_TRACKER = re.compile(r"(latest|last)([-_.](checkpoint|checkpointed|ckpt|iteration|iter|step|epoch|tag|txt))*")


def read_trackers(storage: Storage, listed: Iterable[Entry]) -> dict[str, str]:
    """Return by name the text of the files in which a tool names its newest checkpoint. One that may not be read says nothing.

    Raises OSError.
    """
    found = {}
    for entry in listed:
        if _TRACKER.fullmatch(entry.name) and not (entry.is_dir or entry.unusable) and 0 < entry.size <= MAX_TRACKER:
            try:
                found[entry.name] = storage.read(entry.name).decode().strip()
            except (FileNotFoundError, PermissionError, UnicodeDecodeError):
                continue
    return found


def judged(found: Sequence[Entry], listed: Iterable[Entry], trackers: Mapping[str, str]) -> list[Entry]:
    """Return the candidates, each with what the files beside it say of it. Pure.

    What is newer than the one that a tracker names is not whole, if it is of several files: the end of one file shows by itself.
    """
    names = {entry.name for entry in listed}
    return [each if each.torn else replace(each, torn=_torn(each, found, names, trackers)) for each in found]


def tracked(found: Sequence[Entry], trackers: Mapping[str, str]) -> frozenset[str]:
    """Return the names of the candidates that trackers name. Pure."""
    named = (_named(found, text) for text in trackers.values())
    return frozenset(entry.name for entry in named if entry is not None)


def _torn(entry: Entry, found: Sequence[Entry], names: Collection[str], trackers: Mapping[str, str]) -> str:
    for stem in {entry.name, entry.name.removesuffix(".ckpt"), entry.name.removesuffix(".nemo")}:
        if f"{stem}{UNFINISHED}" in names:
            return f"{stem}{UNFINISHED} is there: the save did not finish"
    if not (entry.is_dir or entry.parts) or order_of(entry.name) is not None:  # our own say it themselves
        return ""
    for tracker, text in trackers.items():
        newest = _named(found, text)
        is_same_family = newest is not None and family_of(newest.name) == family_of(entry.name)
        if newest is not None and is_same_family and numbers_of(entry.name) > numbers_of(newest.name):
            return f"{tracker} still names {newest.name}: the save did not finish"
    return ""


def _named(found: Sequence[Entry], text: str) -> Entry | None:
    """Return the candidate that the text of a tracker names: by its name, its path, or its step."""
    name = text.rstrip("/").rpartition("/")[2]
    for entry in found:
        if name in (entry.name, *(part.name for part in entry.parts)):
            return entry
    step = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else None
    return next((entry for entry in found if entry.is_dir and step is not None and step_of(entry.name) == step), None)
