#!/usr/bin/env python3
"""Run a command, and post the status of its job to Kubeflow Trainer: trainjob_status.py torchrun ...

For Trainer 2.2 and 2.3 with the feature gate TrainJobStatus; the format is that of KEP-2779:
https://github.com/kubeflow/trainer/blob/v2.3.0/proposals/2779-trainjob-progress/README.md. A post replaces the whole status, so
one pod of the job posts: that of index 0, from what any agent's /job.json says of the whole job. The command does not get the
address, so that Hugging Face's Trainer does not post too. Standard library only.
"""

import http.client
import json
import math
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

URL, CA_FILE, TOKEN_FILE = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
POLL_S = 5.0  # between two looks at the job; a change is posted at once, and Kubeflow's guide asks for 5 s between posts
EVERY_S = 30.0  # between two posts if nothing changes, also if they fail
REQUEST_S = 5.0  # for each step of a request, and for the last post once the command has ended
MAX_BYTES = 16 << 20  # of an answer; a job of 1000 nodes has some 250 KB
INT32_MAX, MAX_TEXT = (1 << 31) - 1, 64  # a greater number or a longer text has the whole post refused
Job = dict[str, Any]  # as JSON has it
FAILURES = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError)  # of a request, and of a document
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def since(last: Job | None, new: Job) -> Job | None:
    """Return a new document of /job.json, with what it lacks: between two rounds the last step and gauges still count.

    None before the first step: until then the script may not have reported the number of steps.
    """
    if last is None:
        return new if new["job"]["step"] else None
    kept = {name: last["job"][name] for name in ("step", "total_steps") if new["job"][name] is None}
    return {**new, "job": {**new["job"], **kept}, "gauges": new["gauges"] or last["gauges"]}


def status_of(document: Job, now: float, done: bool) -> Job:
    """Return the body of a post; what is unknown is left out. document: of /job.json. now: Unix time. done: it has ended well."""
    job = document["job"]
    step, total, rate = job["step"], job["total_steps"], job["steps_per_s"]
    trains = job["state"] == "running" and rate and total is not None and step <= total
    left_s = 0 if done else math.ceil(min((total - step) / rate, 2.0**40)) if trains else None
    known = {"current_step": step, "total_steps": total, "step_seconds": f"{1 / rate:.6g}" if rate else None}
    metrics = {**known, "restarts": max(0, job["round"] - 1)}  # named as by Hugging Face's callback
    shown = [*((name, str(value)) for name, value in metrics.items() if value is not None)]
    shown += [(each["name"], each["value"]) for each in document["gauges"] if each["name"] not in metrics]
    status = {
        "progressPercentage": 100 if done else min(99, 100 * step // total) if total else None,
        "estimatedRemainingSeconds": left_s if left_s is not None and left_s <= INT32_MAX else None,
        "metrics": [{"name": name, "value": value} for name, value in shown if 0 < len(name) <= MAX_TEXT],
        "lastUpdatedTime": datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {"trainerStatus": {name: value for name, value in status.items() if value is not None}}


def exchange(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, **headers: str) -> bytes:
    """Return the body of a good answer. Raises OSError, HTTPException."""
    try:
        connection.request(method, path, body, {"User-Agent": "elastic_ext", **headers})
        answer = connection.getresponse()
        text = answer.read(MAX_BYTES)
    finally:
        connection.close()
    if answer.status != http.client.OK:  # a redirect is refused, too: it would get the token
        raise OSError(f"answered {answer.status}, expected 200: {text[:200].decode('ascii', 'replace')!r}")
    return text


def post(environ: Mapping[str, str], status: Job) -> None:
    """Post the status. Raises OSError, HTTPException, ValueError, which never show the token."""
    url, ca = urlsplit(environ[URL]), environ.get(CA_FILE)
    if url.scheme != "https" or not url.hostname:
        raise ValueError(f"{URL} is not an https URL; expected one, because the token goes there")
    with open(environ[TOKEN_FILE], "rb") as file:  # each time, as the file changes; so does the CA's
        token = file.read().strip()
    if not token or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ValueError(f"{environ[TOKEN_FILE]} does not hold a token, expected one word of ASCII characters")
    context = ssl.create_default_context(cafile=ca or None)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # from Python 3.13 on it refuses CAs as clusters make them
    connection = http.client.HTTPSConnection(url.hostname, url.port or 443, timeout=REQUEST_S, context=context)
    headers = {"Authorization": f"Bearer {token.decode()}", "Content-Type": "application/json", "Connection": "close"}
    try:
        exchange(connection, "POST", url.path + (f"?{url.query}" if url.query else ""), json.dumps(status).encode(), **headers)
    except OSError as error:
        raise OSError(str(error).replace(token.decode(), "***")) from None


def job_of(environ: Mapping[str, str]) -> Job:
    """Return the document of this pod's agent. Raises OSError, HTTPException, ValueError."""
    port = int(environ.get("ELASTIC_EXT_METRICS_PORT", "9401"))
    found: Job = json.loads(exchange(http.client.HTTPConnection("localhost", port, REQUEST_S), "GET", "/job.json", None))
    return found


def say(text: str) -> None:
    print(f"trainjob_status: {text}", file=sys.stderr, flush=True)


class Poster:
    """Looks at the job every `poll_s` seconds, and posts what is due, until `end`. read, send: may raise what FAILURES names."""

    def __init__(self, read: Callable[[], Job], send: Callable[[Job], None], poll_s: float, every_s: float) -> None:
        self._read, self._send, self._poll_s, self._every_s = read, send, poll_s, every_s
        self._ended, self._done, self._said = threading.Event(), False, set[str]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self, done: bool, wait_s: float = REQUEST_S) -> None:
        """Post the end, and wait for that, `wait_s` seconds at most. done: it has ended well."""
        self._done = done
        self._ended.set()
        self._thread.join(wait_s)

    def _run(self) -> None:
        job: Job | None = None  # the last document of /job.json with a step
        posted_at, posted = -math.inf, ("", 0)  # when, and state and round
        while not self._ended.wait(self._poll_s):
            with suppress(*FAILURES):  # the agent is not there yet, or no more
                job = since(job, self._read())
            if job is None:
                continue
            now, state = time.monotonic(), (job["job"]["state"], job["job"]["round"])
            if state != posted or now - posted_at >= self._every_s:
                posted_at, posted = now, state
                self._post(job)
        if job is not None:
            self._post({**job, "job": {**job["job"], "state": "ended"}})
        else:
            say("posted nothing: the agent's /job.json never showed a step (is metrics_port=off, or given elsewhere?)")

    def _post(self, job: Job) -> None:
        try:
            self._send(status_of(job, time.time(), self._done))
        except FAILURES as error:
            if (text := f"{type(error).__name__}: {error}") not in self._said:
                self._said.add(text)
                say(f"the status was not posted: {text}; training goes on, and later posts are tried")


def run(command: list[str], poll_s: float = POLL_S, every_s: float = EVERY_S) -> int:
    """Run the command, pass on signals, and return its exit code; as a shell, 128 and the signal that killed it."""
    environ = {**os.environ}
    inner = {name: value for name, value in environ.items() if name != URL}
    if not environ.get(URL) or environ.get("JOB_COMPLETION_INDEX", "0") != "0":
        os.execvpe(command[0], command, inner)
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        received.append(number) if child is None else child.send_signal(number)

    for each in SIGNALS:
        signal.signal(each, forward)
    child = subprocess.Popen(command, env=inner)
    for number in received:
        child.send_signal(number)
    poster = Poster(lambda: job_of(environ), lambda status: post(environ, status), poll_s, every_s)
    while (ended := os.wait())[0] != child.pid:  # the first process of a container gets all orphans, too
        pass
    code = os.waitstatus_to_exitcode(ended[1])
    poster.end(done=code == 0)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("trainjob_status.py: expected a command to run, such as torchrun")
    sys.exit(run(sys.argv[1:]))
