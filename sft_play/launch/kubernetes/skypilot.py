"""A SkyPilot task: the same run on whatever cloud has the GPUs. No cluster of ours, so claims become SkyPilot volumes of those names."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable

from sft_play.config.kubernetes_rules import quantity
from sft_play.errors import HardwareError, UserError
from sft_play.launch.kubernetes.pods import ENTRY, Document, claims, variables
from sft_play.launch.kubernetes.spec import MODELS, RUNS, TRACKING, Spec
from sft_play.plan.catalogue import CATALOGUE

FOLDER = "/tmp/sft-play-config"
END = "END_OF_SFT_PLAY_FILE"
CARDS = {"A100": "A100-80GB", "A100-40GB": "A100", "H100PCIe": "H100", "RTX6000Ada": "RTX6000-Ada"}
"""Our catalogue's name -> SkyPilot's, where they differ."""
NOT_OF_CLOUDS = (
    "namespace", "create_claims", "storage_class", "storage_size", "gpu_resource", "shm", "node_selector", "replica_selectors",
    "rdma_resource", "finished_seconds", "queue",
)  # fmt: skip
RETRIED = 175
"""The entry point's code for a lost peer; all others are permanent. SkyPilot itself recovers a preempted machine."""
SETUP = """\
set -e
command -v uv >/dev/null || pip install uv
uv venv --seed --allow-existing --python 3.11 .venv
scripts/install.sh .venv/bin/python .venv runtime
"""


def refuse_keys(typed: Callable[[str], bool]) -> None:
    """Raises `UserError` for keys of Kubernetes that somebody wrote, and that a SkyPilot task cannot say."""
    given = [f"`kubernetes.{key}`" for key in NOT_OF_CLOUDS if typed(f"kubernetes.{key}")]
    if given:
        raise UserError(
            f"`kubernetes.kind` is `skypilot`, which knows no {', '.join(given)}",
            place="kubernetes.kind", hint="leave them out: SkyPilot finds the machines, and its volumes are made by `sky volumes apply`",
        )  # fmt: skip


def document(spec: Spec, *, own_image: bool) -> Document:
    """Returns the task. With `own_image` machines run that container; else they get this folder and the pinned packages.

    Raises `HardwareError` for a GPU without a name, which no cloud sells.
    """
    task: Document = {"name": spec.name, "num_nodes": spec.pods}
    if not own_image:
        task["workdir"] = "."
    task["resources"] = _resources(spec, own_image)
    task["envs"] = variables(spec) | dict(spec.settings.env)
    if spec.settings.token_secret:
        task["secrets"] = {"HF_TOKEN": None}  # `sky jobs launch --secret HF_TOKEN` takes it from the environment
    where = {"models": MODELS, "runs": RUNS, "tracking": TRACKING}
    task["volumes"] = {where[role]: claim for claim, roles in claims(spec).items() for role in roles}
    if not own_image:
        task["setup"] = SETUP
    task["run"] = _run(spec, own_image)
    return task


def _resources(spec: Spec, own_image: bool) -> Document:
    memory = quantity(spec.settings.memory) or 0
    found: Document = {"cpus": f"{spec.settings.cpus}+", "memory": f"{math.ceil(memory / 2**30)}+"}
    if spec.device == "cuda":
        card = spec.cards[0]
        if card not in CATALOGUE:
            raise HardwareError(
                f"a SkyPilot task needs the GPU's name, and `HARDWARE` says `{card}`", place="HARDWARE", hint="HARDWARE=L40S"
            )
        found["accelerators"] = {CARDS.get(card, card): spec.processes[0]}
    if spec.settings.infiniband:
        found["network_tier"] = "best"
    if own_image:
        found["image_id"] = f"docker:{spec.settings.image}"
    if spec.settings.max_restarts:
        found["job_recovery"] = {"recover_on_exit_codes": [RETRIED]}
    return found


def _run(spec: Spec, own_image: bool) -> str:
    """Returns the shell lines: the files of `/config` as they are (quoted, so that the shell reads nothing in them), and the command."""
    lines = ["set -e", f"mkdir -p {FOLDER}"]
    for name, text in spec.files().items():
        if END in text.split("\n"):
            raise UserError(f"`{name}` holds a line `{END}`, which ends a file in a shell script")
        lines += [f"cat > {FOLDER}/{name} <<'{END}'", *text.removesuffix("\n").split("\n"), END]
    python = ENTRY[0] if own_image else ".venv/bin/python"
    lines.append(shlex.join([python, *ENTRY[1:], *spec.words(folder=FOLDER)]))
    return "\n".join(lines) + "\n"
