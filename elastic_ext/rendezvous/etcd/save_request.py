"""Requests a save on demand from a running job on etcd, from outside the job. Knows nothing of torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import RecordError
from elastic_ext.etcd import (
    AuthError,
    Batch,
    ConfigError,
    EtcdClient,
    EtcdError,
    KeyValue,
    Snapshot,
    UnsupportedVersion,
)
from elastic_ext.rendezvous import run_id as run_ids
from elastic_ext.rendezvous.etcd.header_record import swap, with_save
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, Node, RecordReader, State, decode


@dataclass(frozen=True)
class Outcome:
    """step: of the complete checkpoint; None if there is none, and then the reason says why."""

    step: int | None
    reason: str


def outcome(requested: Header, header: Header | None, nodes: Iterable[Node]) -> Outcome | None:
    """Return the outcome of the request in `requested`; None while it is under way.

    Args:
        header: the current one; None if it is gone, and the job with it.
        nodes: all current nodes.
    """
    for node in nodes:
        # A node's record is about its current round; a node that waits for a later round has left this one.
        if node.after < requested.round and node.saved >= requested.save:
            return Outcome(node.saved_step, f"saved step {node.saved_step}")
    if header is None:
        return Outcome(None, "the job is gone")
    if header.round != requested.round:
        return Outcome(None, f"round {requested.round} ended before the save; the job is now in round {header.round}")
    if header.state is not State.RUNNING:
        return Outcome(None, f"round {requested.round} ended before the save: {header.reason}")
    return None


def save(client: EtcdClient, run_id: str, timeout_s: float) -> Outcome:
    """Request a save, and wait until it is complete or has become impossible, or the time is over.

    Raises UsageError: etcd refuses, or the records are of another version.
    """
    deadline = time.monotonic() + timeout_s
    keys = JobKeys(run_ids.checked(run_id))
    try:
        requested = _ask(client, keys, deadline)
        return requested if isinstance(requested, Outcome) else _await(client, keys, requested, deadline)
    except (AuthError, ConfigError, UnsupportedVersion, RecordError) as error:
        raise UsageError(f"the job {run_id}: {error}") from error
    except EtcdError as error:
        return Outcome(None, str(error))


def _ask(client: EtcdClient, keys: JobKeys, deadline: float) -> Header | Outcome:
    """Write the request into the header; return that header."""
    while (left_s := deadline - time.monotonic()) > 0:
        found = client.get(keys.header, timeout_s=min(left_s, client.timeout_s)).kv
        header = decode(Header, found.value, keys.header) if found is not None else None
        if found is None or header is None:
            return Outcome(None, "the job is not running: it has no round yet")
        if header.state is not State.RUNNING:
            return Outcome(None, f"the job is not running, it is {header.state.value}: {header.reason}")
        requested = with_save(header)
        timeout_s = min(max(0.01, deadline - time.monotonic()), client.timeout_s)
        if swap(client, keys, requested, over=(found.mod_revision, found.lease_id), timeout_s=timeout_s).succeeded:
            return requested
    return Outcome(None, "the job's header kept changing, so no save was requested; try again")


def _await(client: EtcdClient, keys: JobKeys, requested: Header, deadline: float) -> Outcome:
    header: Header | None = requested
    reader = RecordReader()
    with client.watch_with_snapshot(keys.prefix) as watch:
        while (left_s := deadline - time.monotonic()) > 0:
            item = watch.get(left_s)
            if isinstance(item, Snapshot):
                header = None
            # One by one: a node's report of its save comes before the end of the round.
            for kind, kv in _changes(item):
                nodes = []
                if kv.key == keys.header.encode():
                    # An unreadable header changes nothing: the job's leader writes the previous one again.
                    header = (reader.header(kv) or header or requested) if kind == "put" else None
                elif kv.key.startswith(keys.nodes.encode()) and kind == "put" and reader.id_of(keys.nodes, kv.key):
                    nodes += [node for node in [reader.node(kv)] if node is not None]
                if (over := outcome(requested, requested if isinstance(item, Snapshot) else header, nodes)) is not None:
                    return over
            if (over := outcome(requested, header, [])) is not None:
                return over
    return Outcome(None, "the save did not complete in time; the job may still complete it")


def _changes(item: Snapshot | Batch | None) -> Iterator[tuple[str, KeyValue]]:
    """Yield the change to each key, "put" or "delete"; keys of a snapshot count as put."""
    if isinstance(item, Snapshot):
        yield from (("put", kv) for kv in item.kvs)
    elif item is not None:
        yield from ((event.kind, event.kv) for event in item.events)
