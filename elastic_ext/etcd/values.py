"""Requests and responses of etcd as plain frozen values, and their translation to and from the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from elastic_ext.etcd.messages import Message, etcdrpc

Key: TypeAlias = str | bytes


def to_bytes(text: Key) -> bytes:
    """Encode a key or value that is given as text."""
    return text.encode() if isinstance(text, str) else text


def range_of_prefix(prefix: Key) -> tuple[bytes, bytes]:
    """Return (key, range_end) of all keys that start with `prefix`; an empty prefix means all keys.

    The end is the prefix up to its last byte that is not 0xff, with that byte incremented. If there is no such byte, the byte 0
    stands for "no end" (etcd's clientv3, GetPrefixRangeEnd).
    """
    start = to_bytes(prefix)
    head = start.rstrip(b"\xff")
    end = head[:-1] + bytes([head[-1] + 1]) if head else b"\0"
    return start or b"\0", end


@dataclass(frozen=True)
class KeyValue:
    """A key and its value. lease_id: 0 without a lease. version: number of writes since the key was created, from 1."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int

    @property
    def text(self) -> str:
        """The value as text, for any bytes."""
        return self.value.decode(errors="replace")

    @classmethod
    def parse(cls, kv: Message) -> KeyValue:
        return cls(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


@dataclass(frozen=True)
class Event:
    """A put or deletion of a key. After a deletion `kv` holds the key, with the revision of the deletion as mod_revision."""

    kind: Literal["put", "delete"]
    kv: KeyValue

    @classmethod
    def parse(cls, event: Message) -> Event:
        return cls("delete" if event.type else "put", KeyValue.parse(event.kv))


@dataclass(frozen=True)
class Reading:
    """The answer to a get. revision: of the store at the time. count: number of keys in the range, returned or not."""

    revision: int
    kvs: tuple[KeyValue, ...]
    count: int
    more: bool

    @property
    def kv(self) -> KeyValue | None:
        """The first key, or None."""
        return self.kvs[0] if self.kvs else None

    @classmethod
    def parse(cls, response: Message, revision: int) -> Reading:
        return cls(revision, tuple(KeyValue.parse(kv) for kv in response.kvs), response.count, response.more)


@dataclass(frozen=True)
class Written:
    """The answer to a put, at `revision`."""

    revision: int


@dataclass(frozen=True)
class Deleted:
    """The answer to a delete, at `revision`. deleted: number of keys."""

    revision: int
    deleted: int


@dataclass(frozen=True)
class TxnResult:
    """The answer to a transaction, at `revision`. succeeded: the comparisons held. responses: one per operation, in order."""

    succeeded: bool
    revision: int
    responses: tuple[Reading | Written | Deleted, ...]

    @property
    def readings(self) -> tuple[Reading, ...]:
        """The answers to the gets."""
        return tuple(response for response in self.responses if isinstance(response, Reading))

    @classmethod
    def parse(cls, response: Message) -> TxnResult:
        revision = response.header.revision  # the inner answers carry no useful header of their own
        return cls(response.succeeded, revision, tuple(_parse_op(op, revision) for op in response.responses))


def _parse_op(op: Message, revision: int) -> Reading | Written | Deleted:
    kind = op.WhichOneof("response")
    if kind == "response_range":
        return Reading.parse(op.response_range, revision)
    if kind == "response_put":
        return Written(revision)
    return Deleted(revision, op.response_delete_range.deleted)


@dataclass(frozen=True)
class Put:
    """Write a key. lease_id: the key is deleted with this lease; 0 for none."""

    key: Key
    value: Key
    lease_id: int = 0

    def message(self) -> Message:
        rpc = etcdrpc()
        put = rpc.PutRequest(key=to_bytes(self.key), value=to_bytes(self.value), lease=self.lease_id)
        return rpc.RequestOp(request_put=put)


@dataclass(frozen=True)
class Get:
    """Read a key, or all keys with this prefix."""

    key: Key
    prefix: bool = False

    def message(self) -> Message:
        rpc = etcdrpc()
        key, end = range_of_prefix(self.key) if self.prefix else (to_bytes(self.key), b"")
        return rpc.RequestOp(request_range=rpc.RangeRequest(key=key, range_end=end))


@dataclass(frozen=True)
class Delete:
    """Delete a key, or all keys with this prefix."""

    key: Key
    prefix: bool = False

    def message(self) -> Message:
        rpc = etcdrpc()
        key, end = range_of_prefix(self.key) if self.prefix else (to_bytes(self.key), b"")
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=end))


Op: TypeAlias = Put | Get | Delete

_TARGETS = {"version": "version", "create": "create_revision", "mod": "mod_revision", "value": "value", "lease": "lease"}
_RESULTS = {"=": "EQUAL", "!=": "NOT_EQUAL", ">": "GREATER", "<": "LESS"}


@dataclass(frozen=True)
class Compare:
    """A condition on one key. If the key does not exist, version, create, mod and lease are 0, and no value matches."""

    key: Key
    target: Literal["version", "create", "mod", "value", "lease"]
    result: Literal["=", "!=", ">", "<"]
    operand: int | Key

    def message(self) -> Message:
        compare = etcdrpc().Compare
        operand = self.operand if isinstance(self.operand, int) else to_bytes(self.operand)
        return compare(
            key=to_bytes(self.key),
            target=compare.CompareTarget.Value(self.target.upper()),
            result=compare.CompareResult.Value(_RESULTS[self.result]),
            **{_TARGETS[self.target]: operand},
        )


def absent(key: Key) -> Compare:
    """Return the condition that the key does not exist."""
    return Compare(key, "create", "=", 0)


def unchanged(key: Key, mod_revision: int) -> Compare:
    """Return the condition that the key was last written at this revision; 0: that it does not exist."""
    return Compare(key, "mod", "=", mod_revision)


@dataclass(frozen=True)
class Lease:
    """A lease. ttl_s: as granted; the server raises a TTL that is too short. sent_at: monotonic, just before the request."""

    lease_id: int
    ttl_s: int
    sent_at: float


@dataclass(frozen=True)
class KeptAlive:
    """A renewal. ttl_s: by lease id; 0 or less if the lease is gone. sent_at: monotonic, just before the request."""

    sent_at: float
    ttl_s: Mapping[int, int]


@dataclass(frozen=True)
class Status:
    """A member's own view. leader: member id, 0 if it knows of none. db_size: bytes."""

    version: str
    member_id: int
    leader: int
    raft_term: int
    db_size: int
    revision: int


@dataclass(frozen=True)
class Alarm:
    """A raised alarm. kind: NOSPACE or CORRUPT."""

    member_id: int
    kind: str
