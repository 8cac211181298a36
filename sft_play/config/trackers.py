"""Trackers that `train.report_to` names: which there are, and what each needs."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Iterator, Mapping

from sft_play.config.rule import Origins
from sft_play.config.schema import Config
from sft_play.config.types import closest_word
from sft_play.errors import HardwareError, UserError

OWN, AIM = "tensorboard", "aim"
"""Written by ourselves; transformers serves the others."""
KEY = "train.report_to"
PACKAGES: Mapping[str, tuple[str, str]] = {
    OWN: ("tensorboard", "tensorboard"), AIM: ("aim", "aim==3.29.1"), "azure_ml": ("azureml", "azureml-sdk"), "clearml": ("clearml", "clearml"),
    "codecarbon": ("codecarbon", "codecarbon"), "comet_ml": ("comet_ml", "comet-ml"), "dagshub": ("dagshub", "dagshub mlflow"),
    "dvclive": ("dvclive", "dvclive"), "flyte": ("flytekit", "flytekit"), "kubeflow": ("", ""), "mlflow": ("mlflow", "mlflow"),
    "neptune": ("neptune", "neptune"), "swanlab": ("swanlab", "swanlab"), "trackio": ("trackio", "trackio"), "wandb": ("wandb", "wandb"),
}  # fmt: skip
"""Tracker -> the module that it needs, and what pip calls it."""


def trackers(config: Config) -> list[str]:
    """Returns the trackers that are named."""
    wanted = config.train.extra.get("report_to", OWN)
    return [wanted] if isinstance(wanted, str) else list(wanted or [])


def known(config: Config, origins: Origins) -> Iterator[UserError]:
    """A name that no tracker has. As the rules of `config.rules`: no effects."""
    place = origins.get(KEY)
    for name in trackers(config):
        if name not in (*PACKAGES, "all", "none"):
            parts = [part.strip() for part in name.split(",")]
            close = f"[{', '.join(parts)}]" if len(parts) > 1 else closest_word(name, list(PACKAGES))
            hint = (
                f"did you mean `{close}`?"
                if close
                else f"one of {', '.join(PACKAGES)}, a list such as `[tensorboard, wandb]`, or `none`"
            )
            yield UserError(f"`{KEY}` names `{name}`, which is not a tracker", place=place, hint=hint)


def missing(config: Config) -> list[HardwareError]:
    """Returns what is wrong with this environment: a tracker that is named and not installed."""
    needed = {name: PACKAGES[name] for name in trackers(config) if name in PACKAGES}
    return [
        HardwareError(
            f"`{KEY}` names `{name}`, which is not installed here",
            hint=f"{shlex.quote(sys.executable)} -m pip install {package}"
            + (" (it takes older versions of filelock and python-dateutil)" if name == AIM else ""),
        )
        for name, (module, package) in needed.items()
        if module and importlib.util.find_spec(module) is None
    ]


RULES = (known,)
