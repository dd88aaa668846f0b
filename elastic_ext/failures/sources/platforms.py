"""The platform that runs this node's agent, and why it ends the agent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from elastic_ext.failures.evidence import Platform
from elastic_ext.failures.sources import kubernetes, slurm


def detect(environ: Mapping[str, str], pod_file: str | None = None, pod_api: bool = False) -> Platform:
    """Ask the platform why this process ends. Takes up to 2 s if the platform hangs.

    Slurm comes first: with Slinky, Slurm's nodes are pods, but Slurm ends the job.

    Args:
        pod_file: file with the pod or its status as JSON, maintained by another program.
        pod_api: ask the API server if there is no such file.

    Returns:
        A Platform, without a name if the platform is unknown.
    """
    if slurm.job_id(environ):
        return slurm.query(environ)
    if kubernetes.HOST in environ or pod_file:
        return kubernetes.platform_of(_pod(environ, pod_file, pod_api))
    return Platform()


def deletion_grace_s(environ: Mapping[str, str], pod_file: str | None = None, pod_api: bool = False) -> float | None:
    """Return the seconds until Kubernetes kills our pod while deleting it; None if unknown. Arguments as for `detect`."""
    return kubernetes.deletion_grace_s(_pod(environ, pod_file, pod_api), time.time())


def _pod(environ: Mapping[str, str], pod_file: str | None, pod_api: bool) -> dict[str, Any] | None:
    pod = kubernetes.read_pod(pod_file) if pod_file else None
    return kubernetes.get_pod(environ) if pod is None and pod_api else pod
