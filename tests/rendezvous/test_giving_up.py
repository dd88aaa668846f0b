"""Too few nodes come before a node's join_timeout ends: it leaves alone, with 75 and one line; the others go on waiting."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.etcd_server import EtcdServer
from tests.jobs import TORCHRUN, Finished, Job
from tests.ports import free_port
from tests.rendezvous.etcd.test_etcd_jobs import wait_for_nodes

SCRIPT = "import os; print('world', os.environ['WORLD_SIZE'], flush=True)"


LONG_S = 300  # join_timeout of those that do not give up


def start(
    stack: ExitStack, tmp_path: Path, backend: str, endpoint: str, join_timeout: int, conf: str = "", **variables: str
) -> Job:
    (tmp_path / "script.py").write_text(SCRIPT)
    where = [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job", "--nnodes=3:4"]
    own = f"lease_ttl={min(join_timeout, 30)},"  # not longer than it waits
    c10d = "keep_alive_interval=1,keep_alive_max_attempt=30,last_call_timeout=1"
    own += "last_call=0.5" if backend == "ext_etcd" else c10d
    command = [*TORCHRUN, *where, f"--rdzv-conf=join_timeout={join_timeout},{own}{conf}", "script.py"]
    return stack.enter_context(Job(command, tmp_path, **variables))


def wait_for_store(endpoint: str) -> None:
    """Until the first node, which hosts it, has it."""
    host, _, port = endpoint.partition(":")
    TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))


def assert_gave_up(done: Finished, said: str) -> None:
    assert done.returncode == 75, done.all
    assert "Traceback" not in done.err, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("elastic_ext: ")]
    assert said in line


@pytest.mark.seam
def test_on_etcd_each_node_gives_up_alone_and_the_job_stays_open(server: EtcdServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        patient = start(stack, tmp_path, "ext_etcd", server.endpoint, join_timeout=LONG_S)
        wait_for_nodes(server, 1)
        hasty = start(stack, tmp_path, "ext_etcd", server.endpoint, join_timeout=5)
        assert_gave_up(hasty.finish(), "no round was formed in 5 s (join_timeout), --nnodes=3:4")
        assert patient.process.poll() is None, patient.err
        late = [start(stack, tmp_path, "ext_etcd", server.endpoint, join_timeout=LONG_S) for _ in range(2)]
        for job in (patient, *late):
            done = job.finish()
            assert (done.returncode, done.out) == (0, "world 3\n"), done.err


@pytest.mark.full
def test_on_c10d_a_node_gives_up_alone_and_the_job_stays_open(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    with ExitStack() as stack:
        patient = start(stack, tmp_path, "ext_c10d", endpoint, join_timeout=LONG_S)
        wait_for_store(endpoint)
        hasty = start(stack, tmp_path, "ext_c10d", endpoint, join_timeout=5)
        assert_gave_up(hasty.finish(), "no round was formed in 5 s (join_timeout), --nnodes=3:4")
        assert patient.process.poll() is None, patient.err
        late = [start(stack, tmp_path, "ext_c10d", endpoint, join_timeout=LONG_S) for _ in range(2)]
        for job in (patient, *late):
            done = job.finish()
            assert (done.returncode, done.out) == (0, "world 3\n"), done.err


@pytest.mark.full
def test_on_c10d_the_host_of_the_store_gives_up_and_the_others_with_it(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    with ExitStack() as stack:
        # On a busy machine the start takes longer than the host waits. So the other one is there before, and looks for the store.
        waits = ",is_host=0,read_timeout=300"
        other = start(stack, tmp_path, "ext_c10d", endpoint, join_timeout=LONG_S, conf=waits, LOGLEVEL="INFO")
        other.wait_for("Starting elastic_operator")
        host = start(stack, tmp_path, "ext_c10d", endpoint, join_timeout=8)
        assert_gave_up(host.finish(), "no round was formed in 8 s (join_timeout), --nnodes=3:4")
        assert_gave_up(other.finish(), "onnection")
