"""The thread behind the job's status."""

from __future__ import annotations

import json
from collections import Counter

from elastic_ext.agent.metrics import AccountedMetrics
from elastic_ext.agent.observation import CHANGES_PER_S, SETTLE_S, JobView, settle_s
from tests.until import LIMIT_S


class Broken:
    """A rendezvous with a bug in its status."""

    round, host, node_id = 1, "n0", "a"

    def get_run_id(self) -> str:
        return "job"

    def get_backend(self) -> str:
        return "ext_etcd"

    def show(self, report: str, last: bool) -> None:
        pass

    def status(self) -> None:
        raise ValueError("a bug")


def test_a_thread_that_has_failed_is_said_on_the_page():
    view = JobView(Broken(), AccountedMetrics(version="1", torch="2", run_id="job", progress=list))
    try:
        view.document()
        view._thread.join(LIMIT_S)
        view._answer = None
        assert "has failed" in json.loads(view.document())["fault"]
    finally:
        view.close(0.0)


def test_nodes_whose_state_changes_at_once_tell_of_it_one_after_the_other():
    ids = [f"node{number}-77-ab" for number in range(512)]
    spread = [settle_s(id_, 512) for id_ in ids]
    assert spread == [settle_s(id_, 512) for id_ in ids]
    assert SETTLE_S <= min(spread) < max(spread) <= SETTLE_S + 5.12
    assert max(Counter(map(int, spread)).values()) < 1.5 * CHANGES_PER_S
    assert settle_s("a", 2) < SETTLE_S + 0.02
