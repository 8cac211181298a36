"""Trackers of `train.report_to`: the rule about their names; the packages that they and optimizers need."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator, Mapping

from sft_play.config.optimizers import OPTIM, OPTIMIZERS
from sft_play.config.reader import Conflict, closest_word
from sft_play.config.schema import Config
from sft_play.errors import HardwareError

OWN, AIM = "tensorboard", "aim"
"""Written by ourselves; transformers serves the others."""
KEY = "train.report_to"
PACKAGES: Mapping[str, tuple[str, str]] = {
    OWN: ("tensorboard", "tensorboard"),
    AIM: ("aim", "aim==3.29.1"),
    "azure_ml": ("azureml", "azureml-sdk"),
    "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"),
    "comet_ml": ("comet_ml", "comet-ml==3.58.8"),
    "dagshub": ("dagshub", "dagshub mlflow"),
    "dvclive": ("dvclive", "dvclive"),
    "flyte": ("flytekit", "flytekit"),
    "kubeflow": ("", ""),
    "mlflow": ("mlflow", "mlflow-skinny==3.17.2"),
    "neptune": ("neptune", "neptune"),
    "swanlab": ("swanlab", "swanlab"),
    "trackio": ("trackio", "trackio"),
    "wandb": ("wandb", "wandb==0.31.0"),
}
"""Tracker -> the module that it needs, and its packages for pip."""


def trackers(config: Config) -> list[str]:
    """Return the names of the configured trackers."""
    report_to = config.train.extra.get("report_to", OWN)
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    return ["comet_ml" if name == "comet" else name for name in names]


def missing_packages(config: Config) -> list[HardwareError]:
    """Return an error for each package of trackers and optimizer that is not installed."""
    optim = config.train.optim
    chosen = OPTIMIZERS[optim]
    needed = [(f"`{KEY}` names `{name}`", *PACKAGES[name]) for name in trackers(config) if name in PACKAGES]
    needed.append((f"`{OPTIM}` is `{optim}`, which needs `{chosen.module}`", chosen.module, chosen.pip))
    return [
        HardwareError(
            f"{asked}, which is not installed here",
            hint=f"{shlex.quote(sys.executable)} -m pip install -c constraints.txt {package}",
        )
        for asked, module, package in needed
        if module and importlib.util.find_spec(module) is None
    ]


def known_trackers(config: Config) -> Iterator[Conflict]:
    for name in trackers(config):
        if name not in (*PACKAGES, "all", "none"):
            parts = [part.strip() for part in name.split(",")]
            close = f"[{', '.join(parts)}]" if len(parts) > 1 else closest_word(name, list(PACKAGES))
            choices = f"one of {', '.join(PACKAGES)}, a list such as `[tensorboard, wandb]`, or `none`"
            yield Conflict(
                KEY, f"`{KEY}` names `{name}`, which is not a tracker", f"did you mean `{close}`?" if close else choices
            )
