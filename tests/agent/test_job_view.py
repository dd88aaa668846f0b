"""The thread behind the job's status."""

from __future__ import annotations

import json

from elastic_ext.agent.goodput import AccountedMetrics
from elastic_ext.agent.job_view import JobView


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
        view._thread.join(10.0)
        view._answer = None
        assert "has failed" in json.loads(view.document())["fault"]
    finally:
        view.close(0.0)
