"""Two tiers: each node's fast local disk, which saves go to, and the remote directory, which the agents copy them to.

A node's part of a checkpoint has the names that the whole has: the files of the node's own ranks, and the few that all ranks need
(the manifest among them, written last, rank 0's node's last of all). Markers and the fence stay in the remote directory.

A part says itself what it is: by the manifest's digest, and by the ranks in its files' names. So it does not matter which agent
or which node of a round has it, and in which order they come: a checkpoint can be loaded if each of its files is on the disk of
some node (`newest_of_all`). What a rank needs of another node's disk that node sends (`writer.read_tensors_of_nodes`).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated

from elastic_ext.base.errors import UsageError
from elastic_ext.base.printable import redacted
from elastic_ext.base.records import Count, Name, Within
from elastic_ext.checkpoints.directory.generations import MARKERS
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, ManifestError, decode, order_of
from elastic_ext.checkpoints.storage import Storage

logger = logging.getLogger(__name__)

LOCAL_ENV, REMOTE_ENV = "ELASTIC_EXT_LOCAL_DIR", "ELASTIC_EXT_CHECKPOINT_DIR"
OWNER = f"{MARKERS}/copied_to"  # in a local directory: which remote one it belongs to
MOST_RANKS = 1 << 20  # that another node may say have saved a checkpoint

# `__RANK_NUMBER.distcp` of torch/distributed/checkpoint/filesystem.py (prepare_global_plan), and `writer.own_file`.
_RANK = re.compile(r"(?:__(\d+)_\d+\.distcp|rank_(\d+)\.pt)")


def rank_of(file: str) -> int | None:
    """The rank that wrote a file of a checkpoint of ours; None for the few files that every node has."""
    match = _RANK.fullmatch(file)
    return int(match[1] or match[2]) if match else None


def ranks_of(nodes: Sequence[int], node: int) -> range:
    """nodes: ranks of each node, in the order of the nodes."""
    ends = list(accumulate(nodes, initial=0))
    return range(ends[node], ends[node + 1])


def node_of(nodes: Sequence[int], rank: int) -> int:
    return next(node for node in range(len(nodes)) if rank in ranks_of(nodes, node))


@dataclass(frozen=True)
class Offer:
    """What one node has of a checkpoint.

    Attributes:
        digest: of the manifest: the same name may be another checkpoint.
        nodes: that saved it.
        world: their ranks.
        ranks: whose files are here, all of them.
    """

    name: Name
    digest: str
    step: int
    nodes: Count
    world: Annotated[int, Within(0, MOST_RANKS)]
    ranks: tuple[Count, ...]


def own_checkpoints(storage: Storage) -> list[str]:
    """Names of our checkpoints in a directory, complete or not, the newest first. Raises OSError."""
    try:
        orders = {entry.name: order for entry in storage.entries() if (order := order_of(entry.name))}
    except FileNotFoundError:
        return []
    return sorted(orders, key=lambda name: orders[name], reverse=True)


def manifest_of(storage: Storage, name: str) -> tuple[Manifest, bytes] | None:
    """None where the save did not finish. Raises ManifestError, OSError."""
    try:
        data = storage.read(f"{name}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode(data), data


def offers(local: Storage) -> list[Offer]:
    """What this node has of each checkpoint, but for those that it has nothing usable of. Raises OSError."""
    found = []
    for name in own_checkpoints(local):
        try:
            read = manifest_of(local, name)
        except ManifestError as error:
            logger.warning("%s is passed over: %s", local.path(name), error)
            continue
        if read is None or local.stat(f"{MARKERS}/quarantine/{name}.json") is not None:
            continue
        manifest, data = read
        here = files_here(local, name, manifest)
        absent = {rank_of(file.name) for file in manifest.files if file.name not in here}
        if None not in absent and manifest.nodes:
            ranks = tuple(rank for rank in range(manifest.world_size) if rank not in absent)
            found.append(Offer(name, digest(data), manifest.step, len(manifest.nodes), manifest.world_size, ranks))
    return found


def digest(manifest: bytes) -> str:
    return hashlib.sha256(manifest).hexdigest()


def files_here(local: Storage, name: str, manifest: Manifest) -> frozenset[str]:
    """The files of a checkpoint that are in a directory, each with its size. One listing. Raises OSError."""
    try:
        sizes = {entry.name: entry.size for entry in local.entries(name)}
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    return frozenset(file.name for file in manifest.files if sizes.get(file.name) == file.size)


def lacking(told: Iterable[Iterable[Offer]]) -> dict[Offer, tuple[int, ...]]:
    """Each checkpoint that some node has something of, and the ranks whose files no node has. Pure.

    told: what each node offers. The keys are without ranks.
    """
    held: dict[Offer, set[int]] = {}
    for offer in (offer for offers in told for offer in offers):
        held.setdefault(replace(offer, ranks=()), set()).update(offer.ranks)
    return {offer: tuple(rank for rank in range(offer.world) if rank not in ranks) for offer, ranks in held.items()}


def newest_of_all(told: Iterable[Iterable[Offer]], barred: Iterable[str] = ()) -> Offer | None:
    """The newest that the nodes have all files of, whoever has which. Pure.

    told: what each node offers. barred: names that must not be used.
    """
    names = set(barred)
    whole = [offer for offer, ranks in lacking(told).items() if not ranks and offer.name not in names]
    return max(whole, key=_order, default=None)


def _order(offer: Offer) -> tuple[int, int]:
    return order_of(offer.name) or (0, 0)


@dataclass(frozen=True)
class Held:
    """A checkpoint of the local tier. whole: this node has its part; remote: it is complete in the remote directory."""

    name: str
    whole: bool
    remote: bool


def plan_local_prune(newest_first: Sequence[Held], newest_remote: tuple[int, int] | None) -> list[str]:
    """Which ones to remove from the local tier. Pure.

    The newest whole one stays, and each one that no complete one of the remote directory is as new as: it may be the last copy.
    One that is not whole may be in work, unless a newer one is whole.

    newest_remote: order of the newest one that is complete in the remote directory; None: none is.
    """
    removed = []
    newer = False  # is a newer one whole?
    for held in newest_first:
        order = order_of(held.name) or (0, 0)
        safe = held.remote or (newest_remote is not None and newest_remote > order)
        if newer and (safe or not held.whole):
            removed.append(held.name)
        newer = newer or held.whole
    return removed


def claim(local: Storage, remote: Storage) -> None:
    """Bind a local directory to its remote one: what another job left there must not be resumed from.

    Raises UsageError where it belongs to another one; OSError where it cannot be written to.
    """
    address = redacted(remote.address)  # others may read the file
    try:
        found = local.read(OWNER).decode(errors="replace")
    except FileNotFoundError:
        local.put(OWNER, address.encode())
        return
    if redacted(found) != address:  # older versions kept it as it was
        raise UsageError(
            f"local_dir {local.address} holds checkpoints that belong to {found}, and checkpoint_dir is "
            f"{remote.address}: give each job a local_dir of its own, or empty it"
        )
