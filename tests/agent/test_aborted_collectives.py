"""Jobs whose ranks end as NCCL's backends end them, replayed without a GPU: they print the same words and abort."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.failures.test_torch_texts import WORDS
from tests.jobs import SCRIPTS, TORCHRUN, Finished, Job

pytestmark = pytest.mark.full


class Agents:
    """The agents of one job, each with a kernel log of its own, as hosts have."""

    def __init__(self, tmp_path: Path, stack: ExitStack, endpoint: str, words: str, scenario: str) -> None:
        self._folder, self._stack = tmp_path, stack
        where = [
            "--rdzv-backend=ext_etcd",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
            "--rdzv-conf=last_call_timeout=60,backoff=0.02",
        ]
        self._command = [*TORCHRUN, *where, "--max-restarts=3"]
        self._script = [str(SCRIPTS / "aborting_job.py"), scenario]
        self._words = words
        self.jobs: dict[str, Job] = {}

    def start(self, names: str, nnodes: str) -> None:
        """Start these nodes; their ranks are in this order."""
        for name in names:
            log = self._folder / f"kernel-{name}"
            log.touch()
            env = {
                "NODE": name,
                "WORDS": self._words,
                "ELASTIC_EXT_NODE_NAME": f"h{name}",
                "ELASTIC_EXT_TOPOLOGY": f"h{name}",
                "ELASTIC_EXT_VERDICT_FILE": str(self._folder / f"verdict-{name}"),
            }
            of_host = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/kmsg && exec "$@"', str(log)]
            command = [*of_host, *self._command, f"--nnodes={nnodes}", *self._script]
            self.jobs[name] = self._stack.enter_context(Job(command, self._folder, **env))

    def finish(self, names: str) -> dict[str, Finished]:
        return {name: self.jobs[name].finish() for name in names}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


as_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts a file over /dev/kmsg in a mount namespace, which only root may")


def ends(done: dict[str, Finished]) -> dict[str, int]:
    return {name: each.returncode for name, each in done.items()}


@as_root
@pytest.mark.parametrize("backend", [pytest.param("nccl2", marks=pytest.mark.seam), "nccl-legacy"])
def test_a_rank_that_hangs_twice_ends_no_job(tmp_path, stack, server, backend):
    """Not even at one step: the rank that aborts is on one node first, then on the other, as with a bug."""
    agents = Agents(tmp_path, stack, server.endpoint, WORDS[backend]["timeout"], "hang")
    agents.start("ab", "2")
    done = agents.finish("ab")
    assert ends(done) == {"a": 0, "b": 0}, "\n---\n".join(each.err for each in done.values())
    for each in done.values():
        assert each.err.count("(kind network, rule peer-gone)") == 2
        assert "the cause is elsewhere" in each.err


@as_root
@pytest.mark.parametrize("backend", WORDS)
def test_a_lost_nodes_victims_are_not_charged(tmp_path, stack, server, backend):
    agents = Agents(tmp_path, stack, server.endpoint, WORDS[backend]["timeout"], "lost")
    agents.start("abc", "2:3")
    for job in agents.jobs.values():
        job.wait_for('"world": 3')
    agents.jobs["c"].process.kill()
    done = agents.finish("ab")
    assert ends(done) == {"a": 0, "b": 0}, "\n---\n".join(each.err for each in done.values())
    for each in done.values():
        assert "node hc was lost" in each.err
        assert "restart 1 of 3" not in each.err


@as_root
@pytest.mark.parametrize("backend", WORDS)
def test_the_node_whose_driver_reports_it_leaves(tmp_path, stack, server, backend):
    agents = Agents(tmp_path, stack, server.endpoint, WORDS[backend]["system"], "xid")
    agents.start("abc", "2:3")
    done = agents.finish("abc")
    assert ends(done) == {"a": 0, "b": 0, "c": 69}, "\n---\n".join(each.err for each in done.values())
    verdict = json.loads((tmp_path / "verdict-c").read_text())
    assert (verdict["host"], verdict["decision"]["rule"]) == ("hc", "xid-replace")
