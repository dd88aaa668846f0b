"""Real jobs of several nodes on `ext_c10d`: one verdict for all, whoever failed, through the store of torch's rendezvous."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.etcd.proxy import Proxy
from tests.jobs import AGENT, TORCHRUN, Gate, Job
from tests.ports import free_port
from tests.rendezvous.etcd.test_etcd_jobs import ELASTIC, GLOO, reports, seen
from tests.until import until

pytestmark = pytest.mark.full

# No time here decides anything but how long a node that was killed is waited for.
CONF = "keep_alive_interval=1,keep_alive_max_attempt=30,last_call_timeout=1,join_timeout=90,stop_grace=2"


class Nodes:
    """Agents of one job on loopback. The first one hosts the store; each has a ledger file and a verdict file of its own."""

    def __init__(self, tmp_path: Path, stack: ExitStack) -> None:
        self.tmp_path = tmp_path
        self.gate = Gate(tmp_path / "gate")
        self._stack = stack
        self.port = free_port()
        self._launchers = [TORCHRUN, AGENT]

    def start(self, name: str, nnodes: str, *script: str, conf: str = CONF, restarts: int = 3, port: int = 0, **env: str) -> Job:
        where = [f"--rdzv-endpoint=localhost:{port or self.port}", "--rdzv-id=job", f"--nnodes={nnodes}", f"--rdzv-conf={conf}"]
        launcher = self._launchers[ord(name) % 2]
        command = [*launcher, "--rdzv-backend=ext_c10d", *where, f"--max-restarts={restarts}", *script]
        files = {f"ELASTIC_EXT_{key.upper()}_FILE": str(self.tmp_path / f"{key}-{name}") for key in ("verdict", "ledger")}
        env = {"ELASTIC_EXT_NODE_NAME": name, "NODE": name, "GATE": str(self.gate.path), **files, **env}
        return self._stack.enter_context(Job(command, self.tmp_path, **env))

    def start_all(self, names: str, nnodes: str, *script: str, faults: dict[str, list[str]] | None = None, **more) -> list[Job]:
        """The first one alone until it has the store; then the others."""
        jobs = []
        for name in names:
            jobs.append(self.start(name, nnodes, *script, *(faults or {}).get(name, []), **more))
            if len(jobs) == 1:
                jobs[0].wait_for("metrics: serving")  # whoever comes first has the store by then
        return jobs

    def bug_of_b(self, done: str = "", bug: str = "raise NameError('a bug on one node')") -> str:
        """A script whose worker on node "b" has a bug behind the gate, and on node `done` has finished before it."""
        script = self.tmp_path / "bug_of_b.py"
        early = f"import os\nif os.environ['NODE'] == '{done}': raise SystemExit(print('finished'))\n"
        script.write_text(early + Path(ELASTIC).read_text() + f"if env['NODE'] == 'b': {bug}\n")
        return str(script)

    def verdict(self, name: str) -> dict:
        return json.loads((self.tmp_path / f"verdict-{name}").read_text())

    def ledger(self, name: str) -> dict:
        return json.loads(json.loads((self.tmp_path / f"ledger-{name}").read_text())["ledger"])


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def assert_one_verdict(nodes: Nodes, names: str, jobs: list[Job], code: int) -> dict:
    """All agents have left with this code and the same verdict, none of them with an error of torch's rendezvous."""
    done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [code] * len(jobs), "\n----\n".join(each.err for each in done)
    verdicts = [nodes.verdict(name) for name in names]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0]["decision"]["exit_code"] == code
    for each in done:
        assert "RendezvousClosedError" not in each.err
        assert "is lost" not in each.err
    return verdicts[0]


@pytest.mark.seam
def test_a_bug_while_the_others_die_of_lost_connections_is_everybodys_verdict(nodes):
    jobs = nodes.start_all("abc", "3", GLOO, "key:1")
    verdict = assert_one_verdict(nodes, "abc", jobs, 65)
    assert (verdict["rank"], verdict["decision"]["kind"]) == (1, "code")
    assert {line["attempt"] for line in reports(*jobs)} == {0}
    for job in jobs:
        assert "KeyError" in job.err


SLOW_TO_TELL = """
import fcntl, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("up", flush=True)
with open(os.environ["GATE"]) as gate:
    fcntl.flock(gate, fcntl.LOCK_SH)
if os.environ["NODE"] == "b":
    raise KeyError("missing")
dist.all_reduce(value)
"""


def test_lost_connections_do_not_outvote_a_bug_whose_node_is_slow_to_tell(nodes):
    """The agent of b stands still while the workers of the others die of what its worker did."""
    script = nodes.tmp_path / "slow_to_tell.py"
    script.write_text(SLOW_TO_TELL)
    jobs = nodes.start_all("abc", "3", str(script))
    for job in jobs:
        job.wait_for("(?m)^up$")
    jobs[1].process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{jobs[1].process.pid}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    nodes.gate.open()
    with ThreadPoolExecutor(2) as pool:  # one of the two judges
        waits = [pool.submit(job.wait_for, "nodes that have not reported yet") for job in (jobs[0], jobs[2])]
        wait(waits, return_when=FIRST_COMPLETED)
        jobs[1].process.send_signal(signal.SIGCONT)
    assert any(each.exception() is None for each in waits)
    verdict = assert_one_verdict(nodes, "abc", jobs, 65)
    assert (verdict["host"], verdict["decision"]["kind"]) == ("b", "code")


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_bug_on_one_node_stops_the_healthy_ones_too(nodes, bad):
    """Their workers would never have ended. "a" hosts the store: it stays until all have read why."""
    names = "abc"
    jobs = nodes.start_all(names, "3", ELASTIC, faults={bad: ["bug:0"]})
    verdict = assert_one_verdict(nodes, names, jobs, 65)
    assert verdict["host"] == bad
    assert {line["attempt"] for line in reports(*jobs)} == {0}
    told = [job.err for name, job in zip(names, jobs, strict=True) if name != bad]
    for err in told:
        assert re.search(rf"stop: .* raised NameError.* on {bad} ", err), err


def test_a_node_that_has_finished_hears_of_the_bug_on_another(nodes):
    """Torch's barrier at the end would keep it for five minutes, and then it would leave with 0."""
    jobs = nodes.start_all("abc", "3", nodes.bug_of_b(done="a"))
    jobs[0].wait_for("finished")
    for job in jobs[1:]:
        job.wait_for(seen(3, 0))
    nodes.gate.open()
    assert assert_one_verdict(nodes, "abc", jobs, 65)["host"] == "b"


def test_a_killed_worker_costs_the_job_one_restart(nodes):
    jobs = nodes.start_all("abc", "3", GLOO, "kill:1")
    done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0, 0], [each.err for each in done]
    last = [line["rank"] for line in reports(*jobs) if line["attempt"] == 1]
    assert sorted(last) == [0, 1, 2]
    assert {line["attempt"] for line in reports(*jobs)} == {0, 1}
    for each in done:
        assert "restart 2 of" not in each.err


def test_the_budget_is_the_jobs_whoever_fails(nodes):
    """Two restarts, spent by two nodes; the third failure, on a third node, stops all."""
    faults = {"a": ["exit3:0"], "b": ["exit4:1"], "c": ["exit5:2"]}
    jobs = nodes.start_all("abc", "3", ELASTIC, faults=faults, restarts=2)
    verdict = assert_one_verdict(nodes, "abc", jobs, 1)
    assert (verdict["host"], verdict["restarts"], verdict["decision"]["rule"]) == ("c", 2, "budget")
    assert {line["attempt"] for line in reports(*jobs)} == {0, 1, 2}
    ledgers = [nodes.ledger(name) for name in "abc"]
    assert ledgers[0] == ledgers[1] == ledgers[2]
    assert [failure["node"] for failure in ledgers[0]["failures"]] == ["a", "b", "c"]


# Faults go by the number of the round: none may be formed without a node that is only slow.
PATIENT = CONF.replace("last_call_timeout=1", "last_call_timeout=8")


def test_a_node_whose_workers_crash_twice_leaves_with_69_and_the_job_goes_on(nodes):
    jobs = nodes.start_all("abc", "2:3", ELASTIC, faults={"c": ["segv:0", "segv:1"]}, conf=PATIENT)
    good, bad = jobs[:2], jobs[2]
    assert bad.finish().returncode == 69, bad.err
    for job in good:
        job.wait_for(seen(2, 2))
    refused = nodes.start("c", "2:3", ELASTIC)
    assert refused.finish().returncode == 69, refused.err
    assert "may not come back yet" in refused.err
    nodes.gate.open()
    assert [job.finish().returncode for job in good] == [0, 0], [job.err for job in good]
    assert nodes.verdict("c")["decision"]["verdict"] == "replace_node"


def test_a_refused_host_may_come_back_when_its_time_is_over(nodes):
    jobs = nodes.start_all(
        "abc", "2:3", ELASTIC, faults={"c": ["segv:0", "segv:1"]}, conf=PATIENT + ",refuse_node=2", LOGLEVEL="INFO"
    )
    assert jobs[2].finish().returncode == 69, jobs[2].err
    jobs[0].wait_for("host c may come back")  # this one, a command of ours, shows what is logged at INFO
    again = nodes.start("c", "2:3", ELASTIC)
    again.wait_for(seen(3, 3))
    nodes.gate.open()
    assert [job.finish().returncode for job in (*jobs[:2], again)] == [0, 0, 0], [job.err for job in (*jobs[:2], again)]


def test_the_node_of_the_store_stays_though_its_workers_crash_twice(nodes):
    """The store would go with it, and no other node could start again."""
    jobs = nodes.start_all("abc", "2:3", ELASTIC, faults={"a": ["segv:0", "segv:1"]}, conf=PATIENT)
    for job in jobs:
        job.wait_for(seen(3, 2))
    assert "the job cannot run without it" in jobs[0].err or "restart 2 of 3" in jobs[0].err
    nodes.gate.open()
    assert [job.finish().returncode for job in jobs] == [0, 0, 0], [job.err for job in jobs]


def test_the_budget_outlives_an_agent_that_is_killed(nodes):
    """It comes back without its ledger file and finds the ledger in the store: two restarts of two are spent."""
    conf = CONF.replace("max_attempt=30", "max_attempt=5")
    first = nodes.start_all("abc", "3", ELASTIC, faults={"c": ["exit3:0", "exit4:1"]}, conf=conf, restarts=2)
    for job in first:
        job.wait_for(seen(3, 2))
    first[2].process.kill()
    first[2].process.wait()
    (nodes.tmp_path / "ledger-c").unlink()
    again = nodes.start("c", "3", ELASTIC, "exit5:3", conf=conf, restarts=2)
    verdict = assert_one_verdict(nodes, "abc", [*first[:2], again], 1)
    assert (verdict["host"], verdict["restarts"], verdict["decision"]["rule"]) == ("c", 2, "budget")
    assert len(nodes.ledger("c")["failures"]) == 3


def without_the_store(nodes, script):
    """Two nodes train, and the host of the store is killed: the job of the other node, which has noticed."""
    jobs = nodes.start_all("ab", "2", script)
    for job in jobs:
        job.wait_for(seen(2, 0))
    jobs[0].process.kill()
    jobs[0].process.wait()
    jobs[1].wait_for("training continues without it")
    return jobs[1]


def test_without_the_store_each_node_judges_for_itself(nodes):
    """The host of the store is killed; a bug on another node still ends that one with 65, and nothing hangs."""
    b = without_the_store(nodes, nodes.bug_of_b())
    nodes.gate.open()
    done = b.finish()
    assert done.returncode == 65, done.err
    assert done.err.count("each node judges failures for itself") == 1
    assert nodes.verdict("b")["decision"]["kind"] == "code"


@pytest.mark.parametrize(
    ("new", "said", "judges"),
    [
        (False, "trying again on new connections", "all together"),
        (True, "each node judges failures for itself", "b alone"),
    ],
)
def test_a_store_that_is_slow_when_the_verdict_is_due_costs_nobody_the_verdict(nodes, new, said, judges):
    """What b asks takes longer than a call may; the second time for so long that b gives it up, judges alone and closes."""
    with Proxy(nodes.port) as proxy:
        jobs = [nodes.start("a", "3", nodes.bug_of_b())]
        jobs[0].wait_for("metrics: serving")
        jobs.append(nodes.start("b", "3", nodes.bug_of_b(), conf=CONF + ",is_host=0", port=proxy.port))
        jobs.append(nodes.start("c", "3", nodes.bug_of_b()))
        for job in jobs:
            job.wait_for(seen(3, 0))
        proxy.hold(but=1, new=new)  # the first one is torch's own; all its agents stand still when that does
        nodes.gate.open()
        jobs[1].wait_for(said)
        proxy.release()
        done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [65] * 3, "\n----\n".join(each.err for each in done)
    verdicts = [nodes.verdict(name) for name in "abc"]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0]["host"] == "b"
    assert ("is lost" in done[1].err) == (judges == "b alone")


def test_who_would_restart_without_the_store_is_to_be_tried_again(nodes):
    """The host of the store is killed: what is at fault is the infrastructure, and a scheduler may start the job again."""
    b = without_the_store(nodes, nodes.bug_of_b(bug="os._exit(3)"))
    nodes.gate.open()
    done = b.finish()
    assert done.returncode == 75, done.err
    assert "RendezvousConnectionError" in done.err


def test_the_users_interrupt_is_theirs_without_the_store_too(nodes):
    b = without_the_store(nodes, ELASTIC)
    b.process.send_signal(signal.SIGINT)
    done = b.finish()
    assert done.returncode == 130, done.err


def test_an_agent_that_is_told_to_stop_closes_nothing_and_is_not_waited_for(nodes):
    """Torch's rendezvous would wait for its keep-alives to be missed, five minutes here."""
    jobs = nodes.start_all("abc", "2:3", ELASTIC, conf=PATIENT.replace("max_attempt=30", "max_attempt=300"))
    for job in jobs:
        job.wait_for(seen(3, 0))
    jobs[2].process.send_signal(signal.SIGTERM)
    assert jobs[2].finish().returncode == 75, jobs[2].err
    for job in jobs[:2]:
        job.wait_for(seen(2, 1))
    nodes.gate.open()
    assert [job.finish().returncode for job in jobs[:2]] == [0, 0], [job.err for job in jobs[:2]]
    assert not (nodes.tmp_path / "ledger-a").exists()


def test_a_node_that_waits_for_a_place_hears_of_the_end(nodes):
    script = nodes.bug_of_b()
    jobs = nodes.start_all("ab", "2:2", script)
    for job in jobs:
        job.wait_for(seen(2, 0))
    spare = nodes.start("c", "2:2", script, LOGLEVEL="INFO")
    spare.wait_for("Rendezvous'ing worker group")
    nodes.gate.open()
    assert_one_verdict(nodes, "abc", [*jobs, spare], 65)
