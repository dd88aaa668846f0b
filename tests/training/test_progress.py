"""What a script reports reaches the agent's progress table, and all ranks agree on the boundary of a save. Pure."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import ClassVar

import numpy
import pytest
import torch
from prometheus_client import generate_latest

import elastic_ext
from elastic_ext.base.errors import RanksMissing, UsageError
from elastic_ext.telemetry.agent_metrics import AgentMetrics, WorkerProgress
from elastic_ext.training import progress, saves
from elastic_ext.training.progress import doing
from elastic_ext.workers import progress_layout, worker_env
from elastic_ext.workers.progress import ProgressTable, WakePipe
from tests.reference import DOCS


class Store:
    """The round's store, within this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()


@pytest.fixture
def table(tmp_path):
    table = ProgressTable(str(tmp_path / "progress"), 3)
    yield table
    table.remove()


@pytest.fixture
def description(tmp_path, table):
    pipe = WakePipe(str(tmp_path / "pipe"))
    yield {"slot": 1, "progress": table.path, "wake_pipe": pipe.path, "store": ["127.0.0.1", 1]}
    pipe.close()


@pytest.fixture
def as_worker(monkeypatch, description):
    monkeypatch.setenv(worker_env.WORKER_ENV, json.dumps(description))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(progress, "_workers", {})


@pytest.mark.parametrize(("phase", "settled"), [("step", False), ("eval", False), ("data", True), ("checkpoint", True)])
def test_work_that_an_exception_ends_is_not_settled(table, as_worker, phase, settled):
    """Its worker has perhaps waited for a lost peer, which the agent finds out; an exit handler that saves changes nothing."""
    row = progress.this_worker().row.words
    row[progress_layout.STEPS] = 5
    with suppress(ConnectionResetError), elastic_ext.phase(phase):
        before = table.read(1).spent_ns
        raise ConnectionResetError
    assert (table.read(1).spent_ns != before) == settled
    row[progress_layout.ENDS_WITH], ended = 1, table.read(1)
    progress_layout.end(row, time.monotonic_ns())
    with doing("checkpoint_save"):
        pass
    assert (table.read(1).spent_ns, table.read(1).account) == (ended.spent_ns, "productive")


def test_a_save_reports_the_steps_before_it(table, as_worker):
    """However many follow until it is complete."""
    row = progress.this_worker().row.words
    row[progress_layout.STEPS] = 5
    saves.note_save_begins(50)
    row[progress_layout.STEPS] = 8
    elastic_ext.report_saved(50, 0.5)
    assert (table.read(1).saved_step, table.read(1).saved_after) == (50, 5)
    elastic_ext.report_saved(80, 0.5)  # of a script that saves by itself, and trains on afterwards
    assert table.read(1).saved_after == 8


def test_reports_are_in_the_workers_row(table, as_worker):
    elastic_ext.report_progress()
    with elastic_ext.phase("eval"):
        assert table.read(1).phase == "eval"
        with elastic_ext.phase("data"):
            assert table.read(1).phase == "data"
        assert table.read(1).phase == "eval"
    elastic_ext.report_save_failed()
    before = time.monotonic_ns()
    elastic_ext.report_saved(7, 0.5)
    row = table.read(1)
    assert (row.phase, row.reports, row.saves, row.saved_step, row.save_s, row.failed_saves) == ("", 1, 1, 7, 0.5, 1)
    assert before <= row.saved_ns <= time.monotonic_ns()
    elastic_ext.report_saved(8, 0.25)
    assert (table.read(1).save_s, table.read(1).saving_s) == (0.25, 0.75)
    assert table.read(0) == table.read(2)
    with pytest.raises(UsageError, match="expected one of step, data"):
        elastic_ext.phase("training")


def test_one_worker_saves_when_it_is_asked_once(table, as_worker):
    assert not elastic_ext.save_requested()
    assert table.read(1).asks_for_saves
    table.want_save(1, 2)
    assert elastic_ext.save_requested()
    assert not elastic_ext.save_requested()
    elastic_ext.report_saved(3, 100.0)  # was under way when the request came
    assert table.read(1).save_kept == 0
    elastic_ext.report_saved(4, 0.0)
    assert table.read(1).save_kept == 2


@pytest.mark.seam
def test_a_child_the_script_forks_is_no_worker(table, as_worker):
    assert progress.this_worker().rank == 1
    pid = os.fork()
    if pid == 0:
        elastic_ext.report_progress()
        os._exit(0 if table.read(1).reports == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_without_the_agent_nothing_happens(monkeypatch):
    monkeypatch.delenv(worker_env.WORKER_ENV, raising=False)
    monkeypatch.setattr(progress, "_workers", {})
    elastic_ext.report_progress()
    with elastic_ext.phase("eval"):
        assert not elastic_ext.save_requested()
    elastic_ext.report_saved(1, 1.0)
    elastic_ext.report(loss=2.5)
    assert elastic_ext.resume_from() is None
    assert elastic_ext.resume_step() is None


@pytest.mark.parametrize("missing", ["slot", "progress", "wake_pipe", "store"])
def test_an_incomplete_description_is_no_worker(monkeypatch, caplog, table, as_worker, description, missing):
    del description[missing]
    monkeypatch.setenv(worker_env.WORKER_ENV, json.dumps(description))
    elastic_ext.report_progress()
    assert table.read(1).reports == 0
    assert missing in caplog.text


def test_all_ranks_save_at_one_boundary(monkeypatch, table, description):
    """Rank 0 writes the boundary only when all agents have shown the request; the others look for it."""
    store = Store()
    monkeypatch.setattr(saves.round_store, "connect", lambda host, port: store)
    rows = [progress.ProgressRow(table.path, slot, description["wake_pipe"]) for slot in range(3)]
    ranks = [saves._StepBoundaries(progress.Worker(row, ("h", 1), rank, 3)) for rank, row in enumerate(rows)]

    def boundary() -> list[bool]:
        return [rank.reach_next() for rank in ranks]

    assert boundary() == [False] * 3
    for slot in range(3):
        table.want_save(slot, 2)
    assert boundary() == [False] * 3  # request 1 is the oldest unanswered one
    store.set("save/1/go", "1")
    assert boundary() == [False] * 3
    assert store.get("save/1/at") == b"4 2"
    assert boundary() == [True] * 3
    assert boundary() == [False] * 3  # the save has answered request 2, too
    late = saves._StepBoundaries(progress.Worker(rows[1], ("h", 1), 1, 3))
    late._number = 8
    assert not late.reach_next()
    assert table.read(1).save_failed == 2


def test_names_for_scripts():
    assert elastic_ext.RanksMissing is RanksMissing
    assert f"{RanksMissing.__module__}.{RanksMissing.__qualname__}" == "elastic_ext.errors.RanksMissing"  # users' rules name it
    assert {"Checkpointer", "errors", "phase", "save_requested"} <= set(dir(elastic_ext))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = elastic_ext.nothing


@pytest.mark.seam
def test_the_errors_need_no_import_of_their_own():
    code = "import elastic_ext; assert elastic_ext.errors.RanksMissing is elastic_ext.RanksMissing"
    subprocess.run([sys.executable, "-c", code], check=True)


# Gauges.


def test_gauges_are_in_the_table(table, as_worker):
    elastic_ext.report(loss=2.5, learning_rate=1e-4)
    elastic_ext.report(loss=numpy.float32(1.5), epochs=3, worst=math.nan)
    shown = dict(table.read(1).gauges)
    assert math.isnan(shown.pop("worst"))
    assert shown == {"loss": 1.5, "learning_rate": 1e-4, "epochs": 3.0}
    assert table.read(0).gauges == table.read(2).gauges == ()


def test_the_code_on_the_page_is_shown(table, as_worker):
    section = (DOCS / "metrics.md").read_text().partition("## Your own metrics")[2]
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    exec(code, {})
    metrics = AgentMetrics(version="1", torch="2", run_id="r", progress=lambda: [WorkerProgress(0, 0, table.read(1))])
    page = generate_latest(metrics.registry).decode()
    assert [float(line.split()[1]) for line in shown.splitlines()] == [2.5, 1e-4]
    assert all(line in page for line in (each.split()[0] for each in shown.splitlines()))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"1st": 1}, "with no digit first"),
        ({"train/loss": 1}, "letters, digits and underscores"),
        ({"verlust_größe": 1}, "letters, digits and underscores"),
        ({"elastic_ext_step": 1}, "neither elastic_ext_ nor process_ in front"),
        ({"process_open_fds": 1}, "neither elastic_ext_ nor process_ in front"),
        ({"x" * 65: 1}, "64 at most"),
        ({"loss": "2.5"}, "expected a number, got str"),
        ({"loss": None}, "expected a number, got NoneType"),
        ({"loss": torch.ones(1)}, r"got Tensor; of a tensor, report \.item\(\)"),
        ({f"g{number}": 0 for number in range(17)}, "it comes after 16 other names"),
    ],
)
def test_a_wrong_gauge_is_an_error(table, as_worker, given, told):
    with pytest.raises(UsageError, match=told) as error:
        elastic_ext.report(**given)
    assert "\n" not in str(error.value)


def test_sixteen_gauges_of_the_longest_names(table, as_worker):
    given = {f"{number:_>64}": float(number) for number in range(16)}
    for _ in range(2):
        elastic_ext.report(**given)
    assert dict(table.read(1).gauges) == given


@pytest.mark.parametrize("name", [b"elastic_ext_step", b"two words", b"\xff\xff", b"", b"x" * 64])
def test_rubbish_in_the_table_is_no_gauge(table, as_worker, name):
    elastic_ext.report(loss=1)
    row = progress.this_worker().row.words
    second = progress_layout.GAUGES + progress_layout.GAUGE_FIELDS
    row[second + 2 : second + progress_layout.GAUGE_FIELDS] = memoryview(name.ljust(64, b"\0")).cast("Q")
    row[second] = len(name) or 2**63
    row[second + progress_layout.GAUGE_FIELDS] = 3  # a name of zeros
    assert [each for each, _ in table.read(1).gauges] == ["loss", *(["x" * 64] if name == b"x" * 64 else [])]


def test_two_threads_add_a_gauge_once():
    """Neither finds it there before the other does."""
    both = threading.Barrier(2)

    class Gauges(dict[str, int]):
        looked: ClassVar = threading.local()

        def __contains__(self, name: object) -> bool:
            found = super().__contains__(name)
            if not hasattr(self.looked, "once"):
                self.looked.once = True
                both.wait()
            return found

    row = progress.ProgressRow()
    row._gauges, places = Gauges(), len(row._free)
    threads = [threading.Thread(target=row.show, args=("loss", 1.0)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(row._free) == places - 1
