"""What outlives a job that brings its own etcd: another run of it, on other hosts, finds its budget and its refused hosts."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.base import settings
from elastic_ext.etcd import Delete, LeaseSession, Put, Tls
from elastic_ext.own_etcd import cluster, launch, saved_keys
from elastic_ext.rendezvous.keys import JobKeys
from tests.etcd_client import EtcdClient
from tests.jobs import wait_gone
from tests.own_etcd.hosts import ELASTIC, OwnEtcdJob


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.glob("*"))


@pytest.mark.seam
def test_a_jobs_budget_outlives_its_etcd(tmp_path):
    """The first run charges a restart; the second, on another host, has none left. Its end is for good: no file stays."""
    shared = tmp_path / "shared"
    options = {"ledger_file": str(shared / "ledger"), "max_restarts": "1", "backoff": "0"}
    with ExitStack() as stack:
        first = OwnEtcdJob(tmp_path, stack, ["localhost"], Path())
        agent = first.start("1", ELASTIC, "exit3:0", **options)
        agent.wait_for('"attempt": 1')
        agent.process.kill()
        for pid in first.keepers():
            os.kill(pid, signal.SIGKILL)
        assert wait_gone([agent.process.pid, *first.keepers()]) == []
        for each in first.folders():
            launch.folder.remove(each)  # another host does not have it
        assert len(files(shared)) == 1
        first.hosts = ["127.0.0.1"]
        again = first.start("1", ELASTIC, "exit3:0", "exit3:1", name="b", **options)
        done = again.finish()
        assert "what outlived the last run of the job is back" in done.err
        assert done.returncode == 1, done.err
        assert '"attempt": 1' not in done.out
        assert files(shared) == []
        first.assert_gone()


@pytest.mark.full
def test_a_job_that_is_done_leaves_no_file(tmp_path):
    with ExitStack() as stack:
        job = OwnEtcdJob(tmp_path, stack, ["localhost"], Path())
        agent = job.start("1", ledger_file=str(tmp_path / "shared" / "ledger"))
        agent.wait_for('"attempt": 0')
        job.finish([agent])
        assert files(tmp_path / "shared") == []


class Etcd:
    """A keeper of a job without agents of ours: this process is one."""

    def __init__(self, stack: ExitStack, folder: Path, host: str, shared: Path, number: int) -> None:
        job = OwnEtcdJob(folder, stack, [host], Path())
        known = settings.read({"ledger_file": str(shared / "ledger")}, {})
        environ = {**os.environ, "SLURM_RESTART_COUNT": str(number)}
        self.attachment = launch.attach(job.endpoint, job.run_id, None, known, environ)
        access = self.attachment.await_access(60)
        self.client = stack.enter_context(
            EtcdClient(access.endpoints, tls=Tls(access.files.ca, access.files.cert, access.files.key))
        )
        self.keys = JobKeys(job.run_id)

    def found(self) -> dict[str, bytes]:
        keys = [kv for prefix in self.keys.outliving for kv in self.client.get_prefix(prefix).kvs]
        return {kv.key.decode().removeprefix(self.keys.prefix): kv.value for kv in keys}

    def close(self) -> None:
        self.client.close()
        self.attachment.close()


@pytest.mark.full
def test_records_return_with_their_time_newest_file_wins(tmp_path):
    """Three runs on two hosts: what the second has deleted does not come back with the file of the first."""
    with ExitStack() as stack:
        one = Etcd(stack, tmp_path, "localhost", tmp_path / "shared", 0)
        lease = LeaseSession(one.client, 1000)
        leased = [(one.keys.ledger, b"\xff\x00ledger"), (one.keys.refusal("bad"), "broken")]
        others = [(one.keys.charge(3), ""), (one.keys.header, "not outliving")]
        one.client.txn([], [*(Put(*each, lease_id=lease.lease_id) for each in leased), *(Put(*each) for each in others)])
        lease.stop_renewing()
        one.close()
        assert len(files(tmp_path / "shared")) == 1
        two = Etcd(stack, tmp_path, "127.0.0.1", tmp_path / "shared", 1)
        assert two.found() == {"ledger": b"\xff\x00ledger", "refused/bad": b"broken", "charges/3": b""}
        assert two.client.get(two.keys.header).kv is None
        found = two.client.get(two.keys.refusal("bad")).kv
        assert found is not None
        assert 900 < two.client.lease_left_s(found.lease_id) <= 1000
        two.client.txn([], [Delete(two.keys.charge(3)), Put(two.keys.ledger, "newer")])
        two.close()
        assert len(files(tmp_path / "shared")) == 2, "one of each host"
        three = Etcd(stack, tmp_path, "localhost", tmp_path / "shared", 2)
        assert three.found() == {"ledger": b"newer", "refused/bad": b"broken"}
        three.close()


def test_a_file_of_somebody_else_is_passed_over(tmp_path):
    saved = {"schema": 1, "launch": "x", "starts": 1, "revision": 5, "at": 0, "keys": []}
    ledger = tmp_path / "ledger[1]"
    Path(f"{ledger}.{saved_keys._job('r')}.a.json").write_text("{}")
    Path(f"{ledger}.{saved_keys._job('r')}.b.json").write_text(json.dumps(saved))
    Path(f"{ledger}.{saved_keys._job('other')}.c.json").write_text(json.dumps({**saved, "starts": 9}))
    assert saved_keys.newest(str(ledger), "r") == saved_keys.SavedFile("x", 1, 5, 0, ())


@pytest.mark.seam
def test_a_member_is_seen_once_announced(tmp_path):
    """One transaction: a member that was seen, on a host that says it has none, would be taken for lost and be removed."""
    with ExitStack() as stack:
        job = OwnEtcdJob(tmp_path, stack, ["localhost"], Path())
        known = settings.read({}, {})
        attachment = launch.attach(job.endpoint, job.run_id, None, known, os.environ)
        stack.callback(attachment.close)
        access = attachment.await_access(60)
        with EtcdClient(access.endpoints, tls=Tls(access.files.ca, access.files.cert, access.files.key)) as client:
            (seen,) = client.get_prefix(cluster.SEEN).kvs
            told = client.get(cluster.HOSTS + "localhost", revision=seen.mod_revision).kv
            assert told is not None
            assert json.loads(told.value)["member"] is True
            before = client.get(cluster.HOSTS + "localhost", revision=seen.mod_revision - 1).kv
            assert before is None
