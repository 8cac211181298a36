"""Build transformers' `TrainingArguments`; everything the user typed is passed on, or refused with a reason."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from sft_play.config.metrics import higher_is_better
from sft_play.config.optimizers import OPTIMIZERS
from sft_play.config.schema import Config
from sft_play.config.trackers import OWN, trackers
from sft_play.errors import HardwareError, UserError
from sft_play.plan.choices import loader_workers
from sft_play.plan.plan import Plan
from sft_play.runs.folder import RunFolder
from sft_play.training.balance import turns_of
from sft_play.training.noise import NEFTUNE
from sft_play.training.ranks import uses_cpu_flag

TAKEN = (
    "lr_scheduler_type", "weight_decay", "max_grad_norm", "seed", "ddp_find_unused_parameters",
    "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "eval_steps", "logging_steps", "save_strategy", "save_steps",
)  # fmt: skip
"""Keys of `train` that are passed on as they are."""


def training_arguments(config: Config, plan: Plan, run: RunFolder, *, has_validation: bool) -> TrainingArguments:
    """Return the arguments of this rank (`RANK` in the environment).

    Raise `HardwareError` for what this machine lacks, and `UserError` for settings that transformers refuses together.
    """
    values = _values(config, plan, run, has_validation=has_validation)
    try:
        args = TrainingArguments(**values)
        _try_schedule(args)
    except ImportError as error:
        raise HardwareError(f"a setting of `train` needs what cannot be imported: {error}") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UserError(f"transformers refuses these settings of `train`: {error}", place=str(run.config)) from error
    return args


def _try_schedule(args: TrainingArguments) -> None:
    """Build the learning rate schedule once and evaluate every step, to raise its errors now."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    steps = {"num_warmup_steps": args.get_warmup_steps(args.max_steps), "num_training_steps": args.max_steps}
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, **steps, scheduler_specific_kwargs=args.lr_scheduler_kwargs
    )
    for rule in getattr(schedule, "lr_lambdas", ()):
        for step in range(args.max_steps + 1):
            rule(step)


def _values(config: Config, plan: Plan, run: RunFolder, *, has_validation: bool) -> dict[str, Any]:
    """Return every argument that is not transformers' default; keys that the user typed beyond the schema win."""
    train = config.train
    assert plan.steps is not None, "a plan with prepared data knows its steps"
    own = ("report_to", "disable_tqdm", NEFTUNE)  # read by `training.trackers`, the progress line and `training.noise`
    extra = {name: value for name, value in train.extra.items() if name not in own}
    # If FSDP2 did not reduce after each micro-step, every rank would hold the gradient of all weights in fp32.
    accumulation = {"gradient_accumulation_kwargs": {"sync_each_batch": True}} if plan.strategy == "fsdp2" else {}
    values: dict[str, Any] = {
        **{name: getattr(train, name) for name in TAKEN},
        "output_dir": str(run.path),
        # Nominal, and the same on every rank because DeepSpeed compares it; the sampler uses each rank's own.
        "per_device_train_batch_size": max(rank.micro_batch for rank in plan.ranks),
        "gradient_accumulation_steps": turns_of(config, plan),
        "per_device_eval_batch_size": plan.eval_batch_size,
        "max_steps": plan.steps,
        "learning_rate": plan.learning_rate,
        "warmup_steps": plan.warmup_steps or 0,
        # `SftTrainer.create_optimizer` adds ours to AdamW.
        "optim": "adamw_torch_fused" if OPTIMIZERS[plan.optim].matrices else plan.optim,
        "bf16": plan.precision == "bf16",
        "fp16": plan.precision == "fp16",
        "gradient_checkpointing": plan.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if plan.gradient_checkpointing else None,
        "dataloader_num_workers": loader_workers(config, plan.device),
        "dataloader_pin_memory": (
            plan.device == "cuda" if train.dataloader_pin_memory == "auto" else train.dataloader_pin_memory
        ),
        "eval_strategy": (
            ("epoch" if has_validation else "no") if train.eval_strategy == "auto" else train.eval_strategy
        ),
        "eval_on_start": has_validation and config.model.adapter is not None,  # what the parent ended with
        "logging_strategy": "steps",
        "logging_nan_inf_filter": False,  # a loss that is not finite stops the run and must not be hidden
        "save_total_limit": None,  # rotation is `runs.checkpoints.rotate`: only after a newer one is intact
        "metric_for_best_model": train.metric_for_best_model if has_validation else None,
        "greater_is_better": higher_is_better(train.metric_for_best_model) is not False,
        "report_to": "none",  # `training.trackers` has the callbacks
        "run_name": run.name,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": uses_cpu_flag(plan),
        "ddp_backend": plan.backend if plan.world_size > 1 else None,
        "ddp_timeout": config.launch.timeout_seconds,
        "accelerator_config": {"even_batches": False, **accumulation},
        "average_tokens_across_devices": True,
    }
    return values | extra


def wants_tensorboard(config: Config) -> bool:
    """Return whether TensorBoard curves are written: unless `train.report_to` names only other trackers."""
    return bool({OWN, "all"} & set(trackers(config)))
