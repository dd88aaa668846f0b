"""Reads the status of a job from the page of one of its agents, which may ask for TLS, a certificate or a password."""

from __future__ import annotations

import base64
import getpass
import http.client
import queue
import ssl
import sys
import threading
import urllib.error
import urllib.request

from elastic_ext.base import files, records
from elastic_ext.base.errors import UsageError
from elastic_ext.base.records import MAX_BYTES
from elastic_ext.observe import job_document
from elastic_ext.observe.job_document import Document

TIMEOUT_S = 5.0  # for one answer, from the name's resolution to the last byte
MAX_PASSWORD_FILE = 4096  # bytes


class _SamePage(urllib.request.HTTPRedirectHandler):
    """Follows nobody: a password is for this agent only."""

    def redirect_request(self, *args: object) -> None:
        return None


class AgentUrl:
    """One agent."""

    def __init__(self, url: str, ca: str | None, cert: str | None, user: str | None, password_file: str | None) -> None:
        """ca: file of an authority. cert: file of a certificate and its key. Raises UsageError."""
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url: expected a URL such as http://localhost:9401, got {url}")
        if user is not None and not url.startswith("https://"):
            raise UsageError("--user needs https://, else anyone on the way can read the password")
        self._url, self._headers = url.rstrip("/"), {}
        try:
            context = ssl.create_default_context(cafile=ca)
            if cert is not None:
                context.load_cert_chain(cert)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise UsageError(f"{cert or ca}: expected PEM: {error}") from error
        if user is not None:
            login = base64.b64encode(f"{user}:{_password(user, password_file)}".encode()).decode()
            self._headers["Authorization"] = f"Basic {login}"
        # No proxy: an agent's port is inside the cluster, and a proxy would see the password.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _SamePage
        )

    def read(self) -> Document:
        """Return the document now. Raises UsageError: no whole answer within TIMEOUT_S; RecordError: it is of another version.

        Another thread asks: a time limit of a connection is for each of its reads, and an agent may send byte by byte.
        """
        answers: queue.SimpleQueue[bytes | UsageError] = queue.SimpleQueue()
        threading.Thread(target=self._ask, args=(answers,), name="elastic_ext-ask", daemon=True).start()
        try:
            answer = answers.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise UsageError(f"the agent at {self._url}: no whole answer within {TIMEOUT_S:g} s") from None
        if isinstance(answer, UsageError):
            raise answer
        return records.read(Document, answer, self._url, job_document.SCHEMA)

    def _ask(self, answers: queue.SimpleQueue[bytes | UsageError]) -> None:
        try:
            answers.put(self._fetch())
        except UsageError as error:
            answers.put(error)

    def _fetch(self) -> bytes:
        """Return what the agent answers. Raises UsageError."""
        try:
            request = urllib.request.Request(f"{self._url}/job.json", headers=self._headers)
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                text: bytes = answer.read(MAX_BYTES + 1)
                return text
        except urllib.error.HTTPError as error:
            hint = {401: ": --user NAME", 404: ": is this an agent of elastic_ext, with metrics on?"}.get(error.code, "")
            raise UsageError(f"the agent at {self._url}: HTTP {error.code} {error.reason}{hint}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UsageError(f"the agent at {self._url}: {reason}") from error


def _password(user: str, file: str | None) -> str:
    if file is not None:
        try:
            return files.read_text(file, MAX_PASSWORD_FILE).partition("\n")[0]
        except (OSError, ValueError) as error:
            raise UsageError(f"--password-file: {error}") from error
    if not sys.stdin.isatty():
        raise UsageError(f"the password of {user}: expected --password-file, or a terminal to ask on")
    return getpass.getpass(f"password of {user}: ")
