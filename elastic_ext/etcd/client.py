"""EtcdClient: the calls of etcd v3 that elastic_ext needs, each with a deadline, over any number of endpoints.

Reads are repeated on another endpoint within the deadline, or on a second connection to the only one. Writing transactions are
repeated only if the server has certainly not taken them: one that fails with `Unavailable.maybe_applied` may have been carried
out. A caller that must know reads again. A caller that must not write twice compares (`unchanged`, `absent`), so that a second
try does no harm.

etcd3 handles the connection (channel, certificates, stubs) and the plain calls. This module handles those where etcd3 falls
short: ranges (no limit, no revision, a prefix ending in 0xff fails), transactions (no header revision), keep-alive (one lease at
a time), status (also asks for the members) and authentication (once, in its constructor).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastic_ext.etcd import errors, values, watch
from elastic_ext.etcd.calls import BESIDE_S, Caller, CallObserver, Tokens, User, ask, race
from elastic_ext.etcd.endpoints import Endpoints, Stubs, Tls, parse_endpoints
from elastic_ext.etcd.lease import LeaseRenewer
from elastic_ext.etcd.messages import Message, etcdrpc


@dataclass(frozen=True)
class Member:
    """A member. name, clients: "" and () until it has started. peers, clients: URLs."""

    member_id: int
    name: str
    peers: tuple[str, ...]
    clients: tuple[str, ...]

    @classmethod
    def parse(cls, member: Message) -> Member:
        return cls(member.ID, member.name, tuple(member.peerURLs), tuple(member.clientURLs))


class Membership:
    """The calls of etcd's Cluster service. Each raises EtcdError."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def members(self, *, timeout_s: float | None = None) -> tuple[Member, ...]:
        """Return all members, also those that have not started."""
        send = self._sending("MemberList", etcdrpc().MemberListRequest())
        return ask(self._caller, "list the members", send, timeout_s=timeout_s)

    def add(self, peer: str, *, timeout_s: float | None = None) -> tuple[Member, ...]:
        """Add a member that has not started; return all members. peer: its URL. Refused by etcd where there is one with it."""
        send = self._sending("MemberAdd", etcdrpc().MemberAddRequest(peerURLs=[peer]))
        return self._caller.call(f"add the member {peer}", send, repeatable=False, timeout_s=timeout_s)

    def remove(self, member_id: int, *, timeout_s: float | None = None) -> tuple[Member, ...]:
        """Remove a member; return those that are left."""
        send = self._sending("MemberRemove", etcdrpc().MemberRemoveRequest(ID=member_id))
        return self._caller.call(f"remove the member {member_id:x}", send, repeatable=False, timeout_s=timeout_s)

    @staticmethod
    def _sending(method: str, request: Message) -> Callable[[Stubs], tuple[Member, ...]]:
        def send(etcd: Stubs) -> tuple[Member, ...]:
            answer = getattr(etcd.clusterstub, method)(request, etcd.timeout, metadata=etcd.metadata)
            return tuple(map(Member.parse, answer.members))

        return send


PAGE = 1000  # keys per request of a prefix: 1,000 values of 1 kB are well below what the server likes to send at once
_JOIN_S = 2.0  # their calls are canceled by then

T = TypeVar("T")


class EtcdClient:
    """Client for one cluster. Thread-safe; one per process is enough. Never fork with one open: gRPC's threads do not survive it.

    Every method takes `timeout_s` for all attempts together and raises subclasses of `errors.EtcdError`.
    """

    def __init__(
        self,
        endpoints: str | Iterable[str],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 5.0,
        first: int | None = None,
    ) -> None:
        """Create the client without sending anything yet.

        Args:
            endpoints: `host:port`, with or without http(s)://, as a comma list or several strings; default port 2379.
            tls: certificates; https:// without it trusts the system's CAs.
            timeout_s: default for each call.
            first: index of the endpoint to begin with; random by default.
        """
        if (user is None) != (password is None):
            raise errors.ConfigError("etcd: expected both a user and a password, got only one")
        self._closed = threading.Event()
        self._tokens = Tokens(User(user, password) if user is not None and password is not None else None)
        self._endpoints = Endpoints(parse_endpoints(endpoints), tls, first)
        self._caller = Caller(self._endpoints, self._tokens, timeout_s, self._closed)
        self.timeout_s = timeout_s  # default for each call
        self.renewer = LeaseRenewer(self.lease_keep_alive, self._closed)  # keeps the leases of `LeaseSession`s alive
        self.watches = watch.WatchStream(self._caller, self.revision)  # the stream of all watches
        self.membership = Membership(self._caller)  # the members of the cluster

    def __repr__(self) -> str:
        return f"EtcdClient({', '.join(map(str, self._endpoints.endpoints))})"

    def __enter__(self) -> EtcdClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls, watches and keep-alives at once; leases are left to expire. Calling it twice is allowed."""
        self._closed.set()
        self._endpoints.close()  # first: it cancels the calls that the two threads may be in
        self.watches.close()
        self.renewer.close()
        # Last: both may be in a race. A thread that returns from gRPC's C++ code during process exit could abort the process.
        self._caller.threads.join(_JOIN_S)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The addresses in use, as `host:port`."""
        return tuple(map(str, self._endpoints.endpoints))

    def follow(self, endpoints: str | Iterable[str]) -> None:
        """Use these addresses instead of those before: the members of the cluster have changed."""
        self._endpoints.replace(parse_endpoints(endpoints))

    def helped_by(self, who: str) -> None:
        """Let errors of a cluster that does not answer say this, instead of what to check: who starts it again."""
        self._caller.who_helps = who

    def observe(self, observer: CallObserver) -> None:
        """Let this observer, instead of the one before, hear of all calls from now on."""
        self._caller.observer = observer

    def now(self) -> float:
        """Return the monotonic time by which leases are counted here, in seconds."""
        return time.monotonic()

    # Keys

    def get(self, key: values.Key, *, revision: int = 0, timeout_s: float | None = None) -> values.Reading:
        """Read the key now (linearizable) or as of `revision`; `.kv` is None if it does not exist."""
        return self._range(values.to_bytes(key), b"", {"revision": revision}, f"get {_show(key)}", timeout_s)

    def revision(self, key: values.Key, *, timeout_s: float | None = None) -> int:
        """Return the store's current revision. key: any key that the user may read."""
        return self._range(values.to_bytes(key), b"", {"count_only": True}, "get the revision", timeout_s).revision

    def get_prefix(self, prefix: values.Key, *, keys_only: bool = False, timeout_s: float | None = None) -> values.Reading:
        """Read all keys with this prefix, in order, as of one revision, however many there are."""
        deadline = self.now() + (timeout_s or self.timeout_s)
        while True:
            try:
                return self._pages(prefix, keys_only, deadline)
            except errors.Compacted:  # between two pages: begin again at a newer revision
                if self.now() > deadline:
                    raise

    def last_created(
        self, prefix: values.Key, until_revision: int, limit: int, *, timeout_s: float | None = None
    ) -> values.Reading:
        """Read the last-created keys with this prefix, newest first, of those created at a revision or before."""
        start, end = values.range_of_prefix(prefix)
        request = etcdrpc().RangeRequest
        options = {
            "limit": limit,
            "sort_order": request.SortOrder.Value("DESCEND"),
            "sort_target": request.SortTarget.Value("CREATE"),
            "max_create_revision": until_revision,
        }
        return self._range(start, end, options, f"get the last of {_show(prefix)}*", timeout_s)

    def _pages(self, prefix: values.Key, keys_only: bool, deadline: float) -> values.Reading:
        start, end = values.range_of_prefix(prefix)
        options: dict[str, object] = {"limit": PAGE, "keys_only": keys_only}
        what = f"get {_show(prefix)}*"
        page = self._range(start, end, options, what, deadline - self.now())
        first, kvs = page, list(page.kvs)
        options["revision"] = first.revision
        while page.more:
            page = self._range(kvs[-1].key + b"\0", end, options, what, max(0.01, deadline - self.now()))
            kvs += page.kvs
        return values.Reading(first.revision, tuple(kvs), first.count, False)

    def _range(self, key: bytes, end: bytes, options: dict[str, object], what: str, timeout_s: float | None) -> values.Reading:
        request = etcdrpc().RangeRequest(key=key, range_end=end, **options)

        def send(etcd: Stubs) -> values.Reading:
            response = etcd.kvstub.Range(request, etcd.timeout, metadata=etcd.metadata)
            return values.Reading.parse(response, response.header.revision)

        return self._ask(what, send, timeout_s=timeout_s)

    def txn(
        self,
        compares: Sequence[values.Compare],
        on_success: Sequence[values.Op] = (),
        on_failure: Sequence[values.Op] = (),
        *,
        timeout_s: float | None = None,
    ) -> values.TxnResult:
        """Run one list of operations if all comparisons hold, otherwise the other, in one revision.

        etcd's limit is 128 operations per list. Raises LeaseLost if a `Put` names a lease that does not exist (any more).
        """
        request = etcdrpc().TxnRequest(
            compare=[compare.message() for compare in compares],
            success=[op.message() for op in on_success],
            failure=[op.message() for op in on_failure],
        )
        writes = [op for op in (*on_success, *on_failure) if not isinstance(op, values.Get)]
        keys = [op.key for op in writes] or [compare.key for compare in compares] or [op.key for op in on_success]
        kind = "transaction on" if writes or compares else "read of"
        what = f"{kind} {_show(keys[0]) if keys else 'nothing'}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}"

        def send(etcd: Stubs) -> values.TxnResult:
            return values.TxnResult.parse(etcd.kvstub.Txn(request, etcd.timeout, metadata=etcd.metadata))

        if not writes:
            return self._ask(what, send, timeout_s=timeout_s)
        return self._write(what, send, timeout_s=timeout_s)

    def watch_with_snapshot(self, prefix: values.Key, on_item: Callable[[], None] | None = None) -> watch.SnapshotWatch:
        """Deliver the keys first, then their changes: see `SnapshotWatch`."""
        return watch.SnapshotWatch(self, prefix, on_item)

    # Leases

    def lease_grant(self, ttl_s: int, *, timeout_s: float | None = None) -> values.Lease:
        """Grant a lease that is not renewed; see `LeaseSession`. ttl_s: seconds."""

        def send(etcd: Stubs) -> values.Lease:
            sent_at = self.now()
            lease = etcd.lease(ttl_s)
            return values.Lease(lease.id, lease.ttl, sent_at)

        # Repeatable: a second lease expires, as nothing renews it.
        return self._ask("grant a lease", send, timeout_s=timeout_s)

    def lease_revoke(self, lease_id: int, *, timeout_s: float | None = None) -> None:
        """Delete the lease and its keys; do nothing if there is no such lease."""
        with contextlib.suppress(errors.LeaseLost):  # expired, or revoked by an attempt whose answer was lost
            self._ask(f"revoke lease {lease_id:x}", lambda etcd: etcd.revoke_lease(lease_id), timeout_s=timeout_s)

    def lease_keep_alive(
        self, lease_ids: Sequence[int], *, timeout_s: float | None = None, beside_s: float = BESIDE_S
    ) -> values.KeptAlive:
        """Renew the leases once. beside_s: see `race`."""
        rpc = etcdrpc()
        requests = [rpc.LeaseKeepAliveRequest(ID=lease_id) for lease_id in lease_ids]

        def send(etcd: Stubs) -> values.KeptAlive:
            sent_at, answered = self.now(), threading.Event()
            # The client's end of the stream stays open until all answers are there: etcd's grpc-proxy gives none after it.
            answers = etcd.leasestub.LeaseKeepAlive(_until(answered, requests), etcd.timeout, metadata=etcd.metadata)
            try:
                return values.KeptAlive(sent_at, {answer.ID: answer.TTL for answer in itertools.islice(answers, len(requests))})
            finally:
                answered.set()

        what = f"keep {len(requests)} leases alive"
        return self._race(what, send, timeout_s=timeout_s or self.timeout_s, beside_s=beside_s)

    def lease_left_s(self, lease_id: int, *, timeout_s: float | None = None) -> int:
        """Return the seconds until this lease expires; 0 or less if there is no such lease."""
        request = etcdrpc().LeaseTimeToLiveRequest(ID=lease_id)

        def send(etcd: Stubs) -> int:
            return int(etcd.leasestub.LeaseTimeToLive(request, etcd.timeout, metadata=etcd.metadata).TTL)

        return self._ask(f"time left of lease {lease_id:x}", send, timeout_s=timeout_s)

    # The cluster

    def status(self, *, timeout_s: float | None = None) -> values.Status:
        """Return the status of the member in use; a member without a leader answers as well."""
        request = etcdrpc().StatusRequest()

        def send(etcd: Stubs) -> values.Status:
            answer = etcd.maintenancestub.Status(request, etcd.timeout, metadata=etcd.metadata)
            head = answer.header
            return values.Status(answer.version, head.member_id, answer.leader, answer.raftTerm, answer.dbSize, head.revision)

        return self._ask("status", send, timeout_s=timeout_s, leader=False)

    def alarms(self, *, timeout_s: float | None = None) -> tuple[values.Alarm, ...]:
        """Return all alarms that are now raised in the cluster."""
        kinds = etcdrpc().AlarmMember.DESCRIPTOR.fields_by_name["alarm"].enum_type.values_by_number

        def send(etcd: Stubs) -> tuple[values.Alarm, ...]:
            return tuple(values.Alarm(alarm.member_id, kinds[alarm.alarm_type].name) for alarm in etcd.list_alarms())

        return self._ask("list the alarms", send, timeout_s=timeout_s)

    # The three ways to the server. A client without a network replaces them.

    def _ask(self, what: str, send: Callable[[Stubs], T], *, timeout_s: float | None, leader: bool = True) -> T:
        return ask(self._caller, what, send, timeout_s=timeout_s, leader=leader)

    def _race(self, what: str, send: Callable[[Stubs], T], *, timeout_s: float, beside_s: float) -> T:
        return race(self._caller, what, send, timeout_s=timeout_s, beside_s=beside_s)

    def _write(self, what: str, send: Callable[[Stubs], T], *, timeout_s: float | None) -> T:
        return self._caller.call(what, send, repeatable=False, timeout_s=timeout_s)


def _until(answered: threading.Event, requests: Iterable[T]) -> Iterator[T]:
    """Return the requests, then wait."""
    yield from requests
    answered.wait()


def _show(key: values.Key) -> str:
    text = key if isinstance(key, str) else key.decode(errors="backslashreplace")
    return text if text.isprintable() else repr(text)
