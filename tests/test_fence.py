"""Who stops and who trains on when leases are not renewed: several fences over a real store."""

import threading
import time

import pytest
from torch.distributed import TCPStore

from elastic_ext.rendezvous.fence import Fence

TTL_S = 2.0
LONG_S = 30.0


class Node:
    """A node whose lease ends when the test says so."""

    def __init__(self, store, rank, nodes):
        self.lease = (rank + 1, time.monotonic() + LONG_S)
        self.changed = threading.Event()
        self.fence = Fence(lambda: self.lease, TTL_S, self.changed.set)
        self.fence.watch(("localhost", store.port), rank, nodes)

    def ends_in(self, seconds, lease_id=None):
        self.lease = (lease_id or self.lease[0], time.monotonic() + seconds)
        self.fence._wake.acquire()
        self.fence._wake.notify()
        self.fence._wake.release()


@pytest.fixture
def store():
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def nodes(store):
    made = [Node(store, rank, 3) for rank in range(3)]
    yield made
    for node in made:
        node.fence.close()


def said(store, rank, what):
    """Wait until the node says so of itself."""
    key = f"elastic_ext/trouble/{rank}"
    deadline = time.monotonic() + LONG_S
    while not store.check([key]) or store.get(key) != what:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # a store tells of no change


def test_a_node_that_alone_is_cut_off_stops_before_its_lease_ends(nodes):
    nodes[0].ends_in(TTL_S / 2)
    assert nodes[0].changed.wait(LONG_S)
    assert nodes[0].fence.closed
    assert not nodes[1].fence.closed


def test_while_nobody_can_renew_all_train_on(nodes, store):
    for node in nodes:
        node.ends_in(0.3)
    for rank in range(3):
        said(store, rank, b"1")
    assert not any(node.changed.wait(TTL_S) for node in nodes)


def test_when_the_first_comes_back_with_its_old_lease_the_others_have_time_to_follow(nodes, store):
    for node in nodes:
        node.ends_in(0.3)
    for rank in range(3):
        said(store, rank, b"1")
    assert not nodes[1].changed.wait(1.0)  # the leases are over by their count
    nodes[0].ends_in(LONG_S)
    said(store, 0, b"2")
    assert not nodes[1].changed.wait(TTL_S / 4)
    nodes[1].ends_in(LONG_S)
    # The third one is cut off for good, as it seems.
    assert nodes[2].changed.wait(LONG_S)
    assert nodes[2].fence.closed
    assert not nodes[1].changed.is_set()


@pytest.mark.parametrize("over", [False, True])
def test_when_one_comes_back_and_leases_were_not_given_again_the_others_stop_at_once(nodes, store, over):
    """It came back in time, so the server never stopped counting; or it came back with a new lease: the old ones were over."""
    for node in nodes:
        node.ends_in(0.3 if over else TTL_S / 2)
    for rank in range(3):
        said(store, rank, b"1")
    if over:
        assert not nodes[1].changed.wait(1.0)
    nodes[0].ends_in(LONG_S, lease_id=77 if over else None)
    said(store, 0, b"0")
    assert nodes[1].changed.wait(LONG_S)
    assert nodes[1].fence.closed


def test_what_was_said_of_an_earlier_outage_excuses_nobody(nodes, store):
    store.set("elastic_ext/trouble/0", "2")
    store.set("elastic_ext/trouble/2", "2")
    nodes[1].ends_in(TTL_S / 2)
    assert nodes[1].changed.wait(LONG_S)
