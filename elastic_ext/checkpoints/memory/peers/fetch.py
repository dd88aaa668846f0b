"""Get from other nodes what this node lacks of a copy in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elastic_ext.checkpoints.directory import tiers
from elastic_ext.checkpoints.formats.manifest import MANIFEST, Manifest, decode
from elastic_ext.checkpoints.memory.peers import keep, wire
from elastic_ext.checkpoints.memory.peers.keep import Part
from elastic_ext.checkpoints.memory.peers.send import ADOPT_S
from elastic_ext.checkpoints.memory.peers.wire import GET, PeerError, Request
from elastic_ext.checkpoints.storage import Storage

LIMIT_S, LEAST_RATE = 30.0, 50e6  # limit for all parts: so long, and longer where they are many, at so many bytes a second
MAX_MANIFEST = 256 << 20  # bytes; a rank has about 150


def fetch(
    storage: Storage,
    key: str,
    name: str,
    digest: str,
    sources: Mapping[int, tuple[str, int]],
    over: Callable[[], bool],
) -> None:
    """Get the parts of these ranks, and the manifest. Returns when all are in their place.

    Args:
        storage: the directory of this node's copies.
        key: that of the round.
        name: of the copy.
        digest: of its manifest (`tiers.digest`).
        sources: by rank, host and port of the agent of a node that has its part.
        over: returns whether the round is over, so that nobody needs them any more.

    Raises:
        OSError, ElasticExtError: a part could not be had.
    """
    deadline = time.monotonic() + LIMIT_S
    manifest, data = _manifest(key, name, digest, next(iter(sources.values())), deadline, over)
    files = {file.name: file for file in manifest.files}
    if missing := sorted(rank for rank in sources if tiers.memory_file(rank) not in files):
        raise PeerError(f"the manifest of {name} has no part of rank {missing[0]}")
    for rank, source in sources.items():
        file = files[tiers.memory_file(rank)]
        deadline += file.size / LEAST_RATE
        part = Part(name, file.name, file.size, file.checksum)
        with wire.connected(source, deadline, over) as connection:
            size = wire.ask(connection, key, Request(GET, name, file.name), ADOPT_S).size
            if size != part.size:
                raise PeerError(f"{file.name} has {size} bytes there, expected {part.size}")
            keep.receive(storage, part, connection.receive)
    storage.put(f"{name}/{MANIFEST}", data)


def _manifest(
    key: str, name: str, digest: str, source: tuple[str, int], deadline: float, over: Callable[[], bool]
) -> tuple[Manifest, bytes]:
    with wire.connected(source, deadline, over) as connection:
        size = wire.ask(connection, key, Request(GET, name, MANIFEST), ADOPT_S).size
        if not 0 < size <= MAX_MANIFEST:
            raise PeerError(f"the manifest of {name} has {size} bytes there")
        data = bytearray(size)
        connection.receive(memoryview(data))
    if tiers.digest(bytes(data)) != digest:
        raise PeerError(f"the manifest of {name} is not the one that was chosen")
    return decode(bytes(data)), bytes(data)
