"""What `train.optim` and `train.lr_scheduler_type` can run: packages, refusals, and the settings that each word
takes.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from sft_play.config.metrics import VALIDATE, never_evaluated
from sft_play.config.reader import Conflict, Mismatch, Range, closest_word, convert
from sft_play.config.schema import Config, TrainConfig
from sft_play.config.yaml_files import wrap
from sft_play.errors import HardwareError

OPTIM, SCHEDULE, SETTINGS, ARGUMENTS = (
    "train.optim",
    "train.lr_scheduler_type",
    "train.lr_scheduler_kwargs",
    "train.optim_args",
)

BITSANDBYTES = frozenset({
    "paged_adamw_8bit", "paged_adamw_32bit", "adamw_8bit", "adamw_bnb_8bit", "paged_lion_8bit", "paged_lion_32bit", "lion_8bit", "lion_32bit",
    "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit", "ademamix", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
})  # fmt: skip
"""Optimizers of bitsandbytes, which has kernels for CPUs too; there all states are fp32."""
LOW_RANK = ("galore_", "apollo_")
TWO_FACED = "schedule_free_"
"""Prefix of optimizers that train at other weights than those that are evaluated and saved."""
PACKAGES: Mapping[str, tuple[str, str]] = {
    "galore_": ("galore_torch", "galore-torch==1.0"),
    "apollo_": ("apollo_torch", "apollo-torch==1.0.3"),
    "grokadamw": ("grokadamw", "grokadamw==0.1.2"),
    TWO_FACED: ("schedulefree", "schedulefree==1.4.1"),
    "stable_adamw": ("optimi", "torch-optimi==0.3.3"),
}
"""How a word of `train.optim` begins -> the module that it needs, and what pip calls it."""
WHOLE_PARAMETERS = (*PACKAGES,)
"""Beginnings of optimizers that need every parameter in one piece on each rank."""
UNSAVED = ("galore_", "apollo_", "grokadamw")
"""Beginnings of optimizers that keep Python objects among their states."""
IN_BACKWARD = (
    "which updates weights inside the backward pass of each micro-batch: the update would depend on the micro-batch,"
    " and nothing is clipped"
)
SUBCLASSES = (
    "whose states are tensors of torchao's own, which no checkpoint here can hold; `adamw_bnb_8bit` keeps about as"
    " little"
)
REFUSED: Mapping[str, str] = {
    "adamw_torch_4bit": SUBCLASSES,
    "adamw_torch_8bit": SUBCLASSES,
    "lomo": IN_BACKWARD,
    "adalomo": IN_BACKWARD,
    "galore_adamw_layerwise": IN_BACKWARD,
    "galore_adamw_8bit_layerwise": IN_BACKWARD,
    "galore_adafactor_layerwise": IN_BACKWARD,
    "apollo_adamw_layerwise": IN_BACKWARD,
    "adamw_torch_xla": "which runs on TPUs only",
    "adamw_torch_npu_fused": "which runs on Ascend NPUs only",
    "adamw_anyprecision": "which needs `torchdistx`, and that has no release for today's torch",
}
"""Words of `train.optim` that are never run, and why."""
WITHOUT_BETAS = ("adafactor", "sgd", "adagrad", "rmsprop", "galore_", "grokadamw", "schedule_free_sgd")
"""Beginnings of optimizers to which transformers gives neither `train.adam_beta1` nor its siblings."""

FromZero = Annotated[float, Range(minimum=0)]
Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Factor = Annotated[float, Range(above=0, below=1)]
Shape = Literal["linear", "cosine", "1-sqrt"]
ARGUMENTS_OF: Mapping[str, Mapping[str, Any]] = {
    "ademamix": {"beta1": float, "beta2": float, "beta3": float, "alpha": float, "eps": float, "t_alpha": int, "t_beta3": int},
    "sgd": {"momentum": float, "dampening": float, "nesterov": bool},
    "adagrad": {"lr_decay": float, "eps": float},
    "rmsprop": {"momentum": float, "alpha": float, "eps": float, "centered": bool},
    "galore_": {"rank": int, "update_proj_gap": int, "scale": float, "proj_type": str},
    "apollo_": {"rank": int, "update_proj_gap": int, "scale": float, "proj_type": str, "proj": str, "scale_type": str},
    "grokadamw": {"alpha_init": float, "lamb": float, "gamma": float, "grokking_signal_decay_rate": float, "gradient_clipping": float},
    TWO_FACED: {"weight_lr_power": float, "r": float},
    "stable_adamw": {"max_lr": float},
}  # fmt: skip
"""How a word of `train.optim` begins -> the entries of `train.optim_args` that reach it as they are meant."""
_PLATEAU = {
    "mode": Literal["min", "max"],
    "factor": Factor,
    "patience": Count,
    "threshold": FromZero,
    "threshold_mode": Literal["rel", "abs"],
    "cooldown": Count,
    "min_lr": FromZero,
    "eps": FromZero,
}
_FLOORED = {"num_cycles": FromZero, "min_lr": FromZero, "min_lr_rate": FromZero}
SETTINGS_OF: Mapping[str, Mapping[str, Any]] = {
    "linear": {}, "constant": {}, "constant_with_warmup": {}, "cosine": {"num_cycles": FromZero},
    "cosine_with_restarts": {"num_cycles": Positive}, "polynomial": {"lr_end": FromZero, "power": FromZero},
    "inverse_sqrt": {"timescale": Positive}, "reduce_lr_on_plateau": _PLATEAU, "cosine_with_min_lr": _FLOORED,
    "cosine_warmup_with_min_lr": _FLOORED | {"warmup_lr_rate": FromZero},
    "warmup_stable_decay": {
        "num_decay_steps": Count, "num_stable_steps": Count, "warmup_type": Shape, "decay_type": Shape, "min_lr_ratio": FromZero,
        "num_cycles": FromZero,
    },
    "greedy": _PLATEAU | {
        "warmup": Count, "max_lr": FromZero, "smooth": bool, "window_size": Positive, "reset_start": Count,
    },
}  # fmt: skip
"""Word of `train.lr_scheduler_type` -> the entries of `train.lr_scheduler_kwargs` that it takes."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
WITHOUT_WARMUP = ("constant", *BY_METRIC)


def begins(word: str, table: Mapping[str, Any] | tuple[str, ...]) -> str | None:
    """Return the first entry of `table` that `word` begins with."""
    return next((start for start in table if word.startswith(start)), None)


def missing_optimizer(config: Config) -> list[HardwareError]:
    """Return what is wrong with this environment: the package of `train.optim` is not installed."""
    start = begins(config.train.optim, PACKAGES)
    if start is None or config.train.optim in REFUSED or importlib.util.find_spec(PACKAGES[start][0]):
        return []
    module, package = PACKAGES[start]
    return [
        HardwareError(
            f"`{OPTIM}` is `{config.train.optim}`, which needs `{module}`, and that is not installed here",
            hint=f"{shlex.quote(sys.executable)} -m pip install -c constraints.txt {package}",
        )
    ]


def optimizer(config: Config) -> Iterator[Conflict]:
    """Words that cannot run, cannot be saved, or would ignore what else was typed."""
    train, word = config.train, config.train.optim
    if why := REFUSED.get(word):
        yield Conflict(OPTIM, f", {why}", "`adafactor` keeps the least memory; `auto` chooses by mode and hardware")
        return
    if begins(word, UNSAVED) and train.save_strategy != "no":
        yield Conflict(
            OPTIM,
            ", whose states are Python objects, so no checkpoint can hold them",
            "set `train.save_strategy: no` (the model is written at the end, and nothing can be resumed), or take another optimizer",
        )
    low_rank, targets = begins(word, LOW_RANK), train.extra.get("optim_target_modules")
    if low_rank and not targets:
        yield Conflict(
            OPTIM, ", but `train.optim_target_modules` is not given", "TRAIN_OPTIM_TARGET_MODULES=all-linear"
        )
    if targets and not low_rank:
        hint = "leave it out; it is for GaLore and APOLLO"
        yield Conflict(
            "train.optim_target_modules", f"`train.optim_target_modules` is given, but `{OPTIM}` is `{word}`", hint
        )
    if low_rank and train.weight_decay:
        yield Conflict(
            "train.weight_decay", f", which `{word}` does not apply as transformers calls it", "leave it out"
        )
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if name in train.extra and begins(word, WITHOUT_BETAS):
            yield Conflict(f"train.{name}", f"`train.{name}` is given, but `{word}` does not take it", "leave it out")
    yield from _arguments(word, train.extra.get("optim_args"))


def _arguments(word: str, text: str | None) -> Iterator[Conflict]:
    """`train.optim_args`, as transformers reads them: `name=value,name=value`."""
    start = None if word.startswith("rmsprop_bnb") else begins(word.removeprefix("paged_"), ARGUMENTS_OF)
    taken = ARGUMENTS_OF[start] if start else {}
    for part in text.replace(" ", "").split(",") if text else ():
        name, equals, value = part.partition("=")
        if not equals or "=" in value:
            yield Conflict(
                ARGUMENTS,
                f"`{ARGUMENTS}` has `{part}`, which is no `name=value`",
                "TRAIN_OPTIM_ARGS=name=value,name=value",
            )
        elif name not in taken:
            names = ", ".join(taken) or "none"
            yield Conflict(ARGUMENTS, f"`{ARGUMENTS}` has `{name}`, which `{word}` does not take", f"it takes: {names}")
        elif taken[name] is not str:
            problems: list[Mismatch] = []
            convert(wrap(_plain(value.lower())), taken[name], f"{ARGUMENTS}.{name}", problems)
            yield from (Conflict(ARGUMENTS, f"`{one.key}` {one.problem}", one.hint) for one in problems)


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def lr_settings(config: Config) -> Any:
    """Return `train.lr_scheduler_kwargs`, which may be written as JSON."""
    given = config.train.extra.get("lr_scheduler_kwargs") or {}
    return _plain(given) if isinstance(given, str) else given


def schedule(config: Config) -> Iterator[Conflict]:
    """Settings that the schedule does not take, lacks, or cannot follow."""
    train, word = config.train, config.train.lr_scheduler_type
    given = lr_settings(config)
    if not isinstance(given, Mapping):
        yield Conflict(SETTINGS, f"`{SETTINGS}` is no mapping", "`lr_scheduler_kwargs: {num_cycles: 2}`")
        return
    taken = SETTINGS_OF[word]
    for name, value in given.items():
        if name not in taken:
            close = closest_word(str(name), list(taken))
            hint = f"did you mean `{close}`?" if close else f"it takes: {', '.join(taken) or 'none'}"
            yield Conflict(SETTINGS, f"`{SETTINGS}` has `{name}`, which the schedule `{word}` does not take", hint)
            continue
        problems: list[Mismatch] = []
        convert(wrap(value), taken[name], f"{SETTINGS}.{name}", problems)
        yield from (Conflict(SETTINGS, f"`{one.key}` {one.problem}", one.hint) for one in problems)
    floors = [name for name in ("min_lr", "min_lr_rate") if given.get(name) is not None]
    if taken.keys() >= _FLOORED.keys() and len(floors) != 1:
        has = "both `min_lr` and `min_lr_rate`" if floors else "neither `min_lr` nor `min_lr_rate`"
        yield Conflict(
            SCHEDULE,
            f", which needs one floor, and `{SETTINGS}` has {has}",
            "`lr_scheduler_kwargs: {min_lr_rate: 0.1}`",
            SETTINGS,
        )
    if word == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield Conflict(
            SCHEDULE, f", but `{SETTINGS}` has no `num_decay_steps`", "`lr_scheduler_kwargs: {num_decay_steps: 100}`"
        )
    if word in BY_METRIC and (why := never_evaluated(config)):
        yield Conflict(
            SCHEDULE, f", which follows evaluations, but nothing is evaluated while training: {why}", VALIDATE
        )
    # Schedule-free optimizers have a warm-up of their own.
    if word not in WITHOUT_WARMUP or begins(train.optim, (TWO_FACED,)):
        return
    given_ratio = train.warmup_ratio not in (0, TrainConfig().warmup_ratio)
    for key in (["train.warmup_steps"] if train.warmup_steps else []) + (["train.warmup_ratio"] if given_ratio else []):
        yield Conflict(
            key,
            f", but the schedule `{word}` has no warm-up",
            "`lr_scheduler_type: constant_with_warmup`, or leave it out",
        )


RULES = (optimizer, schedule)
