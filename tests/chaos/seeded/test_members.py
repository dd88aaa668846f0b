"""What the suite reads from the members of a job's etcd, of a real one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_ext.failures.ledger import JobVerdict, Ledger, encode_ledger
from elastic_ext.failures.policy import Action, Decision
from elastic_ext.rendezvous.keys import JobKeys
from tests.chaos.seeded.members import Ours, ledger
from tests.etcd_client import EtcdClient

LEDGER = Ledger(verdicts=(JobVerdict(Decision(Action.RESTART, "crash", "it was killed", charged=True), 3),))


def inside(host: str) -> list[str]:
    return []


@pytest.mark.full
def test_the_ledger_of_the_job_while_a_member_runs(tmp_path: Path):
    with ExitStack() as stack:
        members = Ours(tmp_path, {"e0": "127.0.0.1"}, ("e0",), inside, stack)
        members.await_ready()
        assert ledger(members, inside, "job") == Ledger()
        with EtcdClient(members.endpoint) as client:
            client.put(JobKeys("job").ledger, encode_ledger(LEDGER))
        assert ledger(members, inside, "job") == LEDGER
        members.kill("e0")
        assert ledger(members, inside, "job") is None
