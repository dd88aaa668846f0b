"""What runs this node's agent, and what it says about the agent's end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from elastic_ext.failures.evidence import Platform
from elastic_ext.failures.sources import kubernetes, slurm


def detect(environ: Mapping[str, str], pod_file: str | None = None, pod_api: bool = False) -> Platform:
    """Ask the platform that this process runs on; one without a name where there is none that we know. Takes up to 2 s where
    it hangs.

    Slurm first: under Slinky its nodes are pods, and the job's end is Slurm's to tell.

    Args:
        pod_file: JSON of the pod or of its status, kept up to date by somebody else.
        pod_api: ask the API server, if there is no such file.
    """
    if slurm.job_id(environ):
        return slurm.ask(environ)
    if kubernetes.HOST in environ or pod_file:
        return kubernetes.platform_of(_pod(environ, pod_file, pod_api))
    return Platform()


def deletion_grace_s(environ: Mapping[str, str], pod_file: str | None = None, pod_api: bool = False) -> float | None:
    """Seconds until Kubernetes, which deletes our pod, kills it; None: not known. As `detect`."""
    return kubernetes.deletion_grace_s(_pod(environ, pod_file, pod_api), time.time())


def _pod(environ: Mapping[str, str], pod_file: str | None, pod_api: bool) -> dict[str, Any] | None:
    pod = kubernetes.read_pod(pod_file) if pod_file else None
    return kubernetes.get_pod(environ) if pod is None and pod_api else pod
