"""What all kinds of job are rendered from: one frozen description of the run, made from the plan and checked against the kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sft_play.config.kubernetes_rules import LABEL
from sft_play.config.schema import Config, KubernetesConfig
from sft_play.errors import UserError
from sft_play.launch.run_folder import NAME_PATTERN
from sft_play.plan.plan import Plan

MODELS, RUNS, TRACKING, SETTINGS = "/models", "/runs", "/tracking", "/config"
"""Where pods see the claims, and the configuration."""
CONFIG_FILE, DEEPSPEED_FILE = "config.json", "deepspeed.json"
LONGEST_LABEL = 63
BEFORE_CODE = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A run as the manifests need it."""

    name: str
    """Of the job and of everything that belongs to it."""
    run_name: str
    """Of the run's folder in the claim."""
    settings: KubernetesConfig
    command: str
    """`train-distributed`, `train-deepspeed` or `train`."""
    device: Literal["cpu", "cuda"]
    processes: tuple[int, ...]
    """Ranks of each pod, in order; on GPUs one GPU each."""
    selectors: tuple[Mapping[str, str], ...]
    """Labels of the node of each pod, in order."""
    cards: tuple[str, ...]
    """The catalogue's name of each pod's GPU; of a CPU `cpu`."""
    config_json: str
    """The resolved configuration with the origin of each key, as `config.json` of a run has it."""
    deepspeed_json: str | None = None
    """A user's own DeepSpeed JSON, letter for letter."""
    join_seconds: int = 600

    @property
    def pods(self) -> int:
        return len(self.processes)

    def words(self, processes: int | None = None, *, folder: str = SETTINGS) -> list[str]:
        """Returns the words after `python -m sft_play.schedulers.entry`, for a pod with that many ranks and the files in `folder`."""
        words = [self.command, f"CONFIG={folder}/{CONFIG_FILE}", f"RUN_NAME={self.run_name}"]
        if self.deepspeed_json is not None:
            words.append(f"DEEPSPEED_CONFIG={folder}/{DEEPSPEED_FILE}")
        if self.command != "train":
            words.append(f"NUM_GPUS={self.processes[0] if processes is None else processes}")
        if self.pods > 1:
            words += [
                f"NUM_NODES={self.pods}", f"MASTER_PORT={self.settings.port}", f"LAUNCH_JOIN_SECONDS={self.join_seconds}",
            ]  # fmt: skip
        return words

    def files(self) -> dict[str, str]:
        """Returns the files of `/config`."""
        found = {CONFIG_FILE: self.config_json}
        return found | ({DEEPSPEED_FILE: self.deepspeed_json} if self.deepspeed_json is not None else {})


def name_of(run_name: str | None, path: Path | None, kind: str, pods: int) -> tuple[str, str]:
    """Returns the job's name and the run's. Raises `UserError` for one that the cluster would refuse.

    A name that was typed is taken as it is; that of a configuration's file is made to fit (`l40s_pair` is `l40s-pair`).
    """
    room = LONGEST_LABEL - len(_suffix(kind, pods))
    if run_name is None:
        stem = BEFORE_CODE.sub("-", (path.stem if path else "run").lower()).strip("-")
        name = (stem if stem[:1].isalpha() else f"run-{stem}".rstrip("-"))[:room].rstrip("-")
        return name, name
    if not LABEL.fullmatch(run_name) or len(run_name) > room or not NAME_PATTERN.fullmatch(run_name):
        fitting = BEFORE_CODE.sub("-", run_name.lower()).strip("-")
        fitting = (fitting if fitting[:1].isalpha() else f"run-{fitting}".rstrip("-"))[:room].rstrip("-")
        raise UserError(
            f"`RUN_NAME` is `{run_name}`, which a cluster takes for no {kind}: expected small letters, digits and `-`, the first a letter, "
            f"at most {room} ({LONGEST_LABEL} with `{_suffix(kind, pods)}` behind them)",
            hint=f"RUN_NAME={fitting}",
        )
    return run_name, run_name


def _suffix(kind: str, pods: int) -> str:
    """Returns the longest ending that the kind's controller puts behind the name of a job, in a name that is a label."""
    last = max(0, pods - 1)
    return {
        "pytorchjob": f"-worker-{max(0, pods - 2)}" if pods > 1 else "-master-0",
        "trainjob": f"-node-0-{last}",  # "JOBSET-REPLICATED_JOB-JOB-POD" of a JobSet
        "job": f"-{last}",
        "skypilot": "-config",
    }[kind]


def selectors_of(settings: KubernetesConfig, pods: int) -> tuple[Mapping[str, str], ...]:
    """Returns each pod's node selector, in order of ranks: `node_selector` with its own labels on top. Raises `UserError`."""
    own = settings.replica_selectors
    if own and len(own) != pods:
        raise UserError(
            f"`kubernetes.replica_selectors` has {len(own)} entr{'y' if len(own) == 1 else 'ies'}, and the run has {pods} pod"
            f"{'s' if pods > 1 else ''}",
            hint="one entry for each pod in order of ranks, `{}` where nothing is asked, or none at all",
        )
    return tuple({**settings.node_selector, **labels} for labels in (own or [{}] * pods))


def refuse_unlike(spec: Spec) -> None:
    """Raises `UserError` where pods are to differ in a way that the kind of job cannot say."""
    kind = spec.settings.kind
    pods = [
        (count, tuple(sorted(labels.items())), card)
        for count, labels, card in zip(spec.processes, spec.selectors, spec.cards, strict=True)
    ]
    one_template = pods[1:] if kind == "pytorchjob" else pods
    if len(set(one_template)) > 1:
        which = "all its workers (its Master may differ)" if kind == "pytorchjob" else "all its pods"
        raise UserError(
            f"the pods are to have different GPUs, and {one_of(kind)} has one template for {which}",
            place="kubernetes.kind",
            hint=ONE_FIRST if kind == "pytorchjob" else WHERE_UNLIKE,
        )
    if spec.device == "cuda" and len({(labels, card) for _, labels, card in pods}) > len({labels for _, labels, _ in pods}):
        raise UserError(
            f"the pods are to have {' and '.join(sorted(set(spec.cards)))}, and nothing says which pod gets which",
            place="kubernetes.replica_selectors",
            hint="one label for each pod in order of ranks: [{nvidia.com/gpu.product: ...}, {nvidia.com/gpu.product: ...}]",
        )


KINDS = {
    "pytorchjob": "PyTorchJob",
    "trainjob": "TrainJob",
    "job": "indexed Job",
    "skypilot": "SkyPilot task",
}

WHERE_UNLIKE = "kubernetes.kind: pytorchjob, whose Master (rank 0's pod) may differ from its Workers; or GPUs of one kind"
ONE_FIRST = "put the pod that differs first; or run each node's command (docs/launching.md) in a Job of its own"


def one_of(kind: str) -> str:
    """Returns the name of a kind with its article: `an indexed Job`."""
    return f"{'an' if KINDS[kind][0] in 'aeiou' else 'a'} {KINDS[kind]}"


def of_plan(
    config: Config, plan: Plan, *, names: tuple[str, str], command: str, processes: tuple[int, ...], cards: tuple[str, ...],
    config_json: str, deepspeed_json: str | None,
) -> Spec:  # fmt: skip
    """Returns the run's description, with what the kind of job cannot say refused. Raises `UserError`."""
    spec = Spec(
        name=names[0], run_name=names[1], settings=config.kubernetes, command=command, device=plan.device, processes=processes,
        selectors=selectors_of(config.kubernetes, len(processes)), cards=cards, config_json=config_json, deepspeed_json=deepspeed_json,
        join_seconds=config.launch.join_seconds,
    )  # fmt: skip
    refuse_unlike(spec)
    return spec
