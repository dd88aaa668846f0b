"""Agents that ask for their own pod: a server as the API server is, recorded pods, the account where a pod has it, and moods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_server import Certificates
from tests.jobs import AGENT, Finished, Job
from tests.kubernetes.api_server import TOKEN, ApiServer


@pytest.fixture
def api(certificates: Certificates) -> Iterator[ApiServer]:
    server = ApiServer(certificates)
    yield server
    server.close()


# In a mount namespace of its own, the account lies where Kubernetes mounts it.
IN_POD = """
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io &&
cp -r "$0" /run/secrets/kubernetes.io/serviceaccount && exec "$@"
"""


def run_pod(tmp_path: Path, api: ApiServer, script: str) -> tuple[Finished, dict[str, object]]:
    """Run a job of one worker, a shell script, in a pod; return its end and its verdict."""
    account, verdict = api.account(tmp_path / "account"), tmp_path / "verdict.json"
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", IN_POD.strip(), account, *AGENT]
    options = ["--max-restarts=0", "--no-python", "sh", "-c", script]
    environ = {**api.environ, "ELASTIC_EXT_VERDICT_FILE": str(verdict)}
    with Job([*map(str, command), *options], tmp_path, **environ) as job:
        done = job.finish()
    return done, json.loads(verdict.read_text())


@pytest.mark.full
def test_a_disruption_that_the_server_knows_of_decides(tmp_path, api):
    """The worker's exit code says nothing; the pod's condition says that the platform is taking the pod away."""
    done, verdict = run_pod(tmp_path, api, "exit 9")
    assert api.asked[0] == ("/api/v1/namespaces/team-a/pods/train-0-x7k2p", f"Bearer {TOKEN}")
    assert done.returncode == 75, done.err
    assert verdict["decision"]["rule"] == "platform-preempted"


@pytest.mark.full
@pytest.mark.parametrize("mood", ["forbidden", "hangs"])
def test_without_an_answer_the_worker_decides(tmp_path, api, mood):
    """Nothing is said of it: most accounts may not ask. A server that hangs answers only when the job is long over."""
    api.status = 403 if mood == "forbidden" else 200
    if mood == "hangs":
        api.released.clear()
    done, _ = run_pod(tmp_path, api, "exit 65")
    assert done.returncode == 65, done.err
    assert api.asked
    assert "API server" not in done.err
