"""What Kubeflow's operators put into the environment of torchrun, and nothing else, starts real jobs.

Trainer 2 sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT; the user adds PET_RDZV_*. The
training operator 1.9 sets all of PET_RDZV_*, PET_NNODES=MIN:MAX, PET_MAX_RESTARTS and PET_STANDALONE="".
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args

from elastic_ext.agent.__main__ import parser, settle
from elastic_ext.base.errors import UsageError
from elastic_ext.rendezvous.address import endpoint_of
from tests.etcd_server import EtcdServer
from tests.jobs import AGENT, SCRIPTS, TORCHRUN, Finished, Job
from tests.ports import free_port

SCRIPT = str(SCRIPTS / "pet_job.py")


def trainer(rank: int, port: int, processes: str = "1") -> dict[str, str]:
    """What a pod of a TrainJob with two nodes gets; and that both pods are on this machine, and none has an address."""
    return {
        **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": processes, "PET_NODE_RANK": str(rank)},
        **{"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port), "PET_LOCAL_ADDR": "127.0.0.1"},
    }


def pods(tmp_path: Path, command: list[str], *environs: dict[str, str]) -> list[Finished]:
    with ExitStack() as stack:
        jobs = [stack.enter_context(Job([*command, SCRIPT], tmp_path, **environ)) for environ in environs]
        return [job.finish() for job in jobs]


def workers(done: list[Finished]) -> list[list[str]]:
    """The words of each worker, by rank. All pods must have ended well."""
    assert [each.returncode for each in done] == [0] * len(done), [each.all for each in done]
    lines = [line.split()[1:] for each in done for line in each.out.splitlines() if line.startswith("pet ")]
    return sorted(lines, key=lambda line: int(line[0]))


@pytest.mark.seam
@pytest.mark.full("agent")
@pytest.mark.parametrize("command", [TORCHRUN, AGENT], ids=["torchrun", "agent"])
def test_a_backend_is_all_that_a_trainjob_needs(tmp_path, command):
    """No --rdzv-endpoint: the nodes meet at PET_MASTER_ADDR. No --rdzv-id either."""
    port = free_port()
    done = pods(tmp_path, command, *({**trainer(rank, port), "PET_RDZV_BACKEND": "ext_c10d"} for rank in (0, 1)))
    assert [line[:4] for line in workers(done)] == [["0", "2", "0", "1"], ["1", "2", "1", "1"]]


@pytest.mark.full
def test_the_command_of_the_seed(tmp_path):
    """An endpoint and an id on the command line, as in trainer/t5-large.yaml, win over all variables."""
    port = free_port()
    command = [*TORCHRUN, "--nproc_per_node=2", "--rdzv_id=elastic-job", f"--rdzv_endpoint=localhost:{port}"]
    done = pods(tmp_path, command, *({**trainer(rank, 1, "7"), "PET_RDZV_BACKEND": "ext_c10d"} for rank in (0, 1)))
    assert [line[1:5] for line in workers(done)] == [["4", str(rank // 2), "2", "elastic-job"] for rank in range(4)]


def config(monkeypatch, **variables: str) -> LaunchConfig:
    """What torch would launch, on a machine with two cores and no GPU."""
    monkeypatch.setattr("torch._utils.cpu_count", lambda: 2)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, value in {"OMP_NUM_THREADS": "1", **variables}.items():  # torch sets it where it is not
        monkeypatch.setenv(name, value)
    return config_from_args(settle(parser().parse_args([SCRIPT])))[0]


@pytest.mark.parametrize(("processes", "count"), [("auto", 2), ("cpu", 2), ("3", 3)])
def test_processes_per_node(monkeypatch, processes, count):
    assert config(monkeypatch, PET_NPROC_PER_NODE=processes).nproc_per_node == count


def test_gpus_where_there_are_none(monkeypatch):
    with pytest.raises(UsageError, match="--nproc-per-node=gpu"):
        config(monkeypatch, PET_NPROC_PER_NODE="gpu")


def operator(server: EtcdServer, **more: str) -> dict[str, str]:
    """What a pod of training-operator/workers-only.yaml gets, with two workers."""
    host, _, port = server.endpoint.rpartition(":")
    return {
        **{"PET_RDZV_ENDPOINT": f"{host}:{port}", "PET_RDZV_BACKEND": "ext_etcd", "PET_NNODES": "2:2", "PET_MAX_RESTARTS": "3"},
        **{"PET_RDZV_ID": "elastic-workers-1", "PET_NPROC_PER_NODE": "2", "PYTHONUNBUFFERED": "1"},
        **{"PET_RDZV_CONF": "exit_codes=kubeflow,platform_grace=120"},
        **more,
    }


@pytest.mark.full
def test_an_elastic_policy_with_etcd(tmp_path, server):
    done = pods(tmp_path, TORCHRUN, operator(server), operator(server))
    found = workers(done)
    assert len(found) == 4
    assert {tuple(line[4:]) for line in found} == {("elastic-workers-1", "3")}
    assert Counter(line[2] for line in found) == {"0": 2, "1": 2}


@pytest.mark.full
def test_its_exit_codes_match_the_retry_policy(tmp_path, server):
    """The setting comes by PET_RDZV_CONF: an evicted pod ends with 128 + 75, which ExitCode retries."""
    environ = operator(server, PET_NNODES="1:1", PET_NPROC_PER_NODE="1")
    with Job([*TORCHRUN, "--no-python", "sh", "-c", "echo up; exec sleep 600"], tmp_path, **environ) as job:
        job.wait_for("(?m)^up$")
        job.process.terminate()
        assert job.finish().returncode == 203


@pytest.mark.parametrize("standalone", ["", "1"])
def test_standalone_as_the_operator_says_it(monkeypatch, standalone):
    """torchrun cannot read "" and ends with a traceback, before anything of ours is asked."""
    launched = config(monkeypatch, PET_STANDALONE=standalone, PET_RDZV_BACKEND="ext_c10d")
    assert (launched.rdzv_backend, launched.rdzv_endpoint) == ("ext_c10d", "localhost:0")
    assert (launched.min_nodes, launched.max_nodes) == (1, 1)


@pytest.mark.full
def test_no_id_under_etcd_is_one_clear_sentence(tmp_path):
    done = pods(tmp_path, TORCHRUN, {**trainer(0, 1), "PET_RDZV_BACKEND": "ext_etcd", "PET_RDZV_ENDPOINT": "localhost:1"})
    assert done[0].returncode == 78
    assert "PET_RDZV_ID from the UID" in done[0].err.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "max_nodes", "environ", "endpoint"),
    [
        ("host:1", 2, {"PET_MASTER_ADDR": "master"}, "host:1"),
        ("", 1, {"PET_MASTER_ADDR": "master"}, ""),
        ("", 2, {}, ""),
        ("", 2, {"PET_MASTER_ADDR": "master"}, "master:29500"),
        ("", 2, {"PET_MASTER_ADDR": "master", "PET_MASTER_PORT": "1"}, "master:1"),
        ("", 2, {"PET_MASTER_ADDR": "fd00::1", "PET_MASTER_PORT": "1"}, "[fd00::1]:1"),
    ],
)
def test_the_endpoint(given, max_nodes, environ, endpoint):
    assert endpoint_of(given, max_nodes, environ) == endpoint
