"""Jobs whose ranks wait in collectives: the short limit, and what looks like it but is healthy. No setting, as installed."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.jobs import PATIENT_AGENT as AGENT
from tests.jobs import SCRIPTS, Job

pytestmark = pytest.mark.full

JOB = SCRIPTS / "spin_job.py"


def start(tmp_path: Path, group: str, *faults: str) -> Job:
    env = {"STOP": str(tmp_path / "stop"), "GROUP": group, "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / "verdict")}
    return Job([*AGENT, "--nproc-per-node=2", "--max-restarts=0", JOB, *faults], tmp_path, **env)


def test_differing_collectives_hang_by_the_short_limit(tmp_path):
    with start(tmp_path, "gloo", "mismatch:1") as job:
        done = job.finish()
    assert done.returncode == 1, done.err
    assert "each waits for other ranks" in done.err
    verdict = json.loads((tmp_path / "verdict").read_text())
    assert verdict["decision"]["kind"] == "hang"
    apart = r"; rank 0 is in all_reduce \d+ of group default_pg, rank 1 is in all_reduce 1 of group 1$"
    assert re.search(apart, verdict["decision"]["reason"])
    assert re.findall(r", in all_reduce \d+ of group (\S+)", verdict["stacks"]) == ["default_pg", "1"]
    assert verdict["stacks"].count('distributed_c10d.py"') == 2  # innermost frames of both main threads, whatever paths are long


def start_two(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, *faults: str) -> list[Job]:
    """The same on two nodes of one worker each."""
    where = [f"--rdzv-endpoint={request.getfixturevalue('server').endpoint}", "--rdzv-id=job", "--nnodes=2", "--nproc-per-node=1"]
    command = [*AGENT, "--rdzv-backend=ext_etcd", *where, "--rdzv-conf=last_call_timeout=1", "--max-restarts=0", JOB, *faults]
    env = {"STOP": str(tmp_path / "stop"), "GROUP": "spinning"}
    own = [{"ELASTIC_EXT_NODE_NAME": name, "ELASTIC_EXT_VERDICT_FILE": str(tmp_path / f"verdict-{name}")} for name in "ab"]
    return [stack.enter_context(Job(command, tmp_path, **env, **each)) for each in own]


def test_two_nodes_agree_on_it(request, tmp_path):
    """With waits that spin, nothing else would end it for half an hour."""
    with ExitStack() as stack:
        done = [job.finish() for job in start_two(request, stack, tmp_path, "mismatch:1")]
    assert [each.returncode for each in done] == [1, 1], [each.err for each in done]
    for each in done:
        assert "each waits for other ranks" in each.err
        assert "(kind hang," in each.err
    found = [json.loads((tmp_path / f"verdict-{name}").read_text()) for name in "ab"]
    assert found[0] == found[1]
    assert all(f"on {name}: rank" in found[0]["stacks"] for name in "ab")
    assert "waits for other ranks" in found[0]["decision"]["reason"]


def test_the_main_threads_place_does_not_matter(tmp_path):
    """As in `loss.item()`, which may do anything: only the flight recorder knows what it waits for."""
    with start(tmp_path, "gloo", "elsewhere") as job:
        done = job.finish()
    assert done.returncode == 1, done.err
    assert "(limit 15 s); each waits for a collective that has begun and does not complete" in done.err
    verdict = json.loads((tmp_path / "verdict").read_text())
    assert verdict["decision"]["kind"] == "hang"
    assert ", in all_reduce 1 of group 1" in verdict["stacks"]
    assert re.search(r", in all_reduce \d+ of group default_pg", verdict["stacks"])


def test_a_node_awaiting_another_does_not_hang(request, tmp_path):
    """Its own worker stays in its collective for longer than the limit, while the other node's does its own part."""
    with ExitStack() as stack:
        started = start_two(request, stack, tmp_path, "own_part:1")
        for job in started:
            job.wait_for('"attempt": 0')
        own = next(job for job in started if '"rank": 1' in job.out)
        own.wait_for("own_part is over at 1")
        (tmp_path / "stop").touch()
        done = [job.finish() for job in started]
    assert [each.returncode for each in done] == [0, 0], [each.err for each in done]
    waited = done[1 - started.index(own)]
    assert "each waits for other ranks" in waited.err
    assert not re.search(" WARNING .*(made progress|resumed)", waited.err, re.MULTILINE)  # no news for users
    assert "round 1 is over: no worker" not in waited.err


@pytest.mark.parametrize(
    "faults", [("spinning", "evaluate"), ("gloo", "helper:0", "helped:1"), ("gloo", "disordered", "long_part")], ids="-".join
)
def test_what_outlasts_the_short_limit_may_work(tmp_path, faults):
    with start(tmp_path, *faults) as job:
        job.wait_for("is over at", 2)
        (tmp_path / "stop").touch()
        done = job.finish()
    assert done.returncode == 0, done.err
    assert "no progress" not in done.err
    assert "made progress" not in done.err
    assert done.out.count("finished") == 2
