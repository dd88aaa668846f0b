"""The rules act: real agents in namespaces, replaced as the manifests' rules say. See `pods`: no API server is there."""

from __future__ import annotations

import pytest

from tests.jobs import ROOT
from tests.kubernetes.operators import complete
from tests.kubernetes.pods import Pods, name_of, pods
from tests.kubernetes.schemas import at, documents
from tests.rendezvous.test_etcd_jobs import seen

pytestmark = pytest.mark.full

JOBSET, *_ = documents(ROOT / "entrypoints" / "kubernetes" / "plain" / "jobset.yaml")
PLAIN = at(documents(ROOT / "entrypoints" / "kubernetes" / "plain" / "job.yaml")[1], "spec")
SPEC = at(JOBSET, "spec", "replicatedJobs", 0, "template", "spec")
HOSTS = ",".join(map(name_of, range(3)))
# As the manifests have it: etcd by `job:`, on the first three pods.
ETCD = ("--rdzv-backend=ext_etcd", f"--rdzv-endpoint=job:{HOSTS}", "--nnodes=3")
SECRET = {"ELASTIC_EXT_JOB_SECRET": "a secret of the job, from a Secret"}


def trains(kube: Pods, world: int, attempt: int) -> None:
    kube.wait_for(seen(world, attempt))


def finish(kube: Pods) -> None:
    kube.gate.open()
    assert kube.reconcile(ends=len(kube.running)) is None
    assert sorted(kube.ended) == list(range(kube.count)), kube.codes


def test_evicted_lost_and_killed_pods_are_replaced(tmp_path):
    """The first pod, with the first member of etcd, is preempted, twice. Then a node is lost, and a container runs out of memory.
    Each time the others wait for the new pod, which has another address under the old name; nothing is charged for an eviction.
    """
    with pods(tmp_path, SPEC, 3, 4, (*ETCD, "--max-restarts=3"), SECRET) as kube:
        kube.start_all()
        trains(kube, 3, 0)
        for attempt, strike in enumerate((kube.evict, kube.evict, kube.lose_node, kube.out_of_memory), 1):
            before = dict(kube.addresses)
            victim = 0 if strike == kube.evict else attempt - 2
            strike(victim)
            assert kube.reconcile() is None
            assert kube.addresses[victim] != before[victim]
            trains(kube, 3, attempt)
        assert kube.codes[:2] == [(0, 75), (0, 75)]
        assert [code for _, code in kube.codes[2:]] == [137, 137]
        assert dict(kube.controller.failures) == {2: 1}, "the rest was free"
        finish(kube)


def test_a_late_pod_needs_no_etcd_to_finish(tmp_path):
    """The node of the first pod is lost, and the new pod takes long to start. Meanwhile a spare steps in and the job succeeds."""
    with pods(tmp_path, PLAIN, 3, 2, (*ETCD, "--rdzv-conf=join_timeout=90"), SECRET) as kube:
        kube.start_all()
        trains(kube, 3, 0)
        kube.start_on_new_host(3)
        kube.lose_node_for_long(0)
        trains(kube, 3, 1)
        kube.gate.open()
        assert kube.reconcile(ends=3) is None
        assert complete(PLAIN, frozenset(kube.ended)), kube.codes
        kube.start_on_new_host(0)  # as without the successPolicy
        assert kube.running[0].agent.finish().returncode == 75


def test_the_first_pod_takes_the_store_with_it(tmp_path):
    """ext_c10d at the static address: the new first pod, with a new address under the old name, hosts an empty store. The other
    one puts back into it what it knows of the job, and both go on; nothing is charged for the lost node.
    """
    options = ("--rdzv-backend=ext_c10d", "--nnodes=2", "--max-restarts=0")
    first = {"PET_MASTER_ADDR": name_of(0), "PET_MASTER_PORT": "29500"}
    with pods(tmp_path, SPEC, 2, 1, options, first) as kube:
        kube.start_all()
        trains(kube, 2, 0)
        kube.out_of_memory(0)
        assert kube.reconcile() is None
        trains(kube, 2, 1)
        assert kube.codes == [(0, 137)]
        finish(kube)
