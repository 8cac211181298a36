"""Rendered manifests pass Kubernetes' schemas, the operators' official models and rules for what both miss.

The packages come with the development tools (ADR 2).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import pytest

from tests.kubernetes_runs import KINDS, documents, pods

VERSION = "1.34"
FULL = (
    "KUBERNETES_TRACKING_CLAIM=aim",
    "KUBERNETES_TOKEN_SECRET=hub",
    "KUBERNETES_INFINIBAND=true",
    "KUBERNETES_HCA=mlx5",
    "KUBERNETES_CREATE_CLAIMS=true",
    "KUBERNETES_STORAGE_CLASS=nfs",
    "KUBERNETES_NAMESPACE=training",
    "KUBERNETES_QUEUE=team",
    "KUBERNETES_NODE_SELECTOR={gpu: l40s}",
    "KUBERNETES_ENV={NCCL_DEBUG: INFO}",
    "KUBERNETES_PULL_SECRET=registry",
    "KUBERNETES_TOLERATIONS=[{key: gpu, operator: Exists, effect: NoExecute, tolerationSeconds: 60}]",
    "KUBERNETES_RDMA_COUNT=2",
)
Document = dict[str, Any]


def builtin_problem(document: Document) -> str | None:
    """Return the error of a built-in kind's schema for a document."""
    validation = pytest.importorskip("kubernetes_validate")
    try:
        validation.validate(document, VERSION, strict=True)
    except validation.ValidationError as error:
        return str(error.message)
    return None


def lost(written: Any, accepted: Any, where: str = "") -> Iterator[str]:
    """Yield fields that a model dropped as unknown or filled with an empty string because they were missing."""
    if isinstance(written, Mapping) and isinstance(accepted, Mapping):
        yield from (f"{where}.{key}" for key in written if key not in accepted)
        yield from (f"{where}.{key}: missing" for key, value in accepted.items() if key not in written and value == "")
        for key in written.keys() & accepted.keys():
            yield from lost(written[key], accepted[key], f"{where}.{key}")
    elif isinstance(written, list) and isinstance(accepted, list) and len(written) == len(accepted):
        yield from chain.from_iterable(lost(old, new, f"{where}[]") for old, new in zip(written, accepted, strict=True))
    elif written != accepted:
        yield f"{where}: {written!r} became {accepted!r}"


def read_by_trainer(document: Document) -> Any:
    """Return a document as read by the official models of Trainer v2."""
    pytest.importorskip("kubeflow_trainer_api")
    from kubeflow_trainer_api import models

    return getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(copy.deepcopy(document)).to_dict()


def read_by_operator(document: Document) -> Any:
    """Return a document as read by the official models of the Training Operator."""
    pytest.importorskip("kubeflow.training")
    from kubeflow.training import ApiClient, models

    class Answer:
        data = json.dumps(document)

    client = ApiClient()
    return client.sanitize_for_serialization(client.deserialize(Answer(), models.KubeflowOrgV1PyTorchJob))


def problem(document: Document) -> str | None:
    """Return the error of the schema for one of our documents."""
    read = {"PyTorchJob": read_by_operator, "TrainJob": read_by_trainer, "TrainingRuntime": read_by_trainer}.get(
        document["kind"]
    )
    return next(lost(document, read(document)), None) if read else builtin_problem(document)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("words", [(), FULL], ids=["plain", "with everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_document_is_accepted(kind: str, words: tuple[str, ...], nodes: int) -> None:
    manifests = documents(f"KUBERNETES_KIND={kind}", f"NUM_NODES={nodes}", *words)
    assert [(document["kind"], problem(document)) for document in manifests] == [
        (document["kind"], None) for document in manifests
    ]
    templates = pods(manifests)
    assert templates
    for template in templates:  # custom resources hold pods unchecked
        spec = {"restartPolicy": "Never", **template["spec"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template["metadata"]}, "spec": spec}
        assert builtin_problem(pod) is None


@pytest.mark.parametrize("kind", KINDS)
def test_pods_name_existing_objects_and_have_few_permissions(kind: str) -> None:
    """Check what every schema accepts but a cluster would refuse or never start."""
    manifests = documents(f"KUBERNETES_KIND={kind}", *FULL)
    named = {(document["kind"], document["metadata"]["name"]) for document in manifests}
    for pod in (template["spec"] for template in pods(manifests)):
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert all(
            ("ConfigMap", volume["configMap"]["name"]) in named for volume in pod["volumes"] if "configMap" in volume
        )
        assert "subdomain" not in pod or ("Service", pod["subdomain"]) in named
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        assert not container["securityContext"]["allowPrivilegeEscalation"] and container["securityContext"][
            "capabilities"
        ]["drop"] == ["ALL"]
