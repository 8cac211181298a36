"""`make kubernetes`: render the plan as the kind of job that `kubernetes.kind` names, without submitting it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig, own_words, saved_form
from sft_play.config.schedulers import quantity
from sft_play.config.trackers import OWN, PACKAGES, trackers
from sft_play.config.yaml_files import dump_documents
from sft_play.errors import TOKEN, HardwareError, UserError
from sft_play.files import is_file_name, typed_path, write_text
from sft_play.launch.environment import VARIABLE as KEY
from sft_play.launch.rehearse import Rehearsal, rehearse_for_nodes, wants_reasons
from sft_play.launch.settings import require_ours
from sft_play.plan.architecture import shape_of
from sft_play.plan.hardware import GIB, find_card
from sft_play.plan.memory import host_bytes, loading_host_bytes
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from sft_play.runs.folder import RunFolder, runs_folder
from sft_play.runs.gate import check_run
from sft_play.schedulers import manifests
from sft_play.schedulers.manifests import Spec, claims
from sft_play.text import plural, tell

KINDS = {"pytorchjob": "PyTorchJob", "trainjob": "TrainJob", "job": "indexed Job"}
HEADER = "rendered by: make kubernetes"
"""Part of the first line of every file; a file with it may be overwritten."""
LONGEST_NAME = 48
"""A label has 63 letters; the job's controller needs the others for the numbers of pods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The rendered files (name -> text), and notes for the user."""

    spec: Spec
    plan: Plan
    files: dict[str, str]
    notes: tuple[str, ...]


def main(call: Call) -> int:
    """Write the manifests, print how they are submitted, and return 0.

    Raise `UserError` before anything is written.
    """
    rendered = render(call)
    spec, plan = rendered.spec, rendered.plan
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
        f"{KINDS[spec.settings.kind]} `{spec.name}`: {_pods(spec)}",
        *(f"  {path}" for path in paths),
    ]
    print("\n".join(lines), flush=True)
    for note in rendered.notes:
        tell(f"note: {note}")
    print("\n".join(["\nto submit it:", *(f"  {command}" for command in commands)]))
    return 0


def render(call: Call) -> Rendered:
    """Return the files for a call. Raise `UserError` for what the kind of job cannot express."""
    rehearsal = rehearse_for_nodes(call)
    spec = _spec(call, rehearsal)
    settings, loaded = spec.settings, rehearsal.loaded
    head = f"{KINDS[settings.kind]} of the run {spec.name}, {HEADER}"
    # Claims have a separate file, so that deleting the job by its file keeps what it made.
    claim_documents = manifests.claim_documents(spec)
    files = {"claims.yaml": dump_documents(claim_documents, f"Claims of {head}")} if claim_documents else {}
    files[f"{settings.kind}.yaml"] = dump_documents(manifests.documents(spec), head)
    notes = (*rehearsal.options.notices, *_notes(spec, rehearsal.plan, loaded, named="RUN_NAME" in call.options))
    return Rendered(spec=spec, plan=rehearsal.plan, files=files, notes=notes)


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
    """Return the run's facts for manifests. Raise `UserError` if the kind of job cannot express it or it contains a
    token.
    """
    loaded, plan, settings = rehearsal.loaded, rehearsal.plan, rehearsal.loaded.config.kubernetes
    files = {manifests.CONFIG_FILE: json.dumps(saved_form(loaded), indent=2, ensure_ascii=False) + "\n"}
    if path := call.options.get("DEEPSPEED_CONFIG"):
        # It was read and checked by `read_options`.
        files[manifests.DEEPSPEED_FILE] = typed_path(path).read_text(encoding="utf-8")
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
    card = find_card(names[0]) if plan.device == "cuda" else None
    return Spec(
        name=name_of(call.options.get("RUN_NAME"), loaded.path),
        settings=settings,
        command="train-deepspeed" if rehearsal.options.deepspeed else replicas,
        device=plan.device,
        pods=plan.num_nodes,
        processes=rehearsal.processes,
        card=card.name if card else names[0],
        files=files,
        join_seconds=loaded.config.launch.join_seconds,
        own_words=tuple(own_words(loaded)),
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
    what = plural(spec.processes, "process" if spec.device == "cpu" else "GPU")
    size = spec.size
    return f"{plural(spec.pods, 'pod')} with {what} ({spec.card}) each, {size['cpus']} cores and {size['memory']}"


def _commands(spec: Spec, paths: list[Path]) -> list[str]:
    files = " ".join(f"-f {shlex.quote(str(path))}" for path in paths)
    logs = f"-f --prefix --max-log-requests={max(5, spec.pods)} -l app.kubernetes.io/instance={spec.name}"
    return [f"kubectl apply{_namespace(spec)} {files}", f"kubectl logs{_namespace(spec)} {logs}"]


def _namespace(spec: Spec) -> str:
    """Return kubectl's option for the namespace, preceded by a space, or an empty string."""
    return f" -n {spec.settings.namespace}" if spec.settings.namespace else ""


def _notes(spec: Spec, plan: Plan, loaded: LoadedConfig, *, named: bool) -> Iterator[str]:
    """Yield what the cluster must have, and what the plan needs that the pods do not get; `named`: whether `RUN_NAME`
    was typed.
    """
    settings, config = spec.settings, loaded.config
    yield from _notes_of_cluster(spec, loaded)
    if not named:
        yield (
            f"RUN_NAME is not given, so job and run are called `{spec.name}` after the configuration: one of this name"
            " continues the run, once the old job is deleted; another run needs its own RUN_NAME"
        )
    memory = spec.size["memory"]
    if (need := _host_bytes(spec, plan, loaded)) > (quantity(memory) or 0):
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
    sources = [*config.data.sources, *(config.data.validation if isinstance(config.data.validation, list) else [])]
    paths = {
        config.model.name,
        config.model.tokenizer,
        config.data.chat_template,
        *(source.path for source in sources),
    } - {None}
    seen = (*(f"{place}/" for place in manifests.PLACES.values()), "examples/")
    local = [
        t
        for t in paths
        if t and (t.startswith(("/", "~", "./", "../")) or (is_file_name(t) and typed_path(t).exists()))
    ]
    if missing := sorted(text for text in local if not text.startswith(seen)):
        yield (
            "pods see /models and /runs (claims) and the image's examples/; copy these there and use the paths there:"
            f" {', '.join(missing)}"
        )


def _host_bytes(spec: Spec, plan: Plan, loaded: LoadedConfig) -> int:
    """Return the bytes of the largest pod's memory that the plan needs: the complete peak on CPUs, else what is
    offloaded, or what loading takes.
    """
    if plan.device == "cpu":
        return sum(rank.peak_bytes for rank in plan.ranks[: spec.processes])
    config, shape, processes = loaded.config, shape_of(loaded.config.model), spec.processes
    offloaded = processes * host_bytes(config, shape, plan, max(rank.micro_batch for rank in plan.ranks))
    return max(offloaded, loading_host_bytes(config, shape, plan, processes))


def _notes_of_cluster(spec: Spec, loaded: LoadedConfig) -> Iterator[str]:
    settings, several = spec.settings, spec.pods > 1
    secret = f"kubectl create secret generic{_namespace(spec)}"
    if not loaded.typed("kubernetes.image"):
        yield (
            f"the image is `{settings.image}`: build it by the Dockerfile, push it where the cluster pulls from, and"
            " set kubernetes.image"
        )
    if not settings.create_claims:
        shared = ", each mounted by all pods at once (ReadWriteMany)" if several else ""
        yield f"these claims must exist: {', '.join(claims(spec))}{shared}"
    elif manifests.access_mode(spec) == "ReadWriteOnce":
        yield (
            "the claims are ReadWriteOnce, so all pods that use them must be on one node; else kubernetes.access_mode:"
            " ReadWriteMany"
        )
    if several:
        creation = f"openssl rand -hex 32 | {secret} {spec.name}-key --from-file={KEY}=/dev/stdin"
        yield f"create the run's key once; a machine without it cannot join: {creation}"
    if settings.token_secret:
        yield f"this Secret must exist: {secret} {settings.token_secret} --from-file=HF_TOKEN=FILE"
    if settings.pull_secret:
        yield (
            f"this Secret must exist: {secret.replace('generic', 'docker-registry')} {settings.pull_secret}"
            " --docker-server=..."
        )
