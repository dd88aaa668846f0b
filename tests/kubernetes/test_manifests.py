"""Each manifest of entrypoints/kubernetes, field by field, against the schemas that the projects publish."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.jobs import ROOT
from tests.kubernetes import schemas
from tests.kubernetes.schemas import Manifest, at, documents

KUBERNETES = ROOT / "entrypoints" / "kubernetes"
OPERATORS = ("trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2")
INSTALL = "python3 -m tarfile -e /opt/elastic-ext/elastic_ext.tar.xz /tmp/wheels && pip install /tmp/wheels/*.whl || exit 75"
CHAOS = "chaos-mesh.org/v1alpha1"
# Which version of Kubeflow Trainer a file is for.
OLD = ("t5-large.yaml", "t5-large-etcd.yaml", "runtime-2.1.yaml", "jobset.yaml")
NEW = ("t5-large-2.2.yaml", "runtime-2.2.yaml", "jobset.yaml")


def files() -> list[Path]:
    return [path for path in sorted(KUBERNETES.rglob("*.yaml")) if path.name != "max-restarts.yaml"]


def manifests() -> list[Manifest]:
    return [manifest for path in files() for manifest in documents(path)]


def core() -> list[Manifest]:
    return [each for each in manifests() if each["apiVersion"] not in (*OPERATORS, CHAOS, "kubeflow.org/v1")]


def of_operators(names: tuple[str, ...]) -> list[Manifest]:
    return [each for path in files() if path.name in names for each in documents(path)]


def job_templates() -> list[Manifest]:
    """Of JobSets and runtimes."""
    found = []
    for each in manifests():
        keys = {"JobSet": ("spec",), "ClusterTrainingRuntime": ("spec", "template", "spec")}.get(str(each["kind"]))
        if keys:
            found += [at(job, "template") for job in at(each, *keys)["replicatedJobs"]]  # type: ignore[attr-defined]
    return found


def test_each_file_is_for_some_schema():
    """None is left out of the tests below because nobody thought of it."""
    seen = {str(each["apiVersion"]) for each in manifests()}
    assert {*OPERATORS, CHAOS, "kubeflow.org/v1", "v1", "batch/v1", "apps/v1"} < seen
    names = {path.name for path in files() if {each["apiVersion"] for each in documents(path)} & set(OPERATORS)}
    assert names == {*OLD, *NEW}


@pytest.mark.seam
def test_core_kinds():
    assert [wrong for each in core() for wrong in schemas.wrong_core(each)] == []


@pytest.mark.seam
@pytest.mark.parametrize(("names", "old"), [(OLD, True), (NEW, False)], ids=["trainer-2.1", "trainer-2.3"])
def test_trainer_and_jobset(names, old):
    assert schemas.wrong_trainer(of_operators(names), old) == []


@pytest.mark.full
def test_each_version_of_trainer_needs_its_own_files():
    """So the file for one is no file for the other."""
    (patches,) = of_operators(("t5-large-2.2.yaml",))
    assert any("runtimePatches" in wrong for wrong in schemas.wrong_trainer([patches], old=True))
    for name in ("t5-large-etcd.yaml", "runtime-2.1.yaml"):
        assert schemas.wrong_trainer(of_operators((name,)), old=False)


def test_the_jobs_and_pods_inside():
    """The operators' models know no ranges and no sets of values; those of Kubernetes do."""
    templates = job_templates()
    assert len(templates) == 3
    assert [wrong for each in templates for wrong in schemas.wrong_job(each)] == []


@pytest.mark.seam
def test_training_operator():
    """Its package opens a socket when it is imported."""
    jobs = [each for each in manifests() if each["apiVersion"] == "kubeflow.org/v1"]
    assert len(jobs) == 3
    assert [wrong for each in jobs for wrong in schemas.wrong_training_operator(each)] == []


def mappings(value: object) -> Iterator[dict[str, object]]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from mappings(each)
    elif isinstance(value, list):
        for each in value:
            yield from mappings(each)


FREE = ("labels", "annotations", "nodeSelector", "matchLabels", "selector", "limits", "requests", "data", "stringData")


def with_strange_fields(manifest: Manifest) -> Iterator[Manifest]:
    """Copies of it, each with an unknown field in another mapping, where not all names are good."""
    free = [id(value) for each in mappings(manifest) for key, value in each.items() if key in FREE]
    places = [index for index, each in enumerate(mappings(manifest)) if id(each) not in free]
    for index in places:
        changed = copy.deepcopy(manifest)
        list(mappings(changed))[index]["strange"] = "field"
        yield changed


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain/job.yaml", "base/etcd.yaml", "training-operator/workers-only.yaml"])
def test_a_strange_field_is_found_wherever_it_is(name):
    for manifest in documents(KUBERNETES / name):
        check: Callable[[Manifest], list[str]] = (
            schemas.wrong_training_operator if manifest["kind"] == "PyTorchJob" else schemas.wrong_core
        )
        missed = [each for each in with_strange_fields(manifest) if not check(each)]
        assert missed == []


@pytest.mark.full
def test_a_strange_trainer_field_is_found_anywhere():
    for name, old in (("t5-large.yaml", True), ("runtime-2.2.yaml", False)):
        (manifest,) = of_operators((name,))
        strange = list(with_strange_fields(manifest))
        wrong = schemas.wrong_trainer(strange, old)
        assert sum("strange" in each for each in wrong) == len(strange) > 10, wrong


def seed() -> Manifest:
    """The TrainJob that the first file takes over, in the form in which Kubernetes gets it."""
    (path,) = (ROOT / "tests" / "data").glob("t5_large_stock.yaml")
    (manifest,) = documents(path)
    return manifest


def test_the_first_job_differs_only_by_backend():
    (ours,) = documents(KUBERNETES / "trainer" / "t5-large.yaml")
    stock = seed()
    script = at(ours, "spec", "trainer")["command"][2]  # type: ignore[index]
    stock_script = at(stock, "spec", "trainer")["command"][2]  # type: ignore[index]
    assert lines(stock_script) - lines(script) == {"--rdzv_backend=c10d \\"}
    assert lines(script) - lines(stock_script) == {INSTALL}
    at(ours, "spec", "trainer")["command"][2] = stock_script  # type: ignore[index]
    assert sorted(re.sub(": None came back as.*", "", each) for each in schemas.differences(stock, ours, "")) == [
        ".spec.podTemplateOverrides.0.spec.containers.0.volumeMounts: "
        "[{'mountPath': '/dev/shm', 'name': 'dshm'}] came back as "
        "[{'mountPath': '/dev/shm', 'name': 'dshm'}, {'mountPath': '/opt/elastic-ext', 'name': 'elastic-ext'}]",
        ".spec.podTemplateOverrides.0.spec.volumes: "
        "[{'name': 'dshm', 'emptyDir': {'medium': 'Memory', 'sizeLimit': '64Gi'}}] came back as "
        "[{'name': 'dshm', 'emptyDir': {'medium': 'Memory', 'sizeLimit': '64Gi'}}, "
        "{'name': 'elastic-ext', 'configMap': {'name': 'elastic-ext'}}]",
        ".spec.trainer.env",
    ]
    assert at(ours, "spec", "trainer")["env"] == [{"name": "PET_RDZV_BACKEND", "value": "ext_c10d"}]


def lines(script: object) -> set[str]:
    return {line.strip() for line in str(script).splitlines()}


def test_trainer_jobs_ask_for_the_same_machines():
    """The other two files are the same job: image, nodes, zone, /dev/shm, GPUs."""
    (first,) = documents(KUBERNETES / "trainer" / "t5-large.yaml")
    (etcd,) = documents(KUBERNETES / "trainer" / "t5-large-etcd.yaml")
    (new,) = documents(KUBERNETES / "trainer" / "t5-large-2.2.yaml")
    assert first["spec"]["podTemplateOverrides"] == etcd["spec"]["podTemplateOverrides"]  # type: ignore[index]
    pod = at(first, "spec", "podTemplateOverrides", 0, "spec")
    patch = at(new, "spec", "runtimePatches", 0, "trainingRuntimeSpec", "template", "spec", "replicatedJobs", 0, "template")
    assert at(patch, "spec", "template", "spec") == pod
    for name in ("image", "numNodes", "resourcesPerNode"):
        assert len({str(at(each, "spec", "trainer")[name]) for each in (first, etcd, new)}) == 1


def test_the_patch_of_the_runtime():
    (patch,) = documents(KUBERNETES / "trainer" / "max-restarts.yaml")
    assert patch == {"spec": {"template": {"spec": {"failurePolicy": {"maxRestarts": 10}}}}}


def pod_specs() -> Iterator[tuple[str, Manifest]]:
    """Of everything that runs our agents."""
    for path in files():
        for manifest in documents(path):
            for each in mappings(manifest):
                if "containers" in each and manifest["kind"] in ("Job", "JobSet", "ClusterTrainingRuntime", "PyTorchJob"):
                    yield path.name, each


def environment(pod: Manifest) -> Mapping[str, object]:
    (container,) = pod["containers"]  # type: ignore[misc]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container.get("env", [])}


def test_settings_are_those_that_the_program_knows():
    from elastic_ext.base import settings

    for name, pod in pod_specs():
        plain = {
            key: value for key, value in environment(pod).items() if isinstance(value, str) and key.startswith("ELASTIC_EXT_")
        }
        settings.read({}, plain)
        assert (
            int(str(plain.get("ELASTIC_EXT_PLATFORM_GRACE", pod["terminationGracePeriodSeconds"])))
            == pod["terminationGracePeriodSeconds"]
        ), name


def test_a_new_pod_differs_from_the_refused_one():
    """With etcd a node that had to leave is refused by its name, and a new pod has the host name of the old one."""
    by_etcd = [(name, pod) for name, pod in pod_specs() if name != "static.yaml"]
    assert len(by_etcd) == 6
    for name, pod in by_etcd:
        assert environment(pod)["ELASTIC_EXT_NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}, name
        assert environment(pod)["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}, name


def test_pods_can_share_memory_and_are_watched():
    names = ("job.yaml", "jobset.yaml", "runtime-2.1.yaml", "runtime-2.2.yaml")
    found = [(name, pod) for name, pod in pod_specs() if name in names]
    assert [name for name, _ in found] == list(names)
    for name, pod in found:
        (container,) = pod["containers"]  # type: ignore[misc]
        assert {"startupProbe", "livenessProbe", "readinessProbe"} < container.keys(), name
        assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"], name
        assert {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"], name  # type: ignore[operator]
        if "runtime" not in name:  # there the TrainJob says
            assert {"cpu", "memory"} == container["resources"]["requests"].keys(), name


def test_the_checkpoint_claim_names_no_foreign_class():
    (claim,) = documents(KUBERNETES / "base" / "storage.yaml")
    assert "storageClassName" not in at(claim, "spec")
