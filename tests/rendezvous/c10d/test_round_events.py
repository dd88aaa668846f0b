"""News through a real TCPStore."""

import threading
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import TCPStore

from elastic_ext.rendezvous.c10d.round_events import ALL_DONE, RoundEvents


def test_one_tells_and_all_hear():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = [threading.Event() for _ in range(4)]
    news = [RoundEvents("localhost", server.port, "over", event.set) for event in heard]
    assert all(each.reason is None for each in news)
    news[2].tell("workers failed on b")
    assert all(event.wait(20) for event in heard)
    assert {each.reason for each in news} == {"workers failed on b"}


def test_going_on_to_the_next_round_ends_the_waits_of_this_one():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = threading.Event()
    mine, other = (
        RoundEvents("localhost", server.port, "over", lambda: None),
        RoundEvents("localhost", server.port, "over", heard.set),
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
    news = RoundEvents("localhost", server.port, "over", lambda: None)
    assert set(threading.enumerate()) > before
    news.end(60)
    assert set(threading.enumerate()) == before


def test_a_store_that_dies_ends_the_wait():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    threads = set(threading.enumerate())
    news = RoundEvents("localhost", server.port, "over", lambda: None)
    (waiting,) = set(threading.enumerate()) - threads
    del server
    waiting.join(20)
    assert not waiting.is_alive()
    assert news.reason is None


def test_all_hear_when_the_last_one_has_finished():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    news = [RoundEvents("localhost", server.port, "over", lambda: None) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(each.await_all_done, 3, 60) for each in news[:2]]
        assert not any(each.done() for each in first)
        last = pool.submit(news[2].await_all_done, 3, 60)
        assert {each.result(60) for each in (*first, last)} == {ALL_DONE}


def test_a_node_that_has_finished_hears_of_a_failure_first():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    one, other = (RoundEvents("localhost", server.port, "over", lambda: None) for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(one.await_all_done, 2, 60)
        other.tell("workers failed on b")
        assert waits.result(60) == "workers failed on b"
    other.close()  # what was told first stays
    assert server.get("over/1") == b"workers failed on b"
    assert one.of_failure


def test_saves_are_asked_for_and_then_the_round_ends():
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    heard = threading.Condition()

    def on_news():
        with heard:
            heard.notify_all()

    news = [RoundEvents("localhost", server.port, "over", on_news) for _ in range(3)]
    for number in (1, 2):
        news[number].request_save()
        with heard:
            assert heard.wait_for(lambda number=number: all(each.saves == number for each in news), 20)
        assert all(each.reason is None for each in news)
    news[0].tell("it failed")
    with heard:
        assert heard.wait_for(lambda: all(each.reason == "it failed" for each in news), 20)
    news[0].request_save()  # nobody saves any more
    news[0].end()
    assert [each.saves for each in news] == [2, 2, 2]
