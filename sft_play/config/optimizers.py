"""Optimizers and schedules: the packages they need, those that are refused, and the settings that each takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from sft_play.config.metrics import VALIDATE, never_evaluated
from sft_play.config.reader import Conflict, Mismatch, Range, convert
from sft_play.config.schema import Config, TrainConfig
from sft_play.config.yaml_files import wrap

OPTIM, SCHEDULE, SETTINGS, ARGUMENTS = (
    "train.optim",
    "train.lr_scheduler_type",
    "train.lr_scheduler_kwargs",
    "train.optim_args",
)

IN_BACKWARD = (
    "which updates weights inside the backward pass of each micro-batch: the update would depend on the micro-batch,"
    " and nothing is clipped"
)
UNSAVED = "whose states no checkpoint here can contain; `adamw_bnb_8bit` and `adafactor` keep little too"

FromZero = Annotated[float, Range(minimum=0)]
Count = Annotated[int, Range(minimum=0)]
Positive = Annotated[int, Range(minimum=1)]
Factor = Annotated[float, Range(above=0, below=1)]
Shape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """How a word of `train.optim` is treated."""

    refused: str = ""
    """Why it is refused, as a clause after the word and a comma."""
    module: str = ""
    """The module that it needs."""
    pip: str = ""
    """The package of that module, as pip takes it."""
    bitsandbytes: bool = False
    """Whether it is one of bitsandbytes, which has CPU kernels too, with fp32 states."""
    two_faced: bool = False
    """Whether it trains at other weights than those that are evaluated and saved."""
    betas: bool = True
    """Whether transformers passes `train.adam_beta1`, `adam_beta2` and `adam_epsilon` to it."""
    matrices: bool = False
    """Whether it updates each matrix of a layer as one, which adapters have none of; ours, not transformers'."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `train.optim_args` that transformers passes on correctly."""

    @property
    def whole(self) -> bool:
        """Whether it needs every parameter unsharded on each rank."""
        return bool(self.module) or self.matrices


def _each(*words: str, **facts: Any) -> dict[str, Optimizer]:
    return dict.fromkeys(words, Optimizer(**facts))


_SCHEDULE_FREE: dict[str, Any] = {
    "module": "schedulefree",
    "pip": "schedulefree==1.4.1",
    "two_faced": True,
    "arguments": {"weight_lr_power": float, "r": float},
}
_ADEMAMIX = {
    "beta1": float,
    "beta2": float,
    "beta3": float,
    "alpha": float,
    "eps": float,
    "t_alpha": int,
    "t_beta3": int,
}
OPTIMIZERS: Mapping[str, Optimizer] = {
    **_each("auto", "adamw_torch", "adamw_torch_fused"),
    **_each("adafactor", betas=False),
    **_each("sgd", betas=False, arguments={"momentum": FromZero, "dampening": float, "nesterov": bool}),
    **_each("adagrad", betas=False, arguments={"lr_decay": FromZero, "eps": FromZero}),
    **_each(
        "rmsprop", betas=False,
        arguments={"momentum": FromZero, "alpha": FromZero, "eps": FromZero, "centered": bool},
    ),
    **_each(
        "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit", "lion_32bit",
        "paged_lion_8bit", "paged_lion_32bit", bitsandbytes=True,
    ),
    **_each("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", bitsandbytes=True, betas=False),
    **_each(
        "ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit",
        bitsandbytes=True, arguments=_ADEMAMIX,
    ),
    **_each("schedule_free_adamw", "schedule_free_radam", **_SCHEDULE_FREE),
    **_each("schedule_free_sgd", **_SCHEDULE_FREE, betas=False),
    **_each("stable_adamw", module="optimi", pip="torch-optimi==0.3.3", arguments={"max_lr": float}),
    **_each("muon", matrices=True),
    **_each(
        "adamw_torch_4bit", "adamw_torch_8bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw",
        "grokadamw", refused=UNSAVED,
    ),
    **_each(
        "lomo", "adalomo", "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise",
        "apollo_adamw_layerwise",
        refused=IN_BACKWARD,
    ),
    **_each("adamw_torch_xla", refused="which runs on TPUs only"),
    **_each("adamw_torch_npu_fused", refused="which runs on Ascend NPUs only"),
    **_each("adamw_anyprecision", refused="which needs `torchdistx`, and that has no release for today's torch"),
}  # fmt: skip
"""How every word of `train.optim` is treated."""

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
        "num_decay_steps": Count, "num_stable_steps": Count, "warmup_type": Shape, "decay_type": Shape,
        "min_lr_ratio": FromZero, "num_cycles": FromZero,
    },
    "greedy": _PLATEAU | {
        "warmup": Count, "max_lr": FromZero, "smooth": bool, "window_size": Positive, "reset_start": Count,
    },
}  # fmt: skip
"""Word of `train.lr_scheduler_type` -> the entries of `train.lr_scheduler_kwargs` that it takes."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
WITHOUT_WARMUP = ("constant", *BY_METRIC)


def optimizer(config: Config) -> Iterator[Conflict]:
    """Refuse an optimizer that cannot run, cannot be saved, or would ignore other keys."""
    train, word = config.train, config.train.optim
    chosen = OPTIMIZERS[word]
    if chosen.refused:
        hint = "`adafactor` keeps the least memory; `auto` chooses by mode and hardware"
        yield Conflict(OPTIM, f", {chosen.refused}", hint)
        return
    if chosen.matrices and config.tuning.mode != "full":
        yield Conflict(
            OPTIM,
            f", which trains a layer's matrices as a whole, but `tuning.mode` is `{config.tuning.mode}`",
            "`tuning.mode: full`, or `train.optim: auto`",
        )
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if name in train.extra and not chosen.betas:
            yield Conflict(f"train.{name}", f"`train.{name}` is given, but `{word}` does not take it", "omit it")
    yield from _arguments(word, train.extra.get("optim_args"))


def _arguments(word: str, text: str | None) -> Iterator[Conflict]:
    """Check `train.optim_args`, which transformers reads as `name=value,name=value`."""
    settings: dict[str, Any] = {}
    for part in text.replace(" ", "").split(",") if text else ():
        name, equals, value = part.partition("=")
        if not equals or "=" in value:
            yield Conflict(
                ARGUMENTS,
                f"`{ARGUMENTS}` has `{part}`, which is not `name=value`",
                "TRAIN_OPTIM_ARGS=name=value,name=value",
            )
        else:
            settings[name] = _plain(value.lower())
    chosen = OPTIMIZERS[word]
    own = "; `train.adam_beta1`, `adam_beta2`, `adam_epsilon` and `weight_decay` are keys" if chosen.betas else ""
    name = "AdamW (`auto`)" if word == "auto" else f"`{word}`"
    yield from _entries(ARGUMENTS, settings, chosen.arguments, name, own)
    if (
        word == "sgd"
        and settings.get("nesterov") is True
        and (not settings.get("momentum") or settings.get("dampening"))
    ):
        yield Conflict(
            ARGUMENTS,
            f"`{ARGUMENTS}` has `nesterov=true`, which needs a momentum, and no dampening",
            "TRAIN_OPTIM_ARGS=nesterov=true,momentum=0.9",
        )


def _entries(
    key: str, settings: Mapping[str, Any], taken: Mapping[str, Any], taker: str, and_keys: str = ""
) -> Iterator[Conflict]:
    """Check names and values of the entries of `key`."""
    for name, value in settings.items():
        if name not in taken:
            hint = f"it takes {', '.join(taken) or 'none'}{and_keys}"
            yield Conflict(key, f"`{key}` has `{name}`, which {taker} does not take", hint)
            continue
        problems: list[Mismatch] = []
        convert(wrap(value), taken[name], f"{key}.{name}", problems)
        yield from (Conflict(key, f"`{mismatch.key}` {mismatch.problem}", mismatch.hint) for mismatch in problems)


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def lr_settings(config: Config) -> Any:
    """Return `train.lr_scheduler_kwargs`, which may be written as JSON."""
    settings = config.train.extra.get("lr_scheduler_kwargs") or {}
    return _plain(settings) if isinstance(settings, str) else settings


def schedule(config: Config) -> Iterator[Conflict]:
    """Refuse settings that the schedule does not take, and a schedule that lacks one."""
    train, word = config.train, config.train.lr_scheduler_type
    settings = lr_settings(config)
    if not isinstance(settings, Mapping):
        yield Conflict(SETTINGS, f"`{SETTINGS}` is not a mapping", "`lr_scheduler_kwargs: {num_cycles: 2}`")
        return
    taken = SETTINGS_OF[word]
    yield from _entries(SETTINGS, settings, taken, f"the schedule `{word}`")
    floors = [name for name in ("min_lr", "min_lr_rate") if settings.get(name) is not None]
    if taken.keys() >= _FLOORED.keys() and len(floors) != 1:
        has = "both `min_lr` and `min_lr_rate`" if floors else "neither `min_lr` nor `min_lr_rate`"
        yield Conflict(
            SCHEDULE,
            f", which needs one floor, and `{SETTINGS}` has {has}",
            "`lr_scheduler_kwargs: {min_lr_rate: 0.1}`",
            SETTINGS,
        )
    if word == "warmup_stable_decay" and "num_decay_steps" not in settings:
        yield Conflict(
            SCHEDULE, f", but `{SETTINGS}` has no `num_decay_steps`", "`lr_scheduler_kwargs: {num_decay_steps: 100}`"
        )
    if word in BY_METRIC and (why := never_evaluated(config)):
        yield Conflict(
            SCHEDULE, f", which follows evaluations, but nothing is evaluated while training: {why}", VALIDATE
        )
    # Schedule-free optimizers warm up by themselves.
    if word not in WITHOUT_WARMUP or OPTIMIZERS[train.optim].two_faced:
        return
    has_ratio = train.warmup_ratio not in (0, TrainConfig().warmup_ratio)
    for key in (["train.warmup_steps"] if train.warmup_steps else []) + (["train.warmup_ratio"] if has_ratio else []):
        yield Conflict(
            key,
            f", but the schedule `{word}` has no warm-up",
            "`lr_scheduler_type: constant_with_warmup`, or omit it",
        )


RULES = (optimizer, schedule)
