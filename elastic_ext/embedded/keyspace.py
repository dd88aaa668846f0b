"""Keys, leases and history, with the semantics of etcd 3.5 (server/storage/mvcc, server/lease). Pure: callers pass the time.

Requests and answers are messages of `etcd.messages`. Every change has a revision, as in etcd. The first one is random: a client
that knows an earlier store, which is lost with all it held, finds its revisions in the future, or compacted, and reads again.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_ext.etcd.messages import Message, etcdrpc
from elastic_ext.etcd.values import range_of_prefix

MIN_TTL_S = 2  # as etcd with its default election timeout
MAX_TTL_S = 9_000_000_000  # server/lease/lessor.go
STEP = 1 << 32  # between the first revisions of two stores; no store makes as many changes

_COMPARE = (operator.eq, operator.gt, operator.lt, operator.ne)
_TARGETS = ("version", "create_revision", "mod_revision", "value", "lease")
_SORTED_BY = ("key", "version", "create_revision", "mod_revision", "value")


@dataclass(frozen=True)
class KeyspaceLimits:
    """What a store accepts and keeps; a job of 64 nodes needs a hundredth of it."""

    data_bytes: int = 64 << 20  # of all keys and values; as much again for the history
    changes: int = 20_000  # in the history; watches that lag behind more are asked to read again
    # request_bytes, operations: of one transaction; etcd's defaults.
    request_bytes: int = 3 << 19
    operations: int = 128
    leases: int = 10_000


class Refused(Exception):
    """A request that etcd would refuse, too. code: name of gRPC's status. The text is etcd's, for clients that compare it."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Change:
    """One key's change. event: mvccpb.Event. before: the key's KeyValue until then; None: there was none."""

    event: Message
    before: Message | None

    @property
    def revision(self) -> int:
        return int(self.event.kv.mod_revision)

    @property
    def size(self) -> int:
        return _size(self.event.kv)


@dataclass
class _Lease:
    ttl_s: int
    expires: float  # monotonic
    keys: set[bytes] = field(default_factory=set)


def covers(start: bytes, end: bytes, key: bytes) -> bool:
    """Return whether a range of etcd's API has this key. end: b"": only `start`; b"\\0": everything from `start` on."""
    return key == start if not end else key >= start and (end == b"\0" or key < end)


class Keyspace:
    """What a store holds.

    Invariants: all changes of one transaction have one revision, and the history holds all changes after `compacted`.
    """

    def __init__(self, limits: KeyspaceLimits | None = None) -> None:
        # revision: of the newest change.
        # compacted: changes up to this revision are forgotten.
        self.revision = self.compacted = (1 + secrets.randbelow(1 << 30)) * STEP
        self.size = 0  # bytes of keys and values
        self._rpc: Any = etcdrpc()
        self._limits = limits or KeyspaceLimits()
        self._kvs: dict[bytes, Message] = {}
        self._keys: list[bytes] = []  # sorted
        self._leases: dict[int, _Lease] = {}
        self._history: list[Change] = []
        self._history_size = 0

    def header(self) -> Message:
        return self._rpc.ResponseHeader(cluster_id=1, member_id=1, revision=self.revision, raft_term=1)

    def range(self, request: Message, pending: Sequence[Change] = ()) -> Message:
        """Answer a RangeRequest. pending: made by this transaction, and not yet in the history. Raises Refused."""
        self._check_range(request)
        kvs = self._read(request.key, request.range_end, request.revision, pending)
        count = len(kvs)
        if request.max_create_revision:
            kvs = [kv for kv in kvs if kv.create_revision <= request.max_create_revision]
        if request.sort_order or request.sort_target:  # as etcd: ascending, where only a target is given
            by = operator.attrgetter(_SORTED_BY[request.sort_target])
            kvs.sort(key=by, reverse=request.sort_order == request.SortOrder.Value("DESCEND"))
        more = 0 < request.limit < len(kvs)
        kvs = kvs[: request.limit if more else None]
        if request.count_only:
            kvs, more = [], False
        if request.keys_only:
            kvs = [self._without_value(kv) for kv in kvs]
        return self._rpc.RangeResponse(header=self.header(), kvs=kvs, count=count, more=more)

    def _check_range(self, request: Message) -> None:
        if not request.key:
            raise Refused("INVALID_ARGUMENT", "etcdserver: key is not provided")
        if request.revision > self.revision:
            raise Refused("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")
        if 0 < request.revision < self.compacted:
            raise Refused("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")

    def _read(self, start: bytes, end: bytes, revision: int, pending: Sequence[Change]) -> list[Message]:
        """Return the keys of a range as they were at a revision that is not compacted, sorted. revision: 0: as they are."""
        found = {key: self._kvs[key] for key in self._within(start, end)}
        if revision <= 0:
            return list(found.values())
        for change in itertools.chain(reversed(pending), reversed(self._history)):
            if change.revision <= revision:
                break
            if covers(start, end, change.event.kv.key):
                found[change.event.kv.key] = change.before
        return [found[key] for key in sorted(found) if found[key] is not None]

    def _within(self, start: bytes, end: bytes) -> list[bytes]:
        if not end:
            return [start] if start in self._kvs else []
        first = bisect_left(self._keys, start)
        return self._keys[first : None if end == b"\0" else bisect_left(self._keys, end, lo=first)]

    def _without_value(self, kv: Message) -> Message:
        bare = self._rpc.KeyValue()
        bare.CopyFrom(kv)
        bare.ClearField("value")
        return bare

    def under(self, prefix: str) -> list[Message]:
        """Return the keys with a prefix as they are now, sorted."""
        return [self._kvs[key] for key in self._within(*range_of_prefix(prefix))]

    def since(self, revision: int) -> Iterable[Change]:
        """Return the changes from this revision on, the oldest first. The revision must be greater than `compacted`."""
        return itertools.islice(self._history, bisect_left(self._history, revision, key=lambda change: change.revision), None)

    def txn(self, request: Message) -> Message:
        """Carry out a TxnRequest: all of it or, if it raises Refused, nothing."""
        self._check(request)
        succeeded = all(map(self._holds, request.compare))
        operations = request.success if succeeded else request.failure
        self._check_operations(operations)
        revision, changes = self.revision + 1, list[Change]()
        answers = [self._operate(operation, revision, changes) for operation in operations]
        self._commit(revision, changes)
        return self._rpc.TxnResponse(header=self.header(), succeeded=succeeded, responses=answers)

    def put(self, key: str, value: bytes, ttl_s: int = 0, now: float = 0.0) -> None:
        """Write one key. ttl_s: of a lease of its own; 0: it has none. Raises Refused."""
        lease = self.grant(self._rpc.LeaseGrantRequest(TTL=ttl_s), now).ID if ttl_s else 0
        put = self._rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        self.txn(self._rpc.TxnRequest(success=[self._rpc.RequestOp(request_put=put)]))

    def _check(self, request: Message) -> None:
        if max(map(len, (request.compare, request.success, request.failure))) > self._limits.operations:
            raise Refused("INVALID_ARGUMENT", "etcdserver: too many operations in txn request")
        if not all(compare.key for compare in request.compare):
            raise Refused("INVALID_ARGUMENT", "etcdserver: key is not provided")
        for operations in (request.success, request.failure):
            puts, deletes, ranges, others = _by_kind(operations)
            if any(other.WhichOneof("request") is None for other in others):
                raise Refused("INVALID_ARGUMENT", "etcdserver: key not found")
            if others:
                raise Refused("UNIMPLEMENTED", "the embedded store runs no transaction inside another one")
            if not all(part.key for part in puts + deletes + ranges):
                raise Refused("INVALID_ARGUMENT", "etcdserver: key is not provided")
            twice = len({put.key for put in puts}) < len(puts)
            if twice or any(covers(gone.key, gone.range_end, put.key) for gone in deletes for put in puts):
                raise Refused("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request")
        if request.ByteSize() > self._limits.request_bytes:
            raise Refused("INVALID_ARGUMENT", "etcdserver: request is too large")

    def _check_operations(self, operations: Iterable[Message]) -> None:
        """Raise Refused where a lease is gone, the store would be full, or a revision cannot be read."""
        puts, _, ranges, _ = _by_kind(operations)
        if any(put.lease and put.lease not in self._leases for put in puts):
            raise Refused("NOT_FOUND", "etcdserver: requested lease not found")
        if puts and self.size + sum(map(_size, puts)) > self._limits.data_bytes:
            raise Refused("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded")
        for part in ranges:
            self._check_range(part)

    def _holds(self, compare: Message) -> bool:
        kvs = [self._kvs[key] for key in self._within(compare.key, compare.range_end)]
        target, holds = _TARGETS[compare.target], _COMPARE[compare.result]
        if not kvs:  # as etcd: a key that does not exist has no value, and 0 as everything else
            return target != "value" and holds(0, getattr(compare, target))
        return all(holds(getattr(kv, target), getattr(compare, target)) for kv in kvs)

    def _operate(self, operation: Message, revision: int, changes: list[Change]) -> Message:
        rpc, kind = self._rpc, operation.WhichOneof("request")
        if kind == "request_range":
            return rpc.ResponseOp(response_range=self.range(operation.request_range, changes))
        if kind == "request_put":
            changes.append(self._put(operation.request_put, revision))
            return rpc.ResponseOp(response_put=rpc.PutResponse())
        gone = self._within(operation.request_delete_range.key, operation.request_delete_range.range_end)
        changes += [self._delete(key, revision) for key in gone]
        return rpc.ResponseOp(response_delete_range=rpc.DeleteRangeResponse(deleted=len(gone)))

    def _put(self, put: Message, revision: int) -> Change:
        before = self._kvs.get(put.key)
        if before is None:
            insort(self._keys, put.key)
        else:
            self._forget(before)
        kv = self._rpc.KeyValue(
            key=put.key,
            value=put.value,
            lease=put.lease,
            create_revision=before.create_revision if before is not None else revision,
            mod_revision=revision,
            version=before.version + 1 if before is not None else 1,
        )
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        self._kvs[put.key] = kv
        self.size += _size(kv)
        return Change(self._rpc.Event(type=self._rpc.Event.EventType.Value("PUT"), kv=kv), before)

    def _delete(self, key: bytes, revision: int) -> Change:
        before = self._kvs.pop(key)
        del self._keys[bisect_left(self._keys, key)]
        self._forget(before)
        kv = self._rpc.KeyValue(key=key, mod_revision=revision)
        return Change(self._rpc.Event(type=self._rpc.Event.EventType.Value("DELETE"), kv=kv), before)

    def _forget(self, kv: Message) -> None:
        """Take a record that is replaced or deleted from its lease and from the size."""
        self.size -= _size(kv)
        if (lease := self._leases.get(kv.lease)) is not None:
            lease.keys.discard(kv.key)

    def _commit(self, revision: int, changes: list[Change]) -> None:
        if not changes:
            return
        self.revision = revision
        self._history += changes
        self._history_size += sum(change.size for change in changes)
        if len(self._history) > self._limits.changes or self._history_size > self._limits.data_bytes:
            self.compact(self._history[len(self._history) // 2].revision)

    def compact(self, revision: int) -> None:
        """Forget the changes up to this revision."""
        revision_of = operator.attrgetter("revision")
        self.compacted = revision
        kept = self._history[bisect_right(self._history, self.compacted, key=revision_of) :]
        self._history, self._history_size = kept, sum(change.size for change in kept)

    # Leases. `now`: monotonic seconds.

    def grant(self, request: Message, now: float) -> Message:
        """Answer a LeaseGrantRequest. Raises Refused."""
        if request.TTL > MAX_TTL_S:
            raise Refused("OUT_OF_RANGE", "etcdserver: too large lease TTL")
        if len(self._leases) >= self._limits.leases:
            raise Refused("RESOURCE_EXHAUSTED", "etcdserver: too many requests")
        if request.ID in self._leases:
            raise Refused("FAILED_PRECONDITION", "etcdserver: lease already exists")
        lease_id = request.ID or 1 + secrets.randbelow((1 << 63) - 1)
        ttl_s = max(request.TTL, MIN_TTL_S)
        self._leases[lease_id] = _Lease(ttl_s, now + ttl_s)
        return self._rpc.LeaseGrantResponse(header=self.header(), ID=lease_id, TTL=ttl_s)

    def revoke(self, request: Message) -> Message:
        """Answer a LeaseRevokeRequest. Raises Refused."""
        if request.ID not in self._leases:
            raise Refused("NOT_FOUND", "etcdserver: requested lease not found")
        self._end_lease(request.ID)
        return self._rpc.LeaseRevokeResponse(header=self.header())

    def keep_alive(self, request: Message, now: float) -> Message:
        """Answer a LeaseKeepAliveRequest. TTL 0: there is no such lease."""
        lease = self._leases.get(request.ID)
        if lease is not None:
            lease.expires = now + lease.ttl_s
        return self._rpc.LeaseKeepAliveResponse(header=self.header(), ID=request.ID, TTL=lease.ttl_s if lease is not None else 0)

    def time_to_live(self, request: Message, now: float) -> Message:
        """Answer a LeaseTimeToLiveRequest. TTL -1: there is no such lease."""
        lease = self._leases.get(request.ID)
        answer = self._rpc.LeaseTimeToLiveResponse(header=self.header(), ID=request.ID, TTL=-1)
        if lease is not None:
            answer.TTL, answer.grantedTTL = int(lease.expires - now), lease.ttl_s
            answer.keys.extend(sorted(lease.keys) if request.keys else ())
        return answer

    def expire(self, now: float) -> None:
        for lease_id in [lease_id for lease_id, lease in self._leases.items() if lease.expires <= now]:
            self._end_lease(lease_id)

    def prolong(self, seconds: float, now: float) -> None:
        """Let each lease last longer: this process stood still for so long, and no lease could be renewed."""
        for lease in self._leases.values():
            lease.expires = min(lease.expires + seconds, now + lease.ttl_s)

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        revision = self.revision + 1
        self._commit(revision, [self._delete(key, revision) for key in sorted(lease.keys)])


def _by_kind(operations: Iterable[Message]) -> tuple[list[Message], list[Message], list[Message], list[Message]]:
    """Return the puts, the deletes, the reads, and what is none of them."""
    kinds: dict[str, list[Message]] = {"request_put": [], "request_delete_range": [], "request_range": [], "": []}
    for operation in operations:
        kind = operation.WhichOneof("request")
        if kind in kinds:
            kinds[kind].append(getattr(operation, kind))
        else:
            kinds[""].append(operation)
    puts, deletes, ranges, others = kinds.values()
    return puts, deletes, ranges, others


def _size(kv: Message) -> int:
    return len(kv.key) + len(kv.value)
