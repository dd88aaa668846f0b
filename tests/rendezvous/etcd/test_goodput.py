"""The goodput of a job in etcd: one record per host, to which its agents add."""

from __future__ import annotations

import threading

from elastic_ext.base.goodput import PRODUCTIVE, Spent, seconds_of
from elastic_ext.etcd import EtcdClient
from elastic_ext.rendezvous.etcd.goodput import EtcdGoodput
from elastic_ext.rendezvous.etcd.keys import JobKeys
from elastic_ext.rendezvous.etcd.verdict import LEDGER_TTL_S
from tests.etcd_server import EtcdServer

SECOND = Spent(seconds_of({PRODUCTIVE: 1.0}))
KEYS = JobKeys("job")


def test_agents_of_one_host_and_of_another_add_up(server: EtcdServer) -> None:
    with EtcdClient(server.endpoint) as client:

        def add(host: str) -> None:
            mine = EtcdGoodput(client, KEYS, host)
            for _ in range(10):
                mine.share(SECOND)

        threads = [threading.Thread(target=add, args=(host,)) for host in ("a", "a", "b")]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        shared = EtcdGoodput(client, KEYS, "a").share(Spent())
        assert shared.hosts == 2
        assert shared.spent.by_state[PRODUCTIVE] == 30
        (one, other) = client.get_prefix(KEYS.goodput).kvs
        assert one.lease_id != other.lease_id
        left_s = client.lease_keep_alive([one.lease_id]).ttl_s[one.lease_id]
        assert left_s == LEDGER_TTL_S


def test_a_lease_that_expired_and_rubbish_in_the_key(server: EtcdServer) -> None:
    with EtcdClient(server.endpoint) as client:
        mine = EtcdGoodput(client, KEYS, "a")
        mine.share(SECOND)
        (kv,) = client.get_prefix(KEYS.goodput).kvs
        client.lease_revoke(kv.lease_id)
        assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 1
        from elastic_ext.etcd import Put

        client.txn([], [Put(KEYS.goodput + "a", "rubbish")])
        assert mine.share(SECOND).spent.by_state[PRODUCTIVE] == 1
