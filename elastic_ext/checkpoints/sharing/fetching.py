"""Makes a save that several nodes have a part of complete on this node, below `.elastic_ext/of_nodes/NUMBER/`.

What this node has itself is linked there, and stays as it has it; the rest comes from the others. A file appears whole, so an
interrupted fetch goes on where it has ended. There is one save at a time: others go first, unless a process holds them
(`PINNED`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from elastic_ext.checkpoints.directory.own_files import MARKERS
from elastic_ext.checkpoints.directory.tiers import LOADING
from elastic_ext.checkpoints.formats.candidates import ANY
from elastic_ext.checkpoints.sharing.catalogue import MIRRORED, is_entry_name, is_path
from elastic_ext.checkpoints.sharing.merging import SharedFile
from elastic_ext.checkpoints.sharing.peers import NodePeer
from elastic_ext.checkpoints.storage import LocalStorage, remove_if_there

logger = logging.getLogger(__name__)

FETCHED = f"{MARKERS}/of_nodes"
CONNECTIONS = 4  # at once
_PART = ".part"  # the end of a temporary name, which is hidden


def pin_of(number: int) -> str:
    """Return the name by which `tiers.Pin.keep_only` keeps what was fetched under this number."""
    return f"fetched-{number}"


def fetch(
    local: LocalStorage,
    name: str,
    number: int,
    files: Sequence[SharedFile],
    own_node: int,
    peers: Mapping[int, NodePeer],
    only: Collection[str] | None = None,
) -> str:
    """Make a save complete on this node, and return where: its own path, if this node has all of it itself.

    Args:
        name: of the entry, or of the files of all ranks, with "*".
        number: of what it holds, see `AllNodes.number_of`.
        files: see `AllNodes.files_of_save`.
        peers: by group rank.
        only: names of files; the others are left out. None: all of them.

    Raises OSError: a node does not answer, a file has changed, or there is no room.
    """
    asked = [each for each in files if only is None or each.name in only]
    refuse_strange(asked, name)
    wanted = chosen_files((each for each in asked if each.node != own_node or _is_unchanged(local, each)), own_node)
    for each in asked:
        if each.name not in wanted:
            raise OSError(errno.ESTALE, f"it has changed since it was listed with {each.size} bytes", local.path(each.name))
    _remove_others(local, number)
    if all(each.node == own_node and not each.at for each in wanted.values()):
        return local.path(name)
    target = LocalStorage(local.path(f"{FETCHED}/{number}"))
    for left in Path(target.address).rglob(f".*{_PART}"):  # by a fetch that was interrupted
        left.unlink()
    missing = [file for path, file in wanted.items() if not _is_there(target.path(path), file.size)]
    away = [file for file in missing if file.node != own_node]
    _refuse_without_room(local, sum(file.size for file in away))
    for file in missing:
        os.makedirs(os.path.dirname(target.path(file.name)), exist_ok=True)
        if file.node == own_node:
            _link(local.path(file.place), target.path(file.name))
    _fetch_all(away, target, peers)
    return target.path(name)


def let_go(local: LocalStorage, number: int) -> Callable[[], None]:
    """Take away what was fetched under this number, at once; return what frees its memory, which may take seconds.

    Workers keep what they have mapped. Raises OSError.
    """
    old = f"{FETCHED}/.{number}"
    with suppress(FileNotFoundError):
        os.rename(local.path(f"{FETCHED}/{number}"), local.path(old))

    def free() -> None:
        try:
            remove_if_there(local, old)
        except OSError as error:
            logger.debug("%s stays for now: %s", local.path(old), error)

    return free


def chosen_files(files: Iterable[SharedFile], own_node: int) -> dict[str, SharedFile]:
    """Return by name which of the files a node uses: its own one, else the first; a mirrored one is not its own. Pure."""
    found: dict[str, SharedFile] = {}
    for file in files:
        if file.name not in found or (file.node == own_node and not file.at):
            found[file.name] = file
    return found


def refuse_strange(files: Iterable[SharedFile], name: str) -> None:
    """Raise OSError for a file that is not of this entry: nothing is written elsewhere, whoever has sent the list. Pure."""
    fits = re.compile(re.escape(name).replace(re.escape(ANY), r"\d+") + "(/.*)?", re.DOTALL).fullmatch
    strange = next((each.name for each in files if not (is_path(each.name) and fits(each.name) and _is_place(each))), None)
    if strange is not None or not is_entry_name(name):
        raise OSError(errno.EINVAL, f"expected files of an entry of local_dir, got {strange!r} for {name!r}")


def _is_place(file: SharedFile) -> bool:
    return not file.at or (is_path(file.at) and file.at.startswith(f"{MIRRORED}/"))


def _is_unchanged(local: LocalStorage, file: SharedFile) -> bool:
    found = local.stat(file.place)
    return found is not None and not found.is_dir and found.size == file.size


def _remove_others(local: LocalStorage, number: int) -> None:
    for each in local.listed(FETCHED):
        if each.name != str(number) and not _is_pinned(local, each.name):
            remove_if_there(local, f"{FETCHED}/{each.name}")


def _is_pinned(local: LocalStorage, number: str) -> bool:
    """Return whether a process holds a `tiers.Pin` of it. `tiers.unless_pinned` refuses while this agent itself chooses."""
    try:
        pin = os.open(local.path(f"{LOADING}/fetched-{number}"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(pin, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # files cannot be locked here
        logger.debug("cannot find out whether what was fetched is still loaded: %s", error)
    finally:
        os.close(pin)
    return False


def _is_there(path: str, size: int) -> bool:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def _refuse_without_room(local: LocalStorage, size: int) -> None:
    free = shutil.disk_usage(local.address).free
    if size > free:
        text = f"{size} bytes of other nodes are needed to load the checkpoint, and {free} are free: {size - free} are missing"
        raise OSError(errno.ENOSPC, text, local.address)


def _link(source: str, target: str) -> None:
    """Link a file of this node; copy it where there are no hard links. Raises OSError."""
    source = os.path.realpath(source)
    with suppress(FileNotFoundError):
        os.unlink(target)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError as error:
        logger.debug("cannot link %s: %s", source, error)
        with open(source, "rb") as read:
            _write(target, lambda file: shutil.copyfileobj(read, file))


def _write(path: str, fill: Callable[[IO[bytes]], object]) -> None:
    """Write a file that appears whole. Raises OSError."""
    folder, name = os.path.split(path)
    number, part = tempfile.mkstemp(prefix=f".{name[:80]}.", suffix=_PART, dir=folder)
    try:
        with os.fdopen(number, "wb", buffering=0) as file:
            fill(file)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _fetch_all(files: Sequence[SharedFile], target: LocalStorage, peers: Mapping[int, NodePeer]) -> None:
    """Fetch files, several at once, the largest first. After the first error no other file is begun. Raises OSError."""
    failed = threading.Event()

    def get(file: SharedFile) -> None:
        if failed.is_set():
            return
        try:
            if file.node not in peers:
                raise ConnectionError(f"node {file.node} has {file.name}, and serves no files")
            _write(target.path(file.name), lambda to: peers[file.node].copy(file.place, file.size, to))
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(CONNECTIONS, "elastic_ext-fetch") as pool:
        tasks = [pool.submit(get, file) for file in sorted(files, key=lambda each: -each.size)]
    for task in tasks:
        task.result()
