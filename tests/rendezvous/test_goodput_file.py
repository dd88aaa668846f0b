"""The goodput of a job without etcd: what the agents of one launch leave to the next, in a file."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from elastic_ext.base.goodput import PRODUCTIVE, Spent, seconds_of
from elastic_ext.rendezvous.goodput_file import GoodputFile

SECOND = Spent(seconds_of({PRODUCTIVE: 1.0}), reached=7)


@pytest.fixture
def ledger(tmp_path) -> str:
    return str(tmp_path / "ledger")


def test_agents_of_several_hosts_and_launches_add_up(ledger):
    for host in ("a", "b", "a"):
        shared = GoodputFile(ledger, "job", host).share(SECOND)
    assert shared.hosts == 2
    assert shared.spent.by_state[PRODUCTIVE] == 3
    assert shared.spent.reached == 7


def test_agents_at_the_same_time_lose_nothing(ledger):
    def add() -> None:
        mine = GoodputFile(ledger, "job", "a")
        for _ in range(20):
            mine.share(SECOND)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert GoodputFile(ledger, "job", "a").share(Spent()).spent.by_state[PRODUCTIVE] == 80


def test_another_run_and_rubbish_are_not_added(ledger, tmp_path):
    GoodputFile(ledger, "earlier", "a").share(SECOND)
    assert GoodputFile(ledger, "job", "a").share(SECOND).spent.by_state[PRODUCTIVE] == 1
    for text in ("rubbish", "[]", '{"run_id": "job", "hosts": {"a": "{}"}}', '{"run_id": "job", "hosts": 5}'):
        (tmp_path / "ledger.goodput").write_text(text)
        assert GoodputFile(ledger, "job", "a").share(SECOND).spent.by_state[PRODUCTIVE] == 1


def test_a_job_that_ended_well_leaves_nothing_but_goes_on_counting(ledger, tmp_path):
    mine = GoodputFile(ledger, "job", "a")
    mine.share(SECOND)
    mine.forget()
    assert list(tmp_path.iterdir()) == []
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_it_is_kept_in_memory():
    mine = GoodputFile(None, "job", "a")
    mine.share(SECOND)
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 2


def test_a_directory_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(OSError, match="gone"):
        GoodputFile(str(tmp_path / "gone" / "ledger"), "job", "a").share(SECOND)


def test_a_share_that_waits_for_the_directory_does_not_bring_a_forgotten_file_back(tmp_path):
    file = GoodputFile(str(tmp_path / "ledger"), "job", "a")
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    sharing = threading.Thread(target=file.share, args=(Spent(),))
    sharing.start()
    while not file._lock.locked():
        pass
    file.forget()  # returns, though the share waits
    os.close(holder)
    sharing.join()
    assert list(tmp_path.iterdir()) == []
