"""Command lines of the documents that entrypoints/README.md has in its tables and not as a block of its own."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.keys import JobKeys
from tests.entrypoints.test_page import variables
from tests.etcd_server import EtcdServer
from tests.jobs import ROOT, TORCHRUN, Job, run

FOLDER = ROOT / "entrypoints"
LAUNCH = [sys.executable, "-m", "torch.distributed.launch"]
# What each attempt ends with differs, so that it is no failure that recurs.
CRASHES = (
    "import os; n = os.environ['TORCHELASTIC_RESTART_COUNT']; print('attempt', n, flush=True); os._exit((23, 22, 0)[int(n)])"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "code", "attempts", "said"),
    [
        ([*TORCHRUN], 1, 1, "the budget of 0 restarts"),
        ([*LAUNCH, "--max_restarts=999"], 0, 3, "restart 2 of 999"),
    ],
    ids=["default", "999"],
)
def test_restarts(tmp_path: Path, command: list[str], code: int, attempts: int, said: str) -> None:
    """Hypothesis: `--max_restarts` counts from its default of 0, and the predecessor of torchrun restarts, too.

    Method: a process fails twice; the backend comes by the environment, and the command lines are those of the document.
    Observation: no restart by default, two where more are allowed.
    """
    (tmp_path / "crashes.py").write_text(CRASHES)
    done = run([*command, "crashes.py"], tmp_path, PET_RDZV_BACKEND="ext_c10d", ELASTIC_EXT_BACKOFF="0")
    assert done.returncode == code, done.all
    assert done.out.count("attempt") == attempts
    assert said in done.err


@pytest.mark.full
def test_a_script_with_etcd(server: EtcdServer, tmp_path: Path) -> None:
    """Hypothesis: `RDZV_BACKEND=ext_etcd`, with etcd in HOST_NODE_ADDR, is all that the scripts need for another rendezvous.

    Method: two nodes run `elastic.sh train_ddp.py`.
    Observation: both train in one world of two, which etcd has the records of.
    """
    sizes = {"MIN_SIZE": "2", "MAX_SIZE": "4", "TRAINERS_PER_NODE": "1"}
    etcd = {"RDZV_BACKEND": "ext_etcd", "HOST_NODE_ADDR": server.endpoint, "JOB_ID": "job_elastic"}
    command = [str(FOLDER / "elastic.sh"), str(FOLDER / "train_ddp.py"), "--epochs=1", "--examples=64"]
    with ExitStack() as stack, EtcdClient(server.endpoint) as client:
        here = {"PET_RDZV_CONF": "last_call_timeout=0.5", "GLOO_SOCKET_IFNAME": "lo"}
        given = [{**variables(number), **sizes, **etcd, **here} for number in (0, 1)]
        jobs = [stack.enter_context(Job(command, tmp_path, **each)) for each in given]
        done = [job.finish() for job in jobs]
        records = client.get_prefix(JobKeys("job_elastic").prefix).kvs
    assert [each.returncode for each in done] == [0, 0], "".join(each.all for each in done)
    assert "".join(each.out for each in done).count("done ") == 1
    assert (tmp_path / "checkpoints" / "model_latest.pt").exists()
    assert records


def test_both_scripts_hand_on_a_rendezvous_alike() -> None:
    elastic, fault_tolerant = (
        (FOLDER / name).read_text().partition("--rdzv-id=")[2] for name in ("elastic.sh", "fault_tolerant.sh")
    )
    assert elastic == fault_tolerant != ""
