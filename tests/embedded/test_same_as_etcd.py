"""The same requests to a real etcd and to our store have the same answers, but for the first revision."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.embedded.keyspace import Keyspace, KeyspaceLimits, Refused
from elastic_ext.embedded.service import Watches
from tests.embedded.asks import ask, cancel, compare, delete, get, grant, put, revoke, rpc, txn, watch
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.full


def not_as_etcd(*values: Any, why: str) -> Any:
    """A row of requests that ours is known to answer otherwise."""
    return pytest.param(*values, marks=pytest.mark.xfail(strict=True, reason=why))


ALL = b"\0"  # as key and end: all keys
LIMIT_S = 30.0
REVISIONS = ("revision", "create_revision", "mod_revision", "max_create_revision", "start_revision", "compact_revision")
OF_THE_SERVER = ("cluster_id", "member_id", "raft_term")
OF_THE_TIME = ("TTL",)


def moved(request: Any, to: Callable[[int], int]) -> Any:
    """A request with other revisions; 0 means none, and stays."""
    made = type(request)()
    made.CopyFrom(request)
    for field, value in request.ListFields():
        if field.name in REVISIONS:
            setattr(made, field.name, to(value) if value > 0 else value)
        elif field.message_type is not None:
            made.ClearField(field.name)
            if hasattr(value, "ListFields"):
                getattr(made, field.name).CopyFrom(moved(value, to))
            else:
                getattr(made, field.name).extend(moved(each, to) for each in value)
    return made


def shifted(request: Any, base: int) -> Any:
    return moved(request, lambda revision: revision + base)


def plain(answer: Any, base: int) -> dict[str, Any]:
    """What an answer says that depends on neither the store nor the time."""
    said: dict[str, Any] = {}
    for field, value in answer.ListFields():
        if field.name in REVISIONS:
            said[field.name] = value - base
        elif field.name == "keys":
            said[field.name] = sorted(value)
        elif field.message_type is None:
            if field.name not in OF_THE_SERVER + OF_THE_TIME:
                said[field.name] = list(value) if isinstance(value, list) else value
        elif hasattr(value, "ListFields"):
            said[field.name] = plain(value, base)
        else:
            said[field.name] = [plain(each, base) for each in value]
    return said


def outer(said: dict[str, Any]) -> dict[str, Any]:
    """An answer without the headers of the answers in it."""
    for each in said.get("responses", []):
        for part in each.values():
            part.pop("header", None)
    return said


class Ours:
    """A new store."""

    def __init__(self, limits: KeyspaceLimits | None = None) -> None:
        self._store = Keyspace(limits)
        self._watches = Watches(self._store)
        self.base = self._store.revision
        self._calls = {
            rpc.RangeRequest: self._store.range,
            rpc.TxnRequest: self._store.txn,
            rpc.LeaseGrantRequest: lambda request: self._store.grant(request, 0.0),
            rpc.LeaseRevokeRequest: self._store.revoke,
            rpc.LeaseTimeToLiveRequest: lambda request: self._store.time_to_live(request, 0.0),
        }

    def folded(self, revision: int) -> int:
        """A revision that there is, or the next one."""
        return 1 + (revision - 1) % (self._store.revision - self.base + 1)

    def forgotten(self) -> int:
        return self._store.compacted - self.base

    def say(self, request: Any, whole: bool = False) -> dict[str, Any]:
        """whole: with the headers of the answers in the answer."""
        try:
            said = plain(self._calls[type(request)](shifted(request, self.base)), self.base)
            return said if whole else outer(said)
        except Refused as refused:
            return {"code": refused.code, "text": str(refused)}

    def watch(self, request: Any) -> None:
        self._watches.take(shifted(request, self.base))

    def news(self) -> list[dict[str, Any]]:
        return [plain(each, self.base) for each in self._watches.due()]


class Theirs:
    """An etcd that is empty at the beginning, but for its history."""

    def __init__(self, channel: grpc.Channel) -> None:
        kv, lease = rpc.KVStub(channel), rpc.LeaseStub(channel)
        self._stream = rpc.WatchStub(channel).Watch
        self._calls = {
            rpc.RangeRequest: kv.Range,
            rpc.TxnRequest: kv.Txn,
            rpc.LeaseGrantRequest: lease.LeaseGrant,
            rpc.LeaseRevokeRequest: lease.LeaseRevoke,
            rpc.LeaseTimeToLiveRequest: lease.LeaseTimeToLive,
        }
        for each in LEASES:
            with contextlib.suppress(grpc.RpcError):
                lease.LeaseRevoke(revoke(each), timeout=LIMIT_S)
        kv.Txn(txn(delete(ALL, ALL)), timeout=LIMIT_S)
        self.base = kv.Range(ask(b"a"), timeout=LIMIT_S).header.revision

    def say(self, request: Any, whole: bool = False) -> dict[str, Any]:
        try:
            said = plain(self._calls[type(request)](shifted(request, self.base), timeout=LIMIT_S), self.base)
            return said if whole else outer(said)
        except grpc.RpcError as error:
            return {"code": error.code().name, "text": error.details()}

    def __enter__(self) -> Theirs:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._responses = self._stream(iter(self._requests.get, None), timeout=LIMIT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._requests.put(None)
        self._responses.cancel()

    def watch(self, request: Any) -> None:
        self._requests.put(shifted(request, self.base))

    def next_news(self) -> dict[str, Any]:
        """Wait for a message of the stream. Its end, after LIMIT_S, is a failure."""
        return plain(next(self._responses), self.base)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One for all: a test begins with no keys."""
    with EtcdServer(tmp_path_factory.mktemp("same")) as started:
        yield started


@pytest.fixture(scope="module")
def channel(server: EtcdServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.endpoint) as made:
        yield made


# What is asked. Revisions count from the first one, which is 0 there; 0 means none.


def weighed(*strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One of these, each as often as it stands here; `st.one_of` drops repetitions."""
    return st.integers(0, len(strategies) - 1).flatmap(strategies.__getitem__)


KEYS = st.sampled_from([b"a", b"aa", b"b", b"c"])
ENDS = st.sampled_from([b"", b"\0", b"a", b"b", b"d"])
VALUES = st.sampled_from([b"", b"1", b"2", b"10"])
AGES = st.integers(0, 12)
LEASES = (1001, 1002, 1003)
LEASE = st.sampled_from(LEASES)

RANGES = st.fixed_dictionaries(
    {"key": KEYS | st.just(ALL), "end": ENDS},
    optional={
        "limit": st.integers(0, 4),
        "revision": AGES,
        "keys_only": st.booleans(),
        "count_only": st.booleans(),
        "max_create_revision": AGES,
        "order": st.tuples(
            st.sampled_from(["NONE", "ASCEND", "DESCEND"]), st.sampled_from(["KEY", "VERSION", "CREATE", "MOD", "VALUE"])
        ),
    },
)


def make_range(key: bytes, end: bytes, order: tuple[str, str] = ("NONE", "KEY"), **more: Any) -> Any:
    return ask(key, end, sort_order=order[0], sort_target=order[1], **more)


RANGE = RANGES.map(lambda fields: make_range(**fields))
PUT = st.builds(put, KEYS, VALUES, st.sampled_from([0, 0, 0, 1001, 1002]))
DELETE = st.builds(delete, KEYS, st.just(b"")) | st.builds(delete, KEYS | st.just(ALL), ENDS)


def has_known_duplicates(operations: list[Any]) -> bool:
    """Whether etcd would find no duplicate; see the last row of `test_rare_requests`."""
    puts = any(each.HasField("request_put") for each in operations)
    return puts and any(each.request_delete_range.range_end == ALL for each in operations)


def written(operation: Any) -> Any:
    """What no other operation of a transaction may write, mostly."""
    return operation.request_put.key or operation.request_delete_range.key or id(operation)


GET = RANGE.map(lambda request: rpc.RequestOp(request_range=request))
OPERATIONS = st.lists(weighed(PUT, PUT, PUT, DELETE, GET), min_size=1, max_size=4, unique_by=written).filter(
    lambda operations: not has_known_duplicates(operations)
)
WANTED = st.one_of(
    st.builds(lambda number: {"version": number}, st.integers(0, 3)),
    st.builds(lambda number: {"create_revision": number}, AGES),
    st.builds(lambda number: {"mod_revision": number}, AGES),
    st.builds(lambda value: {"value": value}, VALUES),
    st.builds(lambda lease: {"lease": lease}, st.just(0) | LEASE),
)
RESULTS = st.sampled_from(["EQUAL", "GREATER", "LESS", "NOT_EQUAL"])
COMPARE = st.builds(lambda key, result, end, wanted: compare(key, result, end, **wanted), KEYS, RESULTS, ENDS, WANTED)
TXN = st.builds(
    lambda success, failure, compares: txn(*success, failure=failure, compare=compares),
    *(OPERATIONS, OPERATIONS | st.just([]), st.lists(COMPARE, max_size=2)),
)
GRANTED = [grant(1001, 10_000), grant(1002, 10_000)]
LEASE_CALLS = st.one_of(
    st.builds(grant, LEASE, st.just(10_000)),
    st.builds(revoke, LEASE),
    st.builds(lambda lease: rpc.LeaseTimeToLiveRequest(ID=lease, keys=True), LEASE),
)
REQUESTS = st.lists(weighed(RANGE, TXN, TXN, TXN, LEASE_CALLS), min_size=10, max_size=40)  # most are accepted


@given(requests=REQUESTS)
def test_the_same_answers(channel, requests):
    theirs, ours = Theirs(channel), Ours()
    for request in [*GRANTED, *requests, ask(ALL, ALL)]:
        folded = moved(request, ours.folded)
        assert ours.say(folded) == theirs.say(folded), folded


FILTERS = st.sampled_from([[], [], ["NOPUT"], ["NODELETE"]])
WATCHED = st.sampled_from([(b"a", b""), (b"b", b""), (b"a", b"b"), (b"aa", b"\0"), (b"a", b"d"), (ALL, ALL)])
WATCH = st.builds(lambda keys, age, filters: (*keys, age, filters), WATCHED, AGES, FILTERS)
LAST = [txn(*(put(key, b"last") for key in (b"a", b"aa", b"b", b"c"))), txn(delete(ALL, ALL))]  # each watch sees one of them


STEPS = st.lists(weighed(TXN, TXN, TXN, LEASE_CALLS, WATCH, WATCH, st.just("cancel")), min_size=10, max_size=40)


@given(steps=STEPS)
def test_the_same_news(channel, steps):
    """Each watch is sent the same events in the same order; how they come in responses depends on the time."""
    steps = [*GRANTED, *steps]
    ours, open_ids, number = Ours(), [], 0
    with Theirs(channel) as theirs:
        seen = Seen(ours, theirs)
        for step in [*steps, *LAST]:
            if isinstance(step, tuple):
                key, end, age, filters = step
                number += 1
                open_ids.append(number)
                seen.ask(watch(key, end, start_revision=age, filters=filters, watch_id=number))
            elif step == "cancel":
                seen.compare()
                if open_ids:
                    seen.ask(cancel(open_ids.pop(0)))
            else:
                assert ours.say(step) == theirs.say(step), step
        seen.compare()


class Seen:
    """The events of each watch, in both stores."""

    def __init__(self, ours: Ours, theirs: Theirs) -> None:
        self._ours, self._theirs = ours, theirs
        self._events: tuple[dict[int, list[Any]], dict[int, list[Any]]] = ({}, {})

    def ask(self, request: Any) -> None:
        """Send a request about a watch, and compare the answers."""
        self._ours.watch(request)
        self._theirs.watch(request)
        own = [each for each in self._ours.news() if not self._keep(0, each)]
        other = self._theirs.next_news()
        while self._keep(1, other):
            other = self._theirs.next_news()
        assert own == [other], request

    def compare(self) -> None:
        """Wait until etcd has sent as much as ours."""
        assert all(self._keep(0, each) for each in self._ours.news())
        own, other = self._events
        while any(len(events) > len(other.get(watch_id, [])) for watch_id, events in own.items()):
            assert self._keep(1, self._theirs.next_news())
        assert own == other

    def _keep(self, whose: int, news: dict[str, Any]) -> bool:
        """Keep the events of a response; False: it is an answer."""
        if news.keys() & {"created", "canceled"}:
            return False
        self._events[whose].setdefault(news["watch_id"], []).extend(news["events"])
        return True


# What chance would hardly ask.

BEFORE = [
    grant(1001, 10_000),
    txn(put(b"a", b"2", 1001), put(b"c", b"1")),
    txn(put(b"aa", b"1"), put(b"b", b"3")),
    txn(put(b"a", b"2")),
]
NEVER = compare(b"none", "NOT_EQUAL", version=0)
MUCH = b"v" * (3 << 19)  # more than a request may be


def ids(value: Any) -> str:
    """Of the requests of a row: its first characters."""
    return " ".join(str(value).split())[:80]


@pytest.mark.parametrize(
    "request_",
    [
        ask(b""),
        ask(ALL, ALL, revision=4),
        ask(ALL, ALL, revision=1),
        ask(ALL, ALL, revision=2),
        ask(ALL, ALL, limit=-1),  # etcd takes it for none
        ask(ALL, ALL, revision=-1),  # etcd takes it for none
        ask(ALL, ALL, sort_target="VALUE"),  # etcd sorts, ascending
        ask(ALL, ALL, sort_order="ASCEND", sort_target="VALUE", limit=1, keys_only=True),
        ask(ALL, ALL, max_create_revision=-1),
        ask(b"c", b"a"),
        txn(),
        txn(failure=[put(b"a")]),
        txn(rpc.RequestOp()),
        txn(get(b"")),
        txn(put(b"")),
        txn(delete(b"a", b"c"), delete(b"aa", ALL)),
        txn(delete(b"c", b"a"), put(b"b")),
        txn(delete(b"c", b"a"), put(b"c")),
        txn(delete(b"c", b"c"), put(b"c")),
        txn(delete(b"a", b"c"), put(b"c")),
        txn(delete(b"a", b"c"), put(b"b")),
        txn(delete(b"b", ALL), put(b"a")),
        txn(put(b"x"), put(b"x")),
        txn(put(b"x"), failure=[put(b"x")]),
        txn(put(b"x"), failure=[put(b"y"), put(b"y")]),
        txn(put(b"x"), failure=[put(b"")]),
        txn(put(b"x", lease=1003)),
        txn(put(b"x"), failure=[put(b"y", lease=1003)]),
        txn(put(b"x"), get(b"a", revision=9)),
        txn(put(b"x"), get(b"x", revision=4)),
        txn(put(b"x"), failure=[get(b"a", revision=9)]),  # etcd looks at the branch that runs
        txn(put(b"x", lease=1003), get(b"a", revision=9)),  # etcd looks at leases first
        txn(put(b"x"), get(ALL, ALL, revision=3)),
        txn(get(ALL, ALL)),
        txn(put(b"x"), get(b"x"), delete(b"x0"), delete(b"a")),
        txn(delete(b"a"), get(b"a")),
        txn(compare=[compare(b"a", "EQUAL", b"c", value=b"2")]),
        txn(compare=[compare(b"c", "EQUAL", b"a", value=b"2")]),
        txn(compare=[compare(b"", "EQUAL", version=0)]),
        txn(compare=[rpc.Compare(key=b"a", target="VALUE", result="GREATER")]),  # with nothing
        txn(compare=[rpc.Compare(key=b"a", target="VERSION", result="EQUAL", value=b"2")]),
        txn(*[get(b"a")] * 128),
        txn(*[get(b"a")] * 129),
        txn(failure=[get(b"a")] * 129),
        txn(compare=[NEVER] * 129),
        txn(put(b"a", MUCH)),
        txn(put(b"a", MUCH), put(b"a")),  # etcd looks at the size last
        txn(put(b"a", MUCH, lease=1003)),
        grant(1001),
        grant(1002, 9_000_000_001),
        grant(1002, 9_000_000_000),
        grant(-5, 1000),
        revoke(1001),
        revoke(1003),
        revoke(0),
        rpc.LeaseTimeToLiveRequest(ID=1001, keys=True),
        rpc.LeaseTimeToLiveRequest(ID=1001),
        rpc.LeaseTimeToLiveRequest(ID=1003, keys=True),
        not_as_etcd(txn(delete(b"b", ALL), put(b"b")), why="ours finds more duplicates: etcd knows no end of a range but a key"),
    ],
    ids=ids,
)
def test_rare_requests(channel, request_):
    theirs, ours = Theirs(channel), Ours()
    for request in [*BEFORE, request_, ask(ALL, ALL)]:
        assert ours.say(request) == theirs.say(request), request


@pytest.mark.parametrize(
    "requests",
    [
        [watch(b"", watch_id=5)],  # etcd takes it for the first key
        [watch(b"", ALL, watch_id=5)],  # etcd takes it for all keys
        [watch(b"c", b"a", watch_id=5)],  # etcd refuses an empty range
        [watch(b"c", b"c", watch_id=5)],  # etcd refuses an empty range
        [watch(b"a", watch_id=5), watch(b"b", watch_id=5)],  # etcd answers -1 as the number, and another text
        [watch(b"a", watch_id=-5)],
        [watch(b"a", watch_id=5), cancel(5), watch(b"b", watch_id=5)],
        [watch(b"a", watch_id=5, start_revision=99), cancel(5)],
    ],
    ids=ids,
)
def test_rare_watches(channel, requests):
    ours = Ours()
    with Theirs(channel) as theirs:
        seen = Seen(ours, theirs)
        for request in requests:
            seen.ask(request)
        for step in LAST:
            assert ours.say(step) == theirs.say(step)
        seen.compare()


@pytest.mark.xfail(strict=True, reason="ours has one header, that of the whole answer")
def test_answers_in_an_answer_have_headers(channel):
    theirs, ours = Theirs(channel), Ours()
    request = txn(put(b"a"), get(b"a"), delete(b"b"))
    assert ours.say(request, whole=True) == theirs.say(request, whole=True)


@pytest.mark.parametrize("age", [-1, 0, 1])
def test_a_past_that_is_forgotten(server, channel, age):
    """age: of a revision, from the newest one that is forgotten."""
    ours = Ours(KeyspaceLimits(changes=10))
    with Theirs(channel) as theirs:
        for number in range(11):
            change = txn(put(b"ab"[number % 2 :][:1], b"%d" % number))
            assert ours.say(change) == theirs.say(change)
        forgotten = ours.forgotten()
        server.etcdctl("compact", str(theirs.base + forgotten))
        request = ask(ALL, ALL, revision=forgotten + age)
        assert ours.say(request) == theirs.say(request)
        if age:  # etcd itself may show a part of the newest revision that is forgotten
            request = watch(ALL, ALL, watch_id=5, start_revision=forgotten + age)
            ours.watch(request)
            theirs.watch(request)
            answers = [{**each, "cancel_reason": "", "header": {}} for each in ours.news()]
            assert answers == [{**theirs.next_news(), "cancel_reason": "", "header": {}} for _ in answers]
            assert [each.get("compact_revision", 0) for each in answers] == ([0, forgotten] if age < 0 else [0, 0])
