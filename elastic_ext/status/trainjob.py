"""The status of a Kubeflow TrainJob, in the format in which Kubeflow Trainer takes it. Pure functions only.

The format is that of Kubeflow Trainer 2.2.0, unchanged in 2.3.0 (an alpha feature, behind the feature gate TrainJobStatus):
UpdateTrainJobStatusRequest, TrainerStatus and Metric in
https://github.com/kubeflow/trainer/blob/v2.3.0/pkg/apis/trainer/v1alpha1/trainjob_types.go, described in
https://github.com/kubeflow/trainer/blob/v2.3.0/proposals/2779-trainjob-progress/README.md (KEP-2779).

A post replaces the whole status: what it leaves out is unknown from then on. So every post holds all that is known, and only one
process of a job should post.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

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
    shown = *((name, str(value)) for name, value in metrics.items()), *itertools.islice(fitting.items(), MAX_GAUGES)
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
