"""The object store of a run: moto's S3 API server on a host of its own, which errs and throttles when told to.

    object_store.py ADDRESS      the server, started by ObjectStore

Lines on its stdin, one JSON object each, say how ill it is (the fields of Ill). On stdout it says its port, then the path of each
object that a request has put whole, and an empty line once it is as ill as it was told to be.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SECRETS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
BUCKET = "chaos"
HEARS_S = 60
ANSWERS = {
    "InternalError": "500 Internal Server Error",
    "ServiceUnavailable": "503 Service Unavailable",
    "SlowDown": "503 Slow Down",
}


@dataclass(frozen=True)
class Ill:
    """errors: share of requests that get 500 or 503. a_second: requests that are let through; all others get SlowDown.

    path: only requests for objects with this in their path are treated so.
    """

    errors: float = 0.0
    a_second: float | None = None
    path: str = ""


WELL = Ill()


class ObjectStore:
    """`put`: called from a thread of its own with the path of each new object. `environ`: what a client needs."""

    def __init__(self, inside: Sequence[str], address: str, log: Path, put: Callable[[str], None], stack: ExitStack) -> None:
        command = [*inside, sys.executable, str(Path(__file__)), address]
        with log.open("wb") as errors:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        stack.callback(self._end)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        assert port, f"moto's server did not start, see {log}"
        self.pid = self._process.pid
        self.url = f"s3://{BUCKET}/checkpoints"
        self.environ = {**SECRETS, "AWS_ENDPOINT_URL": f"http://{address}:{port}"}
        self._put = put
        self._heard = threading.Semaphore(0)
        threading.Thread(target=self._read, daemon=True).start()

    def be(self, ill: Ill) -> None:
        """Return once it is so."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(ill)), file=self._process.stdin, flush=True)
        assert self._heard.acquire(timeout=HEARS_S), f"the store has not heard of {ill} within {HEARS_S} s"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if path := line.strip():
                self._put(path)
            else:
                self._heard.release()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


# The server.

Start = Callable[..., Any]


class Server:
    """A WSGI application: moto's, or the answer of a store that is ill in its place."""

    def __init__(self, application: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> None:
        self._application = application
        self._ill = WELL
        self._lock = threading.Lock()
        self._next = 0.0  # when another request may pass

    def be(self, ill: Ill) -> None:
        self._ill = ill

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if self._ill.path in environ["PATH_INFO"] and (code := self._refusal()):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(ANSWERS[code], [("Content-Type", "application/xml")])
            if environ["REQUEST_METHOD"] == "HEAD":
                return []
            return [f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>seeded</Message></Error>".encode()]
        answered = []

        def started(status: str, *more: Any) -> Any:
            answered.append(status)
            return start(status, *more)

        body = self._application(environ, started)
        if (
            environ["REQUEST_METHOD"] == "PUT"
            and environ["PATH_INFO"].count("/") > 1
            and answered
            and answered[0].startswith("2")
        ):
            print(environ["PATH_INFO"] + "\n", end="", flush=True)  # in one piece: other threads print, too
        return body

    def _refusal(self) -> str:
        """The code of the error; "": none."""
        ill = self._ill
        if ill.a_second is not None:
            with self._lock:
                now = time.monotonic()
                if now < self._next:
                    return "SlowDown"
                self._next = now + 1 / ill.a_second
        return random.choice(("InternalError", "ServiceUnavailable")) if random.random() < ill.errors else ""


def serve(address: str) -> None:
    from http.client import HTTPConnection

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server(address, 0, server, threaded=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    connection = HTTPConnection(address, listening.server_port)
    connection.request("PUT", f"/{BUCKET}", headers={"Host": f"{address}:{listening.server_port}"})
    assert connection.getresponse().status == 200
    print(listening.server_port, flush=True)
    for line in sys.stdin:
        server.be(Ill(**json.loads(line)))
        print(flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
