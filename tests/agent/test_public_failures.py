"""Failures as public reports have them, each as a real job under stock torchrun. Their texts are cases in tests/data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.etcd_server import EtcdServer
from tests.jobs import SCRIPTS, TORCHRUN, Job, run

pytestmark = pytest.mark.full
SCRIPT = SCRIPTS / "public_failure.py"
# kind of failure: what each start resumes from, and rule, kind and exit code of the verdict (None: the job goes on)
FAILURES = {
    "unknown": (["-"] * 3, "repeated", "code", 65),
    "hub is away": (["-"] * 3, "service-unreachable", "network", None),
    "no credentials": (["-"] * 2, "repeated", "code", 65),
    "other key each time": (["-"] * 2, "repeated", "code", 65),
    "other text each time": (["-"] * 8, "in-a-row", "code", 1),
    "crash on load": (["step_200.pt", "step_200.pt", "step_100.pt"], "crash", "crash", None),
    "nan as an assertion": (["step_200.pt", "step_100.pt"], "numeric", "numeric", None),
    "leaves with a text": (["-"] * 3, "ceiling", "unknown", 1),
    # words beside what has failed
    "disk called sdc": (["-"] * 2, "repeated", "code", 65),
    "rates of learning": (["-"] * 2, "repeated", "code", 65),
    "child looks for a lost gpu": (["-"], "code-at-start", "code", 65),
    "login is over": (["-"] * 2, "repeated", "code", 65),
    "memory while profiling": (["-"] * 2, "arguments", "code", None),
    "compile cache is busy": (["-"] * 2, "file-system-ill", "storage", None),
    "metadata is late": (["-"] * 2, "files", "code", None),
    "core went wrong": (["-"] * 2, "runtime-error", "code", None),
    "other number of ranks": (["step_200.pt"] * 2, "repeated", "code", 65),
    "banner of a check": (["-"] * 3, "ceiling", "network", 1),  # always at the same step
    "plan without memory": (["-"] * 3, "ceiling", "network", 1),
    "fonts are read-only": (["-"] * 3, "ceiling", "unknown", 1),
    "nan is ignored": (["step_200.pt"] * 2, "abort", "crash", None),
}


@pytest.mark.seam("crash_on_load-ext_etcd", "child_looks_for_a_lost_gpu-ext_etcd")
@pytest.mark.full
@pytest.mark.parametrize("backend", ["ext_etcd", "ext_c10d"])
@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: kind.replace(" ", "_"))
def test_a_failure_of_a_public_report(tmp_path: Path, server: EtcdServer, backend: str, kind: str) -> None:
    starts, rule, of_kind, code = FAILURES[kind]
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in (100, 200):
        if "-" not in starts:
            torch.save({"step": step}, checkpoints / f"step_{step}.pt")
    where = server.endpoint if backend == "ext_etcd" else "localhost:0"
    command = [
        *TORCHRUN,
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={where}",
        "--rdzv-id=job",
        "--nnodes=1",
        "--nproc-per-node=1",
    ]
    conf = f"--rdzv-conf=checkpoint_dir={checkpoints},backoff=0.02"  # the waits between the tries are a pure case
    done = run([*command, "--max-restarts=9", conf, SCRIPT, kind, tmp_path], tmp_path)
    assert done.returncode == (code or 0), done.err
    assert (tmp_path / "starts").read_text().split() == starts
    last = re.findall(r"elastic_ext: (?:restart|stop): .*", done.err)[-1]
    assert f"(kind {of_kind}, rule {rule})" in last
    assert code is None or last.endswith(f"; exit code {code}")
    if kind == "leaves with a text":
        assert "SystemExit: no shard is left in the bucket" in last


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "code"), [("disk called sdc", 65), ("child looks for a lost gpu", 65), ("banner of a check", 1)]
)
def test_words_cost_no_node(tmp_path: Path, server: EtcdServer, kind: str, code: int) -> None:
    """On two nodes, one may leave: no word of a broken GPU or disk has it do so."""
    where = [f"--rdzv-backend=ext_etcd --rdzv-endpoint={server.endpoint} --rdzv-id=job --nnodes=1:2 --nproc-per-node=1"]
    conf = f"--rdzv-conf=checkpoint_dir={tmp_path},backoff=0.02,last_call_timeout=5"
    jobs = []
    for name in "ab":
        (tmp_path / name).mkdir()
        command = [*TORCHRUN, *where[0].split(), "--max-restarts=9", conf, SCRIPT, kind, tmp_path / name]
        jobs.append(Job(command, tmp_path, ELASTIC_EXT_NODE_NAME=name))
    with jobs[0], jobs[1]:
        assert [job.finish().returncode for job in jobs] == [code, code], [job.err for job in jobs]
