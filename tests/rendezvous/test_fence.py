"""Who stops and who trains on when leases are not renewed: several fences over a real store."""

import threading
import time

import pytest
from torch.distributed import TCPStore

from elastic_ext.base.threads import StoreCall, await_calls
from elastic_ext.rendezvous import fence
from elastic_ext.rendezvous.fence import POLL_SHARE, TRAIN_ON_S, Fence, may_train_on, train_on_s
from elastic_ext.rendezvous.round_store import MAX_SILENT, ROUNDS_SILENT, NodeStates, RoundStore, recently_silent
from elastic_ext.rendezvous.tasks import returning_s
from tests.ports import free_port
from tests.store_server import StoreServer
from tests.until import until

TTL_S = 2.0
LONG_S = 60.0


class Node:
    """A node whose lease ends when the test says so."""

    def __init__(self, store, rank, nodes):
        self.lease = (rank + 1, time.monotonic() + LONG_S)
        self.keeps_s = None
        self.changed = threading.Event()
        self.fence = Fence(self._lease, TTL_S, self.changed.set)
        self.looks, self._look, self.fence._look = 0, self.fence._look, self._counted
        self.fence.watch(RoundStore("localhost", store.port, rank, nodes))

    def _counted(self, *args):
        self._look(*args)
        self.looks += 1

    def looks_again(self):
        """Wait for a look that begins after this call."""
        before = self.looks
        until(lambda: self.looks > before + 1)

    def _lease(self):
        keeps_s = self.keeps_s
        return self.lease if keeps_s is None else (self.lease[0], time.monotonic() + keeps_s)

    def ends_in(self, seconds, lease_id=None, keeps=False):
        """keeps: so much of the lease is left until the next call, however long that takes."""
        self.lease = (lease_id or self.lease[0], time.monotonic() + seconds)
        self.keeps_s = seconds if keeps else None
        self.fence._wake.acquire()
        self.fence._wake.notify()
        self.fence._wake.release()


@pytest.fixture
def store():
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def nodes(store, monkeypatch):
    """Of a store that may be slow."""
    monkeypatch.setattr(fence, "_call_s", lambda ttl_s: LONG_S)
    made = [Node(store, rank, 3) for rank in range(3)]
    yield made
    for node in made:
        node.fence.close()


def said(store, rank, what):
    """Wait until the node says so of itself."""
    key = f"elastic_ext/trouble/{rank}"
    until(lambda: store.check([key]) and store.get(key) == what, f"{what!r} of rank {rank}")


def all_in_trouble(nodes, store):
    """All have said so, and each has read it of the others, before a lease has ended: nobody is taken to be well."""
    for node in nodes:
        node.ends_in(TTL_S / 2, keeps=True)
    for rank in range(len(nodes)):
        said(store, rank, b"1")
    until(lambda: all(node.fence._trouble.all_down_at is not None for node in nodes))
    for node in nodes:
        node.ends_in(-1)
    for node in nodes:
        node.looks_again()


def test_a_node_cut_off_alone_stops_in_time(nodes):
    nodes[0].ends_in(TTL_S / 2)
    assert nodes[0].changed.wait(LONG_S)
    assert nodes[0].fence.closed
    assert not nodes[1].fence.closed


@pytest.mark.seam
def test_a_cut_node_stays_so_this_round(nodes, store):
    """Its agent was paused, and renews its lease at once: its workers are being stopped, and the others must learn why."""
    nodes[0].ends_in(TTL_S / 20)
    assert nodes[0].changed.wait(LONG_S)
    nodes[0].ends_in(LONG_S)
    said(store, 0, b"0")
    nodes[0].ends_in(TTL_S / 2)  # the next trouble: the look before it is over
    said(store, 0, b"1")
    nodes[0].ends_in(LONG_S)
    said(store, 0, b"0")
    assert nodes[0].fence.closed
    nodes[0].fence.watch(RoundStore("localhost", store.port, 0, 3))
    assert not nodes[0].fence.closed


@pytest.fixture
def frozen_store():
    """(server, a node of rank 1 of 2, a client): the store of the round is in a process that the test stops and continues."""
    with StoreServer() as server:
        store = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
        node = Node(store, 1, 2)
        yield server, node, store
        server.resume()
        node.fence.close()
        await_calls(LONG_S)  # before the store is killed: they would try again, and torch would complain


@pytest.mark.seam
@pytest.mark.parametrize("connected", [True, False])
def test_a_silent_store_holds_up_no_decision(frozen_store, connected):
    """The host of rank 0 is frozen or cut off: torch's call on its connection would never return."""
    server, node, store = frozen_store
    if connected:
        node.ends_in(TTL_S / 2, keeps=True)
        said(store, 1, b"1")
        node.ends_in(LONG_S)
        said(store, 1, b"0")
    server.pause()
    node.ends_in(TTL_S / 2)
    assert node.changed.wait(LONG_S)
    assert node.fence.closed


@pytest.mark.seam
def test_an_ending_process_waits_for_all_rounds_calls(frozen_store, store):
    server, _, frozen = frozen_store
    server.pause()
    states = NodeStates(LONG_S)
    assert states.swap(RoundStore("localhost", frozen.port, 1, 2), "1", 0.05) is None
    assert states.swap(RoundStore("localhost", store.port, 1, 2), "1", LONG_S) == ["0"]
    (call,) = (each for each in threading.enumerate() if isinstance(each, StoreCall))
    await_calls(0.05)
    assert call.is_alive()
    server.resume()
    await_calls(LONG_S)
    assert not call.is_alive()


@pytest.mark.full
def test_an_ending_process_outwaits_two_connection_attempts():
    """Its host is gone. A call that returned while the interpreter ends would abort the process."""
    assert NodeStates(connect_s=4.0).swap(RoundStore("127.0.0.1", free_port(), 1, 2), "1", 0.05) is None
    (call,) = (each for each in threading.enumerate() if isinstance(each, StoreCall))
    await_calls()
    assert not call.is_alive()


def test_without_another_thread_the_store_counts_as_silent(store, monkeypatch):
    states, start = NodeStates(LONG_S), threading.Thread.start

    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    assert states.swap(RoundStore("localhost", store.port, 0, 2), "1", LONG_S) is None
    monkeypatch.setattr(threading.Thread, "start", start)
    assert states.swap(RoundStore("localhost", store.port, 0, 2), "1", LONG_S) == ["0"]


@pytest.mark.seam
def test_a_given_up_calls_write_does_not_stay(frozen_store):
    server, node, store = frozen_store
    node.ends_in(TTL_S / 2, keeps=True)
    said(store, 1, b"1")
    server.pause()
    node.ends_in(TTL_S / 2)
    assert node.changed.wait(LONG_S)
    node.ends_in(LONG_S)
    server.resume()
    said(store, 1, b"0")
    until(lambda: node.fence._states.settled and node.fence._written == "0")
    assert store.get("elastic_ext/trouble/1") == b"0"


@pytest.mark.full
@pytest.mark.parametrize("lease_id", [None, 77])
def test_others_have_time_to_follow_the_first(nodes, store, lease_id, monkeypatch):
    """With its old lease, which the server had kept, or with a new one: it has registered again."""
    monkeypatch.setattr(fence, "TRAIN_ON_S", LONG_S)
    all_in_trouble(nodes, store)
    nodes[0].ends_in(LONG_S, lease_id)
    said(store, 0, b"2")
    for node in nodes[1:]:
        node.looks_again()
        assert not node.changed.is_set()
    nodes[1].ends_in(LONG_S)
    said(store, 1, b"2")
    # The third one is cut off for good, as it seems.
    monkeypatch.setattr(fence, "TRAIN_ON_S", 0.0)
    assert nodes[2].changed.wait(LONG_S)
    assert nodes[2].fence.closed
    assert not nodes[1].changed.is_set()


@pytest.mark.parametrize(
    ("others", "all_down_at", "now", "excuses"),
    [
        ([], None, 100.0, True),  # there is nobody else
        (["1", "1"], None, 100.0, True),
        (["1", "0"], 99.0, 100.0, False),
        (None, 99.0, 100.0, False),  # the store does not answer
        (["1", "an unknown word"], 99.0, 100.0, False),
        (["1", "2"], 99.0, 100.0, True),
        (["2", "2"], 99.0, 99.0 + TRAIN_ON_S - 0.1, True),
        (["2", "2"], 99.0, 99.0 + TRAIN_ON_S, False),
        (["2", "2"], None, 100.0, False),  # of an earlier outage
    ],
)
def test_training_on_after_the_lease_is_over(others, all_down_at, now, excuses):
    assert may_train_on(others, all_down_at, now, TTL_S) is excuses


@pytest.mark.parametrize("ttl_s", [2, 5, 10, 16, 60, 600])
def test_a_leader_waits_longer_than_nodes_train_on(ttl_s):
    """With a look to say that it is back, one to see it, and what a look may take when the store is slow."""
    assert returning_s(ttl_s) >= train_on_s(ttl_s) + 2 * POLL_SHARE * ttl_s + 2


@pytest.mark.seam
def test_what_could_not_be_said_is_said_later(nodes, store):
    """Else a node would look to be in trouble for ever, and a node that is cut off alone would train on."""
    nodes[0].ends_in(TTL_S / 2, keeps=True)
    said(store, 0, b"1")
    states = nodes[0].fence._states
    swap, states.swap = states.swap, lambda *_: None
    nodes[0].ends_in(LONG_S)
    nodes[0].looks_again()
    states.swap = swap
    said(store, 0, b"0")
    assert not nodes[0].changed.is_set()


def test_an_earlier_outages_word_excuses_no_node(nodes, store):
    store.set("elastic_ext/trouble/0", "2")
    store.set("elastic_ext/trouble/2", "2")
    nodes[1].ends_in(TTL_S / 2)
    assert nodes[1].changed.wait(LONG_S)


@pytest.mark.parametrize(
    ("silent", "round_", "found"),
    [
        ({}, 9, ()),
        ({"a": 9}, 9, ("a",)),
        ({"a": 9}, 8 + ROUNDS_SILENT, ("a",)),
        ({"a": 9}, 9 + ROUNDS_SILENT, ()),  # the network may have been mended
        ({"a": 9, "b": 10}, 9 + ROUNDS_SILENT, ("b",)),
        ({str(number): 9 for number in range(MAX_SILENT + 1)}, 9, tuple(map(str, range(1, MAX_SILENT + 1)))),
    ],
)
def test_a_silent_store_is_forgotten_some_rounds_later(silent, round_, found):
    assert recently_silent(silent, round_) == found
