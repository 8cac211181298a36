"""Fills a user's DeepSpeed JSON in from the plan: no `auto` is left, and what contradicts the plan is an error, never ignored."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from sft_play.config.schema import Config
from sft_play.errors import UserError, raise_all
from sft_play.launch.deepspeed_json import BATCH_KEYS, BatchNumbers, UserDeepSpeed, deepspeed_settings
from sft_play.launch.options import LaunchOptions
from sft_play.plan.plan import Plan
from sft_play.plan.shape import ModelShape

AGREED: Mapping[str, str] = {
    "train_micro_batch_size_per_gpu": "the plan's rows per device; set `train.batch_size`",
    "gradient_accumulation_steps": "the plan's micro-steps; set `train.grad_accum`",
    "train_batch_size": "the plan's micro-batch x accumulation x world size; set `train.global_batch_size`",
    "gradient_clipping": "set `train.max_grad_norm`",
}
"""Top-level numbers that the plan or the configuration decides, each with where."""
OURS_UNLESS_TYPED = ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "communication_data_type", "data_types")
SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
SECTIONS_WITH_DEFAULTS = frozenset({"zero_optimization", "fp16", "bf16", "activation_checkpointing"})


def resolve(
    user: UserDeepSpeed, plan: Plan, config: Config, *, hidden_size: int, early: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Returns the JSON for the run and what the user should know.

    Raises `UserError` with all that is wrong in the file and each contradiction, with both values. An `early` plan does not know the
    data: only what the configuration itself says of the batch is compared with it.
    """
    work = _Resolution(user=user, plan=plan, config=config, settings=deepcopy(dict(user.settings)), notices=list(user.notices))
    ours = deepspeed_settings(
        stage=user.stage,
        device=plan.device,
        precision=plan.precision,
        batch=BatchNumbers.of(plan),
        clipping=config.train.max_grad_norm,
        offload=_offloads(work.settings),
        hidden_size=hidden_size,
    )
    open_ones = {name for key, name in BATCH_KEYS.items() if early and not _decided(config, key)}
    for key, because in AGREED.items():
        if key in open_ones:
            work.settings[key] = ours[key]
            continue
        work.agree(work.settings, key, ours[key], because)
    for section in ("bf16", "fp16"):
        part = work.settings.setdefault(section, {})
        work.agree(part, "enabled", ours[section]["enabled"], f"the plan's precision is {plan.precision}", section=section)
    work.leave_optimizer_out()
    work.leave_scheduler_out()
    for key in OURS_UNLESS_TYPED:
        if key in ours:
            work.settings.setdefault(key, ours[key])
    work.settings["bf16"] = ours["bf16"] | work.settings["bf16"]
    work.fill_automatic(work.settings, ours, prefix="")
    raise_all([*user.problems, *work.problems])
    return _whole_numbers(work.settings), work.notices


def checked_plan(options: LaunchOptions, config: Config, shape: ModelShape, make: Callable[[], Plan]) -> Plan:
    """Returns the plan that `make` makes. Raises with it, before anything is prepared, what `resolve` would refuse of a user's file."""
    user = options.deepspeed
    if user is None:
        return make()
    try:
        plan = make()
    except UserError as error:
        if user.problems:
            raise_all([*user.problems, error])
        raise
    resolve(user, plan, config, hidden_size=shape.hidden_size, early=plan.steps_per_epoch is None)
    return plan


def _decided(config: Config, key: str) -> bool:
    train = config.train
    both = train.batch_size != "auto" and train.grad_accum != "auto"
    return both or (key != "global_batch_size" and getattr(train, key) != "auto")


@dataclass(kw_only=True, slots=True)
class _Resolution:
    """A user's settings on their way; collects every problem before any is raised."""

    user: UserDeepSpeed
    plan: Plan
    config: Config
    settings: dict[str, Any]
    notices: list[str]
    problems: list[UserError] = field(default_factory=list)

    def refuse(self, text: str, key: str, hint: str) -> None:
        self.problems.append(UserError(text, place=self.user.document.place(key), hint=hint))

    def agree(self, part: dict[str, Any], key: str, ours: Any, because: str, *, section: str = "") -> None:
        """Sets `part[key]` to our value; another value of the user's is a problem."""
        theirs = part.get(key, "auto")
        if theirs not in ("auto", ours):
            dotted = f"{section}.{key}" if section else key
            text = f"`{dotted}` is `{_json(theirs)}`, but the run uses `{_json(ours)}` ({because})"
            self.refuse(text, dotted, f'write "{key}": "auto", or make the two agree')
        part[key] = ours

    def leave_optimizer_out(self) -> None:
        """One optimizer for every strategy, so that all give one loss curve: the section must agree with the plan."""
        section = self.settings.pop("optimizer", None)
        if section is None:
            return
        kind = _type_of(section)
        if kind.lower() not in {"adam", "adamw"} or "adam" not in self.plan.optim:
            text = f"`optimizer.type` is `{kind}`, but the run uses `{self.plan.optim}`"
            self.refuse(text, "optimizer.type", "set `train.optim` and take `optimizer` out")
            return
        train = self.config.train
        betas = [train.extra.get("adam_beta1", 0.9), train.extra.get("adam_beta2", 0.999)]
        ours: dict[str, tuple[Any, str]] = {
            "lr": (self.plan.learning_rate, "train.learning_rate"),
            "betas": (betas, "train.adam_beta1 and train.adam_beta2"),
            "eps": (train.extra.get("adam_epsilon", 1e-8), "train.adam_epsilon"),
            "weight_decay": (train.weight_decay, "train.weight_decay"),
            "adam_w_mode": (True, "train.optim"),
        }
        for key, value in section.get("params", {}).items():
            dotted = f"optimizer.params.{key}"
            if key == "torch_adam":  # which of two implementations of one formula runs
                continue
            if key not in ours:
                self.refuse(f"`{dotted}` has no counterpart here", dotted, "take `optimizer` out and set `train.optim`")
            elif value not in ("auto", ours[key][0]):
                text = f"`{dotted}` is `{_json(value)}`, but the run uses `{_json(ours[key][0])}`"
                self.refuse(text, dotted, f"set `{ours[key][1]}`")
        place = self.user.document.place("optimizer")
        self.notices.append(f"{place}: `optimizer` agrees with the plan's `{self.plan.optim}`, which runs")

    def leave_scheduler_out(self) -> None:
        """One schedule for every strategy, for the same reason."""
        section = self.settings.pop("scheduler", None)
        if section is None:
            return
        kind, ours = _type_of(section), self.config.train.lr_scheduler_type
        name = SCHEDULES.get(kind.lower())
        if name != ours:
            text = f"`scheduler.type` is `{kind}`, but the run's schedule is `{ours}`"
            wanted = f"set `train.lr_scheduler_type: {name}`" if name else "set `train.lr_scheduler_type`"
            self.refuse(text, "scheduler.type", f"{wanted}, or take `scheduler` out")
            return
        for key, value in section.get("params", {}).items():
            if value != "auto":
                dotted = f"scheduler.params.{key}"
                hint = 'write "auto", and set `train.warmup_steps`, `train.max_steps` or `train.learning_rate`'
                self.refuse(f"`{dotted}` is `{_json(value)}`, which the plan decides", dotted, hint)
        place = self.user.document.place("scheduler")
        self.notices.append(f"{place}: `scheduler` agrees with `train.lr_scheduler_type: {name}`, which runs")

    def fill_automatic(self, part: dict[str, Any], ours: Mapping[str, Any], *, prefix: str) -> None:
        """Replaces each `auto`: by our value, else by DeepSpeed's default where its section has one; else it is a problem."""
        for key, value in list(part.items()):
            inner = ours.get(key)
            if isinstance(value, dict):
                self.fill_automatic(value, inner if isinstance(inner, Mapping) else {}, prefix=f"{prefix}{key}.")
            elif value == "auto" and key in ours:
                part[key] = inner
            elif value == "auto" and prefix.partition(".")[0] in SECTIONS_WITH_DEFAULTS:
                del part[key]
            elif value == "auto":
                self.refuse(f"`{prefix}{key}` is `auto`, but nothing decides it", f"{prefix}{key}", "write a value")


def _type_of(section: Any) -> str:
    return str(section.get("type", "")) if isinstance(section, Mapping) else _json(section)


def _offloads(settings: Mapping[str, Any]) -> bool:
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    return str(offload.get("device", "none")) != "none"


def _whole_numbers(value: Any) -> Any:
    """Turns 5e8 into 500000000, as the typed keys of DeepSpeed want."""
    if isinstance(value, dict):
        return {k: _whole_numbers(v) for k, v in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and value >= 1000 else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
