"""The goodput of a job in etcd: one record per host, to which its agents add, and their sum."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elastic_ext.base import goodput
from elastic_ext.base.goodput import PRODUCTIVE, Shared, Spent, seconds_of
from elastic_ext.etcd import Delete, Put
from elastic_ext.rendezvous.handler import AgentPosition, EtcdGoodput, OtherJob
from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.leader import LEDGER_TTL_S
from elastic_ext.rendezvous.round_records import Header, encode
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer

pytestmark = pytest.mark.seam

SECOND = Spent(seconds_of({PRODUCTIVE: 1.0}), reached=7)
KEYS = JobKeys("job")


@pytest.fixture
def client(server: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(server.endpoint) as client:
        begin_job(client, "first")
        yield client


def begin_job(client: EtcdClient, name: str) -> None:
    client.txn([], [Put(KEYS.header, encode(Header(round=1, job=name)))])


def agent(client: EtcdClient, host: str, rank: int = 0, job: str = "first", round_: int = 1) -> EtcdGoodput:
    return EtcdGoodput(client, KEYS, host, lambda: AgentPosition(job, rank, round_))


def productive(client: EtcdClient) -> dict[str, float]:
    found = {kv.key.decode()[len(KEYS.goodput) :]: goodput.decode(kv.value, "") for kv in client.get_prefix(KEYS.goodput).kvs}
    return {host: record.spent.by_state[PRODUCTIVE] for host, record in found.items()}


def test_agents_of_all_hosts_add_up(client):
    def add(host: str) -> None:
        mine = agent(client, host)
        for _ in range(10):
            mine.share(SECOND)

    threads = [threading.Thread(target=add, args=(host,)) for host in ("a", "a", "b")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    shared = agent(client, "a").share(Spent())
    assert shared.hosts == 2
    assert shared.spent.by_state[PRODUCTIVE] == 30
    (one, other) = client.get_prefix(KEYS.goodput).kvs
    assert one.lease_id != other.lease_id
    left_s = client.lease_keep_alive([one.lease_id]).ttl_s[one.lease_id]
    assert left_s == LEDGER_TTL_S


def test_rank_0_adds_up_and_others_read(client):
    zero, one = agent(client, "a"), agent(client, "b", rank=1)
    assert one.share(SECOND) == Shared(SECOND, 1)  # nobody has added up yet
    assert zero.share(SECOND).spent.by_state[PRODUCTIVE] == 2
    shared = one.share(SECOND)
    assert (shared.spent.by_state[PRODUCTIVE], shared.hosts, shared.spent.reached) == (2, 2, 7)
    assert zero.share(Spent()).spent.by_state[PRODUCTIVE] == 3


def test_a_new_host_learns_the_jobs_progress(client):
    agent(client, "a").share(SECOND)
    assert agent(client, "new", rank=5).share(Spent()).spent.reached == 7
    agent(client, "b", rank=1).share(Spent(reached=9))  # rank 0, which adds up, is lost meanwhile
    assert agent(client, "replaces", rank=5, round_=2).share(Spent()).spent.reached == 9


def test_an_expired_lease_and_rubbish_in_keys(client, caplog):
    """That of another host is logged once."""
    mine = agent(client, "a")
    mine.share(SECOND)
    (kv,) = client.get_prefix(KEYS.goodput).kvs
    client.lease_revoke(kv.lease_id)
    assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 1
    client.txn([], [Put(KEYS.goodput + "a", "rubbish"), Put(KEYS.goodput + "b", "rubbish"), Put(KEYS.goodput_sum, "rubbish")])
    assert agent(client, "c", rank=1).share(SECOND).spent.by_state[PRODUCTIVE] == 1
    caplog.clear()
    assert [mine.share(SECOND).spent.by_state[PRODUCTIVE] for _ in range(3)] == [2, 3, 4]  # of a and c
    assert sum(f"{KEYS.goodput}b" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("same_host", [True, False])
def test_a_late_agent_spares_the_next_job(client, same_host):
    late = agent(client, "a")
    late.share(SECOND)
    client.txn([], [*(Delete(each, prefix=True) for each in KEYS.outliving), Delete(KEYS.header)])
    with pytest.raises(OtherJob, match="no job runs"):
        late.share(SECOND)
    begin_job(client, "next")
    if same_host:
        agent(client, "a", job="next").share(SECOND)
    with pytest.raises(OtherJob, match="job next runs"):
        late.share(SECOND)
    assert productive(client) == ({"a": 1} if same_host else {})
    assert agent(client, "b", rank=1, job="next").share(Spent()).spent.by_state[PRODUCTIVE] == same_host


def test_a_job_that_changes_hands_during_the_write(client, monkeypatch):
    """Between the look at the header and the write."""
    late, txn = agent(client, "a"), EtcdClient.txn

    def and_then(self, compares, *ops, **more):
        done = txn(self, compares, *ops, **more)
        if not compares:  # the look
            monkeypatch.setattr(EtcdClient, "txn", txn)
            begin_job(client, "next")
        return done

    monkeypatch.setattr(EtcdClient, "txn", and_then)
    with pytest.raises(OtherJob):
        late.share(SECOND)
    assert productive(client) == {}
