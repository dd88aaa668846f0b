"""What the watches of one stream are sent, and when a watch ends."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ext.embedded.keyspace import Keyspace, KeyspaceLimits
from elastic_ext.embedded.service import RESPONSE_BYTES, Watches
from tests.embedded.asks import cancel, delete, put, rpc, txn, watch

ALL = b"\0"  # as key and end: all keys
COMPACTED = "etcdserver: mvcc: required revision has been compacted"
PUT, DELETE = "PUT", "DELETE"


@pytest.fixture
def store() -> Keyspace:
    return Keyspace()


@pytest.fixture
def watches(store) -> Watches:
    return Watches(store)


def run(store, *operations):
    store.txn(txn(*operations))


def open_watch(watches, *args, **more):
    """Open one; take what it is sent at once, which begins with the answer. The other watches get their part, too."""
    watches.take(watch(*args, **more))
    answer, *rest = watches.due()
    assert (answer.created, answer.canceled) == (True, False)
    return answer.watch_id, rest


def events_of(responses):
    return [(rpc.Event.EventType.Name(event.type), event.kv.key) for response in responses for event in response.events]


def test_a_watch_from_now_on(store, watches):
    run(store, put(b"a", b"0"))
    watch_id, rest = open_watch(watches, b"a")
    assert rest == []
    run(store, put(b"a", b"1"), put(b"b"))
    (news,) = watches.due()
    kv = rpc.KeyValue(key=b"a", value=b"1", create_revision=store.revision - 1, mod_revision=store.revision, version=2)
    assert news == rpc.WatchResponse(header=store.header(), watch_id=watch_id, events=[rpc.Event(type=PUT, kv=kv)])
    assert list(watches.due()) == []


def test_a_watch_from_the_past(store, watches):
    for key in (b"a", b"b", b"c"):
        run(store, put(key))
    run(store, delete(b"b"))
    _, rest = open_watch(watches, ALL, ALL, start_revision=store.revision - 2)
    assert events_of(rest) == [(PUT, b"b"), (PUT, b"c"), (DELETE, b"b")]
    gone = rest[-1].events[-1].kv
    assert gone == rpc.KeyValue(key=b"b", mod_revision=store.revision)
    run(store, put(b"d"))
    assert events_of(watches.due()) == [(PUT, b"d")]


def test_a_watch_from_the_future(store, watches):
    open_watch(watches, b"a", start_revision=store.revision + 3)
    run(store, put(b"a", b"1"))
    run(store, put(b"a", b"2"))
    assert list(watches.due()) == []
    run(store, put(b"a", b"3"))
    (news,) = watches.due()
    assert [event.kv.value for event in news.events] == [b"3"]


def test_what_comes_before_a_watch_is_answered(store, watches):
    """From now on: since the request, not since its answer."""
    watches.take(watch(b"a"))
    run(store, put(b"a"))
    answer, news = watches.due()
    assert answer.created
    assert events_of([news]) == [(PUT, b"a")]


@pytest.mark.parametrize(
    ("key", "end", "filters", "seen"),
    [
        (b"a", b"", [], [(PUT, b"a"), (DELETE, b"a")]),
        (b"a", b"b", [], [(PUT, b"a"), (PUT, b"aa"), (DELETE, b"a"), (DELETE, b"aa")]),
        (b"aa", ALL, [], [(PUT, b"aa"), (PUT, b"b"), (DELETE, b"aa")]),
        (ALL, ALL, ["NOPUT"], [(DELETE, b"a"), (DELETE, b"aa")]),
        (ALL, ALL, ["NODELETE"], [(PUT, b"a"), (PUT, b"aa"), (PUT, b"b")]),
        (ALL, ALL, ["NOPUT", "NODELETE"], []),
        (b"x", b"", [], []),
    ],
)
def test_what_a_watch_wants(store, watches, key, end, filters, seen):
    open_watch(watches, key, end, filters=filters)
    run(store, put(b"a"), put(b"aa"), put(b"b"))
    run(store, delete(b"a", b"b"))
    assert events_of(watches.due()) == seen


def test_a_canceled_watch_gets_no_more(store, watches):
    one, _ = open_watch(watches, b"a")
    other, _ = open_watch(watches, b"a")
    watches.take(cancel(one))
    run(store, put(b"a"))
    answer, news = watches.due()
    assert answer == rpc.WatchResponse(header=answer.header, watch_id=one, canceled=True)
    assert (news.watch_id, news.canceled) == (other, False)
    watches.take(cancel(one))  # there is none any more
    assert list(watches.due()) == []


def test_numbers_of_watches(store, watches):
    assert open_watch(watches, b"a", watch_id=5)[0] == 5
    free = {open_watch(watches, b"a")[0] for _ in range(3)}
    assert len(free) == 3
    assert 5 not in free
    run(store, put(b"a"))
    assert {news.watch_id for news in watches.due()} == {5, *free}


def test_a_number_that_is_taken_is_refused(store, watches):
    open_watch(watches, b"a", watch_id=5)
    watches.take(watch(b"b", watch_id=5))
    (answer,) = watches.due()
    assert (answer.created, answer.canceled) == (True, True)
    assert "duplicate" in answer.cancel_reason
    run(store, put(b"a"), put(b"b"))
    assert events_of(watches.due()) == [(PUT, b"a")]  # the first goes on
    watches.take(cancel(5))
    list(watches.due())
    assert open_watch(watches, b"b", watch_id=5)[0] == 5


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_a_forgotten_past_ends_a_watch(behind):
    """The answer says where the history begins."""
    store = Keyspace(KeyspaceLimits(changes=4))
    for _ in range(8):
        run(store, put(b"a"))
    assert store.compacted < store.revision
    watches = Watches(store)
    watch_id, rest = open_watch(watches, b"a", start_revision=store.compacted - behind)
    fields = {"canceled": True, "compact_revision": store.compacted, "cancel_reason": COMPACTED}
    assert rest == [rpc.WatchResponse(header=store.header(), watch_id=watch_id, **fields)]
    run(store, put(b"a"))
    assert list(watches.due()) == []


def test_a_watch_that_lags_behind_ends():
    store = Keyspace(KeyspaceLimits(changes=4))
    watches = Watches(store)
    open_watch(watches, b"a", watch_id=1)
    open_watch(watches, b"none", watch_id=2)
    for _ in range(4):
        run(store, put(b"a"))
    assert len(events_of(watches.due())) == 4
    for _ in range(3):
        run(store, put(b"a"))
    assert len(events_of(watches.due())) == 3  # it had what was forgotten
    for _ in range(8):
        run(store, put(b"a"))
    ended = [(news.watch_id, news.canceled, news.compact_revision) for news in watches.due()]
    assert ended == [(1, True, store.compacted), (2, True, store.compacted)]


@pytest.mark.parametrize(("width", "responses"), [(1, 2), (3, 4)])
def test_long_news_comes_in_whole_revisions(store, watches, width, responses):
    value, first = b"v" * (RESPONSE_BYTES // 5), store.revision
    for _ in range(8):
        run(store, *(put(b"%d" % key, value) for key in range(width)))
    _, rest = open_watch(watches, ALL, ALL, start_revision=first + 1)
    parts = [[event.kv.mod_revision - first for event in response.events] for response in rest]
    assert list(itertools.chain(*parts)) == [revision for revision in range(1, 9) for _ in range(width)]
    assert len(parts) == responses
    assert all(set(one).isdisjoint(other) for one, other in itertools.pairwise(parts))
    assert max(map(len, parts)) * len(value) < 2 * RESPONSE_BYTES
    assert list(watches.due()) == []


def test_only_quiet_watches_are_told_of_progress(store, watches):
    asks, _ = open_watch(watches, b"a", progress_notify=True)
    open_watch(watches, b"a")
    run(store, put(b"b"))
    assert list(watches.progress()) == []  # it may not know of that revision yet
    list(watches.due())
    assert list(watches.progress()) == [rpc.WatchResponse(header=store.header(), watch_id=asks)]
    open_watch(watches, b"a", progress_notify=True, start_revision=store.revision + 5)
    assert {news.watch_id for news in watches.progress()} >= {asks}


def test_nothing_is_lost_while_news_is_sent():
    """The store goes on, and forgets, while a stream waits until its client has taken a part."""
    store = Keyspace(KeyspaceLimits(changes=8))
    watches = Watches(store)
    first, long = store.revision, b"v" * RESPONSE_BYTES
    open_watch(watches, b"a", start_revision=first + 1)
    for _ in range(4):
        run(store, put(b"a", long))
    sending = watches.due()
    seen = [next(sending)]
    for _ in range(7):
        run(store, put(b"a"))
    assert store.compacted > first
    seen += [*sending, *watches.due()]
    revisions = [event.kv.mod_revision - first for response in seen for event in response.events]
    assert revisions == list(range(1, len(revisions) + 1))
    assert len(revisions) == 11 or seen[-1].compact_revision == store.compacted


def test_watches_may_come_while_news_is_sent(store, watches):
    for watch_id in (1, 2):
        open_watch(watches, b"a", watch_id=watch_id)
    run(store, put(b"a"))
    sending = watches.due()
    assert next(sending).watch_id == 1
    watches.take(watch(b"a", watch_id=3))
    run(store, put(b"a"))
    rest = [*sending, *watches.due()]
    revisions = {
        each: [event.kv.mod_revision for news in rest if news.watch_id == each for event in news.events] for each in (1, 2, 3)
    }
    assert revisions == {1: [store.revision], 2: [store.revision - 1, store.revision], 3: [store.revision]}


def test_a_watch_is_canceled_while_news_is_sent():
    store = Keyspace(KeyspaceLimits(changes=4))
    watches = Watches(store)
    for watch_id in (1, 2):
        open_watch(watches, b"a", watch_id=watch_id)
    run(store, put(b"a"))
    sending = watches.due()
    assert next(sending).watch_id == 1
    watches.take(cancel(2))
    for _ in range(8):
        run(store, put(b"a"))
    rest = [*sending, *watches.due()]
    of_the_canceled = [news for news in rest if news.watch_id == 2]
    assert of_the_canceled[-1] == rpc.WatchResponse(header=of_the_canceled[-1].header, watch_id=2, canceled=True)
    assert sum(news.canceled for news in of_the_canceled) == 1


@pytest.mark.parametrize("request_", [watch(b"a", watch_id=3), cancel(2)])
def test_requests_may_come_while_progress_is_told(watches, request_):
    for watch_id in (1, 2):
        open_watch(watches, b"a", watch_id=watch_id, progress_notify=True)
    telling = watches.progress()
    assert next(telling).watch_id == 1
    watches.take(request_)
    assert {news.watch_id for news in telling} <= {2}
    assert [news.watch_id for news in watches.due()] == [request_.create_request.watch_id or request_.cancel_request.watch_id]


KEYS = st.sampled_from([b"a", b"b", b"c"])
STEPS = st.one_of(
    st.tuples(st.just("change"), st.lists(KEYS, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("due"), st.none()),
)


@given(steps=st.lists(STEPS, max_size=40), key=KEYS, changes=st.sampled_from([4, 100]))
def test_each_change_is_sent_once(steps, key, changes):
    """In order, and whatever comes between; or the watch ends, just where a change since the last look is forgotten."""
    store = Keyspace(KeyspaceLimits(changes=changes))
    watches, wanted, looked = Watches(store), list[int](), store.revision
    open_watch(watches, key)
    for step, what in [*steps, ("due", None)]:
        before = store.revision
        if step == "due":
            news = list(watches.due())
            if looked < store.compacted:
                assert [(each.canceled, each.compact_revision) for each in news] == [(True, store.compacted)]
                return
            assert [event.kv.mod_revision for each in news for event in each.events] == wanted
            wanted, looked = [], before
        elif step == "change":
            run(store, *map(put, what))
        else:
            run(store, delete(what))
        if store.revision > before and key in what:
            wanted.append(store.revision)
