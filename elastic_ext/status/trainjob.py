"""The status of a Kubeflow TrainJob: its body, in the format in which Kubeflow Trainer takes it, and the thread that posts it.

The format is that of Kubeflow Trainer 2.2.0, unchanged in 2.3.0 (an alpha feature, behind the feature gate TrainJobStatus):
UpdateTrainJobStatusRequest, TrainerStatus and Metric in
https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/apis/trainer/v1alpha1/trainjob_types.go, described in
https://github.com/kubeflow/trainer/blob/v2.3.0/proposals/2779-trainjob-progress/README.md (KEP-2779).

A post replaces the whole status: what it leaves out is unknown from then on. So every post holds all that is known, and only one
process of a job should post.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from urllib.parse import urlsplit

from elastic_ext.base import threads
from elastic_ext.base.printable import printable
from elastic_ext.base.tls import trusting

logger = logging.getLogger(__name__)

INT32_MAX = (1 << 31) - 1  # of estimatedRemainingSeconds; a greater number has the whole post refused
MAX_TEXT = 64  # characters of a metric's name and value; a longer one has the whole post refused
MAX_GAUGES = 32  # of the script; the format takes 256 metrics, and the status lives in the cluster's etcd
NOT_DONE = 99  # the highest percentage of a job that has not ended well


class TrainJobState(Enum):
    TRAINING = "training"
    STOPPED = "stopped"  # between two rounds, or for good after a failure: for an unknown time
    DONE = "done"


@dataclass(frozen=True)
class Training:
    step: int  # optimizer steps done since the beginning of the job
    total: int | None  # of the whole job; None: unknown
    step_s: float | None  # seconds per step in this round; None: unknown
    restarts: int  # how often the workers of the job were started again


def body_of(training: Training, state: TrainJobState, now: float, gauges: Mapping[str, float]) -> bytes:
    """Return the body of a post: JSON. What is unknown is left out.

    now: Unix time in seconds. gauges: what the script shows of itself, by name, e.g. its loss. The first MAX_GAUGES are posted.

    The percentage stays below 100 until the job has ended well. So it does with Hugging Face's callback, whose names of metrics
    these are. The time that is left does not count restarts that are still to come.
    """
    total = {"total_steps": training.total} if training.total is not None else {}
    step_s = {"step_seconds": f"{training.step_s:.6g}"} if training.step_s is not None else {}
    metrics = {"current_step": training.step, **total, **step_s, "restarts": training.restarts}
    fitting = {name: f"{value:.6g}" for name, value in gauges.items() if name not in metrics and len(name) <= MAX_TEXT}
    shown = *((name, str(value)) for name, value in metrics.items()), *list(fitting.items())[:MAX_GAUGES]
    known = {"progressPercentage": _percentage(training, state), "estimatedRemainingSeconds": _remaining_s(training, state)}
    status = {
        **{name: value for name, value in known.items() if value is not None},
        "metrics": [{"name": name, "value": value} for name, value in shown],
        "lastUpdatedTime": datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return json.dumps({"trainerStatus": status}).encode()


def _percentage(training: Training, state: TrainJobState) -> int | None:
    if state is TrainJobState.DONE:
        return 100
    if training.total is None:
        return None
    return min(NOT_DONE, 100 * training.step // training.total)


def _remaining_s(training: Training, state: TrainJobState) -> int | None:
    if state is TrainJobState.DONE:
        return 0
    left = training.total - training.step if training.total is not None else -1
    if state is TrainJobState.STOPPED or training.step_s is None or left < 0:  # beyond its own total: that was wrong
        return None
    seconds = left * training.step_s
    return math.ceil(seconds) if seconds <= INT32_MAX else None


# Posts. The controller gives pods the address in three variables (URL, CA file, token file) and may rotate both files at any
# time, so each post reads them again. It answers 200 or an error with a Kubernetes Status as its body.
# https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/statusserver/server.go
#
# With http.client, because one request in half a minute needs no library, and because it follows neither a redirect, to which it
# would show the token, nor a proxy's variable.

URL, CA_FILE, TOKEN_FILE = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
REQUEST_S = 5.0  # one request, from the connection to the answer; Hugging Face's callback waits as long
GAP_S = 5.0  # between two posts; Kubeflow's guide asks clients for as much
LONGEST_S = 600.0  # between two posts while they fail
MAX_ANSWER = 1 << 16
MAX_TOKEN = 1 << 14  # bytes; the server takes headers of 1 MiB
MAX_MESSAGE = 200  # characters of the server's reason in our log


@dataclass(frozen=True)
class Target:
    """Where the status goes. ca_file: "" for the CAs of this host."""

    host: str
    port: int
    path: str
    token_file: str
    ca_file: str


class PostFailed(Exception):
    """A post failed. kind: for one warning per kind."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def target_of(environ: Mapping[str, str]) -> Target | None:
    """Return where Kubeflow Trainer wants the status; None if it does not, or if the variables are wrong, with a warning."""
    url = environ.get(URL, "")
    if not url:
        return None
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 443
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme != "https" or not host:
        logger.warning("no TrainJob status: %s is not an https URL; expected one, because the token goes there", URL)
        return None
    if not environ.get(TOKEN_FILE):
        logger.warning("no TrainJob status: %s is set, but %s is not; expected the path of the token", URL, TOKEN_FILE)
        return None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(host, port, path, environ[TOKEN_FILE], environ.get(CA_FILE, ""))


def next_post_s(interval_s: float, failures: int) -> float:
    """Return the seconds until the next post. failures: how many in a row have failed by now."""
    return interval_s if not failures else max(interval_s, min(interval_s * 2.0 ** min(failures, 30), LONGEST_S))


class Poster:
    """Posts the status every `interval_s` seconds, and when it has changed, until `close`.

    A change waits until GAP_S (or the interval, if that is shorter) after the last post, or until the next try if posts fail.

    body: called on the thread of the poster; returns what to post now, None: nothing.
    """

    def __init__(self, target: Target, interval_s: float, body: Callable[[], bytes | None]) -> None:
        self._target, self._interval_s, self._body = target, interval_s, body
        self._news = threading.Condition()
        self._changed = self._closed = False
        self._ended = threading.Event()
        self._request = _Request()
        self._warned: set[str] = set()
        self._failures = 0
        text = "no TrainJob status: cannot start its thread: %s"
        if threads.started(self._run, "elastic_ext-trainjob", logger.warning, text) is None:
            self._ended.set()

    def changed(self) -> None:
        """Post soon. Returns at once."""
        with self._news:
            self._changed = True
            self._news.notify()

    def end(self) -> None:
        """Post a change that is not posted yet, now, and nothing more. Returns at once."""
        with self._news:
            self._closed = True
            self._news.notify()

    def close(self, wait_s: float) -> None:
        """The same, and wait for it; give up after `wait_s` seconds."""
        self.end()
        if not self._ended.wait(wait_s):
            logger.info("the last TrainJob status was not posted within %.1f s", wait_s)
            self._request.abort()

    def _run(self) -> None:
        try:
            while self._await_turn():
                self._post()
        except Exception:  # this thread is the only one that would notice
            logger.warning("no TrainJob status from now on", exc_info=True)
        finally:
            self._ended.set()

    def _await_turn(self) -> bool:
        """Wait until it is time to post; return False if there is nothing left to post."""
        now = time.monotonic()
        regular = now + next_post_s(self._interval_s, self._failures)
        early = regular if self._failures else now + min(GAP_S, self._interval_s)
        with self._news:
            while not self._closed:
                left_s = (early if self._changed else regular) - time.monotonic()
                if left_s <= 0:
                    break
                self._news.wait(left_s)
            post = self._changed or not self._closed
            self._changed = False
            return post

    def _post(self) -> None:
        body = self._body()
        if body is None:
            return
        try:
            self._request.send(self._target, body)
        except PostFailed as failed:
            if self._request.aborted:
                return
            self._failures += 1
            new = failed.kind not in self._warned
            self._warned.add(failed.kind)
            level = logging.WARNING if new else logging.DEBUG
            logger.log(level, "TrainJob status not posted: %s; training goes on, and later posts are tried", failed)
        else:
            if self._failures:
                logger.info("TrainJob status posted again after %s failures", self._failures)
            self._failures = 0


class _Request:
    """One request at a time, which another thread may abort."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._late = False
        self.aborted = False

    def abort(self) -> None:
        """Make the request that is under way fail, and those to come."""
        with self._lock:
            self.aborted = True
            self._cut()

    def send(self, target: Target, body: bytes) -> None:
        """Post `body`. Raises PostFailed."""
        token = _token(target.token_file)
        try:
            with self._connected(target) as connection:
                headers = {
                    "Authorization": f"Bearer {token}",
                    "Content-Type": "application/json",
                    "Connection": "close",
                    "User-Agent": "elastic_ext",
                }
                connection.request("POST", target.path, body, headers)
                answer = connection.getresponse()
                text = answer.read(MAX_ANSWER)
                if self._late:  # http.client takes headers that were cut for all headers
                    raise TimeoutError
        except ssl.SSLCertVerificationError as error:
            raise PostFailed(
                "certificate", f"{target.host} is not who {target.ca_file or 'a CA'} says: {error.verify_message}"
            ) from error
        except (OSError, ValueError, RuntimeError, http.client.HTTPException) as error:
            late = self._late or isinstance(error, TimeoutError)
            why = f"no answer within {REQUEST_S:g} s" if late else _text(error, token)
            raise PostFailed("late" if late else type(error).__name__, f"{target.host}:{target.port}: {why}") from error
        if not http.client.OK <= answer.status < http.client.MULTIPLE_CHOICES:
            what = f"{target.host}:{target.port} answers {answer.status}, expected 200: {_reason(text).replace(token, '***')}"
            raise PostFailed(f"status {answer.status}", what)

    @contextmanager
    def _connected(self, target: Target) -> Iterator[http.client.HTTPConnection]:
        """Connect with TLS. All that happens in this context takes REQUEST_S at most, but for the look-up of the name."""
        context = trusting(target.ca_file)
        with socket.create_connection((target.host, target.port), REQUEST_S) as plain:
            with self._lock:
                self._socket, self._late = plain, False
                if self.aborted:
                    raise ConnectionAbortedError("given up")
            # Timeouts of sockets are for each call, and a server may send one byte per second.
            timer = threading.Timer(REQUEST_S, self._give_up)
            timer.daemon = True
            timer.start()
            try:
                with context.wrap_socket(plain, server_hostname=target.host, do_handshake_on_connect=False) as tls:
                    with self._lock:
                        self._socket = tls
                    tls.do_handshake()
                    connection = http.client.HTTPConnection(target.host, target.port)
                    connection.sock = tls
                    yield connection
            finally:
                timer.cancel()
                with self._lock:
                    self._socket = None

    def _give_up(self) -> None:
        with self._lock:
            self._late = True
            self._cut()

    def _cut(self) -> None:
        """End the connection for the thread that waits for it. The caller holds the lock."""
        if self._socket is not None:
            with suppress(OSError):  # it is over
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # not that of SSLSocket: the other thread uses its state


def _token(path: str) -> str:
    """Return the token in a file. Raises PostFailed, without the token."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_TOKEN + 1).strip()
    except OSError as error:
        raise PostFailed("token", f"cannot read the token in {path}: {error.strerror}") from None
    # http.client shows a header that it refuses in its error.
    if not data or len(data) > MAX_TOKEN or not all(0x21 <= byte <= 0x7E for byte in data):
        raise PostFailed("token", f"{path} does not hold a token, expected one word of ASCII characters")
    return data.decode("ascii")


def _text(error: Exception, token: str) -> str:
    return printable(f"{type(error).__name__}: {error}").replace(token, "***")[:MAX_MESSAGE]


def _reason(answer: bytes) -> str:
    """Return the message of a Kubernetes Status."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return "no reason given"
    message = found.get("message") if isinstance(found, dict) else None
    return printable(message)[:MAX_MESSAGE] if isinstance(message, str) else "no reason given"
