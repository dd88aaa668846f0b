"""The state of our own pod in Kubernetes, from a file, or from the API server if the pod may ask it.

The downward API has metadata only, no conditions. So either a sidecar or a node agent must maintain the file, or the pod's
service account needs permission to `get` pods. The API server is asked in any case; a refusal is logged at DEBUG, and no more.
"""

from __future__ import annotations

import http.client
import json
import logging
import platform
import queue
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from elastic_ext.base.printable import printable
from elastic_ext.base.tls import trusting
from elastic_ext.failures.evidence import Platform

HOST = "KUBERNETES_SERVICE_HOST"
PORT = "KUBERNETES_SERVICE_PORT"
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
TIMEOUT_S = 1.0
MAX_BYTES = 4 << 20

logger = logging.getLogger(__name__)

Pod: TypeAlias = Mapping[str, Any]  # as the API writes it


def platform_of(pod: Pod | None) -> Platform:
    """Return why the pod ends. pod: a pod or its status; None if it could not be read."""
    if pod is None:
        return Platform("kubernetes")
    status, metadata = _mapping(pod.get("status", pod)), _mapping(pod.get("metadata"))
    target = next((c for c in _mappings(status.get("conditions")) if c.get("type") == "DisruptionTarget"), {})
    disrupted = target.get("status") == "True"
    reasons = (
        target.get("reason") if disrupted else None,
        status.get("reason"),  # "Evicted", "NodeLost"
        # Not lastState, which is about the previous container, whose agent is gone.
        *(_mapping(_mapping(c.get("state")).get("terminated")).get("reason") for c in _mappings(status.get("containerStatuses"))),
        "Deleted" if metadata.get("deletionTimestamp") else None,
    )
    # "Completed" comes from a sidecar that has done its work.
    reason = next((reason for reason in reasons if isinstance(reason, str) and reason not in ("", "Completed")), "")
    return Platform("kubernetes", reason, disrupted)


def deletion_grace_s(pod: Pod | None, now: float) -> float | None:
    """Return the seconds until a pod that is being deleted is killed; None if it is not, or if that is unknown.

    `deletionGracePeriodSeconds` begins with the request to delete, and a preStop hook uses some of it before SIGTERM comes.
    `deletionTimestamp` is the end of that period by the clock of the API server, another machine, so it only shortens the time.

    Args:
        now: the Unix time of this host.
    """
    metadata = _mapping(_mapping(pod).get("metadata"))
    seconds, end = metadata.get("deletionGracePeriodSeconds"), _unix_time(metadata.get("deletionTimestamp"))
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or seconds <= 0:
        return None
    return end - now if end is not None and 0 < end - now < seconds else float(seconds)


def _unix_time(text: object) -> float | None:
    """Return the Unix time of e.g. "2026-11-21T20:57:24Z", as Kubernetes writes it; None for anything else."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        return None


def get_pod(environ: Mapping[str, str], account: str = SERVICE_ACCOUNT, timeout_s: float = TIMEOUT_S) -> Pod | None:
    """Return our own pod from the API server; None without permission or an answer in time.

    The pod's name comes from the variable POD_NAME, else it is the host name.

    Args:
        account: the directory with the token, the CA and the namespace.
        timeout_s: seconds for the whole call.
    """
    answers: queue.Queue[Pod | None] = queue.Queue()
    # In a thread, because a server may send one byte per second, and a name lookup has no deadline.
    threading.Thread(target=lambda: answers.put(_get(environ, Path(account), timeout_s)), daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _get(environ: Mapping[str, str], account: Path, timeout_s: float) -> Pod | None:
    try:
        token = (account / "token").read_text().strip()
        namespace = (account / "namespace").read_text().strip()
        name = environ.get("POD_NAME") or platform.node()
        context = trusting(str(account / "ca.crt"))
        connection = http.client.HTTPSConnection(environ[HOST], int(environ.get(PORT, "443")), timeout=timeout_s, context=context)
        try:
            path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept": "application/json"})
            answer = connection.getresponse()
            if answer.status == http.client.OK:
                return _object(answer.read(MAX_BYTES + 1))
            logger.debug("the API server does not show the pod %s: %s %s", name, answer.status, printable(answer.reason))
            return None
        finally:
            connection.close()
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return None


def _object(data: bytes) -> Pod | None:
    try:
        found = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _mapping(value: object) -> Pod:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Pod]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
