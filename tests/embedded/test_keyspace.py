"""What a store keeps: reads, transactions, leases and history, as etcd has them."""

from __future__ import annotations

import pytest

from elastic_ext.embedded.keyspace import MAX_TTL_S, MIN_TTL_S, STEP, Keyspace, KeyspaceLimits, Refused, covers
from tests.embedded.asks import ask, compare, delete, get, grant, put, revoke, rpc, txn

ALL = b"\0"  # as key and end: all keys


@pytest.fixture
def store() -> Keyspace:
    return Keyspace()


def run(store, *operations, **more):
    return store.txn(txn(*operations, **more))


def content(store, revision=0):
    return {kv.key: kv.value for kv in store.range(ask(ALL, ALL, revision=revision)).kvs}


def state(store):
    """Everything that a refused request must not change."""
    leases = {lease: list(store.time_to_live(rpc.LeaseTimeToLiveRequest(ID=lease, keys=True), 0).keys) for lease in (7, 8)}
    events = [change.event for change in store.since(store.compacted + 1)]
    return store.range(ask(ALL, ALL)), store.size, leases, events


def keys_of(store, lease):
    return list(store.time_to_live(rpc.LeaseTimeToLiveRequest(ID=lease, keys=True), 0).keys)


def refusal(call, *args):
    with pytest.raises(Refused) as caught:
        call(*args)
    return caught.value.code, str(caught.value)


# Reading


@pytest.mark.parametrize(
    ("key", "end", "inside", "outside"),
    [
        (b"b", b"", [b"b"], [b"a", b"ba"]),
        (b"b", b"d", [b"b", b"ba", b"c"], [b"a", b"d"]),
        (b"b", b"\0", [b"b", b"\xff"], [b"a"]),
        (b"\0", b"\0", [b"\0", b"a"], []),
        (b"d", b"b", [], [b"b", b"c", b"d"]),
    ],
)
def test_a_range_of_keys(store, key, end, inside, outside):
    assert all(covers(key, end, each) for each in inside)
    assert not any(covers(key, end, each) for each in outside)
    run(store, *map(put, inside + outside))
    assert [kv.key for kv in store.range(ask(key, end)).kvs] == inside


@pytest.fixture
def sorted_store(store) -> Keyspace:
    """Three keys whose order is another one by each of their fields."""
    for key, value in ((b"c", b"9"), (b"b", b"3"), (b"a", b"0"), (b"c", b"0"), (b"c", b"1"), (b"a", b"2")):
        run(store, put(key, value))
    return store


@pytest.mark.parametrize(
    ("fields", "keys", "count", "more"),
    [
        ({}, "abc", 3, False),
        ({"sort_order": "ASCEND"}, "abc", 3, False),
        ({"sort_order": "DESCEND"}, "cba", 3, False),
        ({"sort_order": "ASCEND", "sort_target": "CREATE"}, "cba", 3, False),
        ({"sort_order": "ASCEND", "sort_target": "VERSION"}, "bac", 3, False),
        ({"sort_order": "ASCEND", "sort_target": "MOD"}, "bca", 3, False),
        ({"sort_order": "ASCEND", "sort_target": "VALUE"}, "cab", 3, False),
        ({"sort_order": "DESCEND", "sort_target": "VALUE"}, "bac", 3, False),
        ({"limit": 2}, "ab", 3, True),
        ({"limit": 3}, "abc", 3, False),
        ({"limit": 1, "sort_order": "DESCEND", "sort_target": "MOD"}, "a", 3, True),
        ({"count_only": True}, "", 3, False),
        ({"count_only": True, "limit": 1}, "", 3, False),
    ],
)
def test_answers_are_sorted_and_cut(sorted_store, fields, keys, count, more):
    found = sorted_store.range(ask(ALL, ALL, **fields))
    assert (b"".join(kv.key for kv in found.kvs).decode(), found.count, found.more) == (keys, count, more)
    assert found.header.revision == sorted_store.revision


@pytest.mark.parametrize(("newest", "limit", "keys", "more"), [(1, 0, "c", False), (2, 0, "bc", False), (2, 1, "b", True)])
def test_keys_that_are_not_too_new(sorted_store, newest, limit, keys, more):
    first = sorted_store.revision - 6
    found = sorted_store.range(ask(ALL, ALL, max_create_revision=first + newest, limit=limit))
    assert (b"".join(kv.key for kv in found.kvs).decode(), found.count, found.more) == (keys, 3, more)


def test_keys_alone_have_all_but_values(store):
    store.grant(grant(7), 0)
    run(store, put(b"a", b"1", 7))
    first = store.revision
    run(store, put(b"a", b"2", 7))
    bare = rpc.KeyValue(key=b"a", create_revision=first, mod_revision=first + 1, version=2, lease=7)
    assert list(store.range(ask(b"a", keys_only=True)).kvs) == [bare]
    bare.value = b"2"
    assert list(store.range(ask(b"a")).kvs) == [bare]


def test_a_store_as_it_was_before(store):
    """Sorted by key."""
    states, changes = {store.revision: []}, [put(b"b", b"1"), put(b"a", b"1"), put(b"b", b"2"), delete(b"b"), put(b"c", b"1")]
    for change in [*changes, put(b"b", b"3"), delete(b"a")]:
        run(store, change)
        states[store.revision] = list(content(store).items())
    assert {revision: list(content(store, revision).items()) for revision in states} == states
    assert list(states.values())[-2:] == [[(b"a", b"1"), (b"b", b"3"), (b"c", b"1")], [(b"b", b"3"), (b"c", b"1")]]


@pytest.mark.parametrize(
    ("key", "ahead", "refused"),
    [
        (b"", 0, ("INVALID_ARGUMENT", "etcdserver: key is not provided")),
        (b"a", 1, ("OUT_OF_RANGE", "etcdserver: mvcc: required revision is a future revision")),
        (b"a", -2, ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")),
    ],
)
def test_what_cannot_be_read(store, key, ahead, refused):
    run(store, put(b"a"))
    revision = store.revision + ahead
    assert refusal(store.range, ask(key, revision=revision)) == refused
    assert refusal(run, store, put(b"b"), get(key, revision=revision)) == refused
    assert content(store) == {b"a": b""}


def test_two_stores_share_no_revisions():
    one, other = Keyspace(), Keyspace()
    assert one.revision % STEP == other.revision % STEP == 0
    assert one.revision != other.revision
    assert one.revision == one.compacted > 0


# Transactions


def test_the_first_branch_or_the_second(store):
    claim = {"compare": [compare(b"a", "EQUAL", version=0)], "failure": [get(b"a"), put(b"b", b"second")]}
    won = run(store, put(b"a", b"first"), **claim)
    assert (won.succeeded, content(store)) == (True, {b"a": b"first"})
    lost = run(store, put(b"a", b"other"), **claim)
    assert (lost.succeeded, content(store)) == (False, {b"a": b"first", b"b": b"second"})
    assert [each.WhichOneof("response") for each in lost.responses] == ["response_range", "response_put"]
    assert lost.responses[0].response_range.kvs[0].value == b"first"
    assert lost.header.revision == won.header.revision + 1 == store.revision


@pytest.mark.parametrize(
    ("key", "end", "result", "wanted", "holds"),
    [
        # There are a: version 2, value 5, lease 7, and b: version 1, value 6, no lease.
        (b"a", b"", "EQUAL", {"version": 2}, True),
        (b"a", b"", "NOT_EQUAL", {"version": 2}, False),
        (b"a", b"", "GREATER", {"version": 1}, True),
        (b"a", b"", "GREATER", {"version": 2}, False),
        (b"a", b"", "LESS", {"version": 3}, True),
        (b"a", b"", "EQUAL", {"value": b"5"}, True),
        (b"a", b"", "GREATER", {"value": b"4xyz"}, True),
        (b"a", b"", "LESS", {"value": b"50"}, True),
        (b"a", b"", "EQUAL", {"lease": 7}, True),
        (b"b", b"", "EQUAL", {"lease": 0}, True),
        (b"a", b"c", "GREATER", {"version": 0}, True),
        (b"a", b"c", "EQUAL", {"version": 2}, False),  # it must hold for all
        (b"a", b"\0", "GREATER", {"value": b"4"}, True),
        # A key that does not exist has no value, and 0 as everything else.
        (b"x", b"", "EQUAL", {"version": 0}, True),
        (b"x", b"", "EQUAL", {"create_revision": 0}, True),
        (b"x", b"", "NOT_EQUAL", {"mod_revision": 0}, False),
        (b"x", b"", "LESS", {"mod_revision": 1}, True),
        (b"x", b"", "EQUAL", {"lease": 0}, True),
        (b"x", b"", "EQUAL", {"value": b""}, False),
        (b"x", b"", "NOT_EQUAL", {"value": b"5"}, False),
        (b"x", b"z", "EQUAL", {"version": 0}, True),
        (b"x", b"z", "LESS", {"value": b"5"}, False),
    ],
)
def test_what_a_transaction_compares(store, key, end, result, wanted, holds):
    store.grant(grant(7), 0)
    run(store, put(b"a", b"4"))
    run(store, put(b"a", b"5", 7), put(b"b", b"6"))
    assert run(store, compare=[compare(key, result, end, **wanted)]).succeeded is holds


@pytest.mark.parametrize(("name", "behind"), [("create_revision", 1), ("mod_revision", 0)])
def test_revisions_are_compared(store, name, behind):
    run(store, put(b"a"))
    run(store, put(b"a"))
    seen = store.revision - behind
    answers = [run(store, compare=[compare(b"a", "EQUAL", **{name: seen + off})]).succeeded for off in (-1, 0, 1)]
    assert answers == [False, True, False]


def test_all_compares_must_hold(store):
    good, bad = compare(b"a", "EQUAL", version=0), compare(b"a", "EQUAL", version=1)
    assert all(run(store, compare=each).succeeded for each in ([], [good, good]))
    assert not any(run(store, compare=each).succeeded for each in ([good, bad], [bad, good]))


def test_deleting_no_keys_is_no_change(store):
    run(store, *map(put, (b"a", b"b", b"c")))
    answer = run(store, delete(b"a", b"c"), delete(b"b"))
    assert [each.response_delete_range.deleted for each in answer.responses] == [2, 0]
    assert content(store) == {b"c": b""}
    first = store.revision
    assert run(store, delete(b"a"), get(b"c")).header.revision == store.revision == first


def test_reads_see_what_was_written_before(store):
    run(store, put(b"a", b"0"), put(b"c"))
    answer = run(store, get(ALL, ALL), put(b"a", b"1"), put(b"b"), get(ALL, ALL), delete(b"c"), get(ALL, ALL, count_only=True))
    found = [each.response_range for each in answer.responses if each.HasField("response_range")]
    assert [(kv.key, kv.value) for kv in found[0].kvs] == [(b"a", b"0"), (b"c", b"")]
    assert [(kv.key, kv.value) for kv in found[1].kvs] == [(b"a", b"1"), (b"b", b""), (b"c", b"")]
    assert found[1].kvs[0].mod_revision == answer.header.revision
    assert found[2].count == 2


def test_old_reads_do_not_see_own_writes(store):
    run(store, put(b"a", b"0"))
    answer = run(store, put(b"a", b"1"), put(b"b"), get(ALL, ALL, revision=store.revision))
    assert [(kv.key, kv.value) for kv in answer.responses[2].response_range.kvs] == [(b"a", b"0")]


NO_KEY = ("INVALID_ARGUMENT", "etcdserver: key is not provided")
TWICE = ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request")
TOO_MANY = ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request")
TOO_LARGE = ("INVALID_ARGUMENT", "etcdserver: request is too large")
NO_LEASE = ("NOT_FOUND", "etcdserver: requested lease not found")
FULL = ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded")
NEVER = compare(b"none", "NOT_EQUAL", version=0)


@pytest.mark.parametrize(
    ("request_", "refused"),
    [
        (txn(put(b"x"), put(b"")), NO_KEY),
        (txn(put(b"x"), delete(b"")), NO_KEY),
        (txn(put(b"x"), compare=[compare(b"", "EQUAL", version=0)]), NO_KEY),
        (txn(put(b"x"), failure=[put(b"")]), NO_KEY),  # also where it would not run
        (txn(put(b"x"), put(b"y"), put(b"x")), TWICE),
        (txn(put(b"x"), delete(b"x")), TWICE),
        (txn(delete(b"w", b"z"), put(b"x")), TWICE),
        (txn(delete(ALL, ALL), put(b"x")), TWICE),
        (txn(failure=[put(b"x"), put(b"x")]), TWICE),
        (txn(*[get(b"x")] * 5), TOO_MANY),
        (txn(failure=[get(b"x")] * 5), TOO_MANY),
        (txn(compare=[NEVER] * 5), TOO_MANY),
        (txn(put(b"x", b"v" * 200)), TOO_LARGE),
        (txn(put(b"x"), failure=[put(b"y", b"v" * 200)]), TOO_LARGE),
        (txn(put(b"x"), put(b"y", lease=9)), NO_LEASE),
        (txn(compare=[NEVER], failure=[put(b"x"), delete(b"a"), put(b"y", lease=9)]), NO_LEASE),
        (txn(put(b"x", b"v" * 47), put(b"y")), FULL),
    ],
)
def test_a_refused_transaction_changes_nothing(request_, refused):
    store = Keyspace(KeyspaceLimits(data_bytes=50, request_bytes=200, operations=4))
    store.grant(grant(7), 0)
    run(store, put(b"a", b"1", 7))
    before = state(store)
    assert refusal(store.txn, request_) == refused
    assert state(store) == before


@pytest.mark.parametrize(
    "request_",
    [
        txn(put(b"x"), failure=[put(b"x")]),  # in different branches
        txn(delete(b"x"), delete(b"w", b"z")),
        txn(delete(b"x", b"y"), put(b"y")),
        txn(delete(b"y", b"x"), put(b"xx")),  # a range of nothing
        txn(*[get(b"x")] * 4, failure=[get(b"x")] * 4, compare=[NEVER] * 4),
        txn(put(b"x"), failure=[put(b"y", lease=9)]),  # the lease of what does not run may be gone
        txn(put(b"x", b"v" * 48)),
    ],
)
def test_limits_that_are_just_kept(request_):
    store = Keyspace(KeyspaceLimits(data_bytes=49, request_bytes=200, operations=4))
    assert store.txn(request_).header.revision == store.revision


def test_a_transaction_in_another_is_refused(store):
    inner = rpc.RequestOp(request_txn=txn(put(b"x")))
    code, text = refusal(store.txn, txn(put(b"a"), inner))
    assert code == "UNIMPLEMENTED"
    assert "no transaction inside another" in text
    assert content(store) == {}


def test_space_is_free_again_after_deletes():
    store = Keyspace(KeyspaceLimits(data_bytes=10))
    run(store, put(b"a", b"123456789"))
    assert refusal(run, store, put(b"b")) == FULL
    assert run(store, get(b"a"), delete(b"b")).succeeded  # reads and deletes go on
    run(store, delete(b"a"))
    assert store.size == 0
    run(store, put(b"a", b"1234"))
    run(store, put(b"a", b"1"))  # a shorter value
    assert store.size == 2
    run(store, put(b"b", b"1234567"))
    assert store.size == 10


# Leases


@pytest.mark.parametrize(
    ("wanted", "given"), [(-1, MIN_TTL_S), (0, MIN_TTL_S), (1, MIN_TTL_S), (2, 2), (60, 60), (MAX_TTL_S, MAX_TTL_S)]
)
def test_a_lease_lasts_two_seconds_at_least(store, wanted, given):
    answer = store.grant(grant(7, wanted), 100.0)
    assert (7, given) == (answer.ID, answer.TTL)
    left = store.time_to_live(rpc.LeaseTimeToLiveRequest(ID=7), 100.5)
    assert (left.TTL, left.grantedTTL) == (given - 1, given)


def test_leases_without_a_number_get_one(store):
    ids = {store.grant(grant(0), 0).ID for _ in range(100)}
    assert len(ids) == 100
    assert min(ids) > 0


def test_a_lease_that_is_refused(store):
    store.grant(grant(7), 0)
    assert refusal(store.grant, grant(7), 0) == ("FAILED_PRECONDITION", "etcdserver: lease already exists")
    assert refusal(store.grant, grant(8, MAX_TTL_S + 1), 0) == ("OUT_OF_RANGE", "etcdserver: too large lease TTL")
    assert refusal(store.revoke, revoke(8)) == NO_LEASE
    assert store.keep_alive(rpc.LeaseKeepAliveRequest(ID=8), 0).TTL == 0
    assert store.time_to_live(rpc.LeaseTimeToLiveRequest(ID=8), 0).TTL == -1


def test_a_lease_lasts_while_kept_alive(store):
    store.grant(grant(7, 10), 0.0)
    run(store, put(b"a", lease=7))
    for now in (9.0, 18.0):
        store.expire(now)
        assert store.keep_alive(rpc.LeaseKeepAliveRequest(ID=7), now).TTL == 10
    store.expire(27.9)
    assert content(store) == {b"a": b""}
    store.expire(28.0)
    assert content(store) == {}
    assert store.keep_alive(rpc.LeaseKeepAliveRequest(ID=7), 28.0).TTL == 0


def end_by_time(store):
    store.expire(10.0)


def end_by_revoke(store):
    assert store.revoke(revoke(7)).header.revision == store.revision


@pytest.mark.parametrize("end", [end_by_time, end_by_revoke])
def test_a_lease_ends_in_one_revision(store, end):
    store.grant(grant(7, 10), 0.0)
    store.grant(grant(8, 11), 0.0)
    run(store, put(b"c", lease=7), put(b"a", lease=7), put(b"b", lease=8), put(b"d"))
    before = store.revision
    end(store)
    assert [(change.event.type, change.event.kv.key, change.revision) for change in store.since(before + 1)] == [
        (1, b"a", before + 1),
        (1, b"c", before + 1),
    ]
    assert content(store) == {b"b": b"", b"d": b""}
    assert refusal(run, store, put(b"x", lease=7)) == NO_LEASE


def test_all_leases_last_longer_after_a_pause(store):
    for lease, ttl_s in ((7, 10), (8, 20)):
        store.grant(grant(lease, ttl_s), 0.0)
        run(store, put(b"%d" % lease, lease=lease))
    store.keep_alive(rpc.LeaseKeepAliveRequest(ID=8), 33.0)  # just before it is seen that the process stood still
    store.prolong(30.0, 34.0)
    store.expire(39.9)
    assert content(store) == {b"7": b"", b"8": b""}
    store.expire(40.0)
    assert content(store) == {b"8": b""}
    store.expire(53.9)
    assert content(store) == {b"8": b""}
    store.expire(54.0)
    assert content(store) == {}


@pytest.mark.parametrize(
    ("then", "after"),
    [
        ([put(b"a", lease=7)], 7),
        ([put(b"a", lease=8)], 8),
        ([put(b"a")], 0),
        ([delete(b"a"), put(b"a")], 0),
    ],
    ids=["kept", "another", "none", "deleted"],
)
def test_a_key_leaves_its_lease(store, then, after):
    store.grant(grant(7), 0)
    store.grant(grant(8), 0)
    run(store, put(b"a", lease=7), put(b"b", lease=7))
    for operation in then:
        run(store, operation)
    leases = {7: [b"b"], 8: []}
    leases.setdefault(after, []).insert(0, b"a")
    assert (keys_of(store, 7), keys_of(store, 8)) == (leases[7], leases[8])
    store.revoke(revoke(7))
    assert [(kv.key, kv.lease) for kv in store.range(ask(ALL, ALL)).kvs] == ([(b"a", after)] if after != 7 else [])
    before = store.revision
    store.revoke(revoke(8))
    assert store.revision == before + (after == 8)  # a lease without keys leaves no trace


# History


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_history_is_forgotten_in_whole_revisions(width):
    """Of what is left, each revision is whole, and what is no longer there is said."""
    store = Keyspace(KeyspaceLimits(changes=10))
    first, states = store.revision, {}
    for number in range(30):
        run(store, *(put(b"%d" % key, b"%d" % number) for key in range(width)))
        states[store.revision] = content(store)
        left = [change.revision for change in store.since(store.compacted + 1)]
        assert left == [revision for revision in range(store.compacted + 1, store.revision + 1) for _ in range(width)]
        assert len(left) <= 10
    assert first < store.compacted
    assert content(store, store.compacted) == states[store.compacted]
    assert content(store, store.revision) == states[store.revision]
    code, text = refusal(store.range, ask(b"0", revision=store.compacted - 1))
    assert (code, text) == ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted")


def test_one_transaction_may_be_all_history():
    store = Keyspace(KeyspaceLimits(changes=3))
    run(store, *(put(b"%d" % key) for key in range(5)))
    assert store.compacted == store.revision
    assert len(content(store)) == 5
    run(store, delete(b"0"))
    assert [change.event.kv.key for change in store.since(store.compacted + 1)] == [b"0"]


def test_long_values_are_forgotten_sooner():
    store = Keyspace(KeyspaceLimits(data_bytes=100))
    first = store.revision
    for _ in range(4):
        run(store, put(b"a", b"v" * 24))
    assert store.compacted == first
    run(store, put(b"a", b"v"))
    assert store.compacted == first + 3
    for _ in range(3):  # what is left counts
        run(store, put(b"a", b"v" * 24))
    assert store.compacted == first + 6
    assert content(store) == {b"a": b"v" * 24}
