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
    local = _agreed_tier("local_dir", _local_address(local_dir, remote), ranks)
    return Directories(remote, local, _agreed_tier("the memory tier", memory_dir if _is_agents(remote) else "", ranks))


def _local_address(local_dir: str | os.PathLike[str] | None, remote: Storage) -> str:
    """Return the local directory; "" for no local tier."""
    if local_dir is not None:
        return os.fspath(local_dir)
    return os.environ.get(LOCAL_DIR, "") if _is_agents(remote) else ""


def _is_agents(remote: Storage) -> bool:
    """Return whether this is the agent's checkpoint_dir. To another one it would not copy, nor resume from it."""
    agents = os.environ.get(CHECKPOINT_DIR, "")
    return bool(agents) and open_storage(agents).address == remote.address


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
