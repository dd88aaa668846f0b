"""Strict checks of manifests against what the projects themselves publish: a field that no schema knows is an error.

Core kinds: the JSON schemas of Kubernetes in kubernetes-validate 1.37.0, in its strict form. JobSet, TrainJob and runtimes: the
models of kubeflow-trainer-api 2.1.0 and 2.3.0 (with those of JobSet 0.10 and 0.12), which drop an unknown field without a word:
the round trip must give back what went in. PyTorchJob: the models of kubeflow-training 1.9.4.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import kubernetes_validate
import yaml

from tests.programs import required

Manifest = dict[str, object]

KUBERNETES = ("1.31", "1.37")  # podFailurePolicy is stable from the first on, backoffLimitPerIndex has its fields since 1.28
OLD_TRAINER = Path(sys.prefix) / "trainer-2.1.0"  # of the Makefile: one environment holds one version of a package
_MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "ClusterTrainingRuntime": "TrainerV1alpha1ClusterTrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}


def documents(path: Path) -> list[Manifest]:
    return list(yaml.safe_load_all(path.read_text()))


def at(value: object, *keys: str | int) -> Manifest:
    """The mapping at a path, which must be there."""
    for key in keys:
        value = value[key]  # type: ignore[index]
    assert isinstance(value, dict), (keys, value)
    return value


def wrong_core(manifest: Manifest) -> list[str]:
    """What Kubernetes would not accept."""
    wrong = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            wrong.append(f"{version}: {'.'.join(map(str, error.path))}: {error.message}")
    return wrong


def wrong_pod(template: Manifest) -> list[str]:
    """The same for a pod template."""
    return wrong_core({"apiVersion": "v1", "kind": "PodTemplate", "template": template})


def wrong_job(template: Manifest) -> list[str]:
    """The same for a job template."""
    return wrong_core({"apiVersion": "batch/v1", "kind": "CronJob", "spec": {"schedule": "* * * * *", "jobTemplate": template}})


def wrong_training_operator(manifest: Manifest) -> list[str]:
    return list(_unlike_model(manifest, "KubeflowOrgV1PyTorchJob", ""))


def _unlike_model(value: object, kind: str, where: str) -> Iterator[str]:
    """What kubeflow-training's models know nothing of, or of another type."""
    scalars = {"str": str, "int": int, "bool": bool, "object": object}
    if kind in scalars:
        if not isinstance(value, scalars[kind]):
            yield f"{where}: {value!r}, expected {kind}"
    elif kind.startswith(("list[", "dict(")):
        inside = kind[5:-1].rpartition(", ")[2]
        items = value.items() if isinstance(value, Mapping) else enumerate(value)  # type: ignore[arg-type]
        for key, each in items:
            yield from _unlike_model(each, inside, f"{where}.{key}")
    elif kind == "V1PodTemplateSpec":
        yield from (f"{where}: {each}" for each in wrong_pod(at(value)))
    elif kind == "V1ObjectMeta":
        yield from (f"{where}: {each}" for each in wrong_core({"apiVersion": "v1", "kind": "ConfigMap", "metadata": value}))
    elif not isinstance(value, dict):
        yield f"{where}: {value!r}, expected {kind}"
    else:
        model = getattr(importlib.import_module("kubeflow.training.models"), kind)
        types = {json_name: model.openapi_types[name] for name, json_name in model.attribute_map.items()}
        for key, each in value.items():
            if key not in types:
                yield f"{where}.{key}: {kind} has no such field"
            else:
                yield from _unlike_model(each, types[key], f"{where}.{key}")


def wrong_trainer(manifests: list[Manifest], old: bool) -> list[str]:
    """What kubeflow-trainer-api does not give back, or refuses. old: by version 2.1.0, else by 2.3.0."""
    environ = dict(os.environ)
    if old:
        required(OLD_TRAINER.is_dir(), f"{OLD_TRAINER}: not there; `make .venv/.ready` puts kubeflow-trainer-api 2.1.0 there")
        environ["PYTHONPATH"] = str(OLD_TRAINER)
    command = [sys.executable, "-c", _ROUND_TRIP, json.dumps(_MODELS)]
    done = subprocess.run(command, input=json.dumps(manifests), env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        return [done.stderr.strip().splitlines()[-1]]
    wrong = [f"version {back['version']}" for back in json.loads(done.stdout) if back["version"] != ("2.1.0" if old else "2.3.0")]
    for manifest, back in zip(manifests, json.loads(done.stdout), strict=True):
        lost = differences(manifest, back["manifest"], "")
        wrong += back["errors"] or [each for each in lost if ": None came back" not in each]  # a default may be added
    return wrong


# In a process of its own: the two versions have modules of the same names.
_ROUND_TRIP = """
import importlib, importlib.metadata, json, sys
models = json.loads(sys.argv[1])
package = importlib.import_module("kubeflow_trainer_api.models")
backs = []
for manifest in json.load(sys.stdin):
    back = {"version": importlib.metadata.version("kubeflow-trainer-api"), "manifest": {}, "errors": []}
    try:
        back["manifest"] = getattr(package, models[manifest["kind"]]).from_dict(manifest).to_dict()
    except ValueError as error:
        back["errors"] = [str(error)]
    backs.append(back)
json.dump(backs, sys.stdout, default=str)
"""


def differences(one: object, other: object, where: str) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (each, its) in enumerate(zip(one, other, strict=True)):
            yield from differences(each, its, f"{where}.{index}")
    elif one != other:
        yield f"{where}: {one!r} came back as {other!r}"
