"""`make kubernetes`: render the plan as the kind of job that `kubernetes.kind` names, without submitting it.

Manifests are the templates of `kubernetes_templates/`, filled with the facts of a run.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig, own_words, saved_form
from sft_play.config.schedulers import KubernetesConfig, pod_memory, quantity
from sft_play.config.trackers import OWN, PACKAGES, trackers
from sft_play.config.yaml_files import dump_documents, fill, read_plain_yaml
from sft_play.errors import TOKEN, HardwareError, UserError
from sft_play.files import typed_path, write_text
from sft_play.launch.environment import VARIABLE as KEY
from sft_play.launch.rehearse import Rehearsal, local_paths, rehearse_for_nodes, wants_reasons
from sft_play.launch.runs import short_path
from sft_play.launch.settings import require_ours
from sft_play.plan.architecture import shape_of
from sft_play.plan.hardware import GIB, find_card
from sft_play.plan.memory import machine_bytes
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.runs.gate import check_run
from sft_play.text import plural, tell

Document = dict[str, Any]
TEMPLATES = Path(__file__).with_name("kubernetes_templates")
KINDS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "pytorchjob": ("PyTorchJob", ("pytorchjob",), "pytorch"),
    "trainjob": ("TrainJob", ("runtime", "trainjob"), "node"),
    "job": ("indexed Job", ("service", "job"), "train"),
}
"""Kind of job -> its name, the templates of its objects, and the name that it expects of a container."""
PLACES = {"models": "/models", "runs": "/runs", "tracking": "/tracking"}
"""Role of a claim -> its mount path in pods."""
MOUNTED = tuple(f"{place}/" for place in PLACES.values())
SETTINGS = "/config"
"""Mount path of the configuration."""
CONFIG_FILE, DEEPSPEED_FILE = "config.json", "deepspeed.json"
HEADER = "rendered by: make kubernetes"
"""Part of the first line of every file; a file with it may be overwritten."""
LONGEST_NAME = 48
"""A label has 63 letters; the job's controller needs the others for the numbers of pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A run's facts for manifests."""

    name: str
    """Name of the run, the job and all its objects."""
    loaded: LoadedConfig
    plan: Plan
    command: str
    """`train-distributed`, `train-deepspeed` or `train`."""
    processes: int
    """Number of ranks of each pod; on GPUs each has one GPU."""
    card: str
    """The catalogue's name of the pods' GPU, or `cpu`."""
    files: Mapping[str, str]
    """Files of `/config`: the resolved configuration with the origins of typed keys, and a user's DeepSpeed JSON
    verbatim.
    """

    @property
    def settings(self) -> KubernetesConfig:
        return self.loaded.config.kubernetes

    @property
    def kind(self) -> str:
        """The kind of job, by its name."""
        return KINDS[self.settings.kind][0]

    @property
    def pods(self) -> int:
        return self.plan.num_nodes

    @property
    def several(self) -> bool:
        """Whether there are several pods."""
        return self.pods > 1

    @property
    def size(self) -> dict[str, str]:
        """The cores and the memory of a pod."""
        cpus = self.settings.cpus
        return {
            "cpus": str(8 * self.processes if cpus == "auto" else cpus),
            "memory": pod_memory(self.settings, self.processes),
        }

    @property
    def words(self) -> list[str]:
        """The words for the entry point of a pod; some are typed again, since a copied configuration cannot give them
        (`config.load.own_words`).
        """
        words = [self.command, f"CONFIG={SETTINGS}/{CONFIG_FILE}", f"RUN_NAME={self.name}", *own_words(self.loaded)]
        if DEEPSPEED_FILE in self.files:
            words.append(f"DEEPSPEED_CONFIG={SETTINGS}/{DEEPSPEED_FILE}")
        if self.command != "train":
            words.append(f"NUM_GPUS={self.processes}")
        if self.several:
            join_seconds = self.loaded.config.launch.join_seconds
            words += [f"NUM_NODES={self.pods}", f"MASTER_PORT={self.settings.port}"]
            words += [f"LAUNCH_JOIN_SECONDS={join_seconds}"]
        return words

    @property
    def claims(self) -> dict[str, list[str]]:
        """Claim -> its roles."""
        roles: dict[str, list[str]] = {}
        for role in PLACES:
            if claim := getattr(self.settings, f"{role}_claim"):
                roles.setdefault(claim, []).append(role)
        return roles

    @property
    def access_mode(self) -> str:
        """The access mode of rendered claims; `auto` is `ReadWriteMany` for several pods."""
        mode = self.settings.access_mode
        return mode if mode != "auto" else "ReadWriteMany" if self.several else "ReadWriteOnce"

    @property
    def namespace(self) -> str:
        """kubectl's option for the namespace, preceded by a space, or an empty string."""
        return f" -n {self.settings.namespace}" if self.settings.namespace else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The rendered files (name -> text), and notes for the user."""

    spec: Spec
    files: dict[str, str]
    notes: tuple[str, ...]


def main(call: Call) -> int:
    """Write the manifests, print how they are submitted, and return 0.

    Raise `UserError` before anything is written.
    """
    rendered = render(call)
    spec, plan = rendered.spec, rendered.spec.plan
    paths = _write(call, rendered)
    commands = _commands(spec, paths)
    if call.json:
        facts = {
            "kind": spec.settings.kind,
            "name": spec.name,
            "run_name": spec.name,
            "pods": spec.pods,
            "processes": spec.processes,
            "card": spec.card,
            "words": spec.words,
            "files": [str(path) for path in paths],
            "notes": list(rendered.notes),
            "commands": commands,
            "plan": plan.to_json(),
        }
        print(json.dumps(facts, indent=2))
        return 0
    lines = [
        show_plan(plan, why=wants_reasons(call)),
        f"{spec.kind} `{spec.name}`: {_pods(spec)}",
        *(f"  {path}" for path in paths),
    ]
    print("\n".join(lines), flush=True)
    for note in rendered.notes:
        tell(f"note: {note}")
    print("\n".join(["\nto submit it:", *(f"  {command}" for command in commands)]))
    return 0


def render(call: Call) -> Rendered:
    """Return the files for a call. Raise `UserError` for what the kind of job cannot express."""
    rehearsal = rehearse_for_nodes(call, seen=MOUNTED)
    spec = _spec(call, rehearsal)
    head = f"{spec.kind} of the run {spec.name}, {HEADER}"
    # Claims have a separate file, so that deleting the job by its file keeps what it made.
    claims = _claim_documents(spec)
    files = {"claims.yaml": dump_documents(claims, f"Claims of {head}")} if claims else {}
    files[f"{spec.settings.kind}.yaml"] = dump_documents(_documents(spec), head)
    notes = (*rehearsal.options.notices, *_notes(spec, named="RUN_NAME" in call.options))
    return Rendered(spec=spec, files=files, notes=notes)


def name_of(run_name: str | None, path: Path | None) -> str:
    """Return the name of job and run. Raise `UserError` for a name that the cluster would refuse.

    A typed name is not changed; a configuration file's name is adapted (`l40s_pair` becomes `l40s-pair`).
    """
    stem = re.sub("[^a-z0-9]+", "-", (run_name or (path.stem if path else "run")).lower()).strip("-")
    fitting = (stem if stem[:1].isalpha() else f"run-{stem}".rstrip("-"))[:LONGEST_NAME].rstrip("-")
    if run_name not in (None, fitting):
        text = (
            f"`RUN_NAME` is `{run_name}`; expected small letters, digits and `-`, the first a letter, at most"
            f" {LONGEST_NAME}"
        )
        raise UserError(text, hint=f"RUN_NAME={fitting}")
    return fitting


def _spec(call: Call, rehearsal: Rehearsal) -> Spec:
    """Return the run's facts. Raise `UserError` if the kind of job cannot express it or it contains a token."""
    loaded, plan, settings = rehearsal.loaded, rehearsal.plan, rehearsal.loaded.config.kubernetes
    saved = saved_form(loaded)
    saved["origins"] = {key: short_path(origin) for key, origin in saved["origins"].items() if loaded.typed(key)}
    saved["path"] = short_path(saved["path"]) if saved["path"] else None
    files = {CONFIG_FILE: json.dumps(saved, indent=2, ensure_ascii=False) + "\n"}
    if path := call.options.get("DEEPSPEED_CONFIG"):
        # It was read and checked by `read_options`.
        files[DEEPSPEED_FILE] = typed_path(path).read_text(encoding="utf-8")
    for name, text in (*((f"kubernetes.env: {name}", text) for name, text in settings.env.items()), *files.items()):
        if TOKEN.search(text):
            raise UserError(
                f"`{name}` contains what looks like an access token, which would be written to a manifest",
                place=loaded.origins.get("kubernetes.env") if name.startswith("kubernetes.env") else None,
                hint="put the hub's token into a Secret and name that: `kubernetes.token_secret`",
            )
    replicas = "train" if plan.strategy == "single" else "train-distributed"
    names = sorted({rank.device_name for rank in plan.ranks})
    if len(names) > 1 or len(set(plan.ranks_by_node)) > 1:
        raise HardwareError(
            f"the pods need different GPUs ({', '.join(names)}), but a job has one template for all of them",
            place="HARDWARE",
            hint="HARDWARE describes equal nodes; or run each node's command (docs/launching.md) in its own Job",
        )
    memory = pod_memory(settings, rehearsal.processes)
    if (quantity(settings.shm) or 0) >= (quantity(memory) or 0):
        raise UserError(
            f"`kubernetes.shm` is {settings.shm}, which uses all of a pod's memory ({memory})",
            place=loaded.origins.get("kubernetes.shm"),
            hint="`/dev/shm` counts against the pod's memory: make it smaller, or `kubernetes.memory` larger",
        )
    card = find_card(names[0]) if plan.device == "cuda" else None
    return Spec(
        name=name_of(call.options.get("RUN_NAME"), loaded.path),
        loaded=loaded,
        plan=plan,
        command="train-deepspeed" if rehearsal.options.deepspeed else replicas,
        processes=rehearsal.processes,
        card=card.name if card else names[0],
        files=files,
    )


def _write(call: Call, rendered: Rendered) -> list[Path]:
    """Write the files and return their paths. Raise `UserError`, before any is written, for an existing file of another
    origin.
    """
    out = call.options.get("OUT")
    folder = typed_path(out) if out else check_run(RunFolder(runs_folder() / rendered.spec.name), writes=True).path
    paths = [folder / name for name in rendered.files]
    for path in paths:
        require_ours(path, HEADER, "kubernetes")
    try:
        for path, text in zip(paths, rendered.files.values(), strict=True):
            write_text(path, text)
    except OSError as error:
        raise UserError(
            f"`{folder}` cannot be written: {error.strerror}", place="OUT", hint="OUT= takes a folder"
        ) from error
    return paths


def _pods(spec: Spec) -> str:
    what = plural(spec.processes, "process" if spec.plan.device == "cpu" else "GPU")
    size = spec.size
    return f"{plural(spec.pods, 'pod')} with {what} ({spec.card}) each, {size['cpus']} cores and {size['memory']}"


def _commands(spec: Spec, paths: list[Path]) -> list[str]:
    files = " ".join(f"-f {shlex.quote(str(path))}" for path in paths)
    logs = f"-f --prefix --max-log-requests={max(5, spec.pods)} -l app.kubernetes.io/instance={spec.name}"
    return [f"kubectl apply{spec.namespace} {files}", f"kubectl logs{spec.namespace} {logs}"]


def _notes(spec: Spec, *, named: bool) -> Iterator[str]:
    """Yield what the cluster must have, and what the plan needs that the pods do not get; `named`: whether `RUN_NAME`
    was typed.
    """
    settings, config = spec.settings, spec.loaded.config
    yield from _notes_of_cluster(spec)
    if not named:
        yield (
            f"RUN_NAME is not given, so job and run are called `{spec.name}` after the configuration: one of this name"
            " continues the run, once the old job is deleted; another run needs its own RUN_NAME"
        )
    memory = spec.size["memory"]
    if (need := machine_bytes(config, shape_of(config.model), spec.plan, spec.processes)) > (quantity(memory) or 0):
        yield (
            f"the plan needs {need / GIB:.1f} GiB of a pod's memory, and kubernetes.memory is {memory},"
            " /dev/shm included: raise it, or the kernel ends the pod"
        )
    for name in trackers(config):
        if name in PACKAGES and name != OWN:
            built = f"an image that was built with --build-arg TRACKERS={PACKAGES[name][1]}"
            yield (
                f"`train.report_to` names `{name}`, which is in {built}, not in the default one: kubernetes.image is"
                f" {settings.image}"
            )
    if missing := [path for path in local_paths(config) if not path.startswith((*MOUNTED, "examples/"))]:
        yield (
            "pods see /models and /runs (claims) and the image's examples/; copy these there and use the paths there:"
            f" {', '.join(missing)}"
        )


def _notes_of_cluster(spec: Spec) -> Iterator[str]:
    settings = spec.settings
    secret = f"kubectl create secret generic{spec.namespace}"
    if not spec.loaded.typed("kubernetes.image"):
        yield (
            f"the image is `{settings.image}`: build it by the Dockerfile, push it where the cluster pulls from, and"
            " set kubernetes.image"
        )
    if not settings.create_claims:
        shared = ", each mounted by all pods at once (ReadWriteMany)" if spec.several else ""
        yield f"these claims must exist: {', '.join(spec.claims)}{shared}"
    elif spec.access_mode == "ReadWriteOnce":
        yield (
            "the claims are ReadWriteOnce, so all pods that use them must be on one node; else kubernetes.access_mode:"
            " ReadWriteMany"
        )
    if spec.several:
        creation = f"openssl rand -hex 32 | {secret} {spec.name}-key --from-file={KEY}=/dev/stdin"
        yield f"create the run's key once; a machine without it cannot join: {creation}"
    if settings.token_secret:
        yield f"this Secret must exist: {secret} {settings.token_secret} --from-file=HF_TOKEN=FILE"
    if settings.pull_secret:
        yield (
            f"this Secret must exist: {secret.replace('generic', 'docker-registry')} {settings.pull_secret}"
            " --docker-server=..."
        )


# ---- The templates


def _documents(spec: Spec) -> list[Document]:
    """Return the ConfigMap and the objects of the job."""
    facts = _facts(spec)
    facts["pod"] = _pod(spec, facts)
    templates = ("config", *KINDS[spec.settings.kind][1])
    return [document for template in templates if (document := fill(_read(template), facts)) is not None]


def _claim_documents(spec: Spec) -> list[Document]:
    """Return the claims to create."""
    rows = spec.claims.items() if spec.settings.create_claims else ()
    facts = _facts(spec) | {"access_mode": spec.access_mode}
    return [fill(_read("claim"), facts | {"claim": claim, "role": ".".join(roles)}) for claim, roles in rows]


def _read(template: str) -> Any:
    return read_plain_yaml(TEMPLATES / f"{template}.yaml")


def _pod(spec: Spec, facts: dict[str, Any]) -> Document:
    """Return the template of the pods."""
    own = {"words": spec.words, **spec.size, "gpus": str(spec.processes) if spec.plan.device == "cuda" else None}
    pod: Document = fill(_read("pod"), facts | own)
    own_names, [container] = spec.settings.env, pod["spec"]["containers"]
    ours = [variable for variable in container["env"] if variable["name"] not in own_names]
    container["env"] = [*ours, *({"name": name, "value": text} for name, text in own_names.items())]
    return pod


def _facts(spec: Spec) -> dict[str, Any]:
    """Return the facts that templates name: the keys of `kubernetes:`, and others of the run; `None` omits an entry."""
    settings, several, mounted = spec.settings, spec.several, spec.claims
    nccl = spec.plan.device == "cuda" and spec.plan.world_size > 1
    facts: dict[str, Any] = {
        "name": spec.name,
        "pods": spec.pods,
        "others": spec.pods - 1,
        "several": several,
        "processes": spec.processes,
        "processes_as_text": str(spec.processes),
        "files": dict(spec.files),
        "container": KINDS[settings.kind][2],
        "port_name": "pytorchjob-port" if settings.kind == "pytorchjob" else "master",
        "restart_policy": None if settings.kind == "pytorchjob" else "Never",
        "restart_by_code": "ExitCode" if settings.max_restarts else "Never",
        "limit": str(settings.max_restarts) if settings.max_restarts else None,
        "restarts_of_all": settings.max_restarts * spec.pods,
        "subdomain": spec.name if several and settings.kind == "job" else None,
        "nccl": nccl,
        "nccl_over_infiniband": nccl and settings.infiniband,
        "hca": settings.hca if nccl else None,
        "capabilities": ["IPC_LOCK"] if settings.infiniband else [],
        "rdma_count": str(settings.rdma_count) if settings.infiniband else None,
        "tolerations": [
            {k: int(v) if k == "tolerationSeconds" else v for k, v in toleration.items()}
            for toleration in settings.tolerations
        ],
        "volumes": [
            {"name": roles[0], "persistentVolumeClaim": {"claimName": claim}} for claim, roles in mounted.items()
        ],
        "mounts": [
            {"name": roles[0], "mountPath": PLACES[role]} | ({"subPath": role} if len(roles) > 1 else {})
            for roles in mounted.values()
            for role in roles
        ],
    }
    return asdict(settings) | facts
