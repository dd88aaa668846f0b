"""Jobs that bring their own etcd, for real: on this machine, and on hosts in network namespaces that are lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.own_etcd import folder, keeper
from tests.chaos.processes import zombies
from tests.jobs import TIMEOUT_S, TORCHRUN, Job, descendants, wait_gone
from tests.own_etcd.hosts import ELASTIC, OwnEtcdJob, hosts_of, lose, pids_in, revive, wait_for
from tests.programs import needs
from tests.rendezvous.test_etcd_jobs import reports, seen
from tests.until import until

pytestmark = pytest.mark.full

NO_SECRET = Path()
TOGETHER = "60"  # last_call_timeout: the first round waits for all hosts


@pytest.fixture
def laptop(tmp_path):
    with ExitStack() as stack:
        job = OwnEtcdJob(tmp_path, stack, ["localhost"], NO_SECRET)
        yield job
    for pid in job.keepers():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.seam
def test_a_job_on_one_machine_leaves_nothing(laptop):
    """Two agents, two ways to start them, one etcd, one restart. Once both commands have returned, nothing is left."""
    first = laptop.start("2", ELASTIC, "exit3:0", name="a")
    second = laptop.start("2", name="b", command=TORCHRUN)
    wait_for([first, second], seen(2, 1))
    assert len(laptop.keepers()) == 2, "a keeper and its member, whoever was first"
    (place,) = laptop.folders()
    assert place.stat().st_mode & 0o777 == 0o700
    command = [sys.executable, "-m", "elastic_ext.cli", "status", "--json"]
    status = subprocess.run([*command, f"--rdzv-endpoint={laptop.endpoint}", f"--rdzv-id={laptop.run_id}"], capture_output=True)
    assert len(json.loads(status.stdout)["nodes"]) == 2, status.stderr
    laptop.finish([first, second])
    assert laptop.folders() == []
    assert laptop.keepers() == []


def test_a_bug_leaves_nothing(laptop):
    assert laptop.start("1", "tests/no_such_script.py").finish().returncode == 78
    laptop.assert_gone()
    agent = laptop.start("1", ELASTIC, "bug:0")
    assert agent.finish().returncode == 65, agent.err
    assert laptop.folders() == []


@pytest.mark.seam
def test_a_killed_agent_leaves_etcd_to_the_next(laptop):
    """The keeper outlives its agent: the next one finds the job and its records, and at the end there is nothing."""
    first = laptop.start("1:2", name="a")
    first.wait_for(seen(1, 0))
    keepers = laptop.keepers()
    workers = descendants(first.process.pid)
    first.process.kill()
    second = laptop.start("1:2", name="b")
    second.wait_for(seen(1, 1))
    assert laptop.keepers() == keepers
    assert wait_gone([pid for pid in workers if pid not in keepers]) == []
    laptop.finish([second])
    assert laptop.folders() == []


def test_without_any_agent_the_etcd_ends_by_itself(laptop):
    agent = laptop.start("1")
    agent.wait_for(seen(1, 0))
    agent.process.kill()
    laptop.assert_gone()


def test_a_killed_keeper_returns_with_its_own_data(laptop):
    """The agent is in, and about to start another keeper. Stopped, it shows what others see in between. The killed one does not
    stay as its zombie."""
    agent = laptop.start("1")
    agent.wait_for(seen(1, 0))
    (place,) = laptop.folders()
    agent.process.send_signal(signal.SIGSTOP)
    keepers = laptop.keepers()
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    assert wait_gone([pid for pid in keepers if pid != agent.process.pid]) == []
    folder.remove_abandoned(place.with_name(folder.folder_of("another", ("localhost",), "localhost", {}).name))
    agent.process.send_signal(signal.SIGCONT)
    agent.wait_for("runs a member of the job's etcd", count=2)
    assert not [child for child, parent in zombies(os.getpid()) if parent.pid == agent.process.pid]
    laptop.finish([agent])
    assert "had lost the job's records" not in agent.err
    assert {line["attempt"] for line in reports(agent)} == {0}, "the workers have not noticed"
    laptop.assert_gone()


def test_a_dying_member_is_restarted_a_few_times(laptop):
    agent = laptop.start("1")
    agent.wait_for(seen(1, 0))
    for death in range(1, keeper.DEATHS + 2):
        agent.wait_for("runs a member of the job's etcd", count=death)
        (member,) = [pid for pid in laptop.keepers() if Path(f"/proc/{pid}/comm").read_text() == "etcd\n"]
        os.kill(member, signal.SIGKILL)
        assert wait_gone([member]) == []
        agent.wait_for("has ended on localhost: exit code -9|keeps ending on localhost: exit code -9", count=death)
    agent.wait_for("keeps ending")


def test_a_spare_can_replace_a_lost_member(tmp_path):
    """The keeper of one of three members is killed while its agent is stopped. The first spare's port is taken, so the next one
    gets the member. The host that had it goes on without one, for its data is that of a removed one; another host is lost then.
    """
    needs("ip")
    with hosts_of(tmp_path, 5) as (job, hosts):
        server = f"socket.create_server(('', {job.plan.peer_port}))"
        taken = f"import signal, socket; s = {server}; print('up', flush=True); signal.pause()"
        with Job([*hosts[3].inside, sys.executable, "-c", taken], tmp_path) as taker:
            taker.wait_for("up")
            agents = job.start_on(hosts, "1:5", last_call_timeout=TOGETHER)
            wait_for(agents, seen(5, 0))
            stopped = agents[2].process
            stopped.send_signal(signal.SIGSTOP)
            for pid in set(pids_in(hosts[2])).intersection(job.keepers()):
                os.kill(pid, signal.SIGKILL)
            agents[4].wait_for("runs a member")
            stopped.send_signal(signal.SIGCONT)
            data = folder.data_of(job.folder_of(hosts[2].address)) / "member"
            until(lambda: not data.exists(), "what the removed member had is gone")
            until(lambda: len(set(pids_in(hosts[2])).intersection(job.keepers())) == 1, "a keeper without a member")
            lose(hosts[0])
            agents[2].wait_for('"world": 4')
            job.finish(agents[1:])
            assert "does not start" not in agents[2].err
            assert agents[3].err.count("has ended on") <= keeper.DEATHS + 1


def test_a_spare_at_the_end_reruns_nothing(tmp_path):
    """The etcd of two hosts serves only once both are there. By then the other agent has done all in less than a second."""
    needs("ip")
    (tmp_path / "short.py").write_text("print('ran', flush=True)")
    with hosts_of(tmp_path, 2) as (job, hosts):
        ended = [agent.finish() for agent in job.start_on(hosts, "1", "short.py")]
        assert [each.returncode for each in ended] == [0, 0], ended[1].err
        assert "".join(each.out for each in ended) == "ran\n"


def test_a_new_machine_of_old_name_gets_members(tmp_path):
    """Then a second one of the first three is lost, and nothing is left."""
    needs("ip")
    with hosts_of(tmp_path, 3) as (job, hosts):
        agents = job.start_on(hosts, "2:3", last_call_timeout=TOGETHER)
        wait_for(agents, seen(3, 0))
        job.lose(hosts[0])
        wait_for(agents[1:], seen(2, 1))
        revive(hosts[0])
        back = job.start("2:3", inside=hosts[0].inside, name="n0")
        back.wait_for("runs a member")
        wait_for([back, *agents[1:]], seen(3, 2))
        job.lose(hosts[1])
        wait_for([back, agents[2]], seen(2, 3))
        job.finish([back, agents[2]])
        assert job.folders() == []
        assert job.keepers() == []
        assert "supervises this run: ext_etcd" in back.err


def test_a_lost_majoritys_last_member_makes_way(tmp_path):
    """Two of three hosts are lost at once, and so is their data. The agent of the third one gives up, and is started again."""
    needs("ip")
    with hosts_of(tmp_path, 3) as (job, hosts):
        settings = {"last_call_timeout": "30", "join_timeout": "40"}
        first = job.start_on(hosts, "3", **settings)
        wait_for(first, seen(3, 0))
        for host in hosts[1:]:
            job.lose(host)
        assert first[0].finish().returncode == 75
        for host in hosts[1:]:
            revive(host)
        again = job.start_on(hosts, "3", **settings)
        wait_for(again, seen(3, 0))
        job.finish(again)


def test_the_last_hosts_agent_gets_a_new_etcd(tmp_path):
    """It waits for etcd for `join_timeout`, ten minutes. The agents of the other hosts are started again until they get in."""
    needs("ip")
    with hosts_of(tmp_path, 3) as (job, hosts):

        def start(number: int) -> Job:
            return job.start("2", inside=hosts[number].inside, name=f"n{number}")

        stays, other = start(0), start(1)
        wait_for([stays, other], seen(2, 0))
        start(2).wait_for("runs a member")
        for host in hosts[1:]:
            job.lose(host)
            revive(host)
        again = {number: start(number) for number in (1, 2)}

        def two_again() -> bool:
            for number, agent in again.items():
                if agent.process.poll() is not None:
                    assert agent.process.returncode == 75, agent.err
                    again[number] = start(number)
            return len(re.findall('"world": 2', stays.out)) == 2

        until(two_again, limit_s=TIMEOUT_S)
        job.finish([stays])
        assert "has had no majority for 60 s" in stays.err


def test_slurms_signal_to_all_ends_no_etcd(laptop):
    agent = laptop.start("1")
    agent.wait_for(seen(1, 0))
    keepers = laptop.keepers()
    for pid in keepers:
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR2)
    laptop.finish([agent])
    assert "is gone; starting another" not in agent.err
    assert laptop.folders() == []


def test_an_unwritable_ledger_is_wrong_usage(laptop):
    done = laptop.start("1", ledger_file="/proc/no/such").finish()
    assert done.returncode == 78, done.err
    assert "ledger_file=/proc/no/such: No such file or directory" in done.err
    assert laptop.folders() == []


def test_a_node_cut_off_alone_comes_back(tmp_path, monkeypatch):
    """Also in a step of Slurm: the other two train on, and their etcd has a majority."""
    needs("ip")
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.setenv(name, "7")
    settings = {"join_timeout": "300", "lease_ttl": "4", "rejoin_timeout": "0", "last_call_timeout": TOGETHER}
    with hosts_of(tmp_path, 3) as (job, hosts):
        agents = job.start_on(hosts, "2:3", **settings)
        wait_for(agents, seen(3, 0))
        subprocess.run([*hosts[2].inside, "ip", "link", "set", "net0", "down"], check=True)
        wait_for(agents[:2], seen(2, 1))
        agents[2].wait_for("etcd endpoint .* failed", count=10)  # its lease is over by then
        revive(hosts[2])
        wait_for(agents, '"world": 3', count=2)
        job.finish(agents)


@pytest.mark.seam
def test_a_slurm_step_awaits_no_lost_store(tmp_path, monkeypatch):
    """The job's etcd was on the host that is lost; elsewhere than in Slurm that may come back within join_timeout."""
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.setenv(name, "7")
    settings = {"join_timeout": "200", "lease_ttl": "2"}
    with hosts_of(tmp_path, 2, members=1) as (job, hosts):
        lost, left = (job.start("2", inside=host.inside, name=name, **settings) for name, host in zip("ab", hosts, strict=True))
        left.wait_for(seen(2, 0))
        lose(hosts[0])
        lost.finish()
        began = time.monotonic()
        done = left.finish()
        assert done.returncode == 75, done.err
        assert "the job's own store has not answered" in done.err
        assert time.monotonic() - began < 100
