"""A SkyPilot task: the same run on whatever cloud has the GPUs.

No cluster of ours: claims that somebody typed become SkyPilot volumes of those names, which only Kubernetes and RunPod have. Without
them models and runs stand on the machine's disk, or where `/models` and `/runs` are mounted (`file_mounts`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import replace

from sft_play.config.kubernetes_rules import quantity
from sft_play.config.schema import KubernetesConfig
from sft_play.errors import HardwareError, UserError
from sft_play.launch.key import VARIABLE as KEY
from sft_play.plan.catalogue import CATALOGUE
from sft_play.schedulers.kubernetes_spec import MODELS, RUNS, TRACKING, Spec
from sft_play.schedulers.pods import ENTRY, Document, claims, variables

FOLDER = "/tmp/sft-play-config"
END = "END_OF_SFT_PLAY_FILE"
CARDS = {"A100": "A100-80GB", "A100-40GB": "A100", "H100PCIe": "H100", "RTX6000Ada": "RTX6000-Ada"}
"""Our catalogue's name -> SkyPilot's, where they differ."""
NOT_OF_CLOUDS = (
    "namespace", "create_claims", "storage_class", "storage_size", "gpu_resource", "shm", "node_selector", "replica_selectors",
    "rdma_resource", "rdma_count", "finished_seconds", "queue", "tolerations", "pull_secret", "access_mode",
)  # fmt: skip
RETRIED = 175
"""The entry point's code for a lost peer; all others are permanent. SkyPilot itself recovers a preempted machine. It knows no limit, so the
entry point counts (`launch.tries`): where run folders outlive the machine."""
PYTHON_OF_IMAGE = "/opt/venv/bin/python"
"""SkyPilot logs in by ssh, which knows nothing of the image's PATH."""
IN_MODELS = {"HF_HOME": "huggingface", "SFT_PLAY_CACHE": "cache"}
"""Variables that name folders among the models -> those folders."""
OF_ROLE = {"models_claim": tuple(IN_MODELS), "runs_claim": ("RUNS_DIR",)}
"""Variables that say where a role's files are."""
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


def with_typed_claims(settings: KubernetesConfig, typed: Callable[[str], bool]) -> KubernetesConfig:
    """Returns the settings without claims that nobody typed: most clouds have no volumes."""
    models, runs = (getattr(settings, key) if typed(f"kubernetes.{key}") else None for key in ("models_claim", "runs_claim"))
    return replace(settings, models_claim=models, runs_claim=runs)


def document(spec: Spec, *, own_image: bool) -> Document:
    """Returns the task. With `own_image` machines run that container; else they get this folder and the pinned packages.

    Raises `HardwareError` for a GPU without a name, which no cloud sells.
    """
    task: Document = {"name": spec.name, "num_nodes": spec.pods}
    if not own_image:
        task["workdir"] = "."
    task["resources"] = _resources(spec, own_image)
    elsewhere = {name for key, names in OF_ROLE.items() if getattr(spec.settings, key) is None for name in names}
    found = {name: text for name, text in variables(spec).items() if name not in elsewhere}
    task["envs"] = found | dict(spec.settings.env)
    if named := secrets(spec):
        task["secrets"] = dict.fromkeys(named)  # `sky jobs launch --secret HF_TOKEN` takes it from the environment
    where = {"models": MODELS, "runs": RUNS, "tracking": TRACKING}
    if volumes := {where[role]: claim for claim, roles in claims(spec).items() for role in roles}:
        task["volumes"] = volumes
    if not own_image:
        task["setup"] = SETUP
    task["run"] = _run(spec, own_image)
    return task


def secrets(spec: Spec) -> list[str]:
    """Returns the variables that SkyPilot must be given with `--secret`."""
    return [*(["HF_TOKEN"] if spec.settings.token_secret else []), *([KEY] if spec.pods > 1 else [])]


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
    if spec.settings.max_restarts and spec.settings.runs_claim:
        found["job_recovery"] = {"recover_on_exit_codes": [RETRIED]}
    return found


def _run(spec: Spec, own_image: bool) -> str:
    """Returns the shell lines: the files of `/config`, quoted so that the shell reads nothing in them, where things are, and the command.

    What `kubernetes.env` says of where models are stays so.
    """
    lines = ["set -e", f"mkdir -p {FOLDER}"]
    for name, text in spec.files().items():
        if END in text.split("\n"):
            raise UserError(f"`{name}` holds a line `{END}`, which ends a file in a shell script")
        lines += [f"cat > {FOLDER}/{name} <<'{END}'", *text.removesuffix("\n").split("\n"), END]
    if spec.settings.runs_claim is None:
        lines += [f'RUNS={RUNS}; [ -w "$RUNS" ] || RUNS="$HOME/sft-play/runs"', 'export RUNS_DIR="$RUNS"']
    places = {name: part for name, part in IN_MODELS.items() if name not in spec.settings.env}
    if spec.settings.models_claim is None and places:
        lines.append(f'MODELS={MODELS}; [ -w "$MODELS" ] || MODELS="$HOME/sft-play/models"')
        lines.append("export " + " ".join(f'{name}="$MODELS/{part}"' for name, part in places.items()))
    python = PYTHON_OF_IMAGE if own_image else ".venv/bin/python"
    lines.append(shlex.join([python, *ENTRY[1:], *spec.words(folder=FOLDER)]))
    return "\n".join(lines) + "\n"
