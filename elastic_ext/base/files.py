"""Files and private directories in places to which others may write, e.g. /tmp or a shared directory; and text files that a user
names, read in bounded time and space, for any kind of file.

A private directory in such a place has mode 0700, and a name that no one can guess (`tempfile.mkdtemp`). Only where several
processes must find the same one is the name one that they can compute: then `first_private` passes over what is another user's.
The place has the sticky bit, as /tmp has: what is this user's, no other user can replace.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from elastic_ext.base.errors import UsageError
from elastic_ext.base.wakeup import readable


def size(path: str) -> int:
    """Return the bytes of a file; 0 if it is not there, or has just gone."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file with one that holds this; the umask sets its mode. Raises OSError, and then leaves no part file.

    Invariants: readers see the whole old file or the whole new one. No link is followed, neither in place of the file nor of the
    temporary file, whose name no one can guess and which only this call creates.
    """
    part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def is_private(path: Path) -> bool:
    """Return whether this is a directory of this user that no one else may enter, and no link to one."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def first_private(paths: Iterable[Path]) -> Path:
    """Return which of these is this user's private directory: the first that is there, else the first that can be made.

    So all processes of a user find the same one, whatever others have put at some of these paths, and when they take that away.
    Makes nothing. Raises UsageError: others have put something at all of them.
    """
    free, taken = None, None
    for path in paths:
        if is_private(path):
            return path
        if os.path.lexists(path):
            taken = path
        else:
            free = free or path
    if free is None:
        raise UsageError(f"{taken}, and all other names for this directory are taken: ask who owns it to remove them")
    return free


def own(directory: str, lock: str) -> int:
    """Lock a directory until this process ends; return the descriptor. Raises OSError. lock: name of the file in it.

    That file has its name only once the lock is held.
    """
    descriptor, path = tempfile.mkstemp(dir=directory)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(path, os.path.join(directory, lock))
    return descriptor


def remove_orphans(pattern: str, lock: str, on_orphan: Callable[[str], None]) -> None:
    """Remove the directories that processes of this user have owned (see `own`) that live no more.

    Anybody can put anything under such a name. So nothing is followed, waited for or removed that is not this user's, and what
    cannot be opened or removed is left.

    pattern: of their paths, as for glob. on_orphan: called with each before it is removed.
    """
    for folder in glob.glob(pattern):
        with contextlib.suppress(OSError), _opened(folder, os.O_DIRECTORY) as inside:
            if os.fstat(inside).st_uid == os.geteuid():
                _remove_if_orphaned(folder, inside, lock, on_orphan)


def _remove_if_orphaned(folder: str, inside: int, name: str, on_orphan: Callable[[str], None]) -> None:
    """Remove a directory of this user if no process holds its lock. inside: its descriptor. Raises OSError: it has none, say.

    The name still leads to it: in a directory with the sticky bit no other user can put another in its place.
    """
    with _opened(name, os.O_NONBLOCK, inside) as lock:
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # its owner lives, or another process was faster
        on_orphan(folder)
        for entry in os.scandir(folder):  # the lock goes last: should this process end before, the next one goes on
            if entry.name != name and entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Give the descriptor of what has this name, which is no link. Raises OSError. folder: descriptor of its directory."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


MAX_BYTES = 64 << 20
LONGEST_S = 60.0
WAIT_S = 5.0  # time for the writer of a pipe, as in `explain <(program)`


def read_text(path: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the content of a file, or of a pipe or device up to its end.

    Raises:
        OSError: it cannot be read, is longer than max_bytes, sends nothing for WAIT_S (a pipe), or takes longer than LONGEST_S.
        ValueError: the path is not a valid file name, or the content is not UTF-8.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # open() of a pipe without a writer would block
    try:
        return _content(descriptor, path, max_bytes).decode("utf-8")
    finally:
        os.close(descriptor)


def _content(descriptor: int, path: str, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    end = time.monotonic() + LONGEST_S
    while True:
        left_s = min(WAIT_S, end - time.monotonic())
        # poll(2) reports nothing for a pipe that has had no writer yet, and "ended" for one whose writers are gone.
        if left_s <= 0 or not readable(descriptor, left_s):
            raise OSError(errno.ETIMEDOUT, f"a pipe or device that sent nothing for {WAIT_S:g} s", path)
        try:
            piece = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            continue
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes >> 20} MB", path)
