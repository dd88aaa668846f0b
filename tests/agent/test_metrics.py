"""An agent's goodput: where the time of real jobs goes, and the thread that shares it with the job."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_ext.agent.companions import JobCompanions
from elastic_ext.base import goodput
from elastic_ext.base.goodput import Shared, Spent, StateSeconds
from elastic_ext.etcd import Unavailable
from elastic_ext.rendezvous.contract import Rendezvous
from elastic_ext.telemetry import families
from elastic_ext.telemetry.accounting import Goodput, share_every_s
from elastic_ext.telemetry.goodput import TimeLedger
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Job
from tests.until import LIMIT_S

SCRIPT = SCRIPTS / "traced_job.py"
VARIABLES = {"TORCHELASTIC_LOG_LEVEL": "INFO", "LOGLEVEL": "INFO", "ELASTIC_EXT_BACKOFF": "0"}
SECONDS, UNSETTLED = "elastic_ext_goodput_seconds_total", "elastic_ext_goodput_unsettled_seconds"
ROUNDING_S = 1e-3
STATES = {"load": goodput.LOAD, "startup": goodput.STARTUP, "data": goodput.DATA, "save": goodput.SAVE}


class Note(NamedTuple):
    """See tracing.Traced."""

    round: int
    state: str
    steps: int
    earliest: float
    latest: float


@dataclass
class Trace:
    """What workers have noted.

    Attributes:
        least, most: seconds by state, the mean over workers.
        steps: of all of them. repeated: those of them that were done in an earlier round.
    """

    least: dict[str, float]
    most: dict[str, float]
    steps: int
    repeated: int


def notes_in(paths: Iterable[Path]) -> list[list[Note]]:
    return [
        [Note(int(round_), state, int(steps), float(one), float(other)) for round_, state, steps, one, other in lines]
        for lines in ([line.split() for line in path.read_text().splitlines()] for path in paths)
    ]


def traced(folder: Path, agent: str = "trace", before: int = 0) -> Trace:
    """What the workers of one agent have noted. Which of their steps were done in an earlier round, all notes tell.

    before: the steps that were done before the first round.
    """
    workers, everyone = notes_in(folder.glob(f"{agent}.*")), notes_in(folder.glob("trace*.*"))
    done = [(note.round, note.steps) for notes in everyone for note in notes if note.state == "step"]
    reached = {each: max([before, *(steps for round_, steps in done if round_ < each)]) for each, _ in done}
    least: dict[str, float] = defaultdict(float)
    most: dict[str, float] = defaultdict(float)
    for notes in workers:
        spans = [(note, then) for note, then in pairwise(notes) if note.round == then.round]
        for note, then in spans:
            work = goodput.LOST if note.steps < reached[note.round] else goodput.PRODUCTIVE
            state = STATES.get(note.state, work)
            surely_s, perhaps_s = max(0.0, then.earliest - note.latest), then.latest - note.earliest
            least[state] += surely_s / len(workers)
            most[state] += perhaps_s / len(workers)
            if state == goodput.LOAD:  # it waits for saves first
                most[goodput.SAVE] += (perhaps_s - surely_s) / len(workers)
    mine = [note for notes in workers for note in notes]
    finished = [note for note in mine if note.state == "step"]
    # The step that the end of a round interrupts counts as lost, as far as it takes no longer than others.
    longest_s = max(then.latest - note.earliest for note, then in pairwise(finished) if note.steps < then.steps)
    most[goodput.LOST] += longest_s * len({note.round for note in mine} - {note.round for note in mine if note.state == "end"})
    return Trace(least, most, len(finished), sum(note.steps <= reached[note.round] for note in finished))


@dataclass
class Scrape:
    """after, before: when the agent answered, at the earliest and at the latest."""

    after: float
    before: float
    text: str

    @cached_property
    def values(self) -> dict[str, float]:
        return series(self.text)

    @property
    def total_s(self) -> float:
        return sum(self.values.values())


def scrape(url: str) -> Scrape:
    after = time.monotonic()
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    return Scrape(after, time.monotonic(), text)


def series(text: str, *more: str) -> dict[str, float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {each.labels.get("state", each.name): each.value for each in samples if each.name in (SECONDS, UNSETTLED, *more)}


def check_agrees(seconds: dict[str, float], trace: Trace) -> None:
    for state in (goodput.LOAD, goodput.DATA, goodput.SAVE, goodput.PRODUCTIVE, goodput.LOST):
        assert trace.least[state] - ROUNDING_S < seconds[state] < trace.most[state] + ROUNDING_S, state


@pytest.mark.seam
def test_every_second_of_a_job_that_resumes(tmp_path):
    conf = f"--rdzv-conf=checkpoint_dir={tmp_path / 'checkpoints'},metrics_linger=300"  # for the last scrape
    scrapes: list[Scrape] = []
    command = [*AGENT, "--nproc-per-node=2", "--max-restarts=1", conf, SCRIPT, tmp_path, "crash"]
    with Job(command, tmp_path, **VARIABLES) as job, os.fdopen(os.pidfd_open(job.process.pid)) as pidfd:
        (found,) = job.wait_for(r"metrics (http://[^,\s]+),")
        while not select.select([pidfd], [], [], 0.1)[0]:  # the agent has ended
            try:
                scrapes.append(scrape(found[1] + "/metrics"))
                with urllib.request.urlopen(found[1] + "/status.json", timeout=LIMIT_S) as answer:
                    status = json.load(answer)["goodput"]
            except OSError:
                break  # it ends
        done = job.finish()
    assert done.returncode == 0, done.err
    # A busy agent answers with the page that it has made last: of each page the scrape that it was made for.
    made = list({each.total_s: each for each in reversed(scrapes)}.values())[::-1]
    assert len(made) > 2
    for one, other in pairwise(made):
        assert other.after - one.before < other.total_s - one.total_s + 1e-6
        assert other.total_s - one.total_s < other.before - one.after + 1e-6
        assert {state for state in goodput.STATES if other.values[state] < one.values[state]} == set()
    last = series(scrapes[-1].text, "elastic_ext_tokens_total", "elastic_ext_floating_point_operations_total")
    trace = traced(tmp_path)
    assert trace.least[goodput.LOST] > 0.15 * 4  # four steps were repeated
    check_agrees(last, trace)
    assert last[UNSETTLED] == 0
    assert (last["elastic_ext_tokens_total"], last["elastic_ext_floating_point_operations_total"]) == (
        10 * trace.steps,
        2.5e6 * trace.steps,
    )
    assert status["job"]["hosts"] == 1
    assert set(status["seconds"]) == set(goodput.STATES)
    ((summary, shown),) = re.findall(r"(goodput ([\d.]+)%: .*startup [\d.]+%.*lost work [\d.]+%.*)", done.err)
    total_s = sum(last[state] for state in goodput.STATES)
    least, most = (100 * last[goodput.PRODUCTIVE] / each for each in (total_s, total_s - last[goodput.IDLE]))
    assert least - 0.1 < float(shown) < most + 0.1, summary


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ext_c10d", "ext_etcd"])
def test_a_job_started_again_knows_what_it_lost(tmp_path, backend, server: EtcdServer):
    """Preempted at step 9; the next agent of the same run id repeats 5 to 8, and adds up from the first agent on."""
    where = f"--rdzv-endpoint={server.endpoint if backend == 'ext_etcd' else 'localhost:0'}"
    torchrun = [*TORCHRUN, f"--rdzv-backend={backend}", where, "--rdzv-id=job", "--nnodes=1", "--nproc-per-node=2"]
    began = time.monotonic()
    ledger = f",ledger_file={tmp_path / 'ledger'}" if backend == "ext_c10d" else ""
    conf = f"--rdzv-conf=checkpoint_dir={tmp_path / 'checkpoints'},metrics_linger=300{ledger}"
    with Job([*torchrun, conf, SCRIPT, tmp_path, "wait"], tmp_path, **VARIABLES) as job:
        job.wait_for("waits", 2)
        (found,) = job.wait_for(r"metrics (http://[^,\s]+),")
        first = scrape(found[1] + "/metrics").values
        job.process.send_signal(signal.SIGTERM)
        job.finish()
    (tmp_path / "go").touch()
    for path in tmp_path.glob("trace.*"):
        os.rename(path, tmp_path / f"earlier.{path.name[-1]}")
    with Job([*torchrun, conf, SCRIPT, tmp_path, "wait"], tmp_path, **VARIABLES) as job:
        (found,) = job.wait_for(r"metrics (http://[^,\s]+),")
        job.wait_for("serves its last metrics")
        with urllib.request.urlopen(found[1] + "/status.json", timeout=LIMIT_S) as answer:
            shown = json.load(answer)["goodput"]["job"]
        second = scrape(found[1] + "/metrics").values
        done = job.finish()
    assert done.returncode == 0, done.err
    trace = traced(tmp_path, before=8)
    assert trace.repeated == 2 * 4
    check_agrees(second, trace)
    both_s = sum(each[state] for each in (first, second) for state in goodput.STATES)
    # With the time between the two agents, in which torchrun imports torch.
    assert both_s < sum(shown["seconds"].values()) < time.monotonic() - began


LONG_S = 600.0  # of the product; nothing here takes a tenth of it, on any machine, unless something waits that must not


class SharedJob:
    """What an agent shares with. fails: raised instead, as long as it is set. open: while it is not set, a share hangs."""

    def __init__(self) -> None:
        self.spent, self.calls = Spent(), 0
        self.fails: Exception | None = None
        self.called, self.open = threading.Event(), threading.Event()
        self.open.set()

    def share(self, spent: Spent) -> Shared:
        self.calls += 1
        self.called.set()
        self.open.wait(LONG_S)
        if self.fails is not None:
            raise self.fails
        self.spent = self.spent.plus(spent)
        return Shared(self.spent, 1)


@pytest.fixture
def job() -> Iterator[SharedJob]:
    job = SharedJob()
    yield job
    job.open.set()


@pytest.fixture
def mine(job: SharedJob) -> Iterator[Goodput]:
    with pytest.MonkeyPatch.context() as patched:  # of its own: it must last longer than what tests patch
        patched.setattr("elastic_ext.telemetry.accounting.FIRST_SHARE_S", LONG_S)
        mine = Goodput()
        mine.share_with(job.share)
        yield mine
        mine.close(0)


def ends(action: Callable[[], None]) -> bool:
    """Whether this comes to an end before something else lets it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return not thread.is_alive()


def share_again(mine: Goodput, job: SharedJob) -> None:
    """As the end of a round does. Return when it has begun."""
    job.called.clear()
    mine.enter("stop")
    assert job.called.wait(LIMIT_S)


def test_sharing_starts_with_the_first_round(mine, job):
    """Before it, the records may be those of an ended job, which the first node of the next one deletes."""
    mine.enter(families.STARTING)
    mine.enter(families.RUNNING)
    assert (job.calls, mine._thread) == (0, None)
    mine.round_begins(None, 0, 1)
    assert job.calls == 1


def test_what_the_job_spent_never_decreases(mine, job):
    """On etcd an agent reads the sum that rank 0 made last, which may lack what this agent has given since."""
    mine._ledger = TimeLedger(time.monotonic() - 10)  # sums that differ by less than their rounding are the same
    mine.share_with(lambda spent: (job.share(spent), Shared(Spent(), 2))[1])
    mine.round_begins(None, 0, 1)
    before = mine.job()
    share_again(mine, job)
    mine.close(LONG_S)
    assert mine.job().spent.total_s > before.spent.total_s > 0
    assert mine.job().hosts == 2
    job.spent = job.spent.plus(Spent((StateSeconds("productive", 100.0),)))
    mine.share_with(job.share)
    mine._share_once()
    assert mine.job().spent.by_state["productive"] == 100.0


def test_unshared_values_are_logged_once_and_shared_later(mine, job, caplog):
    caplog.set_level(logging.INFO)
    job.fails = Unavailable("etcd does not answer")
    mine.round_begins(None, 0, 1)
    for _ in range(3):
        share_again(mine, job)
    before_s = mine.look().spent.total_s
    job.fails = None
    mine.close(LONG_S)
    assert len([each for each in caplog.records if "was not shared" in each.getMessage()]) == 1
    assert 0 < before_s <= job.spent.total_s <= mine.look().spent.total_s


def test_an_unexpected_error_ends_only_the_sharing(mine, job, caplog):
    job.fails = ZeroDivisionError("a bug")
    assert ends(lambda: mine.round_begins(None, 0, 1))
    mine._thread.join(LIMIT_S)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is job.fails
    mine.enter(families.RUNNING)
    mine.round_begins(None, 0, 1)
    assert ends(lambda: mine.close(LONG_S))
    assert job.calls == 1


def interrupt(limit_s: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_agent_asked_to_leave_skips_etcd(mine, job, interrupted, monkeypatch):
    """The others wait for it. interrupted: another signal comes meanwhile."""
    job.open.clear()
    monkeypatch.setattr(Goodput.close, "__defaults__", (LONG_S,))  # of an end that nobody waits for
    monkeypatch.setattr("elastic_ext.telemetry.accounting.FIRST_SHARE_S", 0.01)
    mine.round_begins(None, 0, 1)
    left = threading.Event()
    if interrupted:
        monkeypatch.setattr(mine._thread, "join", interrupt)
    told: list[BaseException] = []
    companions = SimpleNamespace(
        journal=SimpleNamespace(end=told.append), observation=SimpleNamespace(goodput=mine, show_last=lambda left_s: None)
    )
    ending = SystemExit(1)

    def leave() -> None:
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            JobCompanions.leave(cast("JobCompanions", companions), cast("Rendezvous", SimpleNamespace(leave=left.set)), ending)

    assert ends(leave)
    assert left.is_set()
    assert told == [ending]


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 10), (100, 10), (512, 51.2)])
def test_a_job_writes_ten_times_a_second(nodes, seconds):
    assert share_every_s(nodes) == seconds
