"""The table of what operators do, and what comes of our exit codes under the rules of the manifests."""

from __future__ import annotations

import pytest

from elastic_ext.base.errors import EX_CODE, EX_CONFIG, EX_FAILED, EX_NODE, EX_TRY_AGAIN, EX_USER
from elastic_ext.failures import policy
from tests.jobs import ROOT
from tests.kubernetes.operators import (
    DISRUPTION_TARGET,
    FailedPod,
    JobController,
    JobSetAction,
    JobSetController,
    PodAction,
    complete,
    pod_action,
    retried_by_training_operator,
)
from tests.kubernetes.schemas import Manifest, at, documents

KUBERNETES = ROOT / "entrypoints" / "kubernetes"
DISRUPTED = frozenset({DISRUPTION_TARGET})


def in_job_order(*rules: Manifest) -> Manifest:
    return {"podFailurePolicy": {"rules": list(rules)}}


def on_codes(action: str, operator: str, *codes: int) -> Manifest:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(codes)}}


def on_disruption(action: str) -> Manifest:
    return {"action": action, "onPodConditions": [{"type": DISRUPTION_TARGET, "status": "True"}]}


@pytest.mark.parametrize(
    ("spec", "code", "conditions", "action"),
    [
        ({}, 65, frozenset(), PodAction.COUNT),  # no policy
        (in_job_order(on_codes("FailJob", "In", 65)), 65, frozenset(), PodAction.FAIL_JOB),
        (in_job_order(on_codes("FailJob", "In", 65)), 75, frozenset(), PodAction.COUNT),  # no rule matches
        (in_job_order(on_codes("FailJob", "NotIn", 75)), 65, frozenset(), PodAction.FAIL_JOB),
        (in_job_order(on_codes("FailJob", "NotIn", 75)), None, frozenset(), PodAction.COUNT),  # nobody told a code
        (in_job_order(on_disruption("Ignore"), on_codes("FailJob", "In", 1)), 1, DISRUPTED, PodAction.IGNORE),  # the first wins
        (in_job_order(on_codes("FailJob", "In", 1), on_disruption("Ignore")), 1, DISRUPTED, PodAction.FAIL_JOB),
        (in_job_order(on_disruption("Ignore")), 143, frozenset({"Ready"}), PodAction.COUNT),
    ],
)
def test_rules_for_pods(spec, code, conditions, action):
    assert pod_action(spec, FailedPod(0, code, conditions)) is action


def test_backoff_limits():
    whole = JobController({})
    assert [whole.failed(FailedPod(index, 75)) for index in range(7)] == [*[None] * 6, "BackoffLimitExceeded"]
    each = JobController({"backoffLimitPerIndex": 1, "maxFailedIndexes": 0})
    assert [each.failed(FailedPod(index, 75)) for index in (0, 1, 2, 1)] == [None, None, None, "MaxFailedIndexesExceeded"]
    some = JobController({"backoffLimitPerIndex": 0, "maxFailedIndexes": 1})
    assert [some.failed(FailedPod(index, 75)) for index in (0, 1)] == [None, "MaxFailedIndexesExceeded"]


def test_success():
    assert [complete({"completions": 2}, frozenset(range(count))) for count in range(3)] == [False, False, True]
    enough = {"completions": 4, "successPolicy": {"rules": [{"succeededCount": 3}]}}
    assert [complete(enough, frozenset(range(count))) for count in range(5)] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("failure_policy", "reasons", "actions"),
    [
        (None, ["BackoffLimitExceeded"], [JobSetAction.FAIL]),
        ({"maxRestarts": 1}, ["PodFailurePolicy", "PodFailurePolicy"], [JobSetAction.RESTART, JobSetAction.FAIL]),
        (
            {"maxRestarts": 1, "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
            ["DeadlineExceeded", "PodFailurePolicy"],
            [JobSetAction.RESTART, JobSetAction.FAIL],
        ),
        (
            {"maxRestarts": 0, "rules": [{"action": "RestartJobSetAndIgnoreMaxRestarts"}]},
            ["BackoffLimitExceeded", "BackoffLimitExceeded"],
            [JobSetAction.RESTART_FREE, JobSetAction.RESTART_FREE],
        ),
    ],
)
def test_rules_for_jobs(failure_policy, reasons, actions):
    controller = JobSetController(failure_policy)
    assert [controller.failed(reason) for reason in reasons] == actions


@pytest.mark.parametrize(
    ("restart_policy", "code", "retried"),
    [
        *(("ExitCode", code, False) for code in (1, 2, 65, 127)),
        *(("ExitCode", code, True) for code in (128, 137, 143, 197, 203, None)),
        ("OnFailure", 65, True),
        ("Never", 203, False),
    ],
)
def test_training_operator(restart_policy, code, retried):
    assert retried_by_training_operator(restart_policy, code) is retried


# Ours

NO_MORE = {EX_FAILED, EX_CODE, EX_CONFIG, EX_USER}
AGAIN = {EX_NODE, EX_TRY_AGAIN}


def specs() -> dict[str, tuple[Manifest, Manifest | None]]:
    """Of each Job in the manifests, with the failurePolicy of its JobSet."""
    found = {}
    for name in ("trainer/runtime-2.1.yaml", "trainer/runtime-2.2.yaml", "plain/jobset.yaml", "plain/job.yaml"):
        manifest = documents(KUBERNETES / name)[-1]
        keys = {"ClusterTrainingRuntime": ("spec", "template", "spec"), "JobSet": ("spec",), "Job": ()}[str(manifest["kind"])]
        jobset = at(manifest, *keys)
        job = at(jobset, "replicatedJobs", 0, "template") if keys else manifest
        found[name] = (at(job, "spec"), at(jobset, "failurePolicy") if keys else None)
    return found


def test_all_manifests_have_the_same_rules():
    policies = [spec["podFailurePolicy"] for spec, _ in specs().values()]
    assert all(each == policies[0] for each in policies)
    failures = [failure for _, failure in specs().values() if failure is not None]
    assert len(failures) == 3
    assert all(each == failures[0] for each in failures)


@pytest.mark.parametrize("name", specs())
@pytest.mark.parametrize("code", sorted(NO_MORE | AGAIN))
def test_each_exit_code(name, code):
    spec, failure_policy = specs()[name]
    reason = JobController(spec).failed(FailedPod(0, code))
    assert (reason == "PodFailurePolicy") is (code in NO_MORE)
    if reason is not None and failure_policy is not None:
        assert JobSetController(failure_policy).failed(reason) is JobSetAction.FAIL


def test_enough_finished_pods_complete_a_job():
    """There is one pod more, which may be waiting, or have come too late."""
    spec, _ = specs()["plain/job.yaml"]
    (rule,) = spec["successPolicy"]["rules"]
    enough = rule["succeededCount"]
    assert f"--nnodes={enough}" in spec["template"]["spec"]["containers"][0]["args"]
    assert enough < spec["completions"]
    assert [complete(spec, frozenset(range(count))) for count in (enough - 1, enough)] == [False, True]
    assert "successPolicy" not in specs()["plain/jobset.yaml"][0], "it would end a pod that still copies a checkpoint"


def test_one_incident_is_one_failure_per_pod():
    """All pods leave with 75 at once, ten times; the eleventh starts the whole JobSet again."""
    spec, failure_policy = specs()["trainer/runtime-2.2.yaml"]
    controller = JobController(spec)
    for _ in range(10):
        assert [controller.failed(FailedPod(index, EX_TRY_AGAIN)) for index in range(64)] == [None] * 64
    reason = controller.failed(FailedPod(0, EX_TRY_AGAIN))
    assert reason == "MaxFailedIndexesExceeded"
    assert JobSetController(failure_policy).failed(reason) is JobSetAction.RESTART


def test_a_disrupted_pod_costs_nothing_whatever_it_says():
    spec, _ = specs()["plain/job.yaml"]
    controller = JobController(spec)
    for code in (None, *range(1, 256)):
        assert controller.failed(FailedPod(0, code, DISRUPTED)) is None
    assert not controller.failures


def test_the_preset_for_training_operator():
    codes = {code: policy.exit_code_for(code, "kubeflow") for code in NO_MORE | AGAIN}
    assert {code for code, theirs in codes.items() if retried_by_training_operator("ExitCode", theirs)} == AGAIN
    jobs = [each for path in (KUBERNETES / "training-operator").glob("*.yaml") for each in documents(path)]
    for job in jobs:
        assert "exit_codes=kubeflow" in str(job) or "'exit_codes', 'value': 'kubeflow'" in str(job)
        replicas = at(job, "spec", "pytorchReplicaSpecs")
        assert {at(replicas, name)["restartPolicy"] for name in replicas} == {"ExitCode"}
