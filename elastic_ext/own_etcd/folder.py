"""Where the keeper of a job has its files on a host: one private directory, in memory where there is room.

lock, start.lock, agents  locks, see below
socket             where agents come in
ca.pem, own.pem, own.key  see `certificates`
data               of the member: a directory if it fits here, else a link to one on disk
log                of etcd and of the keeper

One keeper for a job and host: the process that holds `lock` is it. `start.lock` is held from before a keeper takes it until it
listens. Each agent that is in shares `agents`: a folder where no process holds any of them is abandoned, data and all. The last
keeper removes the folder with its locks: a process that gets a lock looks whether the file is still there.

Others may write beside it, and can guess its name. `files.first_private` passes over what they put there: nothing of theirs is
opened, signalled or removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

from elastic_ext.base import files
from elastic_ext.base.errors import UsageError
from elastic_ext.base.helper_process import SocketPeer, peer_of

IN_MEMORY, ON_DISK = "/dev/shm", "elastic_ext_etcd_data_"
MAX_PARENT = 32  # characters; 107 is the limit for a socket's path (unix(7)), and the folder's name and the file's take 70
NAMES = 100  # for one directory, in case that another user has taken some
DATA_BYTES = 256 << 20  # etcd lays out two logs of 64 MB in advance; its records of a job are a few MB


def folder_of(run_id: str, hosts: tuple[str, ...], own: str, environ: Mapping[str, str]) -> Path:
    """Return the directory of this job on this host. own: name of the host; several may share a machine, in tests.

    A job that Slurm starts again gets another one: its etcd is another one, even if its hosts are the same.

    Raises UsageError: others have taken all names for it.
    """
    run = _digest(*hosts, environ.get("SLURM_RESTART_COUNT", ""))
    stem, parent = f"{_stem()}{_digest(run_id, own)}", Path(_parent())
    return files.first_private(parent / f"{stem}{f'.{number}' if number else ''}_{run}" for number in range(NAMES))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def run_of(folder: Path) -> str:
    """Return what all hosts of this run of the job have in common, and no other run of it has."""
    return folder.name.rpartition("_")[2]


def predecessors(mine: Path) -> list[Path]:
    """Return the directories of other runs of this job on this host: with other hosts, or from before a requeue."""
    return [each for each in mine.parent.glob(run_pattern(mine)) if each != mine and files.is_private(each)]


def run_pattern(mine: Path) -> str:
    """Return the pattern of the names of all runs of this job on this host, and not on another that shares the machine."""
    return f"{mine.name.rpartition('_')[0].partition('.')[0]}*_*"


def _parent() -> str:
    """In memory, else where temporary files go, unless its path is too long for a socket in a folder there."""
    places = (IN_MEMORY, tempfile.gettempdir(), "/tmp")
    return next((each for each in places if len(each) <= MAX_PARENT and os.access(each, os.W_OK)), "/tmp")


def _stem() -> str:
    return f"elastic_ext_etcd_{os.geteuid()}_"


def make(folder: Path) -> None:
    """Make the directory, if it is not there. Raises UsageError."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: the directory of the job's etcd cannot be made: {error.strerror}") from error
    if not files.is_private(folder):
        raise UsageError(f"{folder}: another user has just put something there; expected a directory of this user's: start again")


def data_of(folder: Path) -> Path:
    """Return the place of the member's data: in the folder, or on disk if memory is short. Raises OSError."""
    inside = folder / "data"
    if not inside.is_symlink():
        if inside.exists() or shutil.disk_usage(folder).free >= DATA_BYTES:
            return inside
        inside.symlink_to(tempfile.mkdtemp(prefix=ON_DISK))
    return inside.readlink() / "data"  # in it: its own name, removed once, could be taken by another user


def remove(folder: Path) -> None:
    """Remove all that the keeper has written, if it is still there. Only who holds the lock may do so."""
    with suppress(OSError):  # there is no link
        shutil.rmtree((folder / "data").readlink(), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(mine: Path) -> None:
    """Remove what jobs of this user have left whose keeper and agents were killed: no process holds their locks."""
    for folder in mine.parent.glob(f"{_stem()}*"):
        if folder == mine or not files.is_private(folder):
            continue
        try:
            with ExitStack() as locks:
                for name, mode in (("start.lock", "rb"), ("lock", "rb"), ("agents", "ab")):  # perhaps no agent came in
                    lock = locks.enter_context((folder / name).open(mode))
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
        except OSError:  # a keeper or an agent lives there, or it has just gone
            continue


def take(folder: Path) -> tuple[int, int] | None:
    """Become the keeper. Return the descriptors of both locks, the second to be closed once this one listens; None: there is one.

    Waits while another one starts or ends.
    """
    while True:
        make(folder)
        start = _locked(folder / "start.lock")
        if start is None:
            continue
        if keeper_of(folder) is not None:
            os.close(start)
            return None
        own = _locked(folder / "lock")
        if own is not None and _is_same(start, folder / "start.lock"):
            return own, start
        os.close(start)
        if own is not None:
            os.close(own)


def hold(folder: Path) -> int | None:
    """Keep a folder from being removed as abandoned while the descriptor is open, also without a keeper; None: it is gone."""
    return _locked(folder / "agents", fcntl.LOCK_SH)


def keeper_of(folder: Path) -> SocketPeer | None:
    """Return the keeper that takes connections there; None: there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(folder / "socket"))
        except OSError:
            return None
        return peer_of(probe)


def _locked(path: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """Wait for the lock; return None if the file was removed meanwhile, with its folder."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, how)
    if _is_same(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
