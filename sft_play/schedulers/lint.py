"""What schemas miss and a cluster refuses, looked for in what was rendered, before anybody submits it.

Inside custom resources an API server checks pods by their schema alone, and the operators' web hooks look at the rest: an unknown
volume or a restart policy that does not exist passes `kubectl apply` and fails later, or never. The rules are those of the web hooks of
Training Operator 1.9 and Trainer 2.3, of JobSet, and of `validation.go` of Kubernetes. Pure: documents in, problems out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sft_play.config.kubernetes_rules import LABEL, LABEL_VALUE, QUALIFIED, SUBDOMAIN, quantity
from sft_play.errors import TOKEN

Document = Mapping[str, Any]
FORBIDDEN_OF_TRAINJOB = frozenset({"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"})
OF_OPERATOR = FORBIDDEN_OF_TRAINJOB | {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LABEL_NAMES = frozenset({"Service", "PyTorchJob", "TrainJob"})
"""Kinds whose name is a label (RFC 1035); those of all others are subdomains (RFC 1123)."""
LONGEST = 63
ACCESS_MODES = frozenset({"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"})
LARGEST_CONFIG_MAP = 2**20


def problems(documents: Sequence[Document]) -> list[str]:
    """Returns what is wrong with documents that belong together: `PyTorchJob demo: spec...: what`."""
    found = [
        f"{document.get('kind')} {document.get('metadata', {}).get('name')}: {problem}"
        for document in documents
        for problem in (*_metadata(document), *_of_kind(document))
    ]
    return found + list(_between(documents))


def _metadata(document: Document) -> Iterator[str]:
    name = str(document.get("metadata", {}).get("name", ""))
    if document.get("kind") in LABEL_NAMES and not LABEL.fullmatch(name):
        yield f"metadata.name: `{name}` is no RFC 1035 label (small letters, digits, `-`, the first a letter, at most 63)"
    elif not SUBDOMAIN.fullmatch(name):
        yield f"metadata.name: `{name}` is no name (small letters, digits, `-` and `.`)"
    yield from _labels(document.get("metadata", {}), "metadata")


def _labels(metadata: Document, where: str) -> Iterator[str]:
    for key, value in metadata.get("labels", {}).items():
        if not QUALIFIED.fullmatch(str(key)) or not LABEL_VALUE.fullmatch(str(value)):
            yield f"{where}.labels: `{key}: {value}` is no label"


def _of_kind(document: Document) -> Iterator[str]:
    spec, name = document.get("spec", {}), str(document.get("metadata", {}).get("name", ""))
    kind = document.get("kind")
    if kind == "PyTorchJob":
        yield from _pytorchjob(spec, name)
    elif kind == "TrainingRuntime":
        yield from _runtime(spec)
    elif kind == "TrainJob":
        yield from _trainjob(spec)
    elif kind == "Job":
        yield from _job(spec, "spec")
        yield from _too_long(name, f"-{max(0, spec.get('completions', 1) - 1)}")
    elif kind == "PersistentVolumeClaim":
        for mode in spec.get("accessModes", []):
            if mode not in ACCESS_MODES:
                yield f"spec.accessModes: `{mode}` is none"
        if not spec.get("storageClassName"):
            yield "spec.storageClassName: empty means a volume made by hand, never the default class"
    elif kind == "ConfigMap":
        size = sum(len(str(text).encode()) for text in document.get("data", {}).values())
        if size > LARGEST_CONFIG_MAP:
            yield f"data: {size:,} bytes; a ConfigMap holds {LARGEST_CONFIG_MAP:,}"
        yield from (f"data.{key}: holds what looks like an access token" for key, text in document.get("data", {}).items()
                    if TOKEN.search(str(text)))  # fmt: skip


def _pytorchjob(spec: Document, name: str) -> Iterator[str]:
    replicas = spec.get("pytorchReplicaSpecs", {})
    if "backoffLimit" in spec.get("runPolicy", {}):
        yield "spec.runPolicy.backoffLimit: no limit for pods that are made anew (kubeflow/trainer#2045)"
    for role, replica in replicas.items():
        where = f"spec.pytorchReplicaSpecs.{role}"
        count = replica.get("replicas", 1)
        if role not in ("Master", "Worker"):
            yield f"{where}: expected `Master` or `Worker`"
        if (role == "Master" and count != 1) or count < 1:
            yield f"{where}.replicas: {count}; a Master is one, Workers are one or more"
        if replica.get("restartPolicy", "Never") not in ("Always", "OnFailure", "Never", "ExitCode"):
            yield f"{where}.restartPolicy: `{replica['restartPolicy']}`; expected Always, OnFailure, Never or ExitCode"
        yield from _too_long(name, f"-{role.lower()}-{count - 1}")
        template = replica.get("template", {})
        yield from _template(template, f"{where}.template", container="pytorch", operators=OF_OPERATOR)
        if template.get("spec", {}).get("restartPolicy"):
            yield f"{where}.template.spec.restartPolicy: the operator sets it from the replica's"
    if "Master" not in replicas:
        yield "spec.pytorchReplicaSpecs: no `Master`, which is rank 0's pod"
    if spec.get("elasticPolicy") and "Worker" not in replicas:
        yield "spec.elasticPolicy: needs `Worker`"


def _runtime(spec: Document) -> Iterator[str]:
    policy = spec.get("mlPolicy", {})
    if sum(source in policy for source in ("torch", "mpi", "flux", "jax", "xgboost")) > 1:
        yield "spec.mlPolicy: more than one source"
    jobs = spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
    if "ttlSecondsAfterFinished" in spec.get("template", {}).get("spec", {}):
        yield "spec.template.spec.ttlSecondsAfterFinished: the operator makes a JobSet that went again (kubeflow/trainer#3779)"
    if [job.get("name") for job in jobs] != ["node"]:
        yield "spec.template.spec.replicatedJobs: expected one, called `node`"
    for job in jobs:
        where = f"spec.template.spec.replicatedJobs[{job.get('name')}]"
        if job.get("replicas", 1) != 1:
            yield f"{where}.replicas: {job['replicas']}; the operator takes 1, and makes the pods from `numNodes`"
        step = job.get("template", {}).get("metadata", {}).get("labels", {}).get("trainer.kubeflow.org/trainjob-ancestor-step")
        if step != "trainer":
            yield f"{where}.template.metadata.labels: no `trainer.kubeflow.org/trainjob-ancestor-step: trainer`"
        yield from _job(
            job.get("template", {}).get("spec", {}), f"{where}.template.spec", container="node", operators=OF_OPERATOR
        )


def _trainjob(spec: Document) -> Iterator[str]:
    trainer = spec.get("trainer", {})
    for variable in trainer.get("env", []):
        if variable.get("name") in FORBIDDEN_OF_TRAINJOB:
            yield f"spec.trainer.env: `{variable['name']}` is the operator's"
    if not spec.get("runtimeRef", {}).get("name"):
        yield "spec.runtimeRef.name: missing"
    if trainer.get("numNodes", 1) < 1:
        yield f"spec.trainer.numNodes: {trainer['numNodes']}"


def _job(spec: Document, where: str, *, container: str | None = None, operators: frozenset[str] = frozenset()) -> Iterator[str]:
    mode = spec.get("completionMode", "NonIndexed")
    if mode not in ("Indexed", "NonIndexed"):
        yield f"{where}.completionMode: `{mode}`; expected Indexed or NonIndexed"
    template = spec.get("template", {})
    policy = template.get("spec", {}).get("restartPolicy")
    if policy not in ("Never", "OnFailure"):
        yield f"{where}.template.spec.restartPolicy: `{policy}`; a Job takes Never or OnFailure"
    if "podFailurePolicy" in spec:
        if policy != "Never":
            yield f"{where}.podFailurePolicy: needs restart policy `Never`"
        if spec.get("podReplacementPolicy", "Failed") != "Failed":
            yield f"{where}.podReplacementPolicy: `Failed` is the only one beside `podFailurePolicy`"
        yield from _failure_rules(spec["podFailurePolicy"].get("rules", []), template, f"{where}.podFailurePolicy")
    for key in ("backoffLimit", "ttlSecondsAfterFinished"):
        if spec.get(key, 0) < 0:
            yield f"{where}.{key}: {spec[key]} is below 0"
    yield from _template(template, f"{where}.template", container=container, operators=operators)


def _failure_rules(rules: Sequence[Document], template: Document, where: str) -> Iterator[str]:
    names = {container.get("name") for container in template.get("spec", {}).get("containers", [])}
    for index, rule in enumerate(rules):
        if rule.get("action") not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield f"{where}.rules[{index}].action: `{rule.get('action')}`"
        codes = rule.get("onExitCodes")
        if (codes is None) == (rule.get("onPodConditions") is None):
            yield f"{where}.rules[{index}]: one of `onExitCodes` and `onPodConditions`"
        if codes and codes.get("containerName") not in names | {None}:
            yield f"{where}.rules[{index}].onExitCodes.containerName: no container `{codes['containerName']}`"
        values = codes.get("values", []) if codes else []
        if codes and (values != sorted(set(values)) or (codes.get("operator") == "In" and 0 in values)):
            yield f"{where}.rules[{index}].onExitCodes.values: expected codes in order, each once, without 0"


def _template(template: Document, where: str, *, container: str | None, operators: frozenset[str]) -> Iterator[str]:
    """What the server checks of a pod by itself, and not of one inside a custom resource."""
    pod = template.get("spec", {})
    yield from _labels(template.get("metadata", {}), f"{where}.metadata")
    containers = pod.get("containers", [])
    if container and container not in [one.get("name") for one in containers]:
        yield f"{where}.spec.containers: none is called `{container}`, which the operator looks for"
    volumes = {volume.get("name") for volume in pod.get("volumes", [])}
    if len(volumes) < len(pod.get("volumes", [])):
        yield f"{where}.spec.volumes: a name stands twice"
    if pod.get("restartPolicy", "Never") not in ("Always", "OnFailure", "Never"):
        yield f"{where}.spec.restartPolicy: `{pod['restartPolicy']}`; expected Always, OnFailure or Never"
    if pod.get("terminationGracePeriodSeconds", 30) < 120:
        yield f"{where}.spec.terminationGracePeriodSeconds: below 120, and a save may take that long"
    yield from _pod_security(pod, f"{where}.spec")
    for one in containers:
        yield from _container(one, f"{where}.spec.containers[{one.get('name')}]", volumes, operators)
    memory = next((v["emptyDir"] for v in pod.get("volumes", []) if v.get("emptyDir", {}).get("medium") == "Memory"), None)
    if memory is None:
        yield f"{where}.spec.volumes: `/dev/shm` is no memory of its own, and 64 MB are too little for NCCL and loaders"


def _pod_security(pod: Document, where: str) -> Iterator[str]:
    """PodSecurity `restricted`, but for the capability that InfiniBand needs."""
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        yield f"{where}.securityContext: runs as root"
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield f"{where}.securityContext.seccompProfile: not RuntimeDefault"
    if pod.get("automountServiceAccountToken") is not False:
        yield f"{where}.automountServiceAccountToken: the pod gets a token for the cluster"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield f"{where}.{key}: shares the machine's"
    for one in pod.get("containers", []):
        own = one.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{where}.containers[{one.get('name')}].securityContext: may become root"
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or not set(capabilities.get("add", [])) <= {"IPC_LOCK"}:
            yield f"{where}.containers[{one.get('name')}].securityContext.capabilities: not all dropped"


def _container(one: Document, where: str, volumes: set[Any], operators: frozenset[str]) -> Iterator[str]:
    if not one.get("image"):
        yield f"{where}.image: missing"
    mounts = one.get("volumeMounts", [])
    for mount in mounts:
        if mount.get("name") not in volumes:
            yield f"{where}.volumeMounts: there is no volume `{mount.get('name')}`"
    paths = [mount.get("mountPath") for mount in mounts]
    if len(paths) != len(set(paths)):
        yield f"{where}.volumeMounts: a path stands twice"
    names = [variable.get("name") for variable in one.get("env", [])]
    for variable in one.get("env", []):
        name = str(variable.get("name"))
        if not VARIABLE.fullmatch(name) or names.count(name) > 1:
            yield f"{where}.env: `{name}` is no variable, or stands twice"
        if name in operators:
            yield f"{where}.env: `{name}` is the operator's"
        if "value" in variable and "valueFrom" in variable:
            yield f"{where}.env: `{name}` has a value and a source"
        if TOKEN.search(str(variable.get("value", ""))):
            yield f"{where}.env: `{name}` holds what looks like an access token; name a Secret"
        if name == "HF_TOKEN" and "secretKeyRef" not in variable.get("valueFrom", {}):
            yield f"{where}.env: `HF_TOKEN` is not taken from a Secret"
    yield from _resources(one.get("resources", {}), where)


def _resources(resources: Document, where: str) -> Iterator[str]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for key in ("cpu", "memory"):
        if key not in requests or key not in limits:
            yield f"{where}.resources: no `{key}`"
    for key, wanted in {**requests, **limits}.items():
        size = quantity(str(wanted))
        if size is None:
            yield f"{where}.resources: `{key}: {wanted}` is no quantity"
        if key not in ("cpu", "memory") and requests.get(key, limits.get(key)) != limits.get(key):
            yield f"{where}.resources: `{key}` cannot be promised to two: request and limit must be the same"


def _too_long(name: str, suffix: str) -> Iterator[str]:
    if len(name + suffix) > LONGEST:
        yield f"metadata.name: `{name}{suffix}`, a pod's name, has {len(name + suffix)} letters; {LONGEST} is the most"


def _between(documents: Sequence[Document]) -> Iterator[str]:
    """What one document says of another."""
    by_kind: dict[str, dict[str, Document]] = {}
    for document in documents:
        named = by_kind.setdefault(str(document.get("kind")), {})
        name = str(document.get("metadata", {}).get("name"))
        if name in named:
            yield f"{document.get('kind')} {name}: stands twice"
        named[name] = document
    if len({document.get("metadata", {}).get("namespace") for document in documents}) > 1:
        yield "the documents are in different namespaces"
    for name, job in by_kind.get("TrainJob", {}).items():
        reference = job.get("spec", {}).get("runtimeRef", {})
        if reference.get("kind") == "TrainingRuntime" and reference.get("name") not in by_kind.get("TrainingRuntime", {}):
            yield f"TrainJob {name}: spec.runtimeRef: there is no TrainingRuntime `{reference.get('name')}`"
        yield from (f"TrainJob {name}: {text}" for text in _too_long(name, f"-node-0-{job['spec']['trainer']['numNodes'] - 1}"))
    for name, template in _templates(documents):
        if (subdomain := template.get("subdomain")) and subdomain not in by_kind.get("Service", {}):
            yield f"{name}: subdomain `{subdomain}` has no Service"
        for volume in template.get("volumes", []):
            wanted = volume.get("configMap", {}).get("name")
            if wanted and wanted not in by_kind.get("ConfigMap", {}):
                yield f"{name}: there is no ConfigMap `{wanted}`"


def _templates(documents: Sequence[Document]) -> Iterator[tuple[str, Document]]:
    """Yields the pods of all documents, whatever holds them."""
    for document in documents:
        spec, name = document.get("spec", {}), f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
        found = [replica.get("template", {}) for replica in spec.get("pytorchReplicaSpecs", {}).values()]
        if document.get("kind") == "Job":
            found.append(spec.get("template", {}))
        if document.get("kind") == "TrainingRuntime":
            jobs = spec.get("template", {}).get("spec", {}).get("replicatedJobs", [])
            found += [job.get("template", {}).get("spec", {}).get("template", {}) for job in jobs]
        yield from ((name, template.get("spec", {})) for template in found)
