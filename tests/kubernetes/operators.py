"""What Kubernetes' Job controller, JobSet and training-operator v1 do about pods that fail: the rules only, no I/O.

Written from KEP-3329 (podFailurePolicy), KEP-3850 (backoffLimitPerIndex), KEP-3998 (successPolicy), JobSet's KEP-262 and the
field documentation of kubeflow.org/v1; `test_operators.py` holds the table. It reads the manifests as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from tests.kubernetes.schemas import Manifest, at

DISRUPTION_TARGET = "DisruptionTarget"
NOT_TERMINATED = 0xBEEF  # what training-operator takes for the exit code of a container that told none
DEFAULT_BACKOFF_LIMIT = 6


@dataclass(frozen=True)
class FailedPod:
    """exit_code: as the container status has it, 128 + N for signal N; None: its node is gone and nobody told."""

    index: int
    exit_code: int | None
    conditions: frozenset[str] = frozenset()


class PodAction(Enum):
    IGNORE, COUNT, FAIL_INDEX, FAIL_JOB = "Ignore", "Count", "FailIndex", "FailJob"


class JobSetAction(Enum):
    FAIL, RESTART, RESTART_FREE = "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"


def pod_action(spec: Manifest, pod: FailedPod) -> PodAction:
    """The action of the first rule of podFailurePolicy that matches; Count without one."""
    policy = cast(Mapping[str, list[Manifest]], spec.get("podFailurePolicy", {}))
    return next((PodAction(rule["action"]) for rule in policy.get("rules", []) if _matches(rule, pod)), PodAction.COUNT)


def _matches(rule: Manifest, pod: FailedPod) -> bool:
    if "onExitCodes" in rule:
        codes = at(rule, "onExitCodes")
        if not pod.exit_code:  # 0 never matches
            return False
        return (pod.exit_code in cast(list[int], codes["values"])) == (codes["operator"] == "In")
    patterns = cast(list[Mapping[str, str]], rule["onPodConditions"])
    return any(each["type"] in pod.conditions and each.get("status", "True") == "True" for each in patterns)


def complete(spec: Manifest, succeeded: frozenset[int]) -> bool:
    """Return whether the Job is done once these indexes have succeeded; what still runs is then deleted."""
    policy = cast(Mapping[str, list[Mapping[str, int]]], spec.get("successPolicy", {}))
    least = [rule["succeededCount"] for rule in policy.get("rules", [])]
    return len(succeeded) >= min([*least, cast(int, spec.get("completions", 1))])


@dataclass
class JobController:
    """One Job: replaces pods until the Job has failed. spec: of the Job."""

    spec: Manifest
    failures: Counter[int] = field(default_factory=Counter)

    def failed(self, pod: FailedPod) -> str | None:
        """Return the reason for which the Job fails; None: the pod is replaced."""
        action = pod_action(self.spec, pod)
        if action is PodAction.IGNORE:
            return None
        if action is PodAction.FAIL_JOB:
            return "PodFailurePolicy"
        self.failures[pod.index] += 1
        per_index = cast("int | None", self.spec.get("backoffLimitPerIndex"))
        if per_index is None:
            limit = cast(int, self.spec.get("backoffLimit", DEFAULT_BACKOFF_LIMIT))
            return "BackoffLimitExceeded" if self.failures.total() > limit else None
        lost = sum(count > per_index for count in self.failures.values()) + (action is PodAction.FAIL_INDEX)
        most = cast(int, self.spec.get("maxFailedIndexes", self.spec.get("completions", 1)))
        return "MaxFailedIndexesExceeded" if lost > most else None


@dataclass
class JobSetController:
    """policy: failurePolicy of a JobSet; None if it has none."""

    policy: Manifest | None
    restarts: int = 0

    def failed(self, reason: str) -> JobSetAction:
        """Return what becomes of the JobSet after a Job of it has failed for this reason."""
        if self.policy is None:
            return JobSetAction.FAIL
        rules = cast(list[Mapping[str, object]], self.policy.get("rules", []))
        actions = (rule["action"] for rule in rules if reason in cast(list[str], rule.get("onJobFailureReasons", [reason])))
        action = JobSetAction(next(actions, JobSetAction.RESTART.value))
        if action is JobSetAction.RESTART:
            if self.restarts >= cast(int, self.policy.get("maxRestarts", 0)):
                return JobSetAction.FAIL
            self.restarts += 1
        return action


def retried_by_training_operator(restart_policy: str, exit_code: int | None) -> bool:
    """Return whether training-operator 1.9 deletes a failed pod and makes a new one; else the job fails."""
    if restart_policy != "ExitCode":
        return restart_policy in ("OnFailure", "Always")
    return (NOT_TERMINATED if exit_code is None else exit_code) >= 128
