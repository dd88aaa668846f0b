"""What the ranks of a job do together for a save or a load: their collectives, the errors that they send each other, the
directories as one rank sees them, and how its node gets the files that are on other nodes.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from io import BufferedReader
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic_ext.base.contracts import CHECKPOINT_DIR, LOCAL_DIR
from elastic_ext.base.errors import ElasticExtError
from elastic_ext.base.printable import ranks_in_words
from elastic_ext.checkpoints.directory.generations import StaleGroup
from elastic_ext.checkpoints.directory.own_files import MARKERS, Manifest, StoredFile
from elastic_ext.checkpoints.directory.tiers import node_of, rank_of, ranks_of
from elastic_ext.checkpoints.storage import Entry, Storage, is_away, open_storage, remove_if_there

logger = logging.getLogger(__name__)


DESCRIPTION = "elastic_ext"  # of a group, for torch and its logs; `workers.bootstrap.recorder` knows it
MOST_CAUSES = 4  # that a message names
MOST_SHOWN = 500  # characters of each


class CheckpointError(ElasticExtError):
    """A checkpoint could not be loaded: it is damaged or does not fit this model."""

    by_rank: Sequence[tuple[int, str]] = ()  # (rank, cause), if all ranks have exchanged them

    @classmethod
    def of_ranks(cls, by_rank: Sequence[tuple[int, str]]) -> CheckpointError:
        error = cls(summary(by_rank))
        error.by_rank = by_rank
        return error


class StorageFailed(CheckpointError):
    """A checkpoint could not be read because its storage failed. It may be whole: to load an older one would lose work."""


class Rank0Failed(ElasticExtError):
    """What rank 0 was to decide for all failed in an unforeseen way. Raised on all ranks, which are in step."""


class FailureKind(str, Enum):
    """Why a save failed. Reactions differ, but training always continues."""

    FULL = "full"  # disk or quota: free space
    PERMISSION = "permission"
    THROTTLED = "throttled"  # the storage asks to retry later, or does not answer
    STALE = "stale"  # another group of workers has taken over
    GROUP = "group"  # ranks can no longer communicate, or may not be in step
    OTHER = "other"


_KINDS: Mapping[int, FailureKind] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), FailureKind.FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), FailureKind.PERMISSION),
    **dict.fromkeys((errno.EAGAIN, errno.EINTR), FailureKind.THROTTLED),
}


@dataclass(frozen=True)
class SaveFailure:
    """Why one rank could not do its part of a save. Has only plain values, because ranks pickle it."""

    kind: FailureKind
    reason: str
    rank: int = 0


def failure_of(error: BaseException, rank: int) -> SaveFailure:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StaleGroup):
        return SaveFailure(FailureKind.STALE, str(error), rank)
    if isinstance(error, Rank0Failed):
        return SaveFailure(FailureKind.OTHER, str(error), 0)
    if isinstance(error, CheckpointException):  # raised by torch's planning, on all ranks
        found = causes(error, rank)
        return SaveFailure(FailureKind.OTHER, summary(found), found[0][0])
    if not isinstance(error, OSError):
        return SaveFailure(FailureKind.OTHER, text, rank)
    kind = FailureKind.THROTTLED if is_away(error) else _KINDS.get(error.errno or 0, FailureKind.OTHER)
    return SaveFailure(kind, text, rank)


def causes(error: BaseException, rank: int) -> list[tuple[int, str]]:
    """Return (rank, cause in one line) of what a rank has caught: of all ranks, where it holds what they have raised. Pure.

    torch's CheckpointException holds that with tracebacks, which are left out.
    """
    if isinstance(error, CheckpointException) and error.failures:
        return [(each, cause) for each, (wrapped, _) in sorted(error.failures.items()) for _, cause in causes(wrapped, each)]
    if isinstance(error, CheckpointError) and error.by_rank:
        return list(error.by_rank)
    text = " ".join(str(error).split())
    cause = text if isinstance(error, ElasticExtError) and text else f"{type(error).__name__}: {text}"
    return [(rank, cause if len(cause) <= MOST_SHOWN else f"{cause[:MOST_SHOWN]}...")]


def summary(failures: Iterable[tuple[int, str]]) -> str:
    """Return one message of (rank, cause): each cause once, then the ranks that have it. Pure."""
    ranks_of: dict[str, set[int]] = {}
    for rank, cause in failures:
        ranks_of.setdefault(cause, set()).add(rank)
    found = [f"{cause} ({ranks_in_words(ranks)})" for cause, ranks in ranks_of.items()]
    others = len(found) - MOST_CAUSES
    more = [f"{others} more {'cause' if others == 1 else 'causes'} on other ranks"] if others > 0 else []
    return "; ".join(found[:MOST_CAUSES] + more)


T = TypeVar("T")


class Ranks:
    """All ranks, in a separate gloo group, because background saves must not mix their messages with those of training.

    Every method is a collective unless it says otherwise. Values are pickled; all ranks run the same version of this package.
    After `leave`, those of this rank raise RuntimeError.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Make the group. Collective. timeout: how long a rank waits for the others before torch raises RuntimeError."""
        together = dist.is_available() and dist.is_initialized()
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc=DESCRIPTION) if together else None
        self.group: dist.ProcessGroup | None = group  # None for a single process
        self.rank: int = dist.get_rank() if together else 0
        self.world: int = dist.get_world_size() if together else 1
        self.timeout_s = timeout.total_seconds()  # how long a collective waits for the others
        self.lost = False  # whether a collective has failed, so that the ranks can no longer communicate

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Note whether the collectives in this context fail. Not a collective itself."""
        try:
            yield
        except Exception:
            self.lost = True
            raise

    def leave(self) -> None:
        """Leave the group, so that no rank waits for this one: the collectives of the others fail at once. Not a collective.

        Only after an error, and once nothing of this process waits in the group.
        """
        group, self.group, self.lost = self.group, None, True
        if group is None:
            return
        try:
            dist.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError) as error:  # the script has destroyed all groups, say
            logger.debug("the group is left as it is: %s", error)

    def group_failure(self, error: BaseException) -> SaveFailure:
        """Return why the ranks can do nothing together any more, after an error that has not been shared between them.

        If no collective has failed, the other ranks may wait in one for this rank. Not a collective itself.
        """
        why = "the ranks can no longer communicate" if self.lost else "unforeseen, and the other ranks may have gone on"
        [(_, cause), *_] = causes(error, self.rank)
        return SaveFailure(FailureKind.GROUP, f"{cause} ({why})", self.rank)

    def _alone(self, value: T) -> T:
        if self.world > 1:
            raise RuntimeError("this rank has left the group")
        return value

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        if self.group is None:
            return [self._alone(value)]
        values: list[T | None] = [None] * self.world
        with self.communicating():
            dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value; the values of other ranks are ignored."""
        if self.group is None:
            return self._alone(value)
        values = [value]
        with self.communicating():
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def from_rank_0(self, decide: Callable[[], T]) -> T:
        """Run `decide` on rank 0 and return its result, or raise its exception, on all ranks: Rank0Failed if it is unforeseen."""
        found: tuple[T | None, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                found = decide(), None
            except (ElasticExtError, OSError) as error:
                found = None, error
            except Exception as error:  # of some class that perhaps cannot be pickled
                logger.exception("unforeseen failure on rank 0")
                found = None, Rank0Failed(causes(error, 0)[0][1])
        value, raised = self.broadcast(found)
        if raised is not None:
            raise raised
        return cast(T, value)

    def run_on_all(self, do: Callable[[], T], reads: Storage | None = None) -> T:
        """Run `do` on every rank. Raises CheckpointError on all ranks if it failed on one, so that none continues alone.

        reads: the storage that it does little else but read, if what that raises does not mean damage. If it is to blame on
        every rank that failed, that is StorageFailed.
        """
        result: T | None = None
        failed: tuple[list[tuple[int, str]], bool] | None = None
        try:
            result = do()
        except (Exception, CheckpointException) as error:
            blamed = reads is not None and _is_to_blame(reads, error)
            failed = causes(error, self.rank), blamed or isinstance(error, StorageFailed)
            logger.debug("checkpoint load failed", exc_info=True)
        failures = [each for each in self.all_gather(failed) if each is not None]
        if failures:
            found = [cause for each, _ in failures for cause in each]
            if all(blamed for _, blamed in failures):
                logger.warning("the storage failed: %s", summary(found))
                raise StorageFailed(found[0][1])  # of one rank: the same failure must read the same, on however many
            raise CheckpointError.of_ranks(found)
        return cast(T, result)

    def send(self, data: torch.Tensor, target: int) -> None:
        """Send a tensor to one rank, which has called `receive`. Only these two call this, and `receive`."""
        with self.communicating():
            dist.send(data, dst=target, group=self.group)

    def receive(self, data: torch.Tensor, source: int) -> dist.Work:
        """Begin to receive a tensor; return what waits for it."""
        with self.communicating():
            work = dist.irecv(data, src=source, group=self.group)
        assert work is not None, "this rank is of the group"
        return work

    def send_tensor(self, data: torch.Tensor, source: int, targets: tuple[int, ...]) -> None:
        """Copy `data` from one rank to others. With one target, only the two ranks involved need to call this; else all ranks."""
        if len(targets) > 1:
            dist.broadcast(data, src=source, group=self.group)
        elif self.rank == source:
            dist.send(data, dst=targets[0], group=self.group)
        elif self.rank in targets:
            dist.recv(data, src=source, group=self.group)


def _is_to_blame(storage: Storage, error: BaseException) -> bool:
    """Return whether it did not answer, or refused. A file that is missing is damage. torch wraps what its reader raises."""
    if isinstance(error, CheckpointException):
        return all(_is_to_blame(storage, wrapped) for wrapped, _ in error.failures.values())
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not storage.means_damage(error)


# The directories, and what nodes send each other of them.


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

    local_dir: None: the agent's choice; "": no local tier. memory_dir: the agent's directory for copies in memory; "": none.
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
