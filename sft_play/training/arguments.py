"""`TrainingArguments` from configuration and plan. Everything that is decided here was decided by one of the two."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainingArguments

from sft_play.config.schema import Config
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.training.world import uses_cpu_flag

OWN_TRACKER = "tensorboard"
"""Written by `training.curves`, with values that transformers' callback does not have."""


def training_arguments(config: Config, plan: Plan, run: RunFolder, *, has_validation: bool) -> TrainingArguments:
    """Returns the arguments of this rank (`RANK` in the environment)."""
    mine = plan.ranks[int(os.environ.get("RANK", "0"))]
    train = config.train
    assert plan.steps is not None, "a plan with prepared data knows its steps"
    extra = {name: value for name, value in train.extra.items() if name != "report_to"}
    return TrainingArguments(
        output_dir=str(run.path),
        per_device_train_batch_size=mine.micro_batch,
        gradient_accumulation_steps=mine.accumulation,
        per_device_eval_batch_size=plan.eval_batch_size,
        max_steps=plan.steps,
        learning_rate=plan.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_steps=plan.warmup_steps or 0,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=plan.optim,
        seed=train.seed,
        bf16=plan.precision == "bf16",
        fp16=plan.precision == "fp16",
        gradient_checkpointing=plan.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if plan.gradient_checkpointing else None,
        ddp_find_unused_parameters=train.ddp_find_unused_parameters,
        ddp_broadcast_buffers=train.ddp_broadcast_buffers,
        ddp_bucket_cap_mb=train.ddp_bucket_cap_mb,
        dataloader_num_workers=train.dataloader_num_workers,
        dataloader_pin_memory=plan.device == "cuda" if train.dataloader_pin_memory == "auto" else train.dataloader_pin_memory,
        eval_strategy=_evaluation(config, has_validation),
        eval_steps=train.eval_steps,
        eval_accumulation_steps=train.eval_accumulation_steps,
        eval_do_concat_batches=train.eval_do_concat_batches,
        logging_strategy=extra.pop("logging_strategy", "steps"),
        logging_steps=train.logging_steps,
        logging_nan_inf_filter=False,  # a loss that is not a number stops the run, it is not papered over
        save_strategy=train.save_strategy,
        save_steps=train.save_steps,
        save_total_limit=None,  # rotation is `runs.checkpoints.rotate`: only after a newer one is whole
        metric_for_best_model=train.metric_for_best_model if has_validation else None,
        greater_is_better=not train.metric_for_best_model.endswith(("loss", "perplexity")),
        report_to=_trackers(config),
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=uses_cpu_flag(plan),
        ddp_backend=plan.backend if plan.world_size > 1 else None,
        ddp_timeout=config.launch.timeout_seconds,
        accelerator_config={"even_batches": False},
        average_tokens_across_devices=True,
        **extra,
    )


def _evaluation(config: Config, has_validation: bool) -> str:
    wanted = config.train.eval_strategy
    if wanted == "auto":
        return "epoch" if has_validation else "no"
    return wanted


def _trackers(config: Config) -> list[str]:
    """Returns the trackers that transformers serves; ours is TensorBoard."""
    wanted = config.train.extra.get("report_to", OWN_TRACKER)
    names = [wanted] if isinstance(wanted, str) else list(wanted or [])
    return [name for name in names if name not in (OWN_TRACKER, "none")]


def wants_tensorboard(config: Config) -> bool:
    """Whether curves are written: yes, unless `train.report_to` names other trackers only."""
    wanted: Any = config.train.extra.get("report_to", OWN_TRACKER)
    return wanted is not None and (wanted == OWN_TRACKER or wanted == "all" or OWN_TRACKER in wanted)
