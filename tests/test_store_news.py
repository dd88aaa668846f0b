"""News through a real TCPStore."""

import threading

from torch.distributed import TCPStore

from elastic_ext.rendezvous.store_news import RoundNews


def test_one_tells_and_all_hear():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = [threading.Event() for _ in range(4)]
    news = [RoundNews("localhost", server.port, "over", event.set) for event in heard]
    assert all(each.reason is None for each in news)
    news[2].tell("workers failed on b")
    assert all(event.wait(20) for event in heard)
    assert {each.reason for each in news} == {"workers failed on b"}


def test_going_on_to_the_next_round_ends_the_waits_of_this_one():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = threading.Event()
    mine, other = (
        RoundNews("localhost", server.port, "over", lambda: None),
        RoundNews("localhost", server.port, "over", heard.set),
    )
    before = threading.active_count()
    mine.close()
    assert heard.wait(20)
    assert mine.reason is None  # not news to the one that went on
    assert other.reason == "a node has gone on to the next round"
    assert threading.active_count() <= before + 1  # the one that told may still be ending


def test_no_thread_is_left_at_the_end():
    """One that comes back from C++ while the interpreter ends aborts the process (torch 2.8: exit code -6)."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    before = set(threading.enumerate())
    news = RoundNews("localhost", server.port, "over", lambda: None)
    assert set(threading.enumerate()) > before
    news.end(60)
    assert set(threading.enumerate()) == before


def test_a_store_that_dies_ends_the_wait():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    threads = set(threading.enumerate())
    news = RoundNews("localhost", server.port, "over", lambda: None)
    (waiting,) = set(threading.enumerate()) - threads
    del server
    waiting.join(20)
    assert not waiting.is_alive()
    assert news.reason is None
