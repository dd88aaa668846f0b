"""One keeper for a job and host: who holds `lock` is it. `start.lock` is held from before a keeper takes it until it listens.
Each agent that is in shares `agents`: a folder where nobody holds any of them is abandoned, data and all.

All are files of the job's folder, which the last keeper removes: who gets a lock looks whether the file is still there.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from elastic_ext.base.helper_process import peer_of
from elastic_ext.own_etcd import folder as folders


def take(folder: Path) -> tuple[int, int] | None:
    """Become the keeper. Return the descriptors of both locks, the second to be closed once this one listens; None: there is one.

    Waits while another one starts or ends.
    """
    while True:
        folders.make(folder)
        start = _locked(folder / "start.lock")
        if start is None:
            continue
        if is_up(folder):
            os.close(start)
            return None
        own = _locked(folder / "lock")
        if own is not None and _same(start, folder / "start.lock"):
            return own, start
        os.close(start)
        if own is not None:
            os.close(own)


def hold(folder: Path) -> int | None:
    """Keep a folder from being removed as abandoned while the descriptor is open, also without a keeper; None: it is gone."""
    return _locked(folder / "agents", fcntl.LOCK_SH)


def is_up(folder: Path) -> bool:
    """Return whether a keeper takes connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(folder / "socket"))
        except OSError:
            return False
    return True


def keeper_of(folder: Path) -> int:
    """Return the process id of the keeper that listens there; 0 if there is none, or in another container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(folder / "socket"))
        except OSError:
            return 0
        peer = peer_of(probe)
        return peer.pid if peer.user == os.geteuid() else 0


def _locked(path: Path, how: int = fcntl.LOCK_EX) -> int | None:
    """Wait for the lock; return None if the file was removed meanwhile, with its folder."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    fcntl.flock(descriptor, how)
    if _same(descriptor, path):
        return descriptor
    os.close(descriptor)
    return None


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
