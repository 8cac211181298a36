"""`TrainingArguments` from configuration and plan: everything that is typed reaches them, or is refused with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from sft_play.errors import UserError
from sft_play.runs.folder import RunFolder
from sft_play.training.trainer import training_arguments
from tests.training_runs import Trial, make_plan


def arguments(tmp_path: Path, **train: Any) -> Any:
    config = Config(model=ModelConfig(name="m"), data=DataConfig(train_path="x"), train=TrainConfig(**train))
    return training_arguments(config, make_plan(Trial()), RunFolder(tmp_path), has_validation=True)


def test_every_key_of_the_contract_arrives(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        lr_scheduler_type="linear", weight_decay=0.1, max_grad_norm=0.5, seed=7, ddp_find_unused_parameters=True,
        ddp_broadcast_buffers=True, ddp_bucket_cap_mb=3, dataloader_num_workers=2, dataloader_pin_memory=True, eval_strategy="steps",
        eval_steps=5, logging_steps=4, save_strategy="epoch", save_steps=6,
        metric_for_best_model="eval_rougeL",
    )  # fmt: skip
    assert str(args.lr_scheduler_type.value) == "linear"
    assert (args.weight_decay, args.max_grad_norm, args.seed) == (0.1, 0.5, 7)
    assert args.ddp_find_unused_parameters and args.ddp_broadcast_buffers and args.ddp_bucket_cap_mb == 3
    assert args.dataloader_num_workers == 2 and not args.dataloader_pin_memory, "there is no GPU to pin memory for"
    assert (args.eval_strategy.value, args.eval_steps) == ("steps", 5)
    assert (args.logging_steps, args.save_strategy.value, args.save_steps) == (4, "epoch", 6)
    assert args.metric_for_best_model == "eval_rougeL" and args.greater_is_better


def test_further_fields_win_over_what_we_set(tmp_path: Path) -> None:
    extra = {
        "adam_beta1": 0.8, "neftune_noise_alpha": 5.0, "greater_is_better": True, "logging_nan_inf_filter": True,
        "logging_strategy": "epoch", "disable_tqdm": True, "eval_on_start": True, "report_to": "none",
    }  # fmt: skip
    args = arguments(tmp_path, extra=extra)
    assert (args.adam_beta1, args.neftune_noise_alpha) == (0.8, 5.0)
    assert args.greater_is_better and args.logging_nan_inf_filter and args.eval_on_start
    assert args.logging_strategy.value == "epoch"
    assert args.report_to == []


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        ({"lr_scheduler_type": "linear", "extra": {"lr_scheduler_kwargs": {"nonsense": 1}}}, "nonsense"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_loaded(train: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        arguments(tmp_path, **train)
    assert words in caught.value.render()
