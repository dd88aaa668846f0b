"""The directories that this job saves to: the remote one and, with a local tier, one on each node."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from elastic_ext.base.checkpoint_variables import CHECKPOINT_DIR, LOCAL_DIR
from elastic_ext.checkpoints.storage import Storage, open_storage
from elastic_ext.checkpoints.writing.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalTier:
    """The local tier as one rank sees it.

    Attributes:
        storage: this node's local directory.
        nodes: number of ranks on each node, in rank order.
        node: this node's index in `nodes`.
        first: whether this is the first rank of its node, which writes the files that the node shares.
    """

    storage: Storage
    nodes: tuple[int, ...]
    node: int
    first: bool


@dataclass(frozen=True)
class Directories:
    """Both directories. remote: shared by all nodes. local: None without a local tier."""

    remote: Storage
    local: LocalTier | None

    def tier_of(self, storage: Storage) -> LocalTier | None:
        """Return the local tier if `storage` is its directory."""
        return self.local if self.local is not None and storage.address == self.local.storage.address else None

    def __contains__(self, storage: Storage) -> bool:
        return storage.address == self.remote.address or self.tier_of(storage) is not None


def open_directories(remote: Storage, local_dir: str | os.PathLike[str] | None, ranks: Ranks) -> Directories:
    """Open both directories. Collective. local_dir: None: the agent's choice; "": no local tier. Raises UsageError."""
    return Directories(remote, _agreed_tier(_local_address(local_dir, remote), ranks))


def _local_address(local_dir: str | os.PathLike[str] | None, remote: Storage) -> str:
    """Return the local directory; "" for no local tier."""
    if local_dir is not None:
        return os.fspath(local_dir)
    agents = os.environ.get(CHECKPOINT_DIR, "")
    if not agents or open_storage(agents).address != remote.address:
        return ""  # the agent would copy to a directory other than the script's
    return os.environ.get(LOCAL_DIR, "")


def _agreed_tier(address: str, ranks: Ranks) -> LocalTier | None:
    """Return the local tier if all nodes have one; else None on all. Collective."""
    group, local_rank = int(os.environ.get("GROUP_RANK") or 0), int(os.environ.get("LOCAL_RANK") or 0)
    if address and ranks.world > 1 and "GROUP_RANK" not in os.environ:
        logger.warning("local_dir is not used: GROUP_RANK, which torchrun sets, is needed to know which ranks share a node")
        address = ""
    found = ranks.all_gather((group, local_rank, bool(address)))
    if not all(has for _, _, has in found):
        if address:
            lacking = [rank for rank, (_, _, has) in enumerate(found) if not has]
            logger.warning("local_dir is not used: ranks %s have none", lacking)
        return None
    groups = [group for group, _, _ in found]
    if groups != sorted(groups):
        logger.warning("local_dir is not used: the ranks of a node are not consecutive")
        return None
    numbers = sorted(set(groups))
    nodes = tuple(groups.count(number) for number in numbers)
    return LocalTier(open_storage(address), nodes, numbers.index(group), local_rank == 0)
