"""Rules between keys, as plain functions without effects. Each returns problems; none raises."""

from __future__ import annotations

from collections.abc import Iterator

from sft_play.config import (
    elastic_rules,
    kubernetes_rules,
    metric_rules,
    network_rules,
    path_rules,
    security_rules,
    slurm_rules,
    source_rules,
    task_rules,
    trackers,
)
from sft_play.config.rule import Origins, Rule, problem
from sft_play.config.schema import Config
from sft_play.errors import UserError


def check_rules(config: Config, origins: Origins) -> list[UserError]:
    """Returns every violated rule, each at the place of the key that broke it."""
    return [one for rule in RULES for one in rule(config, origins)]


def _precision(config: Config, origins: Origins) -> Iterator[UserError]:
    if config.train.fp16 and config.train.bf16 is True:
        yield problem(
            origins, "train.fp16", "`train.fp16` and `train.bf16` are both `true`", "keep one; bf16 needs no loss scaling"
        )


def _data(config: Config, origins: Origins) -> Iterator[UserError]:
    data = config.data
    if data.train_path and [source.path for source in data.sources] != [data.train_path]:
        yield problem(origins, "data.train_path", "`data.train_path` and `data.sources` are both given", "keep one of them")
    if data.val_path and not (isinstance(data.validation, list) and [s.path for s in data.validation] == [data.val_path]):
        yield problem(origins, "data.val_path", "`data.val_path` and `data.validation` are both given", "keep one of them")
    for index, source in enumerate(data.sources):
        if not source.path.strip():
            yield problem(origins, "data.sources", f"`data.sources[{index}].path` is empty")
    if data.group_by is not None and (isinstance(data.validation, list) or not data.validation):
        message = (
            "`data.group_by` says which rows stay together when a fraction is held out, and `data.validation` is no fraction"
        )
        yield problem(origins, "data.group_by", message, "set `data.validation: 0.05`, or leave `data.group_by` out")


def _names(config: Config, origins: Origins) -> Iterator[UserError]:
    """Text that must say something."""
    said = {"model.name": config.model.name, "model.revision": config.model.revision, "data.train_path": config.data.train_path,
            "data.val_path": config.data.val_path}  # fmt: skip
    for key, text in said.items():
        if text is not None and not text.strip() and not (key == "model.name" and config.model.init == "random"):
            yield problem(origins, key, f"`{key}` is empty")
    if isinstance(config.data.validation, list):
        for index, source in enumerate(config.data.validation):
            if not source.path.strip():
                yield problem(origins, "data.validation", f"`data.validation[{index}].path` is empty")
    targets = config.tuning.lora.target_modules
    if isinstance(targets, list) and not all(name.strip() for name in targets or [""]):
        yield problem(origins, "tuning.lora.target_modules", "`tuning.lora.target_modules` names no module", "leave it to `auto`")


def _evaluation(config: Config, origins: Origins) -> Iterator[UserError]:
    train = config.train
    held_out = config.data.validation is not None and config.data.validation != 0.0
    if train.eval_strategy in ("steps", "epoch") and not held_out:
        yield problem(
            origins, "train.eval_strategy", f"`train.eval_strategy` is `{train.eval_strategy}`, but there is no validation data",
            "set `data.val_path`, or `data.validation: 0.05`",
        )  # fmt: skip
    if train.predict_with_generate is True and not held_out:
        yield problem(
            origins, "train.predict_with_generate", "`train.predict_with_generate` is `true`, but there is no validation data to answer",
            "set `data.val_path`, or `data.validation: 0.05`",
        )  # fmt: skip
    if train.eval_strategy == "steps" and train.eval_steps is None:
        yield problem(
            origins,
            "train.eval_strategy",
            "`train.eval_strategy` is `steps`, but `train.eval_steps` is not given",
            "TRAIN_EVAL_STEPS=100",
        )
    if train.eval_steps is not None and train.eval_strategy != "steps":
        yield problem(
            origins, "train.eval_steps", f"`train.eval_steps` is {train.eval_steps}, but `train.eval_strategy` is `{train.eval_strategy}`",
            "set `train.eval_strategy: steps`, or leave `train.eval_steps` out",
        )  # fmt: skip


def _launch(config: Config, origins: Origins) -> Iterator[UserError]:
    if config.launch.backend == "mpi":
        yield problem(
            origins, "launch.backend", "`launch.backend` is `mpi`, which torch's published builds lack",
            "leave it to `auto`: nccl between GPUs, gloo between CPUs",
        )  # fmt: skip


def _warmup(config: Config, origins: Origins) -> Iterator[UserError]:
    train = config.train
    if train.warmup_steps is not None and train.max_steps > 0 and train.warmup_steps > train.max_steps:
        yield problem(
            origins,
            "train.warmup_steps",
            f"`train.warmup_steps` is {train.warmup_steps}, but the run has {train.max_steps} steps",
        )


RULES: tuple[Rule, ...] = (
    _names, _precision, _data, _evaluation, _launch, _warmup, *elastic_rules.RULES, *kubernetes_rules.RULES, *metric_rules.RULES,
    *network_rules.RULES, *path_rules.RULES, *security_rules.RULES, *slurm_rules.RULES, *source_rules.RULES, *task_rules.RULES,
    *trackers.RULES,
)  # fmt: skip
