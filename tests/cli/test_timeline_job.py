"""A real job loses a worker and a node and is requeued; `elastic-ext timeline` shows it.

With RECORD_TIMELINE=1 the picture replaces the one in the docs, and its events those of test_timeline.py.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.cli import main
from elastic_ext.timeline import events, spans
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, ROOT, SCRIPTS, Job
from tests.until import until

PICTURE = ROOT / "entrypoints" / "monitoring" / "timeline.svg"
RECORDED = ROOT / "tests" / "data" / "timeline_events.jsonl"


class Nodes:
    """The agents of one job; each host has a file of events."""

    def __init__(self, folder: Path, etcd: str, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.saving, self.finish = folder / "saving", folder / "finish"
        self.saving.touch()
        conf = f"checkpoint_dir={folder / 'checkpoints'},backoff=1,lease_ttl=15,last_call_timeout=60"
        where = [
            "--rdzv-backend=ext_etcd",
            f"--rdzv-endpoint={etcd}",
            "--rdzv-id=llama-70b",
            "--nnodes=2:3",
            "--nproc-per-node=1",
        ]
        self.command = [*AGENT, *where, "--max-restarts=3", f"--rdzv-conf={conf}", str(SCRIPTS / "monitored_job.py")]
        self.jobs: dict[str, Job] = {}

    def start(self, *names: str) -> None:
        for name in names:
            where = {
                "NODE": name,
                "SAVING": str(self.saving),
                "FINISH": str(self.finish),
                "ELASTIC_EXT_NODE_NAME": name,
                "ELASTIC_EXT_STANDBY": "on",
            }
            events = str(self.folder / f"{name}.jsonl")
            self.jobs[name] = self.stack.enter_context(Job(self.command, self.folder, ELASTIC_EXT_EVENTS_FILE=events, **where))

    def trains(self, name: str, rounds: int) -> int:
        """Wait until a node has trained in so many rounds since its start; the pid of its worker."""
        return int(self.jobs[name].wait_for(rf"trains: {name} \d+ \d+ (\d+)", rounds)[-1][1])

    def saved(self) -> None:
        """Wait until n0 has told of five checkpoints more."""
        count = self._told()
        until(lambda: self._told() >= count + 5, self.jobs["n0"].err)

    def _told(self) -> int:
        return (self.folder / "n0.jsonl").read_text().count('"event":"checkpoint_saved"')


def told_of_the_lost_node(endpoint: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What explain says of each verdict on a lost node: the line with the cause."""
    assert main.main(["explain", f"--rdzv-endpoint={endpoint}", "--rdzv-id=llama-70b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line, after in itertools.pairwise(lines) if after.startswith("  kind node_lost")]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_crash_a_lost_node_and_a_requeue(tmp_path, capsys):
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(tmp_path / "etcd"))
        nodes = Nodes(tmp_path, etcd.endpoint, stack)
        nodes.start("n0", "n1", "n2")
        for name in nodes.jobs:
            nodes.trains(name, 1)
        nodes.saved()
        os.kill(nodes.trains("n1", 1), signal.SIGKILL)
        for name in nodes.jobs:
            nodes.trains(name, 2)
        nodes.saved()
        nodes.jobs["n2"].process.kill()
        nodes.trains("n0", 3)
        nodes.trains("n1", 3)
        nodes.saved()
        said = told_of_the_lost_node(etcd.endpoint, capsys)
        for name in ("n0", "n1"):
            nodes.jobs[name].process.terminate()
        assert [nodes.jobs[name].finish().returncode for name in ("n0", "n1")] == [75, 75]
        nodes.start("n0", "n1")
        for name in ("n0", "n1"):
            nodes.trains(name, 1)
        nodes.start("n2")  # a change of members
        for name, rounds in (("n0", 2), ("n1", 2), ("n2", 1)):
            nodes.trains(name, rounds)
        nodes.saved()
        nodes.finish.touch()
        assert [job.finish().returncode for job in nodes.jobs.values()] == [0, 0, 0]
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    for kind in ("json", "svg"):
        assert main.main(["timeline", *files, f"--output={tmp_path / f'life.{kind}'}"]) == 0
    found = spans.timeline([each for file in files for each in events.parse(Path(file).read_text(), file)[0]])
    marks = {(each.kind, each.node) for each in found.interruptions}
    assert ("unknown", "n1") in marks
    assert ("node_lost", "n2") in marks
    for each in said:  # unless both others were told that it is lost before their workers noticed
        assert re.match(r"  n2: node n2 was lost; then rank [012] raised RuntimeError: .*, on n[01]$", each), each
    decided = [line for file in files for line in map(json.loads, Path(file).read_text().splitlines()) if "culprit_rank" in line]
    of_lost = [line for line in decided if line["kind"] == "node_lost"]
    assert bool(of_lost) == bool(said)
    assert {(line["culprit_host"], line["culprit_rank"], line["decision"]) for line in of_lost} <= {("n2", -1, "restart_free")}
    assert marks & {("preemption", "n0"), ("preemption", "n1")}
    assert found.interruptions[-1].kind == "membership"
    assert found.headline.endswith("ended: succeeded")
    if "RECORD_TIMELINE" in os.environ:
        PICTURE.write_bytes((tmp_path / "life.svg").read_bytes())
        RECORDED.write_text("".join(Path(file).read_text() for file in files).replace(str(tmp_path), "/job"))
