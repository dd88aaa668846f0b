"""What an agent makes of the files of its workers' processes, whatever is in them."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from elastic_ext.base import metric_files as layout
from elastic_ext.telemetry.script_metrics import ScriptMetrics, added, newer, set_last
from elastic_ext.workers import worker_env
from tests.test_readme import DOCS, blocks

Samples = dict[tuple[str, ...], float]


@pytest.fixture
def agent(tmp_path: Path) -> ScriptMetrics:
    return ScriptMetrics(str(tmp_path / "metrics"))


def read(agent: ScriptMetrics) -> Samples:
    """All samples by name and label values; both formats hold the same."""
    registry = CollectorRegistry()
    registry.register(agent)
    texts = (parse_text(generate_latest(registry).decode()), parse_openmetrics(generate_openmetrics(registry).decode()))
    found, same = (
        {
            (each.name, *(value for _, value in sorted(each.labels.items()))): each.value
            for family in text
            for each in family.samples
        }
        for text in texts
    )
    assert str(found) == str(same)  # a NaN does not equal itself
    return found


def observed(at_most_1: int = 0, at_most_10: int = 0, more: int = 0, total: float = 0.0) -> Samples:
    """The samples of the workers' histogram."""
    count = at_most_1 + at_most_10 + more
    buckets = {("h_bucket", "1.0"): at_most_1, ("h_bucket", "10.0"): at_most_1 + at_most_10, ("h_bucket", "+Inf"): count}
    return {**buckets, ("h_count",): count, ("h_sum",): total}


class Worker:
    """A process that defines c, g and h with a label, and does what it is told until it ends."""

    CODE = """
import os, signal, sys
from elastic_ext import metrics
c, g = metrics.counter("c_total", "Of c.", ("x",)), metrics.gauge("g", "Of g.")
h = metrics.histogram("h", "Of h.", buckets=(1, 10))
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""

    def __init__(self, agent: ScriptMetrics, round: int, local_rank: int, rank: int, code: str = CODE) -> None:
        message = json.dumps(agent.message(round, local_rank, rank))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, worker_env.WORKER_ENV: message},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def start(agent: ScriptMetrics) -> Iterator[Callable[..., Worker]]:
    started = []

    def worker(*args: int, **changes: str) -> Worker:
        started.append(Worker(agent, *args, **changes))
        return started[-1]

    yield worker
    for each in started:
        if each.process.poll() is None:
            each.end()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours: what another test of this process has left running may warn, too."""
    ours = [record for record in caplog.records if record.name.startswith("elastic_ext.telemetry")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def files(agent: ScriptMetrics) -> list[str]:
    return sorted(os.listdir(agent._directory))


@pytest.mark.seam
def test_counters_are_summed_and_gauges_are_the_workers(agent, start):
    one, other = start(1, 0, 2), start(1, 1, 3)
    one.do("c.labels('a').inc(2); h.observe(5); g.set(7)")
    assert read(agent) == {("c_total", "a"): 2, ("g", "0", "2"): 7, **observed(at_most_10=1, total=5)}
    other.do("c.labels('a').inc(); c.labels('b').inc(4); h.observe(100); g.set(float('nan'))")
    found = read(agent)
    assert math.isnan(found.pop(("g", "1", "3")))
    counted = {("c_total", "a"): 3, ("c_total", "b"): 4}
    assert found == {**counted, ("g", "0", "2"): 7, **observed(at_most_10=1, more=1, total=105)}


@pytest.mark.seam
def test_what_ended_processes_have_counted_stays(agent, start):
    first = start(1, 0, 0)
    first.do("c.labels('a').inc(2); h.observe(5); g.set(7)")
    before = read(agent)
    first.end()
    assert read(agent) == {key: value for key, value in before.items() if key[0] != "g"}
    assert files(agent) == []
    agent.round_ended()
    second = start(2, 0, 1)  # another rank
    second.do("c.labels('a').inc(1); h.observe(0.5); g.set(8)")
    assert read(agent) == {("c_total", "a"): 3, ("g", "0", "1"): 8, **observed(at_most_1=1, at_most_10=1, total=5.5)}
    agent.round_ended()  # though this process, a child of the worker, say, runs on
    assert read(agent)["c_total", "a"] == 3
    assert ("g", "0", "1") not in read(agent)
    second.do("c.labels('a').inc(1)")
    assert read(agent)["c_total", "a"] == 4
    shutil.rmtree(agent._directory)  # the end of the job
    assert read(agent)["c_total", "a"] == 4
    second.end()
    assert read(agent)["c_total", "a"] == 4


@pytest.mark.seam
def test_a_gauge_is_the_last_living_value(agent, start):
    worker = start(1, 0, 0)
    worker.do("g.set(1)")
    child = "(signal.alarm(600), g.set(2), os.write(write, b'1'), signal.pause())"  # the alarm: should this test fail
    worker.do(f"read, write = os.pipe(); pid = os.fork() or {child}; os.read(read, 1)")
    assert read(agent)["g", "0", "0"] == 2
    worker.do("g.set(3)")
    assert read(agent)["g", "0", "0"] == 3
    worker.do("os.kill(pid, 9); os.waitpid(pid, 0)")
    assert read(agent)["g", "0", "0"] == 3


FORKED = 150
FORKS = (
    f"FORKED = {FORKED}"
    + """
import os, sys
from elastic_ext import metrics
c = metrics.counter("c", "Of c.")
for _ in range(FORKED):
    if not (pid := os.fork()):
        c.inc()
        os._exit(0)
    os.waitpid(pid, 0)
print("done", flush=True)
sys.stdin.readline()
"""
)


@pytest.mark.full
def test_many_forks_leave_nothing_and_never_count_back(agent, start):
    worker = start(1, 0, 0, code=FORKS)
    ended, back = threading.Event(), []

    def scrape() -> None:
        last = 0.0
        while not ended.is_set():
            now = sum(each.value for family in agent.collect() for each in family.samples)
            back.extend([(last, now)] if now < last else [])
            last = now

    scrapes = threading.Thread(target=scrape)
    scrapes.start()
    assert worker.process.stdout.readline() == "done\n"
    ended.set()
    scrapes.join()
    assert back == []
    assert read(agent) == {("c_total",): FORKED}
    assert len(files(agent)) <= 1  # its own, as it still runs
    worker.end()
    assert read(agent) == {("c_total",): FORKED}
    assert files(agent) == []


@pytest.mark.seam
def test_a_loop_without_scrapes_takes_in_processes(agent, start, monkeypatch):
    worker = start(1, 0, 0)
    monkeypatch.setattr("elastic_ext.telemetry.script_metrics.LOOK_S", 600)
    worker.do("c.labels('a').inc()")
    agent.look()
    worker.end()
    agent.look()  # too soon
    assert len(files(agent)) == 1
    monkeypatch.setattr("elastic_ext.telemetry.script_metrics.LOOK_S", 0)
    agent.look()
    assert files(agent) == []


@pytest.mark.seam
def test_rubbish_fails_no_scrape_and_takes_nothing_back(agent, start):
    """Any bytes may come from a worker that is killed amid a store, or that writes where it should not."""
    worker = start(1, 0, 0)
    worker.do("c.labels('a').inc(2); c.labels('b').inc(3); h.observe(5); g.set(7)")
    before = read(agent)
    (name,) = files(agent)
    path = Path(agent._directory) / name
    whole = path.read_bytes()
    used = int.from_bytes(whole[8:16], "little")
    chance = random.Random(1)
    for number in range(400):
        broken = bytearray(whole)
        for _ in range(chance.choice((1, 1, 8, 200))):
            at = chance.randrange(chance.choice((16, 40, used)))
            broken[at : at + 4] = chance.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", chance.randbytes(4)))
        path.write_bytes(broken[: chance.choice((len(broken), len(broken), chance.randrange(used)))])
        families = {each.name: each for each in agent.collect()}
        for family in ("c", "h"):
            for each in families[family].samples:
                key = (each.name, *(value for _, value in sorted(each.labels.items())))
                assert key[0] == "h_sum" or each.value >= before.get(key, 0), (key, each)
        if number % 20 == 0:
            read(agent)  # parses


@pytest.mark.seam
def test_other_files_are_left_alone(agent, start, tmp_path):
    worker = start(1, 0, 0)
    worker.do("c.labels('a').inc()")
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    directory, gone = Path(agent._directory), f"1.0.0.{worker.process.pid}.1"  # nobody with this pid began then
    (directory / f"{gone}.link").symlink_to(outside)
    (directory / f"{gone}.dir").mkdir()
    os.mkfifo(directory / f"{gone}.pipe")
    (directory / "note.txt").write_text("")
    (directory / f"1.0.0.{'9' * 30}.1.x").write_text("")
    assert read(agent) == {("c_total", "a"): 1, **observed()}
    assert outside.read_bytes() == b"mine"
    assert (directory / "note.txt").exists()


OTHERS = """
import os, sys
from elastic_ext import metrics
metrics.gauge("c", "Another kind.").set(1)
metrics.gauge(*WHICH).set(1)
metrics.gauge("g", "In other words.").set(5)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@pytest.mark.seam
def test_the_first_definition_of_a_name_stands(agent, start, caplog):
    start(1, 0, 0).do("c.labels('a').inc(); h.observe(0.5); g.set(1)")
    before = read(agent)
    start(1, 1, 1, code=OTHERS.replace("*WHICH", "'h_count', 'Shown by the name of another.'")).do("0")
    start(1, 1, 1, code=OTHERS.replace("gauge(*WHICH).set", "histogram('h', 'Other buckets.', buckets=(2,)).observe")).do("0")
    assert read(agent) == {**before, ("g", "1", "1"): 5}
    assert read(agent) == {**before, ("g", "1", "1"): 5}
    said = warnings(caplog)
    assert len(said) == 2, said
    assert sum("define it in different ways" in each for each in said) == 1
    assert sum("another metric is shown by that name" in each for each in said) == 1


@pytest.mark.seam
def test_all_processes_together_are_bounded(agent, start, caplog, monkeypatch):
    monkeypatch.setattr(layout, "MAX_SERIES", 30)
    for number in range(3):
        start(1, number, number).do(f"[c.labels(f'{number}-{{each}}').inc() for each in range(20)]")
    found = read(agent)
    assert len([key for key in found if key[0] == "c_total"]) in (28, 29)  # beside h, and g
    (said,) = warnings(caplog)
    assert "c and further new ones are not shown: more than 200 names or 30 label sets on this node" in said


@pytest.mark.seam
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say(agent, start):
    start(1, 0, 0).do("c.labels('ä\\n\"').inc(); h.observe(0.5); g.set(1)")
    registry = CollectorRegistry()
    registry.register(agent)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.mark.seam
def test_the_page_shows_what_works(agent, start):
    (shown,) = [block for block in blocks("python") if "import metrics" in block]
    loop = "import sys\nbatches = iter(['batch'])\n" + shown + "\nfor line in sys.stdin: print('done', flush=True)"
    start(1, 0, 0, code=loop).do("")
    found = read(agent)
    assert (found["train_samples_total", "train"], found["train_loss", "0", "0"]) == (32, 2.5)
    assert found["train_data_wait_seconds_count",] == 1
    assert f"{layout.MAX_NAMES} names and {layout.MAX_SERIES:,} label sets in all" in DOCS
    assert f"{layout.MAX_LABELS} labels and {layout.MAX_BOUNDS} buckets for each" in DOCS


COUNTER, GAUGE = layout.define("counter", "c", ""), layout.define("gauge", "g", "")
HISTOGRAM = layout.define("histogram", "h", "", bounds=(1,))
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("definition", "last", "now", "believed"),
    [
        (COUNTER, None, (1.0,), (1.0,)),
        (COUNTER, (1.0,), (2.0,), (2.0,)),
        (COUNTER, (2.0,), (1.0,), (2.0,)),
        (COUNTER, (2.0,), (NAN,), (2.0,)),
        (COUNTER, None, (INF,), None),
        (COUNTER, None, (-1.0,), None),
        (COUNTER, None, (1.0, 2.0), None),
        (GAUGE, None, (NAN, 0.0), None),
        (GAUGE, None, (NAN, NAN), None),
        (GAUGE, (3.0, 1.0), (1.0, 2.0), (1.0, 2.0)),
        (HISTOGRAM, None, (1.0, 0.0, -5.0), (1.0, 0.0, -5.0)),
        (HISTOGRAM, (1.0, 0.0, -5.0), (1.0, 1.0, -9.0), (1.0, 1.0, -9.0)),
        (HISTOGRAM, (1.0, 0.0, -5.0), (0.0, 9.0, 9.0), (1.0, 0.0, -5.0)),
        (HISTOGRAM, None, (1.0, 0.0, INF), None),
        (HISTOGRAM, None, (1.5, 0.0, 1.0), None),
        (HISTOGRAM, None, (1e300, 0.0, 1.0), None),
    ],
)
def test_which_values_are_believed(definition, last, now, believed):
    assert newer(definition, last, now) == believed


def test_merging():
    assert added(None, (1.0, 2.0)) == (1.0, 2.0)
    assert added((1.0, 2.0), (3.0, 4.0)) == (4.0, 6.0)
    assert set_last((1.0, 10.0), (2.0, 9.0)) == (1.0, 10.0)
    assert set_last((1.0, 10.0), (2.0, 11.0)) == (2.0, 11.0)
