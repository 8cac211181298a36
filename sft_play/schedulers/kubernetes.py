"""`make kubernetes`: the plan, rendered as the kind of job that `kubernetes.kind` names. Submits nothing."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sft_play.config.call import Call
from sft_play.config.load import saved_form
from sft_play.config.yaml_write import dump_documents
from sft_play.errors import HardwareError, UserError
from sft_play.files import typed_path, write_text
from sft_play.launch.key import VARIABLE as KEY
from sft_play.launch.options import LaunchOptions
from sft_play.launch.rehearse import planned_ahead
from sft_play.plan.catalogue import find_card
from sft_play.plan.fit import DoesNotFitError
from sft_play.plan.plan import Plan
from sft_play.plan.show import misfit_json, show_misfit, show_plan
from sft_play.runs.folder import runs_folder
from sft_play.schedulers import job, lint, pytorchjob, skypilot, trainjob
from sft_play.schedulers.kubernetes_spec import KINDS, Spec, name_of, of_plan, one_of
from sft_play.schedulers.notes import namespace, notes
from sft_play.schedulers.pods import Document, claim_documents, config_map

RENDERED = {"pytorchjob": pytorchjob.documents, "trainjob": trainjob.documents, "job": job.documents}
HEADER = "rendered by: make kubernetes"
"""In the first line of every file: what has it may be written over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """What is written: file name -> text, and what the user should read."""

    spec: Spec
    plan: Plan
    files: dict[str, str]
    notes: tuple[str, ...]


def main(call: Call) -> int:
    """Writes the manifests and says how they are submitted; returns 0. What does not fit is shown part by part before the error.

    Raises `UserError`, and then writes nothing.
    """
    try:
        rendered = render(call)
    except DoesNotFitError as error:
        print(json.dumps(misfit_json(error), indent=2) if call.json else show_misfit(error) + "\n", flush=True)
        raise
    paths = _paths(call, rendered)
    _write(paths, rendered.files.values())
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
    ahead = planned_ahead(call)
    loaded, plan, options = ahead.loaded, ahead.plan, ahead.options
    settings, config = loaded.config.kubernetes, loaded.config
    if loaded.config.launch.elastic is not None:
        raise UserError(
            f"`launch.elastic` is `{loaded.config.launch.elastic}`, and {one_of(settings.kind)} has a fixed number of pods",
            place=loaded.origins.get("launch.elastic"),
            hint="it is for `make train-cluster`; here leave it out",
        )
    if settings.kind == "skypilot":
        skypilot.refuse_keys(loaded.typed)
        config = replace(config, kubernetes=skypilot.with_typed_claims(settings, loaded.typed))
    processes = plan.ranks_by_node
    spec = of_plan(
        config, plan, names=name_of(call.options.get("RUN_NAME"), loaded.path, settings.kind, len(processes)),
        command=_command(plan, options), processes=processes, cards=_cards(plan, processes),
        config_json=json.dumps(saved_form(loaded), indent=2, ensure_ascii=False) + "\n", deepspeed_json=_deepspeed(call),
    )  # fmt: skip
    head = f"{KINDS[settings.kind]} of the run {spec.run_name}, rendered by: {_typed(call)}"
    if settings.kind == "skypilot":
        task = skypilot.document(spec, own_image=loaded.typed("kubernetes.image"))
        files = {"skypilot.yaml": dump_documents([task], head)}
    else:
        files = _manifests(spec, head)
    told = (*options.notices, *notes(spec, plan, loaded, named="RUN_NAME" in call.options))
    return Rendered(spec=spec, plan=plan, files=files, notes=told)


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


def _paths(call: Call, rendered: Rendered) -> list[Path]:
    """Returns where the files go. Raises `UserError` where one stands that this command has not written."""
    out = call.options.get("OUT")
    folder = typed_path(out) if out else runs_folder() / rendered.spec.run_name
    paths = [folder / name for name in rendered.files]
    for path in paths:
        try:
            first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        except (FileNotFoundError, NotADirectoryError):
            continue  # what is no folder is said when it is to be made
        except OSError as error:
            raise _not_writable(path, error) from error
        if not (first.startswith("#") and HEADER in first):
            raise UserError(
                f"`{path}` exists, and is no file of `make kubernetes`", place="OUT", hint="choose another OUT=, or remove it"
            )
    return paths


def _write(paths: list[Path], texts: Iterable[str]) -> None:
    for path, text in zip(paths, texts, strict=True):
        try:
            write_text(path, text)
        except OSError as error:
            raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"`{path}` cannot be written: {error.strerror}", place="OUT", hint="OUT= takes a folder")


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
        given = skypilot.secrets(spec)
        key = [f"export {KEY}=$(openssl rand -hex 32)"] if KEY in given else []
        return [*key, f"sky jobs launch{''.join(f' --secret {name}' for name in given)} {shlex.quote(str(paths[0]))}"]
    space = namespace(spec)
    files = " ".join(f"-f {shlex.quote(str(path))}" for path in paths)
    logs = f"kubectl logs{space} -f --prefix --max-log-requests={max(5, spec.pods)} -l app.kubernetes.io/instance={spec.name}"
    return [f"kubectl apply{space} {files}", logs]


def _facts(rendered: Rendered, paths: list[Path]) -> dict[str, object]:
    spec = rendered.spec
    return {
        "kind": spec.settings.kind, "name": spec.name, "run_name": spec.run_name, "pods": spec.pods, "processes": list(spec.processes),
        "cards": list(spec.cards), "words": spec.words(), "files": [str(path) for path in paths], "notes": list(rendered.notes),
        "commands": _commands(spec, paths), "plan": rendered.plan.to_json(),
    }  # fmt: skip
