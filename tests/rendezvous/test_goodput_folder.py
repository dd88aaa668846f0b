"""The goodput of a job on one machine: what the agents of one launch leave to the next, in a folder."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base import goodput
from elastic_ext.base.goodput import PRODUCTIVE, Spent, seconds_of
from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.ledger import Report
from elastic_ext.rendezvous import goodput_folder
from elastic_ext.rendezvous.goodput_folder import GoodputFolder
from elastic_ext.rendezvous.one_machine import OneMachine

SECOND = Spent(seconds_of({PRODUCTIVE: 1.0}), reached=7)


@pytest.fixture
def ledger(tmp_path) -> str:
    return str(tmp_path / "ledger")


@pytest.fixture(autouse=True)
def reads_at_every_share(monkeypatch):
    monkeypatch.setattr(goodput_folder, "READ_S", -1000.0)


def share_once(ledger: str, run_id: str, host: str) -> goodput.Shared:
    return GoodputFolder(ledger, run_id, host).share(SECOND)


def productive(ledger: str, run_id: str = "job", host: str = "looks") -> float:
    """What all but this host, which has nothing, have done."""
    return GoodputFolder(ledger, run_id, host).share(Spent()).spent.by_state[PRODUCTIVE]


@pytest.mark.seam
def test_agents_of_several_hosts_and_launches_add_up(ledger):
    for host in ("a", "b", "a"):
        shared = share_once(ledger, "job", host)
    assert shared.hosts == 2
    assert shared.spent.by_state[PRODUCTIVE] == 3
    assert shared.spent.reached == 7


@pytest.mark.seam
def test_agents_at_the_same_time_lose_nothing(ledger):
    """Four on one host: each finds a name that no other has."""

    def add() -> None:
        mine = GoodputFolder(ledger, "job", "a")
        for _ in range(20):
            mine.share(SECOND)
        at_once.wait(60)

    at_once = threading.Barrier(4)
    threads = [threading.Thread(target=add) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert productive(ledger) == 80


@pytest.mark.seam
def test_another_run_and_rubbish_are_not_added(ledger, tmp_path):
    share_once(ledger, "earlier", "a")
    assert share_once(ledger, "job", "a").spent.by_state[PRODUCTIVE] == 1
    for text in ("rubbish", "[]", '{"run_id": "job", "record": "{}"}', '{"run_id": "job", "record": 5}'):
        (file,) = (tmp_path / "ledger.goodput").glob("*.json")
        file.write_text(text)
        assert share_once(ledger, "job", "a").spent.by_state[PRODUCTIVE] == 1


@pytest.mark.seam
def test_a_file_of_another_host_that_cannot_be_read_is_passed_over_and_logged_once(ledger, tmp_path, caplog):
    mine = GoodputFolder(ledger, "job", "a")
    mine.share(SECOND)
    (tmp_path / "ledger.goodput" / "b.json").mkdir()  # reading it fails as that of a broken disk would
    assert [mine.share(SECOND).spent.by_state[PRODUCTIVE] for _ in range(3)] == [2, 3, 4]
    (record,) = caplog.records
    assert "b.json" in record.getMessage()


@pytest.mark.seam
def test_a_file_of_its_own_that_cannot_be_read_is_not_overwritten(ledger, tmp_path):
    share_once(ledger, "job", "a")
    (file,) = (tmp_path / "ledger.goodput").glob("*.json")
    text = file.read_text()
    file.write_bytes(bytes(goodput_folder.MOST_BYTES + 1))  # reading it fails as that of a broken disk would
    mine = GoodputFolder(ledger, "job", "a")
    with pytest.raises(OSError, match="longer than"):
        mine.share(SECOND)
    file.write_text(text)
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 2


@pytest.mark.seam
def test_the_other_files_are_read_only_so_often(ledger, monkeypatch):
    monkeypatch.setattr(goodput_folder, "READ_S", 1000.0)
    mine, other = GoodputFolder(ledger, "job", "a"), GoodputFolder(ledger, "job", "b")
    mine.share(SECOND)
    other.share(SECOND)
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 2
    mine._read_at = 0.0
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 4


@pytest.mark.seam
def test_a_job_that_ended_well_leaves_nothing_but_goes_on_counting(ledger, tmp_path):
    mine, other = GoodputFolder(ledger, "job", "a"), GoodputFolder(ledger, "job", "b")
    other.share(SECOND)
    mine.share(SECOND)
    (tmp_path / "ledger.goodput" / ".name.0123.part").touch()  # of an agent that was killed
    mine.forget()
    assert list(tmp_path.iterdir()) == []
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 3  # the other host's, too
    other.forget()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.seam
def test_a_late_agent_writes_neither_for_the_job_that_ended_nor_for_the_next(ledger, tmp_path):
    late, ends = GoodputFolder(ledger, "job", "a"), GoodputFolder(ledger, "job", "b")
    late.share(SECOND)
    ends.forget()
    with pytest.raises(FileNotFoundError):
        late.share(SECOND)
    assert list(tmp_path.iterdir()) == []
    GoodputFolder(ledger, "job", "c").share(SECOND)
    with pytest.raises(FileNotFoundError):
        late.share(SECOND)
    assert productive(ledger) == 1


@pytest.mark.seam
def test_a_share_that_is_under_way_does_not_bring_a_forgotten_folder_back(ledger, tmp_path, monkeypatch):
    writes, may_write, write_whole = threading.Event(), threading.Event(), goodput_folder.write_whole

    def slow_disk(path, text) -> None:
        writes.set()
        may_write.wait(60)
        write_whole(path, text)

    file = GoodputFolder(ledger, "job", "a")
    file.share(SECOND)
    monkeypatch.setattr(goodput_folder, "write_whole", slow_disk)
    monkeypatch.setattr(goodput_folder, "FORGET_S", 0.01)
    sharing = threading.Thread(target=file.share, args=(SECOND,))
    sharing.start()
    writes.wait(60)
    file.forget()  # returns, though the share waits
    may_write.set()
    sharing.join()
    file.forget()
    assert productive(ledger) in (0, 2)  # what was written stays whole
    assert file.share(SECOND).spent.by_state[PRODUCTIVE] == 3


def test_without_a_file_it_is_kept_in_memory():
    mine = GoodputFolder(None, "job", "a")
    mine.share(SECOND)
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 2


def test_a_directory_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(OSError, match="gone"):
        GoodputFolder(str(tmp_path / "gone" / "ledger"), "job", "a").share(SECOND)


BUG = Evidence(rank=0, exception=RaisedException("NameError", "x", ("train.py:3 in step",)))


def machine(ledger: str, host: str) -> OneMachine:
    """An agent's rendezvous, in its first round."""
    params = RendezvousParameters("ext_c10d", "localhost:0", "job", 1, 1)
    made = OneMachine(params, Settings(ledger_file=ledger, node_name=host))
    made.prepare(WorkerSpec("default", 1, rdzv_handler=made, entrypoint="true"), 3)
    made.next_rendezvous()
    return made


@pytest.mark.seam
@pytest.mark.parametrize(("evidence", "kept"), [(Evidence(rank=0, exit_code=20), True), (BUG, False), (None, True)])
def test_the_goodput_is_dropped_with_the_ledger_and_only_then(ledger, evidence, kept):
    """A job that ended for good, and that the user has started again under its run id, begins anew."""
    earlier = machine(ledger, "a")
    earlier.share_goodput(SECOND)
    if evidence is not None:
        verdict = earlier.conclude(Report("a", replace(classify(evidence), order=0)))
        assert verdict.keeps_ledger == kept
    del earlier
    mine = machine(ledger, "a")
    assert bool(mine.status().ledger.verdicts) == (kept and evidence is not None)
    assert mine.share_goodput(SECOND).spent.by_state[PRODUCTIVE] == 1 + kept
    later = machine(ledger, "b")  # of the same launch
    assert later.share_goodput(SECOND).spent.by_state[PRODUCTIVE] == 2 + kept
