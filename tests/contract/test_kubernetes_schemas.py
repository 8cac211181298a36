"""What is rendered is accepted by the schemas of Kubernetes, by the official models of the operators and by rules for what both miss.

The packages come with the development tools (ADR 2). SkyPilot, half a gigabyte, does not: its schema is asked where it is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
import yaml

from tests.kubernetes_runs import KINDS, documents, pods, rendered

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


def lost(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yields what a model that ignores unknown fields did not keep, and what it put an empty text for: required, and not given."""
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        yield from (f"{where}.{key}" for key in given if key not in kept)
        yield from (f"{where}.{key}: missing" for key, value in kept.items() if key not in given and value == "")
        for key in given.keys() & kept.keys():
            yield from lost(given[key], kept[key], f"{where}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        yield from chain.from_iterable(lost(old, new, f"{where}[]") for old, new in zip(given, kept, strict=True))
    elif given != kept:
        yield f"{where}: {given!r} became {kept!r}"


def read_by_trainer(document: Document) -> Any:
    """Returns a document as the official models of Trainer v2 have it."""
    pytest.importorskip("kubeflow_trainer_api")
    from kubeflow_trainer_api import models

    return getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(copy.deepcopy(document)).to_dict()


def read_by_operator(document: Document) -> Any:
    """Returns a document as the official models of the Training Operator have it."""
    pytest.importorskip("kubeflow.training")
    from kubeflow.training import ApiClient, models

    class Answer:
        data = json.dumps(document)

    client = ApiClient()
    return client.sanitize_for_serialization(client.deserialize(Answer(), models.KubeflowOrgV1PyTorchJob))


def problem(document: Document) -> str | None:
    """Returns what the schema of any of our documents says."""
    read = {"PyTorchJob": read_by_operator, "TrainJob": read_by_trainer, "TrainingRuntime": read_by_trainer}.get(document["kind"])
    return next(lost(document, read(document)), None) if read else builtin_problem(document)


def missed(found: Sequence[Document]) -> list[str]:
    """Returns what web hooks and the server's own code would refuse, or never start, in documents that every schema takes."""
    named, wrong = {(document["kind"], document["metadata"]["name"]) for document in found}, []
    for pod in (template["spec"] for template in pods(found)):
        [one] = pod["containers"]
        security, resources = one["securityContext"], one["resources"]
        rules = {
            "requests unlike limits": resources["requests"] == resources["limits"],
            "no ConfigMap": all(("ConfigMap", v["configMap"]["name"]) in named for v in pod["volumes"] if "configMap" in v),
            "no Service": "subdomain" not in pod or ("Service", pod["subdomain"]) in named,
            "root": pod["securityContext"]["runAsNonRoot"] and not security["allowPrivilegeEscalation"],
            "capabilities": security["capabilities"]["drop"] == ["ALL"],
            "a token for the cluster": pod["automountServiceAccountToken"] is False,
        }
        wrong += [name for name, kept in rules.items() if not kept]
    return wrong


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("words", [(), FULL], ids=["plain", "with everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_accepted(kind: str, words: tuple[str, ...], nodes: int) -> None:
    found = documents(f"KUBERNETES_KIND={kind}", f"NUM_NODES={nodes}", *words)
    assert [(document["kind"], problem(document)) for document in found] == [(document["kind"], None) for document in found]
    templates = pods(found)
    assert templates and missed(found) == []
    for template in templates:  # custom resources hold pods unchecked
        spec = {"restartPolicy": "Never", **template["spec"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template["metadata"]}, "spec": spec}
        assert builtin_problem(pod) is None


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot (459 MB) is not installed")
def test_skypilots_own_schema_takes_the_task() -> None:
    import sky

    words = ("KUBERNETES_KIND=skypilot", "KUBERNETES_RUNS_CLAIM=runs", "KUBERNETES_MODELS_CLAIM=models")
    task = yaml.safe_load(rendered(*words).files["skypilot.yaml"])
    assert sky.Task.from_yaml_config(copy.deepcopy(task)).num_nodes == 2
    with pytest.raises(sky.exceptions.InvalidSkyPilotConfigError, match="num_node"):
        sky.Task.from_yaml_config(task | {"num_node": 2})
