"""A job on one machine: what it leaves in `ledger_file` for its next start. No other process takes part."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.agent.leaving import ask_for_save, save_wanted
from elastic_ext.base.goodput import PRODUCTIVE, Spent, seconds_of
from elastic_ext.base.settings import Settings
from elastic_ext.embedded import one_machine, snapshot
from elastic_ext.embedded.keyspace import Keyspace
from elastic_ext.embedded.one_machine import JobFile, OneMachine, OneRound
from elastic_ext.embedded.snapshot import SnapshotFile
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence, RaisedException
from elastic_ext.failures.ledger import JobVerdict, Ledger, Report
from elastic_ext.rendezvous.configuration import WorkerProgram
from elastic_ext.rendezvous.contract import AgentHooks

pytestmark = pytest.mark.seam  # the address of the node is looked for

SECOND = Spent(seconds_of({PRODUCTIVE: 1.0}))
BUG = Evidence(rank=0, exception=RaisedException("NameError", "x", ("train.py:3 in step",)))
CRASH = Evidence(rank=0, exit_code=20)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "ledger")


def machine(path: str, max_restarts: int = 3, **settings: object) -> OneMachine:
    """An agent's rendezvous, in its first round, for which no store was started."""
    made = OneMachine(
        RendezvousParameters("ext_c10d", "localhost:0", "job", 1, 1), Settings(ledger_file=path, node_name="a", **settings)
    )
    made.prepare(WorkerProgram("true", "default", 1, max_restarts, {}), AgentHooks())
    made.part = OneRound(1, made)
    return made


def fails(job: OneMachine, evidence: Evidence = CRASH) -> JobVerdict:
    return job.part.conclude(Report("a", replace(classify(evidence), order=0)))


def productive(job: OneMachine | JobFile, spent: Spent = SECOND) -> float:
    share = job.share if isinstance(job, JobFile) else job.share_goodput
    return share(spent).spent.by_state[PRODUCTIVE]


def test_the_only_node_saves_each_time_it_asks(path):
    job = machine(path)
    heard: list[int] = []
    job.hooks.on_event = lambda: heard.append(save_wanted(job.part))
    for _ in range(2):
        ask_for_save(job.part)
    assert heard == [1, 2]


def test_the_budget_outlives_the_agent(path):
    assert not fails(machine(path, max_restarts=1)).ends_job
    again = machine(path, max_restarts=1)
    assert again.status().ledger.charged == 1
    verdict = fails(again, replace(CRASH, exit_code=21))
    assert (verdict.restarts, verdict.ends_job) == (1, True)


def test_a_charge_expires_while_no_agent_runs(path, monkeypatch):
    fails(machine(path, budget_window=60))
    file = JobFile(path, "job", "a")
    assert file.charges() == 1
    later = Clock(50.0)
    monkeypatch.setattr(one_machine, "time", later)
    assert file.charges() == 1
    later.passed_s = 61.0
    assert file.charges() == 0


class Clock:
    """time, some seconds later."""

    def __init__(self, passed_s: float) -> None:
        from time import monotonic, time

        self.passed_s, self._monotonic, self.time = passed_s, monotonic, time

    def monotonic(self) -> float:
        return self._monotonic() + self.passed_s


def test_launches_of_one_round_are_charged_each(path):
    """A scheduler starts the job again after each failure, and each start begins with round 1."""
    for charged in range(3):
        job = machine(path, max_restarts=5, budget_window=3600)
        assert fails(job, replace(CRASH, exit_code=20 + charged)).restarts == charged + 1
    assert JobFile(path, "job", "a").charges() == 3


@pytest.mark.parametrize(("evidence", "kept"), [(CRASH, True), (BUG, False), (None, True)])
def test_goodput_is_dropped_with_the_ledger(path, evidence, kept):
    """A job that ended for good, and that the user has started again under its run id, begins from zero."""
    earlier = machine(path)
    assert productive(earlier) == 1
    if evidence is not None:
        assert fails(earlier, evidence).keeps_ledger == kept
    again = machine(path)
    assert bool(again.status().ledger.verdicts) == (kept and evidence is not None)
    assert productive(again) == 1 + kept


def test_a_successful_job_leaves_no_file(path):
    job = machine(path)
    fails(job)
    assert Path(path).exists()
    assert job.part.await_all_done()
    assert productive(job) == 1  # in memory
    assert not Path(path).exists()
    assert job.status().ledger.verdicts


def test_without_a_file_all_is_in_memory():
    job = machine("")
    fails(job)
    assert (productive(job), productive(job)) == (1, 2)


SAVED = {"schema": 1, "launch": "a", "starts": 1, "revision": 1, "at": 1, "run_id": "job"}
BAD_BASE64 = {**SAVED, "keys": [{"key": "ledger", "value": "no base64", "left_s": 0}]}
UNREADABLE = [{"schema": 1}, {"schema": 1, "launch": 7}, {"schema": 99, "keys": []}, [], BAD_BASE64]


@pytest.mark.parametrize("text", ["", "{", "\x00" * 100, *map(json.dumps, UNREADABLE)])
def test_a_file_that_cannot_be_read(path, caplog, text):
    Path(path).write_text(text)
    assert JobFile(path, "job", "a").ledger == Ledger()
    assert "cannot be used; starting a new ledger" in caplog.text


def test_a_file_of_another_job_does_not_count(path):
    fails(machine(path))
    assert JobFile(path, "other", "a").ledger == Ledger()


def test_goodput_leaves_the_verdicts_of_another_agent(path):
    """The next launch has begun, and failed, before the agent of this one has ended."""
    old = JobFile(path, "job", "a")
    productive(old)
    fails(machine(path))
    assert productive(old) == 2
    assert JobFile(path, "job", "a").ledger.charged == 1


def test_trouble_with_the_file_is_logged_once(tmp_path, caplog):
    file = JobFile(str(tmp_path / "no" / "ledger"), "job", "a")
    assert productive(file) == 1
    for _ in range(3):
        file.judged(Ledger(), 0, refunded=False)
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "no").mkdir()
    file.judged(Ledger(), 0, refunded=False)
    assert Path(file._path).exists()


def test_a_job_ends_without_waiting_for_its_disk(path, monkeypatch):
    writes, may_write, write_whole = threading.Event(), threading.Event(), snapshot.write_whole

    def slow_disk(*args: object) -> None:
        writes.set()
        assert may_write.wait(60)
        write_whole(*args)

    monkeypatch.setattr(snapshot, "write_whole", slow_disk)
    monkeypatch.setattr(one_machine, "FORGET_S", 0.01)
    file = JobFile(path, "job", "a")
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(productive, file)
        assert writes.wait(60)
        file.forget()
        may_write.set()
        assert late.result(60) == 1
    assert not Path(path).exists()


def test_goodput_of_another_writer_is_ignored(path, caplog):
    file = JobFile(path, "job", "a")
    file._keyspace.put(file._own, b"{")
    assert productive(file) == 1
    assert "does not count" in caplog.text


def test_an_embedded_store_takes_the_file_over(path):
    """The job gets more nodes at its next start."""
    fails(machine(path, budget_window=60))
    keyspace = Keyspace()
    warnings: list[str] = []
    SnapshotFile(keyspace, "job", path, warnings.append).restore(0.0)
    assert not warnings
    assert {kv.decode().rpartition("/elastic_ext/job/")[2] for kv in keyspace._within(b"\0", b"\0")} == {"ledger", "charges/1"}
