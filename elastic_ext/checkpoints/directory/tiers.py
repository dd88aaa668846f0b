"""Two tiers of checkpoints: saves go to each node's fast local disk, and are copied from there to the remote directory.

The files of a checkpoint have the same names in both tiers. A node has the files of its own ranks, and the few that every rank
needs. The manifest, one of the latter, is written last, and last of all on the node of rank 0. Marks and generations are only in
the remote directory.

A node's part of a checkpoint describes itself by the digest of the manifest and the ranks in its file names. So it does not
matter which agent of a round has it, or whether the nodes changed their order. A checkpoint can be loaded if each of its files is
on the disk of some node (`newest_loadable`). A rank that needs a file of another node gets it over the network.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, BinaryIO

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import redacted
from elastic_ext.base.records import Count, Name, Within
from elastic_ext.checkpoints.directory import own_files
from elastic_ext.checkpoints.directory.own_files import MANIFEST, MARKERS, Manifest, ManifestError, decode, encode
from elastic_ext.checkpoints.formats.candidates import order_of, order_or_oldest
from elastic_ext.checkpoints.storage import Storage, poll

logger = logging.getLogger(__name__)


OWNER = f"{MARKERS}/copied_to"  # in a local directory: the address of its remote directory
MAX_RANKS = 1 << 20  # more than any job has; bounds the work that another node can cause here

# `__RANK_NUMBER.distcp` of torch/distributed/checkpoint/filesystem.py (prepare_global_plan), `rank_NNNNN.pt` of `writing`, and
# `memory_file`.
_RANK = re.compile(r"(?:__(\d+)_\d+\.distcp|rank_(\d+)\.(?:pt|mem))")


def memory_file(rank: int) -> str:
    """Return the name of the file with a rank's part of a copy in memory."""
    return f"rank_{rank:05d}.mem"


def rank_of(file: str) -> int | None:
    """Return the rank that wrote a file of one of our checkpoints; None for the few files that every node has."""
    match = _RANK.fullmatch(file)
    return int(match[1] or match[2]) if match else None


def ranks_of(nodes: Sequence[int], node: int) -> range:
    """Return the ranks on a node. nodes: number of ranks on each node, in order."""
    ends = list(accumulate(nodes, initial=0))
    return range(ends[node], ends[node + 1])


def node_of(nodes: Sequence[int], rank: int) -> int:
    """Return the node of a rank. nodes: number of ranks on each node, in order."""
    return bisect_right(list(accumulate(nodes)), rank)


@dataclass(frozen=True)
class Offer:
    """The part of a checkpoint in one node's local directory. Nodes send it in a message, see `agreement/messages.py`."""

    name: Name  # name of the checkpoint
    digest: str  # digest of its manifest, because two checkpoints may have the same name
    step: int  # optimizer steps done
    nodes: Count  # number of nodes that saved it
    world: Annotated[int, Within(0, MAX_RANKS)]  # number of ranks that saved it
    ranks: tuple[Count, ...]  # the ranks whose files are all on this node


def own_checkpoints(storage: Storage) -> list[str]:
    """Return the names of our checkpoints in a directory, complete or not, newest first. One listing. Raises OSError."""
    orders = {entry.name: order for entry in storage.listed() if (order := order_of(entry.name))}
    return sorted(orders, key=lambda name: orders[name], reverse=True)


def manifest_of(storage: Storage, name: str) -> tuple[Manifest, bytes] | None:
    """Return the manifest and its bytes; None if the save did not finish. Raises ManifestError, OSError."""
    data = storage.read_if_there(f"{name}/{MANIFEST}")
    return None if data is None else (decode(data), data)


def put_manifest(storage: Storage, name: str, manifest: Manifest) -> None:
    """Write a manifest, which is the commit. Raises OSError."""
    storage.put(f"{name}/{MANIFEST}", encode(manifest))


def offers(local: Storage) -> list[Offer]:
    """Return this node's part of each usable checkpoint, newest first. Raises OSError."""
    found = []
    quarantined = own_files.quarantined_names(local)
    for name in own_checkpoints(local):
        if name in quarantined:
            continue
        try:
            read = manifest_of(local, name)
        except ManifestError as error:
            logger.warning("checkpoint passed over: %s: %s", local.path(name), error)
            continue
        if read is None:
            continue
        manifest, data = read
        here = files_here(local, name, manifest)
        absent = {rank_of(file.name) for file in manifest.files if file.name not in here}
        if None not in absent and manifest.nodes:
            ranks = tuple(rank for rank in range(manifest.world_size) if rank not in absent)
            found.append(Offer(name, digest(data), manifest.step, len(manifest.nodes), manifest.world_size, ranks))
    return found


def digest(manifest: bytes) -> str:
    """Return the digest that distinguishes checkpoints of the same name."""
    return hashlib.sha256(manifest).hexdigest()


def files_here(local: Storage, name: str, manifest: Manifest) -> frozenset[str]:
    """Return the names of the manifest's files that exist here with the right size. One listing. Raises OSError."""
    sizes = {entry.name: entry.size for entry in local.listed(name)}
    return frozenset(file.name for file in manifest.files if sizes.get(file.name) == file.size)


def missing_ranks(offers_of_nodes: Iterable[Iterable[Offer]]) -> dict[Offer, tuple[int, ...]]:
    """Return the ranks whose files are on no node, for each offered checkpoint. Pure.

    The keys are offers without ranks.
    """
    held: dict[Offer, set[int]] = {}
    for offer in (offer for offers in offers_of_nodes for offer in offers):
        held.setdefault(replace(offer, ranks=()), set()).update(offer.ranks)
    return {offer: tuple(rank for rank in range(offer.world) if rank not in ranks) for offer, ranks in held.items()}


def newest_loadable(offers_of_nodes: Iterable[Iterable[Offer]], excluded: Collection[str] = ()) -> Offer | None:
    """Return the newest checkpoint whose files are all on some node, or None. Pure.

    excluded: names of checkpoints that must not be used.
    """
    whole = [offer for offer, ranks in missing_ranks(offers_of_nodes).items() if not ranks and offer.name not in excluded]
    return max(whole, key=lambda offer: order_or_oldest(offer.name), default=None)


def claim(local: Storage, remote: Storage) -> None:
    """Bind a local directory to a remote one, so that no job resumes from another job's checkpoints.

    Raises UsageError if the local directory belongs to another remote one, OSError.
    """
    address = redacted(remote.address)  # other users may read the file
    found = local.read_if_there(OWNER)
    if found is None:
        local.put(OWNER, address.encode())
    elif found != address.encode():
        raise UsageError(
            f"local_dir {local.address} holds checkpoints that belong to {found.decode(errors='replace')}, but checkpoint_dir is "
            f"{remote.address}: give each job its own local_dir, or empty it"
        )


IN_USE = f"{MARKERS}/in_use"
CHOOSING = f"{MARKERS}/choosing"
LOADING = f"{MARKERS}/loading"  # a directory with one file per pinned checkpoint
REMOVAL_S = 20.0  # time limit for the removal of one checkpoint
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # from filesystems without locks, such as Lustre without -o flock


def use_alone(local: Storage) -> BinaryIO:
    """Lock a local directory for this agent until the file, which is returned, is closed: two nodes with one directory would each
    record their part over that of the other.

    Raises UsageError: another agent has locked it. Where files cannot be locked, all may use it.
    """
    lock = os.fdopen(_open(local.path(IN_USE)), "rb")
    try:
        is_locked = _try_lock(lock.fileno(), fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            lock.close()
            raise
        is_locked = True
    if not is_locked:
        lock.close()
        raise UsageError(f"another agent uses {local.address}, too: give each agent a local_dir of its own")
    return lock


class Pin:
    """One agent's pin in its local directory: it keeps a checkpoint between its choice and its load, although the copier prunes
    there.

    A pin is a file lock (flock(2)), so it ends with its process, however that ends. While an agent chooses, it holds a shared
    lock on CHOOSING, and nothing is pruned. Then it locks only the chosen checkpoint. The copier locks CHOOSING exclusively for
    each removal, so everything that an agent sees once it holds the shared lock will stay.

    If files cannot be locked, nothing is pinned, and a warning is logged. A load that finds its checkpoint gone uses the copy in
    the remote directory.
    """

    def __init__(self, local: Storage) -> None:
        """Keep everything from now on. Wait at most REMOVAL_S for a removal in progress."""
        self._local = local
        self._locks: list[int] = []  # file descriptors
        try:
            descriptor = _open(local.path(CHOOSING))
            self._locks.append(descriptor)
            if not poll(lambda: _try_lock(descriptor, fcntl.LOCK_SH), bool, time.monotonic() + REMOVAL_S):
                logger.warning(
                    "removing a checkpoint in %s takes more than %.0f s: the chosen one may be gone", local.address, REMOVAL_S
                )
        except OSError as error:
            logger.warning("cannot keep the checkpoints in %s from being pruned: %s", local.address, error)

    def keep_only(self, name: str) -> None:
        before, self._locks = self._locks, []
        try:
            self._locks.append(_open(self._local.path(f"{LOADING}/{name}")))
            _try_lock(self._locks[0], fcntl.LOCK_SH)
        except OSError as error:
            logger.warning("cannot keep the checkpoint %s from being pruned: %s", self._local.path(name), error)
        _release(before)

    def release(self) -> None:
        """Stop keeping anything. A second call does nothing."""
        before, self._locks = self._locks, []
        _release(before)


@contextmanager
def unless_pinned(local: Storage, name: str) -> Iterator[bool]:
    """Yield whether this checkpoint may be removed now. No agent can choose until the context ends. Raises OSError.

    If files cannot be locked, it counts as not pinned.
    """
    descriptor = _open(local.path(CHOOSING))
    try:
        try:
            free = _try_lock(descriptor, fcntl.LOCK_EX) and not _is_loaded(local.path(f"{LOADING}/{name}"))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            free = True
        yield free
    finally:
        os.close(descriptor)


def _is_loaded(path: str) -> bool:
    """Return whether an agent holds the lock. If none does, remove the lock file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            return True
        os.unlink(path)  # no agent is about to lock it, because that agent would hold CHOOSING
        return False
    finally:
        os.close(descriptor)


def _open(path: str) -> int:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file without waiting; return whether that succeeded. Raises OSError if files cannot be locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _release(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile may also have it open
        except OSError as error:  # files cannot be locked here, so it never was locked
            logger.debug("cannot release a pin: %s", error)
        os.close(descriptor)
