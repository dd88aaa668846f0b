"""The directories that a job saves to, as one rank sees them, and how its node gets the files that are on other nodes.

With a local tier, each node has a directory of its own beside the remote one. For a load, from the requests of all ranks, each
computes the same list of pieces (`plan_pieces`), and all follow its order. A piece travels over gloo as a uint8 tensor: by send
and receive to one node, by broadcast to several. A received piece is stored at its own offset below FETCHED in the local
directory until the load ends. Copies in memory that other nodes or another number of ranks have made are loaded in the same way.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import cast

import torch

from elastic_ext.base.contracts import CHECKPOINT_DIR, LOCAL_DIR
from elastic_ext.checkpoints.directory import MARKERS
from elastic_ext.checkpoints.directory.tiers import node_of, rank_of, ranks_of
from elastic_ext.checkpoints.formats.manifest import Manifest, StoredFile
from elastic_ext.checkpoints.ranks import CheckpointError, Ranks
from elastic_ext.checkpoints.storage import Entry, Storage, open_storage, remove_if_there

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalTier:
    """The local tier as one rank sees it."""

    storage: Storage  # this node's local directory
    nodes: tuple[int, ...]  # number of ranks on each node, in rank order
    node: int  # this node's index in `nodes`
    first: bool  # whether this is the first rank of its node, which writes the files that the node shares


@dataclass(frozen=True)
class Directories:
    """All directories. remote: shared by all nodes. local, memory: on each node; None without such a tier."""

    remote: Storage
    local: LocalTier | None
    memory: LocalTier | None = None

    def tier_of(self, storage: Storage) -> LocalTier | None:
        """Return the local tier if `storage` is its directory."""
        return self.local if self.local is not None and storage.address == self.local.storage.address else None

    def __contains__(self, storage: Storage) -> bool:
        return storage.address == self.remote.address or self.tier_of(storage) is not None


def open_directories(remote: Storage, local_dir: str | os.PathLike[str] | None, memory_dir: str, ranks: Ranks) -> Directories:
    """Open all directories. Collective. Raises UsageError.

    Args:
        local_dir: None: the agent's choice; "": no local tier.
        memory_dir: the agent's directory for copies in memory; "": none.
    """
    agents = os.environ.get(CHECKPOINT_DIR, "")
    # To another directory than its own checkpoint_dir an agent would not copy, nor resume from it.
    is_agents = bool(agents) and open_storage(agents).address == remote.address
    if local_dir is None:
        local_dir = os.environ.get(LOCAL_DIR, "") if is_agents else ""
    local = _agreed_tier("local_dir", os.fspath(local_dir), ranks)
    return Directories(remote, local, _agreed_tier("the memory tier", memory_dir if is_agents else "", ranks))


def _agreed_tier(what: str, address: str, ranks: Ranks) -> LocalTier | None:
    """Return the tier in each node's own directory if all nodes have one; else None on all. Collective."""
    group, local_rank = int(os.environ.get("GROUP_RANK") or 0), int(os.environ.get("LOCAL_RANK") or 0)
    if address and ranks.world > 1 and "GROUP_RANK" not in os.environ:
        logger.warning("%s is not used: GROUP_RANK, which torchrun sets, is needed to know which ranks share a node", what)
        address = ""
    found = ranks.all_gather((group, local_rank, bool(address)))
    if not all(has for _, _, has in found):
        if address:
            lacking = [rank for rank, (_, _, has) in enumerate(found) if not has]
            logger.warning("%s is not used: ranks %s have none", what, lacking)
        return None
    groups = [group for group, _, _ in found]
    if groups != sorted(groups):
        logger.warning("%s is not used: the ranks of a node are not consecutive", what)
        return None
    numbers = sorted(set(groups))
    nodes = tuple(groups.count(number) for number in numbers)
    return LocalTier(open_storage(address), nodes, numbers.index(group), local_rank == 0)


FETCHED = f"{MARKERS}/fetched"
LARGEST_PIECE = 64 << 20  # bytes; each rank needs memory for one piece
NEAR = 1 << 20  # bytes; ranges no further apart than this are sent as one

Range = tuple[str, int, int]
"""(file, first byte, first byte after the range)."""


@dataclass(frozen=True)
class Parts:
    """A checkpoint in the local tier, or a copy in memory, whose files are on the nodes. Equal on all ranks except for `tier`."""

    tier: LocalTier
    name: str
    manifest: Manifest
    holders: Mapping[str, tuple[int, ...]]  # the nodes that have a file, by file name

    def has(self, node: int, file: str) -> bool:
        """Return whether a file is on a node's disk."""
        return node in self.holders.get(file, ())

    @property
    def fit(self) -> bool:
        """Whether the same nodes have saved it, as far as ranks go, and each has all files of its ranks."""
        ranks = ((file.name, rank) for file in self.manifest.files if (rank := rank_of(file.name)) is not None)
        here = all(self.has(node_of(self.tier.nodes, rank), file) for file, rank in ranks)
        return self.manifest.nodes == self.tier.nodes and here

    def responsible_rank(self, node: int, file: str) -> int:
        """Return the rank that reads a file on a node, or stores its received pieces. The node's ranks share the work. Pure."""
        ranks = ranks_of(self.tier.nodes, node)
        return ranks[(rank_of(file) or 0) % len(ranks)]


@dataclass(frozen=True, order=True)
class Transfer:
    """One transfer of bytes."""

    number: int  # the position of the piece in its range
    file: str
    # begin, end: byte offsets in the file.
    begin: int
    end: int
    sender: int
    receivers: tuple[int, ...]  # the ranks that store it, one on each node that wants it


def merge_ranges(ranges: Iterable[Range], near: int = NEAR) -> list[Range]:
    """Return the ranges sorted and merged, including gaps of up to `near` bytes between them. Pure."""
    found: list[Range] = []
    for file, begin, end in sorted(ranges):
        if found and found[-1][0] == file and begin - found[-1][2] <= near:
            found[-1] = file, found[-1][1], max(end, found[-1][2])
        else:
            found.append((file, begin, end))
    return found


def plan_pieces(parts: Parts, requests: Sequence[tuple[int, Sequence[Range]]], largest: int = LARGEST_PIECE) -> list[Transfer]:
    """Return the pieces to send, in the order that all ranks follow. Pure.

    requests: (node, ranges) of each rank. The first pieces of all files come first. So if each node wants the files of its
    neighbor, all pairs of nodes send at the same time.
    """
    wanting: dict[str, list[tuple[int, Range]]] = {}
    for node, ranges in requests:
        for found in ranges:
            wanting.setdefault(found[0], []).append((node, found))
    sent = []
    for file, wanted in wanting.items():
        for _, begin, end in merge_ranges(found for _, found in wanted):
            for number, first in enumerate(range(begin, end, largest)):
                last = min(end, first + largest)
                nodes = sorted({node for node, found in wanted if found[1] < last and first < found[2]})
                if not nodes:
                    continue  # a gap between two ranges
                holder = parts.holders[file][nodes[0] % len(parts.holders[file])]
                receivers = tuple(parts.responsible_rank(node, file) for node in nodes)
                sent.append(Transfer(number, file, first, last, parts.responsible_rank(holder, file), receivers))
    return sorted(sent)


class PieceExchange:
    """The transfers for one load of one checkpoint."""

    def __init__(self, parts: Parts, ranks: Ranks) -> None:
        self._parts, self._tier, self._ranks = parts, parts.tier, ranks

    @contextmanager
    def with_files(self, files: Iterable[StoredFile]) -> Iterator[Storage]:
        """Yield the local directory, completed with the given small files that this node lacks. Collective.

        Data from other nodes, here and by `fetch`, stays in the local directory until the context ends. Raises CheckpointError on
        all ranks.
        """
        local, first = self._tier.storage, self._tier.first
        self._ranks.run_on_all(lambda: remove_if_there(local, FETCHED) if first else None)
        try:
            self.fetch((file.name, 0, file.size) for file in files)
            yield _Overlay(local)
        finally:
            try:
                if first:
                    remove_if_there(local, FETCHED)
            except OSError as error:  # the next load removes it
                logger.warning("cannot remove the files that other nodes sent, %s: %s", local.path(FETCHED), error)

    def fetch(self, ranges: Iterable[Range]) -> None:
        """Get the ranges that this node lacks from other nodes. Collective; the ranks of a node share the received data.

        Raises CheckpointError on all ranks if one fails to read or store a piece.
        """
        wanted = [found for found in ranges if not self._parts.has(self._tier.node, found[0])]
        failed: list[tuple[int, str]] = []
        for piece in plan_pieces(self._parts, self._ranks.all_gather((self._tier.node, wanted))):
            try:
                self._transfer(piece)
            except OSError as error:
                failed = failed or [(self._ranks.rank, f"{piece.file}: {error}")]
        failures = [each for found in self._ranks.all_gather(failed) for each in found]
        if failures:
            raise CheckpointError.of_ranks(failures)

    def _transfer(self, piece: Transfer) -> None:
        """Send one piece from the node that has it to those that want it. Raises OSError only after this rank's transfer."""
        rank, local = self._ranks.rank, self._tier.storage
        if len(piece.receivers) == 1 and rank not in (piece.sender, *piece.receivers):
            return
        data = torch.zeros(piece.end - piece.begin, dtype=torch.uint8)
        failure: OSError | None = None
        if rank == piece.sender:
            try:
                read_bytes(local, f"{self._parts.name}/{piece.file}", piece.begin, data)
            except OSError as error:  # the receivers still wait for data
                failure = error
        self._ranks.send_tensor(data, piece.sender, piece.receivers)
        if failure is not None:
            raise failure
        if rank in piece.receivers:
            _keep(local.path(f"{FETCHED}/{self._parts.name}/{piece.file}"), piece.begin, data)


class _Overlay(Storage):
    """A read-only view of a node's local directory, in which files sent by other nodes take precedence."""

    def __init__(self, local: Storage) -> None:
        super().__init__(local.address)
        self._local = local

    def stat(self, name: str) -> Entry | None:
        return self._local.stat(f"{FETCHED}/{name}") or self._local.stat(name)

    def open(self, name: str) -> AbstractContextManager[BufferedReader]:
        fetched = f"{FETCHED}/{name}"
        return self._local.open(fetched if self._local.stat(fetched) is not None else name)


def read_bytes(local: Storage, path: str, first: int, piece: torch.Tensor) -> None:
    """Fill `piece` with the bytes of a file from offset `first`. Raises OSError."""
    with local.open(path) as stream:
        stream.seek(first)
        if cast(io.BufferedIOBase, stream).readinto(memoryview(piece.numpy())) != len(piece):
            raise OSError(errno.EIO, f"it ends before byte {first + len(piece)}")


def _keep(path: str, first: int, piece: torch.Tensor) -> None:
    """Write `piece` into a file at offset `first`. Other ranks of this node may write other pieces of the file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
        file.seek(first)
        file.write(memoryview(piece.numpy()))
