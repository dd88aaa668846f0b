"""What is noted in `local_dir` about the saves of a script there: which of them were copied, and which the script has removed.

    .elastic_ext/copied/NAME     its content names the save that was copied last, see `identity`
    .elastic_ext/removed/NAME    a worker was seen to remove the entry
    .elastic_ext/used            a script saves here: it has called `save_dir()`, or one of its saves was copied
    .elastic_ext/off             this round saves elsewhere, so nothing of scripts is copied before its end
    .elastic_ext/began           its time is that at which the last round began here
    .elastic_ext/older/NAME      the entry is older than a save of that name on other nodes, unless it was changed since

So a copy is removed because a script has removed its original, and never because a disk was wiped: then the notes are gone, too.
The agent writes the latter, the copier the former, and takes both away once the copy is removed or has a new original.
"""

from __future__ import annotations

import hashlib

from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.record.stored import BEGAN, KnownSave, began_at, changed_at
from elastic_ext.checkpoints.storage import LocalStorage, Storage, remove_if_there

COPIED, REMOVED = f"{MARKERS}/copied", f"{MARKERS}/removed"
USED, OFF = f"{MARKERS}/used", f"{MARKERS}/off"
OLDER = f"{MARKERS}/older"


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


def is_of_earlier_round(local: LocalStorage, name: str) -> bool:
    """Return whether nothing of an entry was changed since the last round began. Raises OSError."""
    began = began_at(local)
    return began is not None and changed_at(local, name) < began


def note_older(local: Storage, name: str, number: int, changed: float) -> None:
    """Note that an entry is older than a save. number: see `KnownSave`. changed: see `changed_at`, before. Raises OSError."""
    if older_than(local, name, changed) == 0:
        local.put(f"{OLDER}/{name}", f"{number} {changed!r}".encode())


def older_than(local: Storage, name: str, changed: float) -> int:
    """Return the number of the first save that an entry is known to be older than; 0: there is none. Raises OSError."""
    number, _, noted = (local.read_if_there(f"{OLDER}/{name}") or b"").decode(errors="replace").partition(" ")
    return int(number) if number.isdecimal() and noted == repr(changed) else 0


def forget_older(local: Storage) -> None:
    """Take back what was noted of entries that have gone. Raises OSError."""
    for each in local.listed(OLDER):
        if local.stat(each.name) is None:
            remove_if_there(local, f"{OLDER}/{each.name}")


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
