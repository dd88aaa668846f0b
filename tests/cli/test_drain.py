"""`elastic-ext drain`: nodes leave real jobs on a real etcd at a checkpoint, and no step is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.cli import requests
from elastic_ext.cli.main import main
from elastic_ext.cli.requests import DrainOutcome, Ending
from elastic_ext.etcd import EtcdClient, Put
from elastic_ext.failures.ledger import Ledger, PastFailure, decode_ledger, encode_ledger
from elastic_ext.rendezvous.drains import DrainRequest
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, Node, State, decode, encode
from elastic_ext.rendezvous.running_job import Unreachable
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Finished, Job
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import Store, store, wait_for_header, wait_for_nodes
from tests.until import LIMIT_S, until

pytestmark = pytest.mark.full

KEYS = JobKeys("job")

__all__ = ["store"]


def cli(*arguments: str) -> Finished:
    """The command, in this process: only its start would cost half a second."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    return Finished(code, out.getvalue(), err.getvalue())


class Drained:
    """A job whose agents have names, and its folder."""

    def __init__(self, folder: Path, server: Store, stack: ExitStack) -> None:
        self.folder, self.server, self.stack = folder, server, stack
        self.lease_ttl = 15
        self.where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job"]
        (folder / "checkpoints").mkdir()

    def start(self, name: str, nnodes: str, how: str) -> Job:
        conf = f"lease_ttl={self.lease_ttl},last_call_timeout=60,node_name={name},checkpoint_dir={self.folder}/checkpoints"
        conf += f",verdict_file={self.folder}/{name}.json,events_file={self.folder}/{name}.events"
        job = [*self.server.options, *self.where, f"--nnodes={nnodes}", f"--rdzv-conf={conf}", "--max-restarts=3"]
        command = [*TORCHRUN, *job, SCRIPTS / "drained_job.py", self.folder, how]
        return self.stack.enter_context(Job(command, self.folder, STOP=str(self.folder / "stop")))

    def start_all(self, *names: str, nnodes: str, how: str, leader: str = "") -> dict[str, Job]:
        """leader: the one that will lead. Returns once all run."""
        jobs = {}
        for name in (leader or names[0], *(each for each in names if each != (leader or names[0]))):
            jobs[name] = self.start(name, nnodes, how)
            if name == leader:
                wait_for_nodes(self.server, 1)
        for job in jobs.values():
            job.wait_for(f"of {len(names)} attempt 0")
        return jobs

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "elastic_ext.cli", "drain", *options, *self.where]

    def drain(self, *options: str) -> Finished:
        return cli("drain", *options, *self.where)

    def status(self) -> dict:
        found: dict = json.loads(cli("status", "--json", *self.where).out)
        return found

    def saves(self) -> int:
        return len(os.listdir(self.folder / "checkpoints"))

    def steps(self) -> list[tuple[int, int, int, float]]:
        """Attempt, world size, step and weight of each step, as they were done."""
        lines = (line.split() for line in (self.folder / "steps").read_text().splitlines())
        return [(int(attempt), int(world), int(step), float(weight)) for attempt, world, step, weight in lines]

    def check_steps(self, saved: dict[int, int]) -> None:
        """Check that no step is missing, that each weight follows from the step before, and that each attempt goes on where the
        one before it has saved. saved: step, by the attempt after it.
        """
        known = {0: 0.0}
        done = self.steps()
        for attempt, world, step, weight in done:
            before = known[step - 1]
            known[step] = weight
            assert weight == pytest.approx(before - 0.01 * (before - (world + 1) / 2), abs=1e-9), (attempt, step)
        assert sorted(known) == list(range(len(known)))
        firsts = {attempt: next(step for of, _, step, _ in done if of == attempt) for attempt in saved}
        assert firsts == {attempt: step + 1 for attempt, step in saved.items()}


@pytest.fixture
def job(tmp_path: Path, server: EtcdServer) -> Iterator[Drained]:
    with ExitStack() as stack:
        yield Drained(tmp_path, server, stack)


@pytest.fixture
def stored_job(tmp_path: Path, store: Store) -> Iterator[Drained]:
    """On etcd, and on the embedded store."""
    with ExitStack() as stack:
        yield Drained(tmp_path, store, stack)


def said(done: Finished, code: int, text: str) -> None:
    assert done.returncode == code, done.all
    assert text in (done.out if code == 0 else done.err)
    assert "Traceback" not in done.all


def saved_step(done: Finished) -> int:
    (step,) = re.findall(r"has left: saved step (\d+)", done.out)
    return int(step)


@pytest.mark.seam
def test_a_node_leaves_at_a_checkpoint_others_continue(stored_job):
    job = stored_job
    jobs = job.start_all("n1", "n2", nnodes="1:2", how="asks")
    assert job.status()["job"]["backend"] == job.server.options[0].partition("=")[2]
    saved = cli("checkpoints", "save", *job.where)
    assert saved.returncode == 0, saved.all
    done = job.drain("n1")
    said(done, 0, "round 2 runs with 1 node")
    assert jobs["n1"].finish().returncode == 69
    jobs["n2"].wait_for(f"of 1 attempt 1 from step {saved_step(done)}")
    said(job.drain("n2"), 77, "0 nodes would remain, and the job takes at least 1; nothing was changed")
    (job.folder / "stop").touch()
    assert jobs["n2"].finish().returncode == 0
    job.check_steps({1: saved_step(done)})


def test_only_rank_0_reports_the_checkpoint(job):
    """As a script may: the node that leaves learns of it from checkpoint_dir."""
    jobs = job.start_all("n1", "n2", nnodes="1:2", how="asks0", leader="n1")
    said(job.drain("n2"), 0, "round 2 runs with 1 node")
    assert jobs["n2"].finish().returncode == 69
    (job.folder / "stop").touch()
    assert jobs["n1"].finish().returncode == 0


def test_a_spare_steps_in(job):
    """The leader leaves. Without a spare: refused. Nothing is charged, and whoever should learns the reason."""
    jobs = job.start_all("n1", "n2", "n3", nnodes="3", how="asks", leader="n1")
    said(job.drain("n2"), 77, "2 nodes would remain, and the job takes at least 3")
    spare = job.start("spare", "3", "asks")
    wait_for_nodes(job.server, 4)
    done = job.drain("n1", "--reason=fan  broken")
    said(done, 0, "round 2 runs with 3 nodes")
    left = jobs.pop("n1").finish()
    assert left.returncode == 69
    assert left.err.count("asked to leave the job after the checkpoint of step") == 1
    assert "NodeDrained" not in left.err  # workers that were stopped a moment later than their peers may show a traceback
    verdict = json.loads((job.folder / "n1.json").read_text())
    assert (verdict["decision"]["exit_code"], verdict["decision"]["rule"]) == (69, "drained")
    events = [json.loads(line) for line in (job.folder / "n1.events").read_text().splitlines()]
    (event,) = [each for each in events if each["event"] == "node_drained"]
    assert (event["reason"], event["step"]) == ("fan broken", saved_step(done))
    assert not any(each["charged"] for each in events if each["event"] == "decision")
    for each in (*jobs.values(), spare):
        each.wait_for(f"of 3 attempt 1 from step {saved_step(done)}")
    said(job.drain("n2"), 77, "nothing was changed")
    said(job.drain("n1"), 0, "n1 has left the job before: drained: fan broken")
    shown = job.status()
    assert shown["job"]["state"] == "running"
    assert shown["job"]["restarts_charged"] == 0
    assert {each["decision"] for each in shown["failures"]} <= {"restart_free"}
    assert shown["refused"] == [{"host": "n1", "why": "drained: fan broken"}]
    (job.folder / "stop").touch()
    assert [each.finish().returncode for each in (*jobs.values(), spare)] == [0] * 3
    job.check_steps({1: saved_step(done)})


def test_a_job_shrinks_after_its_own_checkpoint(job):
    """The script saves by itself and reports nothing. etcd stands still meanwhile; the host is refused until that is undone."""
    job.lease_ttl = 60
    jobs = job.start_all("n1", "n2", "n3", nnodes="2:3", how="saves")
    with Job(job.command("n2"), job.folder) as asking:
        wait_for_header(job.server, lambda header: header.drains)
        assert job.server.process is not None
        job.server.process.send_signal(signal.SIGSTOP)
        saves = job.saves()
        until(lambda: job.saves() > saves)
        job.server.process.send_signal(signal.SIGCONT)
        done = asking.finish()
    said(done, 0, "round 2 runs with 2 nodes")
    assert jobs.pop("n2").finish().returncode == 69
    until(lambda: any(attempt == 1 for attempt, *_ in job.steps()), "the others train")
    again = job.start("n2", "2:3", "saves").finish()
    assert again.returncode == 69
    assert "drained: by an operator" in again.err
    said(job.drain("n2", "--undo"), 0, "n2 may come back")
    jobs["n2"] = job.start("n2", "2:3", "saves")
    for each in jobs.values():
        each.wait_for("of 3 attempt 2")
    (job.folder / "stop").touch()
    assert [each.finish().returncode for each in jobs.values()] == [0] * 3
    assert {(attempt, world) for attempt, world, _, _ in job.steps()} == {(0, 3), (1, 2), (2, 3)}


def test_without_a_checkpoint_nothing_happens_unless_now(job):
    jobs = job.start_all("n1", "n2", "n3", nnodes="2:3", how="deaf")
    said(job.drain("n9"), 78, "no node n9 in the job; its nodes: n1, n2, n3")
    said(job.drain("n3", "--timeout=1"), 75, "no checkpoint in 1 s: n3 stays in the job")
    with Job(job.command("n3"), job.folder) as asking:
        wait_for_header(job.server, lambda header: header.drains)
        assert "to leave at the next checkpoint" in job.status()["refused"][0]["why"]
        said(job.drain("n3", "--undo"), 0, "n3 stays in the job")
        said(asking.finish(), 75, "the drain was withdrawn")
    assert job.status()["refused"] == []
    assert {attempt for attempt, *_ in job.steps()} == {0}
    said(job.drain("n3", "--now"), 0, "round 2 runs with 2 nodes")
    assert jobs.pop("n3").finish().returncode == 69
    (job.folder / "stop").touch()
    assert [each.finish().returncode for each in jobs.values()] == [0] * 2


def test_of_two_drains_at_once_one_is_refused(server):
    """Three nodes, and the job takes two. Records of a job, and what the command does with them."""
    with EtcdClient(server.endpoint) as client, ThreadPoolExecutor(2) as pool:
        lease = client.lease_grant(600).lease_id
        client.txn([], [Put(KEYS.job, '{"schema":3,"min_nodes":2,"max_nodes":3}', lease)])
        nodes = [f"{host}-1-abcdef" for host in ("n1", "n2", "n3")]
        client.txn([], [Put(KEYS.node(id_), encode(Node(2, 1, "w", "h", 1)), lease) for id_ in nodes])
        for _ in range(20):
            client.txn([], [Put(KEYS.header, encode(Header(3, State.RUNNING, 3)), lease)])
            both, told = threading.Barrier(2), threading.Event()

            def ask(host: str, both=both, told=told) -> DrainOutcome:
                with EtcdClient(server.endpoint) as own:
                    own.get(KEYS.header)
                    both.wait()
                    return requests.drain(own, "job", DrainRequest(host, "", 600), LIMIT_S, lambda line: told.set())

            asked = {host: pool.submit(ask, host) for host in ("n1", "n2")}
            assert told.wait(LIMIT_S)
            (drain,) = decode(Header, client.get(KEYS.header).kv.value, "round").drains
            refused = asked.pop("n2" if drain.host == "n1" else "n1").result(LIMIT_S)
            assert refused.ending is Ending.TOO_FEW
            assert len(decode(Header, client.get(KEYS.header).kv.value, "round").drains) == 1
            assert "stays in the job" in requests.undo(client, "job", drain.host)
            assert asked[drain.host].result(LIMIT_S) == DrainOutcome(
                Ending.LATE, "the drain was withdrawn; the node stays in the job"
            )


@pytest.mark.seam
def test_where_nothing_can_be_drained(job):
    said(job.drain("n1"), 69, "the job job is not running")
    said(job.drain("n1", "--undo"), 0, "n1 was neither to leave nor refused: nothing to undo")


def test_no_etcd_is_69_bad_settings_are_78(job, monkeypatch, tmp_path):
    nowhere = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    said(cli("drain", "n1", nowhere, "--rdzv-id=job", "--undo"), 69, "no endpoint answered")
    assert job.server.process is not None
    job.server.process.send_signal(signal.SIGSTOP)  # after it has been connected to
    with EtcdClient(job.server.endpoint, timeout_s=0.5) as client, pytest.raises(Unreachable, match="is withdrawn"):
        requests.undo(client, "job", "n1")
    job.server.process.send_signal(signal.SIGCONT)
    monkeypatch.setenv("ELASTIC_EXT_ETCD_CA", str(tmp_path / "missing"))
    said(job.drain("n1"), 78, "missing")


def test_a_host_given_back_counts_as_repaired(server):
    """The leader judges by the ledger in etcd, and writes it only as it has read it: so all agents know from then on."""
    with EtcdClient(server.endpoint) as client:
        lease = client.lease_grant(600).lease_id
        failures = tuple(PastFailure("f", node=host, of_node=True) for host in ("n1", "n2", "n1"))
        client.txn([], [Put(KEYS.ledger, encode_ledger(Ledger(failures, 2)), lease), Put(KEYS.refusal("n1"), "bad", lease)])
        assert requests.undo(client, "job", "n1-12-abcdef") == (
            "n1 may come back; its failures so far no longer count against it (bad-node)"
        )
        kept = client.get(KEYS.ledger).kv
        ledger = decode_ledger(kept.value)
        assert (kept.lease_id, [each.before_repair for each in ledger.failures]) == (lease, [True, False, True])
        assert ledger.charged == 2
        assert requests.undo(client, "job", "n1") == "n1 was neither to leave nor refused: nothing to undo"
        assert client.get(KEYS.ledger).kv.mod_revision == kept.mod_revision
        assert "neither to leave nor refused; its failures" in requests.undo(client, "job", "n2")  # its hour is over
        client.txn([], [Put(KEYS.ledger, "{", lease), Put(KEYS.refusal("n1"), "bad", lease)])
        assert requests.undo(client, "job", "n1") == "n1 may come back"
