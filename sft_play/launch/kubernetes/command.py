"""`make kubernetes`: the plan, rendered as the kind of job that `kubernetes.kind` names. Submits nothing."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.call import Call
from sft_play.config.load import LoadedConfig, saved_form
from sft_play.config.yaml_write import dump_documents
from sft_play.errors import HardwareError, UserError
from sft_play.files import is_file_name, typed_path, write_text
from sft_play.launch.kubernetes import job, lint, pytorchjob, skypilot, trainjob
from sft_play.launch.kubernetes.pods import Document, claim_documents, claims, config_map
from sft_play.launch.kubernetes.spec import KINDS, MODELS, RUNS, TRACKING, Spec, name_of, of_plan
from sft_play.launch.options import LaunchOptions, read_options
from sft_play.plan.catalogue import find_card
from sft_play.plan.command import hardware_of, needs_several, plan_for
from sft_play.plan.plan import Plan
from sft_play.plan.show import show_plan
from sft_play.runs.folder import runs_folder

RENDERED = {"pytorchjob": pytorchjob.documents, "trainjob": trainjob.documents, "job": job.documents}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """What is written: file name -> text, and what the user should read."""

    spec: Spec
    plan: Plan
    files: dict[str, str]
    notes: tuple[str, ...]


def main(call: Call) -> int:
    """Writes the manifests and says how they are submitted; returns 0. Raises `UserError`, and then writes nothing."""
    rendered = render(call)
    folder = _folder(call, rendered.spec)
    for name, text in rendered.files.items():
        write_text(folder / name, text)
    paths = [folder / name for name in rendered.files]
    if call.json:
        print(json.dumps(_facts(rendered, paths), indent=2))
        return 0
    print(show_plan(rendered.plan))
    print(f"{KINDS[rendered.spec.settings.kind]} `{rendered.spec.name}`: {_pods(rendered.spec)}")
    for path in paths:
        print(f"  {path}")
    print("\nto submit it:")
    for line in _commands(rendered.spec, paths):
        print(f"  {line}")
    for note in rendered.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def render(call: Call) -> Rendered:
    """Returns the files for a call. Raises `UserError` with what a cluster would refuse."""
    loaded = call.load_config()
    settings = loaded.config.kubernetes
    if loaded.config.launch.elastic is not None:
        raise UserError(
            f"`launch.elastic` is `{loaded.config.launch.elastic}`, and a {KINDS[settings.kind]} has a fixed number of pods",
            place=loaded.origins.get("launch.elastic"),
            hint="it is for `make train-cluster`; here leave it out",
        )
    plan, options = planned(call, loaded)
    processes = _processes(plan)
    spec = of_plan(
        loaded.config, plan, names=name_of(call.options.get("RUN_NAME"), loaded.path, settings.kind, len(processes)),
        command=_command(plan, options), processes=processes, cards=_cards(plan, processes),
        config_json=json.dumps(saved_form(loaded), indent=2, ensure_ascii=False) + "\n", deepspeed_json=_deepspeed(call),
    )  # fmt: skip
    head = f"{KINDS[settings.kind]} of the run {spec.run_name}, rendered by: {_typed(call)}"
    if settings.kind == "skypilot":
        skypilot.refuse_keys(loaded.typed)
        task = skypilot.document(spec, own_image=loaded.typed("kubernetes.image"))
        files = {"skypilot.yaml": dump_documents([task], head)}
    else:
        files = _manifests(spec, head)
    notes = (*options.notices, *_notes(spec, loaded))
    return Rendered(spec=spec, plan=plan, files=files, notes=notes)


def planned(call: Call, loaded: LoadedConfig) -> tuple[Plan, LaunchOptions]:
    """Returns the plan as `make plan` makes it, for the hardware that is described or this machine's, and the launch's options."""
    hardware = hardware_of(call)
    options, loaded = read_options(call, loaded, "auto", rehearsal=True)
    request = options.request
    if hardware.nodes > 1 and "NUM_NODES" not in call.options:
        request = replace(request, num_nodes=hardware.nodes)
    if not needs_several(loaded, hardware, request):
        request = replace(request, command_strategy="single")
    return plan_for(loaded, hardware, request), replace(options, request=request)


def _processes(plan: Plan) -> tuple[int, ...]:
    return plan.node_ranks or (plan.world_size // plan.num_nodes,) * plan.num_nodes


def _cards(plan: Plan, processes: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the catalogue's name of each pod's GPUs. Raises `HardwareError` for a pod with two kinds, which no request can say."""
    found, first = [], 0
    for pod, count in enumerate(processes):
        names = sorted({rank.device_name for rank in plan.ranks[first : first + count]})
        if len(names) > 1:
            raise HardwareError(
                f"pod {pod} is to have {' and '.join(names)}, and a pod asks for GPUs of one kind",
                place="HARDWARE", hint="HARDWARE describes one node; NUM_GPUS=1 NUM_NODES=2 makes two pods of one GPU",
            )  # fmt: skip
        card = find_card(names[0]) if plan.device == "cuda" else None
        found.append(card[0] if card else names[0])
        first += count
    return tuple(found)


def _command(plan: Plan, options: LaunchOptions) -> str:
    if options.deepspeed:
        return "train-deepspeed"
    return "train" if plan.strategy == "single" else "train-distributed"


def _deepspeed(call: Call) -> str | None:
    path = call.options.get("DEEPSPEED_CONFIG")
    return Path(path).read_text(encoding="utf-8") if path else None  # read and checked by `read_options`


def _manifests(spec: Spec, head: str) -> dict[str, str]:
    """Returns the job's file, and one of the claims: who deletes the job by its file keeps what it made."""
    documents: list[Document] = [config_map(spec), *RENDERED[spec.settings.kind](spec)]
    wanted = claim_documents(spec)
    if wrong := lint.problems([*wanted, *documents]):
        raise UserError(
            "the cluster would refuse what was rendered:\n  " + "\n  ".join(wrong),
            place="kubernetes", hint="change the keys of `kubernetes` that these come from; docs/kubernetes.md lists what a name may be",
        )  # fmt: skip
    files = {"claims.yaml": dump_documents(wanted, f"Claims of {head}")} if wanted else {}
    return files | {f"{spec.settings.kind}.yaml": dump_documents(documents, head)}


def _typed(call: Call) -> str:
    """Returns the command as it can be typed again, without where the files went."""
    options = [f"{name}={text}" for name, text in sorted(call.options.items()) if name not in ("OUT", "JSON")]
    return shlex.join(["make", call.command, *options, *(one.origin.removeprefix("make ") for one in call.overrides)])


def _folder(call: Call, spec: Spec) -> Path:
    """Returns the folder for the files, made where it is missing. Raises `UserError`."""
    folder = Path(call.options["OUT"]) if call.options.get("OUT") else runs_folder() / spec.run_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"`{folder}` cannot be made: {error.strerror}", place="OUT", hint="OUT= takes a folder") from error
    return folder


def _pods(spec: Spec) -> str:
    what = "process" if spec.device == "cpu" else "GPU"
    each = sorted(set(zip(spec.cards, spec.processes, strict=True)))
    shares = " and ".join(
        f"{count} {what}{'s' if count > 1 and what == 'GPU' else 'es' if count > 1 else ''} ({card})" for card, count in each
    )
    return (
        f"{spec.pods} pod{'s' if spec.pods > 1 else ''} with {shares} each"
        if len(each) == 1
        else f"{spec.pods} pods with {shares}"
    )


def _commands(spec: Spec, paths: list[Path]) -> list[str]:
    if spec.settings.kind == "skypilot":
        secret = " --secret HF_TOKEN" if spec.settings.token_secret else ""
        return [f"sky jobs launch{secret} {shlex.quote(str(paths[0]))}"]
    space = _in(spec)
    files = " ".join(f"-f {shlex.quote(str(path))}" for path in paths)
    return [f"kubectl apply{space} {files}", f"kubectl logs{space} -f --prefix -l app.kubernetes.io/instance={spec.name}"]


def _in(spec: Spec) -> str:
    return f" -n {spec.settings.namespace}" if spec.settings.namespace else ""


def _facts(rendered: Rendered, paths: list[Path]) -> dict[str, object]:
    spec = rendered.spec
    return {
        "kind": spec.settings.kind, "name": spec.name, "run_name": spec.run_name, "pods": spec.pods, "processes": list(spec.processes),
        "cards": list(spec.cards), "words": spec.words(), "files": [str(path) for path in paths], "notes": list(rendered.notes),
        "commands": _commands(spec, paths), "plan": rendered.plan.to_json(),
    }  # fmt: skip


def _notes(spec: Spec, loaded: LoadedConfig) -> Iterator[str]:
    """Yields what the cluster must have for this to run."""
    settings = spec.settings
    cluster = settings.kind != "skypilot"
    if cluster and not loaded.typed("kubernetes.image"):
        yield f"the image is `{settings.image}`: build it by the Dockerfile, push it where the cluster pulls from, and set kubernetes.image"
    if not settings.create_claims:
        kind = "claims" if cluster else "SkyPilot volumes"
        several = ", each mounted by all pods at once (ReadWriteMany)" if spec.pods > 1 and cluster else ""
        yield f"these {kind} must exist: {', '.join(claims(spec))}{several}"
    if settings.token_secret and cluster:
        yield f"this Secret must exist: kubectl create secret generic{_in(spec)} {settings.token_secret} --from-file=HF_TOKEN=FILE"
    if settings.infiniband and cluster:
        yield (
            "InfiniBand needs IPC_LOCK, which PodSecurity `restricted` refuses, and nodes whose container runtime allows unlimited locked "
            "memory (LimitMEMLOCK=infinity): a capability that is added does not reach a user who is not root"
        )
    if settings.kind == "pytorchjob" and spec.pods > 1:
        yield "the operator gives Workers an init container that waits for the Master's name (alpine:3.10 unless it is set otherwise)"
    yield from _paths(loaded)


def _paths(loaded: LoadedConfig) -> Iterator[str]:
    """Yields the files of this machine that pods will look for under the same name, and may not find."""
    config = loaded.config
    sources = [*config.data.sources, *(config.data.validation if isinstance(config.data.validation, list) else [])]
    named = [config.model.name, config.model.tokenizer, config.data.chat_template, *(source.path for source in sources)]
    local = {text for text in named if text and (text.startswith(("/", "~", "./", "../")) or _is_here(text))}
    seen = (MODELS + "/", RUNS + "/", TRACKING + "/", "examples/")
    missing = sorted(text for text in local if not text.startswith(seen))
    if missing:
        yield f"pods see {MODELS} and {RUNS} (claims) and the image's examples/; copy these there and name them so: {', '.join(missing)}"


def _is_here(text: str) -> bool:
    return is_file_name(text) and typed_path(text).exists()
