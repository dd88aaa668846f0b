"""`ext_c10d` among several agents of this machine: what torch's own c10d gets wrong, one by one."""

import json
import logging
import os
import re
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_ext.base.settings import Settings
from elastic_ext.failures.classify import classify
from elastic_ext.failures.evidence import Evidence
from elastic_ext.failures.ledger import Report
from elastic_ext.rendezvous.address import address_towards, host_of
from elastic_ext.rendezvous.c10d.handler import UNKNOWN_END, EmbeddedRendezvous
from elastic_ext.rendezvous.c10d.round_events import LocalEvents
from elastic_ext.rendezvous.c10d.several_nodes import Round
from elastic_ext.rendezvous.c10d.store_job import Membership
from elastic_ext.rendezvous.round_records import State
from tests.jobs import SCRIPTS, TORCHRUN, Job
from tests.ports import free_port
from tests.store_server import StoreServer

pytestmark = pytest.mark.seam

GLOO = str(SCRIPTS / "gloo_job.py")
# No node dies here; with few attempts a busy machine makes torch drop a node that lives, and both parts train on.
FAST = "keep_alive_interval=1,keep_alive_max_attempt=30,last_call_timeout=1,join_timeout=60"


def node(port: int, nnodes: str, *more: str) -> list[str]:
    return [
        *TORCHRUN,
        "--rdzv-backend=ext_c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=job",
        f"--nnodes={nnodes}",
        f"--rdzv-conf={FAST}",
        "--max-restarts=3",
        *more,
    ]


def reports(*jobs: Job) -> list[dict]:
    return [json.loads(line) for job in jobs for line in re.findall(r"\{\"rank\".*\}", job.out)]


@pytest.mark.full
def test_a_failure_on_one_node_restarts_both_in_the_same_round(tmp_path):
    """Mixed local world sizes and roles; the restart count is the job's, not the agent's."""
    port = free_port()
    with (
        Job(node(port, "2", "--nproc-per-node=1", "--role=reader", GLOO, "kill:2"), tmp_path) as first,
        Job(node(port, "2", "--nproc-per-node=2", "--role=trainer", GLOO, "kill:2"), tmp_path) as second,
    ):
        assert first.finish().returncode == 0, first.err
        assert second.finish().returncode == 0, second.err
        found = reports(first, second)
        assert {line["world"] for line in found} == {3}
        attempts = sorted({line["attempt"] for line in found})
        assert len(attempts) >= 2
        # Only the node whose worker was killed has failed: the other one heard of it before its own worker died of it, or at
        # the same time.
        assert "round 1 is over: workers failed on" in first.err or "restart:" in first.err
        last = [line["rank"] for line in found if line["attempt"] == attempts[-1]]
        assert sorted(last) == [0, 1, 2]


JOINABLE = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("world", dist.get_world_size(), "attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", dist.get_rank(), flush=True)
if dist.get_world_size() == 1:
    signal.pause()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_late_node_joins_without_killing_the_job(tmp_path):
    """Torch: the joiner waits for an address that nobody publishes, and after 60 s the whole job dies."""
    script = tmp_path / "joinable.py"
    script.write_text(JOINABLE)
    port = free_port()
    with Job(node(port, "1:2", str(script)), tmp_path) as first:
        first.wait_for("world 1")
        with Job(node(port, "1:2", str(script)), tmp_path) as second:
            assert first.finish().returncode == 0, first.err
            assert second.finish().returncode == 0, second.err
            worlds = [re.findall(r"world (\d) attempt (\d+)", job.out) for job in (first, second)]
            assert worlds == [[("1", "0"), ("2", "1")], [("2", "1")]], first.err + second.err


@pytest.mark.full
def test_training_goes_on_when_the_host_of_the_store_is_gone(tmp_path):
    """Torch: num_nodes_waiting() raises and every agent dies, wherever its workers are."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, sys\n"
        "print('up', os.environ['GROUP_RANK'], flush=True)\n"
        "if os.environ['MODE'] == 'host': import signal; signal.pause()\n"
        "open('fifo').read()\n"
        "print('done', flush=True)\n"
    )
    os.mkfifo(tmp_path / "fifo")
    port = free_port()
    with Job(node(port, "2", str(script)), tmp_path, MODE="host") as host:
        host.wait_for("metrics: serving")  # it has the store by now: whoever comes first has
        with Job(node(port, "2", str(script)), tmp_path, MODE="other") as other:
            host.wait_for(r"(?m)^up \d$")
            other.wait_for(r"(?m)^up \d$")
            host.process.kill()
            host.finish()
            other.wait_for("training continues without it")
            with open(tmp_path / "fifo", "w"):
                pass
            other.wait_for("done")
            other.process.kill()  # else it would try for seconds to tell the node that is gone


@pytest.mark.full
def test_an_agent_says_whether_the_rendezvous_store_is_its_own(caplog):
    def starts(endpoint: str, **config: str) -> str:
        caplog.clear()
        handler = EmbeddedRendezvous(RendezvousParameters("ext_c10d", endpoint, "job", 1, 2, **config), Settings())
        handler.leave()
        return next(line for line in caplog.messages if "the rendezvous store is" in line)

    port = free_port()
    with caplog.at_level(logging.INFO), StoreServer() as other:
        assert starts(f"localhost:{port}") == f"the rendezvous store is at localhost:{port}, in this agent"
        told = starts(other.endpoint, is_host="0")
        assert told == f"the rendezvous store is at localhost:{other.port}, in another process"


def test_a_job_that_has_ended_well_is_shown_so_with_its_failures():
    handler = EmbeddedRendezvous(RendezvousParameters("ext_c10d", "localhost:0", "job", 1, 1), Settings())
    assert handler.status().header.state is State.FORMING
    handler.next_rendezvous()
    handler.conclude(Report("h", classify(Evidence(rank=0, exit_code=3))))
    assert handler.status().header.state is State.RUNNING
    handler.finished()
    assert handler.status().header.state is State.DONE
    assert len(handler.status().ledger.verdicts) == 1


def test_a_node_that_has_not_heard_of_the_others_end_does_not_claim_it():
    handler = EmbeddedRendezvous(RendezvousParameters("ext_c10d", f"localhost:{free_port()}", "job", 1, 2), Settings())
    handler._nodes._round = Round(Membership(1, 0, 2), LocalEvents(lambda: None))  # the round's store does not answer
    handler.finished()
    header = handler.status().header
    assert (header.state, header.reason) == (State.RUNNING, UNKNOWN_END)
    handler.leave()


def test_no_stranger_is_given_a_port_of_a_test():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 1
    assert not any(low <= port <= high for port in ports)


def test_addresses():
    assert [host_of(text) for text in ("", "a", "a:1", "[::1]:29400", " b:2 ", "https://c:3")] == ["", "a", "a", "::1", "b", "c"]
    assert address_towards("localhost") == "localhost"
    assert address_towards("127.0.0.1") == "localhost"
    # This host under its own name: the route is the loopback, and the name is what other nodes can resolve.
    assert address_towards("127.0.0.2") == "127.0.0.2"
