"""What is rendered is accepted by the schemas of Kubernetes and by the official models of the operators; what is mistyped is not.

The packages come with the development tools (ADR 2). SkyPilot, half a gigabyte, does not: its schema is asked where it is installed.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import pytest
import yaml

from tests.kubernetes_runs import KINDS, documents, of_kind, pods, rendered

VERSION = "1.34"
FULL = (
    "KUBERNETES_TRACKING_CLAIM=aim", "KUBERNETES_TOKEN_SECRET=hub", "KUBERNETES_INFINIBAND=true", "KUBERNETES_HCA=mlx5",
    "KUBERNETES_CREATE_CLAIMS=true", "KUBERNETES_STORAGE_CLASS=nfs", "KUBERNETES_NAMESPACE=training", "KUBERNETES_QUEUE=team",
    "KUBERNETES_NODE_SELECTOR={gpu: l40s}", "KUBERNETES_ENV={NCCL_DEBUG: INFO}", "KUBERNETES_PULL_SECRET=registry",
    "KUBERNETES_TOLERATIONS=[{key: gpu, operator: Exists, effect: NoExecute, tolerationSeconds: 60}]", "KUBERNETES_RDMA_COUNT=2",
)  # fmt: skip
Document = dict[str, Any]


def builtin_problem(document: Document) -> str | None:
    """Returns what the schema of a built-in kind says against a document."""
    validation = pytest.importorskip("kubernetes_validate")
    try:
        validation.validate(document, VERSION, strict=True)
    except validation.ValidationError as error:
        return str(error.message)
    return None


def as_pod(template: Document) -> Document:
    """Returns the pod of a template, which custom resources hold unchecked; `PyTorchJob` decides about restarts by itself."""
    spec = {"restartPolicy": "Never", **template["spec"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template["metadata"]}, "spec": spec}


def lost(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yields what a model that ignores unknown fields did not keep."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(kept, Mapping) or key not in kept:
                yield f"{where}.{key}"
            else:
                yield from lost(value, kept[key], f"{where}.{key}")
    elif isinstance(given, list):
        if not isinstance(kept, list) or len(kept) != len(given):
            yield where
        else:
            for index, value in enumerate(given):
                yield from lost(value, kept[index], f"{where}[{index}]")
    elif given != kept:
        yield f"{where}: {given!r} became {kept!r}"


def filled(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yields what a model put an empty text for: it is required, and was not given."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        for key, value in kept.items():
            if key not in given and value == "":
                yield f"{where}.{key}: missing"
            elif key in given:
                yield from filled(given[key], value, f"{where}.{key}")
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (old, new) in enumerate(zip(given, kept, strict=True)):
            yield from filled(old, new, f"{where}[{index}]")


def trainer_problem(document: Document) -> str | None:
    """Returns what the official models of Trainer v2 say."""
    pytest.importorskip("kubeflow_trainer_api")
    from kubeflow_trainer_api import models

    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    try:
        kept = model.from_dict(copy.deepcopy(document)).to_dict()
    except (ValueError, TypeError, AttributeError) as error:  # pydantic's own error is a ValueError
        return str(error)
    return next(chain(lost(document, kept), filled(document, kept)), None)


def pytorchjob_problem(document: Document) -> str | None:
    """Returns what the official models of the Training Operator say."""
    pytest.importorskip("kubeflow.training")
    from kubeflow.training import ApiClient, models

    class Answer:
        data = ""

    import json

    answer = Answer()
    answer.data = json.dumps(document)
    client = ApiClient()
    try:
        kept = client.sanitize_for_serialization(client.deserialize(answer, models.KubeflowOrgV1PyTorchJob))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        return str(error)
    return next(lost(document, kept), None)


def problem(document: Document) -> str | None:
    """Returns what the schema of any of our documents says."""
    if document["kind"] == "PyTorchJob":
        return pytorchjob_problem(document)
    if document["kind"] in ("TrainJob", "TrainingRuntime"):
        return trainer_problem(document)
    return builtin_problem(document)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("words", [(), FULL], ids=["plain", "with everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_accepted(kind: str, words: tuple[str, ...], nodes: int) -> None:
    found = documents(f"KUBERNETES_KIND={kind}", f"NUM_NODES={nodes}", *words)
    for document in found:
        assert problem(document) is None, document["kind"]
    templates = pods(found)
    assert templates
    for template in templates:
        assert builtin_problem(as_pod(template)) is None


MUTANTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("job", "Job", lambda d: d["spec"].update(completionsMode="Indexed")),
    ("job", "Job", lambda d: d["spec"].update(parallelism="two")),
    ("job", "Job", lambda d: d["spec"].pop("template")),
    ("job", "Job", lambda d: d["spec"]["template"]["spec"]["containers"][0].update(envs=[])),
    ("job", "Job", lambda d: d["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"].pop("operator")),
    ("job", "Service", lambda d: d["spec"]["ports"][0].pop("port")),
    ("job", "Service", lambda d: d["spec"].update(publishNotReadyAddress=True)),
    ("job", "ConfigMap", lambda d: d["data"].update(number=1)),
    ("job", "PersistentVolumeClaim", lambda d: d["spec"].update(storageClass="nfs")),
    ("trainjob", "TrainJob", lambda d: d["spec"].pop("runtimeRef")),
    ("trainjob", "TrainJob", lambda d: d["spec"]["trainer"].update(numNode=2)),
    ("trainjob", "TrainJob", lambda d: d["spec"]["trainer"].update(numNodes="two")),
    ("trainjob", "TrainJob", lambda d: d["spec"].update(podSpecOverrides=[])),
    ("trainjob", "TrainingRuntime", lambda d: d["spec"]["template"]["spec"].update(failurePolicies={})),
    ("trainjob", "TrainingRuntime", lambda d: d["spec"]["template"]["spec"]["failurePolicy"]["rules"][0].pop("action")),
    ("trainjob", "TrainingRuntime", lambda d: d["spec"]["mlPolicy"].update(numNodes="two")),
    ("trainjob", "TrainingRuntime", lambda d: d["spec"]["template"]["spec"]["replicatedJobs"][0].pop("name")),
    ("pytorchjob", "PyTorchJob", lambda d: d["spec"].pop("pytorchReplicaSpecs")),
    ("pytorchjob", "PyTorchJob", lambda d: d["spec"].update(replicas=2)),
    ("pytorchjob", "PyTorchJob", lambda d: d["spec"]["runPolicy"].update(ttlSeconds=1)),
    ("pytorchjob", "PyTorchJob", lambda d: d["spec"]["runPolicy"].update(backoffLimit="many")),
    ("pytorchjob", "PyTorchJob", lambda d: d["spec"]["pytorchReplicaSpecs"]["Master"].update(restart="Never")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "mutate"), MUTANTS, ids=[f"{name}-{number}" for number, (_, name, _) in enumerate(MUTANTS)]
)
def test_a_wrong_document_is_refused(kind: str, name: str, mutate: Callable[[Any], Any]) -> None:
    document = copy.deepcopy(of_kind([one for one in _found(kind) if one["metadata"]["name"] != "models"], name)
                             if name != "PersistentVolumeClaim" else _found(kind)[0])  # fmt: skip
    assert problem(document) is None
    mutate(document)
    assert problem(document) is not None


FOUND: dict[str, list[Document]] = {}


def _found(kind: str) -> list[Document]:
    if kind not in FOUND:
        FOUND[kind] = documents(f"KUBERNETES_KIND={kind}", "KUBERNETES_CREATE_CLAIMS=true", "KUBERNETES_STORAGE_CLASS=nfs")
    return FOUND[kind]


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot (459 MB) is not installed")
def test_skypilots_own_schema_takes_the_task() -> None:
    import sky

    words = ("KUBERNETES_KIND=skypilot", "KUBERNETES_RUNS_CLAIM=runs", "KUBERNETES_MODELS_CLAIM=models")
    task = yaml.safe_load(rendered(*words).files["skypilot.yaml"])
    assert sky.Task.from_yaml_config(copy.deepcopy(task)).num_nodes == 2
    with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError, match="num_node"):
        sky.Task.from_yaml_config(task | {"num_node": 2})
