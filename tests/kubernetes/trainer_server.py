"""The status server of Kubeflow Trainer, as far as a client can tell: HTTPS with a CA of its own, a bearer token, checked bodies.

The controller itself is a Go program that needs a Kubernetes API server; this keeps to the checks that its types make
(pkg/apis/trainer/v1alpha1/trainjob_types.go and pkg/statusserver/server.go of v2.3.0).
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import struct
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.etcd_server import Certificates

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/night/status"
RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")


def wrong(body: bytes) -> str:
    """Why the API server would refuse this body; "" if it would not."""
    status = json.loads(body).get("trainerStatus")
    if not isinstance(status, dict):
        return "no trainerStatus"
    for key, most in (("progressPercentage", 100), ("estimatedRemainingSeconds", (1 << 31) - 1)):
        value = status.get(key, 0)
        if type(value) is not int or not 0 <= value <= most:
            return f"{key}: {value!r}"
    metrics = status.get("metrics", [])
    if len(metrics) > 256:
        return f"{len(metrics)} metrics"
    for each in metrics:
        if each.keys() != {"name", "value"} or not all(isinstance(text, str) and 1 <= len(text) <= 64 for text in each.values()):
            return f"metric {each!r}"
    if not RFC3339.fullmatch(status.get("lastUpdatedTime", "")):
        return f"lastUpdatedTime: {status.get('lastUpdatedTime')!r}"
    return (
        "unknown fields"
        if status.keys() - {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
        else ""
    )


@dataclass(frozen=True)
class Post:
    """One request. token: None without an Authorization of a bearer. wrong: see `wrong`."""

    path: str
    token: str | None
    agent: str
    status: dict[str, Any]
    wrong: str

    @property
    def percentage(self) -> int | None:
        return self.status.get("progressPercentage")

    @property
    def remaining_s(self) -> int | None:
        return self.status.get("estimatedRemainingSeconds")

    @property
    def metrics(self) -> dict[str, str]:
        return {each["name"]: each["value"] for each in self.status.get("metrics", [])}


class TrainerServer:
    """Keeps what it was sent and answers `answers`, the last of them again and again.

    An answer is a status code, "hang" (until the test closes the server), "drip" (a byte now and then, for ever), "reset", or the
    URL to redirect to.
    """

    def __init__(self, certificates: Certificates) -> None:
        self.certificates = certificates
        self.answers: list[int | str] = [200]
        self.posts: list[Post] = []
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.left = threading.Semaphore(0)  # counts clients that have hung up on "hang"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.path("server.crt"), certificates.path("server.key"))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.trainer = self  # type: ignore[attr-defined]
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.server_address[1]}{PATH}"

    def environ(self, token: Path) -> dict[str, str]:
        names = {"URL": self.url, "CA_CERT": self.certificates.path("ca.crt"), "TOKEN": str(token)}
        return {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in names.items()}

    def next_answer(self, post: Post) -> int | str:
        with self.changed:
            self.posts.append(post)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            self.changed.notify_all()
        return answer

    def wait(self, enough: Any, timeout_s: float = 120) -> list[Post]:
        """Wait until enough(posts); return all posts. enough: or a number of them."""
        test = enough if callable(enough) else lambda posts: len(posts) >= enough
        with self.changed:
            assert self.changed.wait_for(lambda: test(self.posts), timeout_s), self.posts
            return list(self.posts)

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        trainer: TrainerServer = self.server.trainer  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        status = json.loads(body).get("trainerStatus", {})
        post = Post(self.path, token if scheme == "Bearer" else None, self.headers["User-Agent"], status, wrong(body))
        answer = trainer.next_answer(post)
        if answer == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        elif answer == "hang":
            self.connection.settimeout(0.05)
            while not trainer.closing.is_set():
                try:
                    if not self.connection.recv(1):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
            trainer.left.release()
        elif answer == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            try:
                while not trainer.closing.wait(0.05):
                    self.wfile.write(b"x")
            except OSError:
                trainer.left.release()
        elif isinstance(answer, str):
            self.send_response(307)
            self.send_header("Location", answer)
            self.end_headers()
        else:
            kind = {"kind": "Status", "message": f"sorry, {answer}", "code": answer}
            reply = body if answer == 200 else json.dumps(kind).encode()
            self.send_response(answer)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

    def log_message(self, *args: object) -> None:
        pass
