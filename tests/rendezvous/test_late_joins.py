"""A host that joins a running job again and again, and restarts everybody each time, is refused in the end."""

from __future__ import annotations

import logging

import pytest

from elastic_ext.rendezvous.keys import JobKeys
from elastic_ext.rendezvous.rounds import MAX_JOINS, JoinAnswer, after_join, is_late
from tests.etcd_client import EtcdClient
from tests.etcd_server import EtcdServer
from tests.rendezvous.test_etcd_jobs import CONF, Nodes


@pytest.mark.parametrize("joins", [2, 3, 99])
def test_a_name_of_several_machines_is_not_refused(joins: int) -> None:
    """It may be the other one that comes and goes."""
    decided = after_join(joins, 2, ambiguous=True)
    assert (decided.answer, decided.level) == (JoinAnswer.NOTHING, logging.WARNING)
    assert ("several machines of the job have its name" in decided.line(7)) is (joins > 2)


NEW = "this host was not in the round before: it has joined the running job"
REFUSED = "this host may not come back for 7 s: it has joined the running job"


@pytest.mark.parametrize(
    ("joins", "limit", "answer", "level", "line"),
    [
        (1, 20, JoinAnswer.NOTHING, logging.INFO, f"{NEW} once within 60 minutes"),
        (20, 20, JoinAnswer.NOTHING, logging.WARNING, f"{NEW} 20 times"),
        (21, 20, JoinAnswer.REFUSE, logging.WARNING, f"once it has left, {REFUSED} 21 times"),
        (22, 20, JoinAnswer.LEAVE, logging.WARNING, f"{REFUSED} 22 times within 60 minutes"),
        (1, 0, JoinAnswer.REFUSE, logging.WARNING, f"once it has left, {REFUSED} once"),
        (2, 0, JoinAnswer.LEAVE, logging.WARNING, f"{REFUSED} 2 times"),
    ],
)
def test_what_follows_from_a_join(joins: int, limit: int, answer: JoinAnswer, level: int, line: str) -> None:
    decided = after_join(joins, limit)
    assert (decided.answer, decided.level) == (answer, level)
    assert decided.line(refused_s=7).startswith(line)


@pytest.mark.parametrize(("round_", "last", "late"), [(1, 0, False), (2, 1, False), (2, 0, True), (5, 3, True), (6, 5, False)])
def test_a_node_absent_last_round_is_late(round_: int, last: int, late: bool) -> None:
    assert is_late(round_, last) is late


KEYS = JobKeys("job")


@pytest.mark.full
def test_a_host_that_rejoins_often_is_refused(nodes: Nodes, server: EtcdServer) -> None:
    """That its next agent ends with 69 is the same for each reason: test_etcd_failures."""
    with EtcdClient(server.endpoint) as client:
        for number in range(MAX_JOINS):  # those of the last hour
            client.put(KEYS.join("late", 1000 + number), "")
    conf = CONF
    steady = nodes.start("steady", server.endpoint, "1:2", conf=f"{conf},node_name=steady")
    steady.wait_for('"world": 1')
    late = nodes.start("late", server.endpoint, "1:2", conf=f"{conf},node_name=late")
    late.wait_for("once it has left, this host may not come back .* joined the running job 21 times within 60 minutes")
    with EtcdClient(server.endpoint) as client:
        assert [client.get(KEYS.refusal(name)).kv is not None for name in ("late", "steady")] == [True, False]
    nodes.wait_for('"world": 2')
    nodes.finish()
