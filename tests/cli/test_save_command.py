"""`elastic-ext checkpoints save`: a real job on a real etcd is asked for a save from outside of it."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_ext.cli import requests
from elastic_ext.cli.requests import SaveOutcome, save, save_outcome, with_save
from elastic_ext.etcd import EtcdClient, Put
from elastic_ext.rendezvous import board, topics
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.round_records import Header, Node, State, encode
from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Finished, Job, run
from tests.ports import free_port
from tests.rendezvous.test_etcd_jobs import wait_for_header
from tests.until import LIMIT_S

KEYS = JobKeys("job")

JOB = SCRIPTS / "saving_job.py"
CLI = [sys.executable, "-m", "elastic_ext.cli", "checkpoints", "save", "--rdzv-id=job"]


def command(endpoint: str, *options: str) -> list[str]:
    return [*CLI, f"--rdzv-endpoint={endpoint}", *options]


def node_of(server: EtcdServer, folder: Path, nodes: int, *how: str, workers: int = 2) -> Job:
    where = [f"--rdzv-endpoint={server.endpoint}", "--rdzv-id=job", f"--nnodes={nodes}", "--rdzv-conf=lease_ttl=60"]
    return Job(
        [*TORCHRUN, "--rdzv-backend=ext_etcd", *where, f"--nproc-per-node={workers}", JOB, folder, *how],
        folder,
        STOP=str(folder / "stop"),
    )


def saved(folder: Path, ranks: int) -> list[list[str]]:
    return [(folder / f"saved.0.{rank}").read_text().split() for rank in range(ranks)]


def node(after: int, done: int, step: int = 0) -> Node:
    posts = board.posted(board.Posts(), 3, topics.SAVED, topics.SaveDone(done, step)) if done else board.Posts()
    return Node(after, 2, "default", "localhost", 1, board=posts)


ASKED = with_save(with_save(Header(3, State.RUNNING, 2, 4)))


@pytest.mark.parametrize(
    ("header", "nodes", "step", "said"),
    [
        (ASKED, [node(2, 0), node(2, 0)], None, None),
        (ASKED, [node(2, 1, 100)], None, None),  # an earlier save
        (ASKED, [node(2, 0), node(2, 2, 120)], 120, "saved step 120"),
        (ASKED, [node(2, 3, 130)], 130, "saved step 130"),  # somebody has asked for another one since
        (ASKED, [node(3, 2, 120)], None, None),  # it waits for round 4: what it says is not of this round
        (Header(3, State.BROKEN, reason="lost node b"), [node(2, 2, 120)], 120, "step 120"),
        (Header(3, State.BROKEN, reason="lost node b"), [node(2, 0)], None, "round 3 ended before the save: lost node b"),
        (Header(3, State.DONE, reason="all workers have finished"), [], None, "all workers have finished"),
        (Header(4, State.RUNNING), [node(3, 0)], None, "the job is now in round 4"),
        (None, [], None, "the job is gone"),
    ],
)
def test_what_became_of_a_request(header, nodes, step, said):
    found = save_outcome(ASKED, header, nodes)
    if said is None:
        assert found is None
    else:
        assert found is not None
        assert found.step == step
        assert said in found.reason


def test_a_save_request_does_not_change_the_reason():
    runs = Header(3, State.RUNNING, 2, reason="n2 has joined")
    assert replace(with_save(runs), agreed=runs.agreed) == runs
    assert topics.SAVE.agreed(with_save(with_save(runs)).agreed) == topics.SaveOrder(2)


@pytest.mark.seam
def test_all_ranks_save_at_the_printed_step(server, tmp_path):
    with ExitStack() as stack:
        jobs = [stack.enter_context(node_of(server, tmp_path, 2, workers=1)) for _ in range(2)]
        for job in jobs:
            job.wait_for("steps")
        printed = []
        for _ in range(2):
            done = run(command(server.endpoint), tmp_path)
            assert done.returncode == 0, done.err
            printed += done.out.split()
        assert len(printed) == 2
        assert saved(tmp_path, 2) == [printed] * 2
        (tmp_path / "stop").touch()
        assert [job.finish().returncode for job in jobs] == [0, 0]


@pytest.mark.full
def test_requests_that_overlap_are_all_answered(server, tmp_path):
    """A preemption of all nodes is as many requests. Each rank sees them at other moments; it must not save alone."""
    with ExitStack() as stack:
        jobs = [stack.enter_context(node_of(server, tmp_path, 2)) for _ in range(2)]
        for job in jobs:
            job.wait_for("steps", 2)
        client = stack.enter_context(EtcdClient(server.endpoint))

        def ask(_: int) -> list[SaveOutcome]:
            return [save(client, "job", 60) for _ in range(10)]

        with ThreadPoolExecutor(8) as pool:
            done = [one for each in pool.map(ask, range(8)) for one in each]
        assert all(one.step is not None for one in done), done
        steps = saved(tmp_path, 4)
        assert all(each == steps[0] for each in steps)
        assert {str(one.step) for one in done} <= set(steps[0])
        (tmp_path / "stop").touch()
        assert [job.finish().returncode for job in jobs] == [0, 0]


def asks(header: Header) -> bool:
    return topics.SAVE.agreed(header.agreed) is not None


def write(client: EtcdClient, header: Header) -> None:
    client.txn([], [Put(KEYS.header, encode(header))])


@pytest.mark.full
def test_a_wait_ends_with_round_or_time(server, monkeypatch):
    """Records of a job that does not save, and what the command does with them."""
    with EtcdClient(server.endpoint) as client, ThreadPoolExecutor(1) as pool:
        write(client, Header(1, State.RUNNING, 1))
        asking = pool.submit(save, client, "job", LIMIT_S)
        wait_for_header(server, asks)
        write(client, Header(1, State.DONE, 1, reason="all workers have finished"))
        assert asking.result() == SaveOutcome(None, "round 1 ended before the save: all workers have finished")
        not_running = "the job is not running, it is done: all workers have finished"
        assert save(client, "job", LIMIT_S) == SaveOutcome(None, not_running, 69)
        write(client, Header(2, State.RUNNING, 1))
        ticks = itertools.count(step=0.05)  # or a busy machine would not come to ask in time
        monkeypatch.setattr(requests, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
        assert "did not complete in time" in save(client, "job", 0.3).reason
        wait_for_header(server, asks)


@pytest.mark.full
def test_etcd_dies_while_we_wait(server, tmp_path):
    with EtcdClient(server.endpoint) as client:
        write(client, Header(1, State.RUNNING, 1))
        with Job(command(server.endpoint, "--timeout=15"), tmp_path) as asking:
            wait_for_header(server, asks)
            server.kill()
            refused(asking.finish(), 75, "no save: ")


@pytest.mark.full
def test_no_job_and_no_etcd(server, tmp_path):
    refused(run(command(server.endpoint), tmp_path), 69, "it has no round yet")
    refused(run(command(f"127.0.0.1:{free_port()}"), tmp_path), 78, "etcd")
    refused(run(command(server.endpoint, "--timeout=0"), tmp_path), 78, "--timeout")


def refused(done: Finished, code: int, said: str) -> None:
    assert done.returncode == code, done.all
    assert done.out == ""
    assert sum(line.startswith("elastic-ext") for line in done.err.splitlines()) == 1, done.err
    assert said in done.err
