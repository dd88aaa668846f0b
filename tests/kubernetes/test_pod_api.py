"""Agents that ask for their own pod: a server as the API server is, recorded pods, the account where a pod has it, and moods."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.etcd_server import Certificates
from tests.jobs import AGENT, Finished, Job

# From `kubectl get pod -o json` of a drained pod, shortened.
EVICTED = {
    "kind": "Pod",
    "metadata": {
        "name": "train-0-x7k2p",
        "deletionGracePeriodSeconds": 120,
        "deletionTimestamp": "2026-11-23T07:21:04Z",
        "labels": {"batch.kubernetes.io/job-name": "train"},
    },
    "spec": {"nodeName": "ip-10-0-4-210", "terminationGracePeriodSeconds": 120},
    "status": {
        "phase": "Running",
        "conditions": [
            {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "EvictionByEvictionAPI",
                "message": "Eviction API: evicting",
                "lastTransitionTime": "2026-11-23T07:19:04Z",
            },
            {"type": "Ready", "status": "True"},
        ],
        "containerStatuses": [{"name": "node", "state": {"running": {"startedAt": "2026-11-23T06:00:00Z"}}, "restartCount": 0}],
    },
}
RUNNING = {**EVICTED, "metadata": {"name": "train-0-x7k2p"}, "status": {**EVICTED["status"], "conditions": []}}  # type: ignore[dict-item]
TOKEN = "the-token"


@dataclass
class ApiServer:
    """certificates: its own, and a CA that has not signed them. released: what a hanging answer waits for."""

    certificates: Certificates
    pod: dict[str, object] = field(default_factory=lambda: dict(EVICTED))
    status: int = 200
    released: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append((self.path, str(self.headers["Authorization"])))
                outer.released.wait()
                allowed = self.headers["Authorization"] == f"Bearer {TOKEN}"
                self.send_response(outer.status if allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps(outer.pod).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificates.path("server.crt"), self.certificates.path("server.key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


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


def run_pod(tmp_path: Path, api: ApiServer, script: str, ca: str = "ca.crt") -> tuple[Finished, dict[str, object]]:
    """Run a job of one worker, a shell script, in a pod whose account trusts this CA; return its end and its verdict."""
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(TOKEN + "\n")
    (account / "namespace").write_text("team-a")
    (account / "ca.crt").write_text(Path(api.certificates.path(ca)).read_text())
    verdict = tmp_path / "verdict.json"
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", IN_POD.strip(), account, *AGENT]
    options = ["--max-restarts=0", "--no-python", "sh", "-c", script]
    environ = {
        **{"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port), "POD_NAME": "train-0-x7k2p"},
        **{"ELASTIC_EXT_VERDICT_FILE": str(verdict)},
    }
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
@pytest.mark.parametrize("mood", ["well", "forbidden", "wrong-ca", "hangs"])
def test_without_an_answer_the_worker_decides(tmp_path, api, mood):
    """A server that hangs answers only when the job is long over."""
    api.pod = dict(RUNNING) if mood == "well" else api.pod
    api.status = 403 if mood == "forbidden" else 200
    if mood == "hangs":
        api.released.clear()
    done, _ = run_pod(tmp_path, api, "exit 65", ca="other-ca.crt" if mood == "wrong-ca" else "ca.crt")
    assert done.returncode == 65, done.err
    assert bool(api.asked) is (mood != "wrong-ca"), "the token is for the right server only"
