"""Fills a user's DeepSpeed JSON in from the plan: no `auto` is left, and whatever contradicts the plan is an error, never ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from sft_play.config.schema import Config
from sft_play.errors import UserError, raise_all
from sft_play.launch.deepspeed_json import (
    DEFAULT_HIDDEN_SIZE,
    BatchNumbers,
    UserDeepSpeed,
    deepspeed_settings,
)
from sft_play.plan.plan import Plan


def resolve(user: UserDeepSpeed, plan: Plan, config: Config, *, hidden_size: int | None) -> tuple[dict[str, Any], list[str]]:
    """Returns the JSON for the run and what the user should know. Raises `UserError` for every contradiction, with both values."""
    settings = deepcopy(dict(user.settings))
    problems: list[UserError] = []
    notices = list(user.notices)
    ours = deepspeed_settings(
        stage=user.stage,
        device=plan.device,
        precision=plan.precision,
        batch=BatchNumbers.of(plan),
        clipping=config.train.max_grad_norm,
        offload=_offloads(settings),
        hidden_size=hidden_size or DEFAULT_HIDDEN_SIZE,
    )
    for key, because in SAME.items():
        _require_same(user, settings, key, ours[key], because, problems)
    for section in ("bf16", "fp16"):
        part = settings.setdefault(section, {})
        _require_same(user, part, "enabled", ours[section]["enabled"], f"the plan's precision is {plan.precision}", problems, section)
    _take_out_optimizer(user, settings, plan, config, problems, notices)
    _take_out_scheduler(user, settings, config, problems, notices)
    for key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        settings.setdefault(key, ours[key])
    _fill_automatic(user, settings, ours, problems, prefix="")
    raise_all(problems)
    return _whole_numbers(settings), notices


SAME: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "the plan's rows per device; set `train.batch_size`",
    "gradient_accumulation_steps": "the plan's micro-steps; set `train.grad_accum`",
    "train_batch_size": "the plan's micro-batch x accumulation x world size; set `train.global_batch_size`",
    "gradient_clipping": "set `train.max_grad_norm`",
}


def _require_same(
    user: UserDeepSpeed, part: dict[str, Any], key: str, ours: Any, because: str, problems: list[UserError], section: str = ""
) -> None:
    theirs = part.get(key, "auto")
    if theirs not in ("auto", ours):
        dotted = f"{section}.{key}" if section else key
        text = f"`{dotted}` is `{_json(theirs)}`, but the run uses `{_json(ours)}` ({because})"
        problems.append(UserError(text, place=user.document.place(dotted), hint=f'write "{key}": "auto", or make the two agree'))
    part[key] = ours


def _take_out_optimizer(
    user: UserDeepSpeed, settings: dict[str, Any], plan: Plan, config: Config, problems: list[UserError], notices: list[str]
) -> None:
    """One optimizer for every strategy, so that they give one loss curve: the section must agree with the plan, and is left out."""
    section = settings.pop("optimizer", None)
    if section is None:
        return
    kind = str(section.get("type", "")) if isinstance(section, Mapping) else str(section)
    if kind.lower() not in {"adam", "adamw"} or "adam" not in plan.optim:
        text = f"`optimizer.type` is `{kind}`, but the run uses `{plan.optim}`"
        problems.append(UserError(text, place=user.document.place("optimizer.type"), hint="set `train.optim` and take `optimizer` out"))
        return
    parameters = section.get("params", {})
    extra = config.train.extra
    betas = [extra.get("adam_beta1", 0.9), extra.get("adam_beta2", 0.999)]
    agreed = {
        "lr": (plan.learning_rate, "train.learning_rate"),
        "betas": (betas, "train.adam_beta1 and train.adam_beta2"),
        "eps": (extra.get("adam_epsilon", 1e-8), "train.adam_epsilon"),
        "weight_decay": (config.train.weight_decay, "train.weight_decay"),
        "torch_adam": (True, "train.optim"),
        "adam_w_mode": (True, "train.optim"),
    }
    for key, value in parameters.items():
        place = user.document.place(f"optimizer.params.{key}")
        if key not in agreed:
            problems.append(UserError(f"`optimizer.params.{key}` has no counterpart here", place=place, hint="take `optimizer` out"))
        elif value not in ("auto", agreed[key][0]) and key != "torch_adam":
            text = f"`optimizer.params.{key}` is `{_json(value)}`, but the run uses `{_json(agreed[key][0])}`"
            problems.append(UserError(text, place=place, hint=f"set `{agreed[key][1]}`"))
    notices.append(f"{user.document.place('optimizer')}: `optimizer` agrees with the plan's `{plan.optim}`, which runs")


SCHEDULERS = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}


def _take_out_scheduler(
    user: UserDeepSpeed, settings: dict[str, Any], config: Config, problems: list[UserError], notices: list[str]
) -> None:
    section = settings.pop("scheduler", None)
    if section is None:
        return
    kind = str(section.get("type", "")) if isinstance(section, Mapping) else str(section)
    name = SCHEDULERS.get(kind.lower())
    place = user.document.place("scheduler")
    if name != config.train.lr_scheduler_type:
        text = f"`scheduler.type` is `{kind}`, but the run's schedule is `{config.train.lr_scheduler_type}`"
        hint = f"set `train.lr_scheduler_type: {name}`" if name else "set `train.lr_scheduler_type` and take `scheduler` out"
        problems.append(UserError(text, place=place, hint=hint))
        return
    numbers = {k: v for k, v in section.get("params", {}).items() if v != "auto"}
    if numbers:
        text = f"`scheduler.params` sets {', '.join(f'`{k}`' for k in numbers)}, which the plan decides"
        problems.append(UserError(text, place=place, hint='write "auto", and set `train.warmup_steps` or `train.learning_rate`'))
    notices.append(f"{place}: `scheduler` agrees with `train.lr_scheduler_type: {name}`, which runs")


def _fill_automatic(
    user: UserDeepSpeed, part: dict[str, Any], ours: Mapping[str, Any], problems: list[UserError], *, prefix: str
) -> None:
    """Replaces every `auto` by our value, takes it out where DeepSpeed's own default is meant, and refuses it where neither exists."""
    for key in list(part):
        dotted = f"{prefix}{key}"
        value = part[key]
        if isinstance(value, dict):
            inner = ours.get(key)
            _fill_automatic(user, value, inner if isinstance(inner, Mapping) else {}, problems, prefix=f"{dotted}.")
        elif value == "auto" and key in ours:
            part[key] = ours[key]
        elif value == "auto" and prefix.split(".")[0] in {"zero_optimization", "fp16", "bf16", "activation_checkpointing"}:
            del part[key]  # these sections have a default for every key
        elif value == "auto":
            place = user.document.place(dotted)
            problems.append(UserError(f"`{dotted}` is `auto`, but nothing decides it", place=place, hint="write a value"))


def _offloads(settings: Mapping[str, Any]) -> bool:
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    return str(offload.get("device", "none")) != "none"


def _whole_numbers(value: Any) -> Any:
    """Turns 5e8 into 500000000 inside `zero_optimization`, as its typed keys want."""
    if isinstance(value, dict):
        return {k: _whole_numbers(v) for k, v in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and value >= 1000 else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
