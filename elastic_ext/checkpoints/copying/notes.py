"""What is noted in `local_dir` about the saves of a script there: which of them were copied, and which the script has removed.

    .elastic_ext/copied/NAME     its content names the save that was copied last, see `identity`
    .elastic_ext/removed/NAME    a worker was seen to remove the entry
    .elastic_ext/used            a script saves here: it has called `save_dir()`, or one of its saves was copied
    .elastic_ext/off             this round saves elsewhere, so nothing of scripts is copied before its end
    .elastic_ext/began           its time is that at which the last round began here

So a copy is removed because a script has removed its original, and never because a disk was wiped: then the notes are gone, too.
The agent writes the latter, the copier the former, and takes both away once the copy is removed or has a new original.
"""

from __future__ import annotations

import hashlib

from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.record.stored import BEGAN, KnownSave, began_at, files_at
from elastic_ext.checkpoints.storage import Storage, remove_if_there

COPIED, REMOVED = f"{MARKERS}/copied", f"{MARKERS}/removed"
USED, OFF = f"{MARKERS}/used", f"{MARKERS}/off"


def identity(known: KnownSave, record: bytes) -> str:
    """Return what distinguishes one state of a save from all others. record: the content of its file."""
    return f"{known.number:x} {hashlib.sha256(record).hexdigest()}"


def copied_as(local: Storage, name: str) -> str:
    """Return the `identity` of the save of this entry that was copied last; "": none was. Raises OSError."""
    return (local.read_if_there(f"{COPIED}/{name}") or b"").decode(errors="replace")


def note_copied(local: Storage, name: str, identity: str) -> None:
    """Raises OSError."""
    local.put(f"{COPIED}/{name}", identity.encode())


def is_used(local: Storage) -> bool:
    """Raises OSError."""
    return local.stat(USED) is not None or bool(local.listed(COPIED))


def is_off(local: Storage) -> bool:
    """Raises OSError."""
    return local.stat(OFF) is not None


def note_round(local: Storage, saves_here: bool) -> None:
    """Note that a round begins, and where it saves. Raises OSError."""
    local.put(BEGAN, b"")
    if saves_here:
        remove_if_there(local, OFF)
    elif not is_off(local):
        local.put(OFF, b"")


def is_of_earlier_round(local: Storage, name: str) -> bool:
    """Return whether nothing of an entry was written since the last round began. Raises OSError."""
    began, times = began_at(local), [each.mtime for each in files_at(local, name).values()]
    return began is not None and all(time is not None and time < began for time in times)


def note_removed(local: Storage, name: str, recorded: bool) -> None:
    """Note that a worker has removed an entry that has gone, if it was recorded or copied. Raises OSError."""
    note = f"{REMOVED}/{name}"
    if (recorded or copied_as(local, name)) and local.stat(note) is None:
        local.put(note, b"")


def removed_names(local: Storage) -> list[str]:
    """Raises OSError."""
    return [each.name for each in local.listed(REMOVED)]


def forget(local: Storage, name: str, copied: bool = True) -> None:
    """Take back that an entry was removed; copied: and that it was copied. Raises OSError."""
    remove_if_there(local, f"{REMOVED}/{name}")
    if copied:
        remove_if_there(local, f"{COPIED}/{name}")
