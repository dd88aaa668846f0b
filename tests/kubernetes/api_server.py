"""A server as the API server is, with one recorded pod, and the account that a pod has for it."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path

from tests.etcd_server import Certificates

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
TOKEN = "the-token"


@dataclass
class ApiServer:
    """certificates: its own, and a CA that has not signed them. released: what a hanging answer waits for."""

    certificates: Certificates
    body: bytes = json.dumps(EVICTED).encode()
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
                self.wfile.write(outer.body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificates.path("server.crt"), self.certificates.path("server.key"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the pod."""
        port = str(self._server.server_address[1])
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port, "POD_NAME": "train-0-x7k2p"}

    def account(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "token").write_text(TOKEN + "\n")
        (folder / "namespace").write_text("team-a")
        (folder / "ca.crt").write_text(Path(self.certificates.path("ca.crt")).read_text())
        return folder

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
