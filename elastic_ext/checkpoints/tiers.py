"""Two tiers: each node's fast local disk, which saves go to, and the remote directory, which the agents copy them to.

A node's part of a checkpoint has the names that the whole has: the files of the node's own ranks, and the few that all ranks need
(the manifest among them, written last, rank 0's node's last of all). Markers and the fence stay in the remote directory.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elastic_ext.checkpoints.generations import MARKERS
from elastic_ext.checkpoints.manifest import MANIFEST, Manifest, ManifestError, StoredFile, decode, order_of
from elastic_ext.checkpoints.storage import Storage
from elastic_ext.errors import UsageError
from elastic_ext.printable import redacted

logger = logging.getLogger(__name__)

LOCAL_ENV, REMOTE_ENV = "ELASTIC_EXT_LOCAL_DIR", "ELASTIC_EXT_CHECKPOINT_DIR"
OWNER = f"{MARKERS}/copied_to"  # in a local directory: which remote one it belongs to

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


def part_of(manifest: Manifest, node: int) -> list[StoredFile]:
    """What of a checkpoint a node must have."""
    ranks = ranks_of(manifest.nodes, node)
    return [file for file in manifest.files if (rank := rank_of(file.name)) is None or rank in ranks]


@dataclass(frozen=True)
class Offer:
    """A checkpoint whose part one node has. digest: of the manifest: the same name may be another checkpoint."""

    name: str
    digest: str
    step: int
    nodes: tuple[int, ...]


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


def offers(local: Storage, node: int) -> list[Offer]:
    """The checkpoints that this node could load its part of, as the node with this number. Raises OSError."""
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
        if node < len(manifest.nodes) and all(_has(local, name, file) for file in part_of(manifest, node)):
            found.append(Offer(name, hashlib.sha256(data).hexdigest(), manifest.step, manifest.nodes))
    return found


def _has(local: Storage, name: str, file: StoredFile) -> bool:
    found = local.stat(f"{name}/{file.name}")
    return found is not None and found.size == file.size


def newest_of_all(told: Sequence[Iterable[Offer]], nodes: Sequence[int], barred: Iterable[str] = ()) -> Offer | None:
    """The newest that every node has its part of, saved by the same ranks on nodes of the same order. Pure.

    told: what each node offers, in the order of the nodes. nodes: ranks of each. barred: names that must not be used.
    """
    common = set.intersection(*(set(each) for each in told)) if told else set()
    usable = [offer for offer in common if offer.nodes == tuple(nodes) and offer.name not in set(barred)]
    return max(usable, key=lambda offer: order_of(offer.name) or (0, 0), default=None)


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
