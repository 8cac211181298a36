"""Own rules for what schemas miss: what is rendered has none of these faults, and each fault, planted, is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from sft_play.schedulers.lint import problems
from tests.kubernetes_runs import KINDS, documents, of_kind, pods

Mutation = Callable[[list[dict[str, Any]]], None]


def pod(found: list[dict[str, Any]]) -> Any:
    return pods(found)[0]["spec"]


def one(found: list[dict[str, Any]]) -> Any:
    return pod(found)["containers"][0]


def replica(found: list[dict[str, Any]], role: str) -> Any:
    return of_kind(found, "PyTorchJob")["spec"]["pytorchReplicaSpecs"][role]


def in_job(found: list[dict[str, Any]]) -> Any:
    return of_kind(found, "Job")["spec"]


def node(found: list[dict[str, Any]]) -> Any:
    return of_kind(found, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_is_rendered_has_none(kind: str, nodes: int) -> None:
    assert problems(documents(f"KUBERNETES_KIND={kind}", f"NUM_NODES={nodes}", "KUBERNETES_TOKEN_SECRET=hub")) == []


COMMON: list[tuple[Mutation, str]] = [
    (lambda d: pod(d).update(restartPolicy="Sometimes"), "restartPolicy"),
    (lambda d: one(d)["volumeMounts"].append({"name": "nothing", "mountPath": "/x"}), "there is no volume `nothing`"),
    (lambda d: one(d)["volumeMounts"].append({"name": "shm", "mountPath": "/runs"}), "a path stands twice"),
    (lambda d: pod(d)["volumes"].append({"name": "shm", "emptyDir": {}}), "a name stands twice"),
    (lambda d: pod(d).update(volumes=[v for v in pod(d)["volumes"] if v["name"] != "shm"]), "there is no volume `shm`"),
    (lambda d: pod(d)["securityContext"].update(runAsUser=0), "runs as root"),
    (lambda d: pod(d)["securityContext"].pop("seccompProfile"), "seccompProfile"),
    (lambda d: pod(d).update(hostNetwork=True), "shares the machine's"),
    (lambda d: pod(d).pop("automountServiceAccountToken"), "a token for the cluster"),
    (lambda d: pod(d).update(terminationGracePeriodSeconds=30), "below 120"),
    (lambda d: one(d)["securityContext"].update(privileged=True), "may become root"),
    (lambda d: one(d)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "not all dropped"),
    (lambda d: one(d).pop("image"), "image: missing"),
    (lambda d: one(d).update(name="main"), "contain"),
    (lambda d: one(d)["env"].append({"name": "RUNS_DIR", "value": "/x"}), "stands twice"),
    (lambda d: one(d)["env"].append({"name": "a-b", "value": "x"}), "is no variable"),
    (lambda d: one(d)["env"].append({"name": "HF_TOKEN", "value": "x"}), "not taken from a Secret"),
    (lambda d: one(d)["env"].append({"name": "X", "value": "hf_" + "a" * 30}), "access token"),
    (lambda d: one(d)["resources"]["limits"].update(memory="64 GB"), "is no quantity"),
    (lambda d: one(d)["resources"]["limits"].pop("cpu"), "no `cpu`"),
    (lambda d: one(d)["resources"]["requests"].update({"nvidia.com/gpu": "2"}), "promised to two"),
    (lambda d: d.remove(of_kind(d, "ConfigMap")), "there is no ConfigMap"),
    (lambda d: of_kind(d, "ConfigMap")["metadata"].update(name="A_b"), "is no name"),
    (lambda d: of_kind(d, "ConfigMap")["metadata"].update(namespace="other"), "different namespaces"),
    (lambda d: of_kind(d, "ConfigMap")["data"].update(x="a" * 2**20), "a ConfigMap holds"),
    (lambda d: d[-1]["metadata"]["labels"].update({"a b": "c"}), "is no label"),
]  # fmt: skip

OF_KIND: list[tuple[str, Mutation, str]] = [
    ("pytorchjob", lambda d: of_kind(d, "PyTorchJob")["metadata"].update(name="7b.run"), "RFC 1035"),
    ("pytorchjob", lambda d: of_kind(d, "PyTorchJob")["metadata"].update(name="a" * 55), "63 is the most"),
    ("pytorchjob", lambda d: replica(d, "Master").update(replicas=2), "a Master is one"),
    ("pytorchjob", lambda d: replica(d, "Worker").update(replicas=0), "Workers are one or more"),
    ("pytorchjob", lambda d: replica(d, "Worker").update(restartPolicy="Sometimes"), "expected Always, OnFailure, Never or ExitCode"),
    ("pytorchjob", lambda d: one(d)["env"].append({"name": "MASTER_ADDR", "value": "x"}), "is the operator's"),
    ("pytorchjob", lambda d: of_kind(d, "PyTorchJob")["spec"]["pytorchReplicaSpecs"].pop("Master"), "no `Master`"),
    ("pytorchjob", lambda d: (of_kind(d, "PyTorchJob")["spec"].update(elasticPolicy={"minReplicas": 1}),
                              of_kind(d, "PyTorchJob")["spec"]["pytorchReplicaSpecs"].pop("Worker"))[0], "needs `Worker`"),
    ("trainjob", lambda d: of_kind(d, "TrainJob")["spec"]["trainer"].update(env=[{"name": "PET_NNODES", "value": "2"}]), "is the operator's"),
    ("trainjob", lambda d: of_kind(d, "TrainJob")["spec"]["runtimeRef"].update(name="other"), "there is no TrainingRuntime `other`"),
    ("trainjob", lambda d: of_kind(d, "TrainJob")["metadata"].update(name="a" * 60), "63 is the most"),
    ("trainjob", lambda d: of_kind(d, "TrainingRuntime")["spec"]["mlPolicy"].update(mpi={}), "more than one source"),
    ("pytorchjob", lambda d: of_kind(d, "PyTorchJob")["spec"]["runPolicy"].update(backoffLimit=3), "no limit for pods"),
    ("trainjob", lambda d: of_kind(d, "TrainingRuntime")["spec"]["template"]["spec"].update(ttlSecondsAfterFinished=9), "went again"),
    ("trainjob", lambda d: node(d).update(replicas=2), "the operator takes 1"),
    ("trainjob", lambda d: node(d).update(name="workers"), "expected one, called `node`"),
    ("trainjob", lambda d: node(d)["template"]["metadata"]["labels"].clear(), "trainjob-ancestor-step"),
    ("trainjob", lambda d: one(d)["env"].append({"name": "PET_NODE_RANK", "value": "0"}), "is the operator's"),
    ("job", lambda d: in_job(d).update(completionMode="indexed"), "expected Indexed or NonIndexed"),
    ("job", lambda d: pod(d).update(restartPolicy="OnFailure"), "needs restart policy `Never`"),
    ("job", lambda d: in_job(d).update(podReplacementPolicy="TerminatingOrFailed"), "the only one"),
    ("job", lambda d: in_job(d)["podFailurePolicy"]["rules"][1]["onExitCodes"].update(containerName="main"), "no container `main`"),
    ("job", lambda d: in_job(d)["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=[2, 1]), "expected codes in order"),
    ("job", lambda d: in_job(d)["podFailurePolicy"]["rules"][0].update(action="Retry"), "`Retry`"),
    ("job", lambda d: in_job(d).update(backoffLimit=-1), "is below 0"),
    ("job", lambda d: d.remove(of_kind(d, "Service")), "has no Service"),
    ("job", lambda d: d.append(copy.deepcopy(d[-1])), "stands twice"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mutation", "said"), COMMON, ids=[said for _, said in COMMON])
def test_a_fault_in_any_pod_is_found(kind: str, mutation: Mutation, said: str) -> None:
    _refused(kind, mutation, said)


@pytest.mark.parametrize(("kind", "mutation", "said"), OF_KIND, ids=[f"{kind}: {said}" for kind, _, said in OF_KIND])
def test_a_fault_of_one_kind_is_found(kind: str, mutation: Mutation, said: str) -> None:
    _refused(kind, mutation, said)


def _refused(kind: str, mutation: Mutation, said: str) -> None:
    found = copy.deepcopy(_rendered(kind))
    mutation(found)
    assert any(said in problem for problem in problems(found)), problems(found)


RENDERED: dict[str, list[dict[str, Any]]] = {}


def _rendered(kind: str) -> list[dict[str, Any]]:
    """Renders each kind once: the plan takes most of the time."""
    if kind not in RENDERED:
        RENDERED[kind] = documents(f"KUBERNETES_KIND={kind}")
    return RENDERED[kind]


def test_claims_are_looked_at_too() -> None:
    claims = documents("KUBERNETES_CREATE_CLAIMS=true", "KUBERNETES_STORAGE_CLASS=nfs")[:2]
    assert problems(claims) == []
    claims[0]["spec"]["accessModes"] = ["ReadWriteEverywhere"]
    claims[1]["spec"]["storageClassName"] = ""
    assert len(problems(claims)) == 2
