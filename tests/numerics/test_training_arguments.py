"""`TrainingArguments` from configuration and plan: everything that is typed reaches them, or is refused with its
reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_play.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from sft_play.errors import UserError
from sft_play.runs.folder import RunFolder
from sft_play.training.arguments import training_arguments
from sft_play.training.trainer import SftTrainer
from tests.families import tiny_model
from tests.training_runs import Trial, make_plan


def arguments(tmp_path: Path, **train: Any) -> Any:
    config = Config(model=ModelConfig(name="m"), data=DataConfig(train_path="x"), train=TrainConfig(**train))
    return training_arguments(config, make_plan(Trial()), RunFolder(tmp_path), has_validation=True)


def test_every_key_of_the_contract_arrives(tmp_path: Path) -> None:
    typed = {
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "seed": 7,
        "ddp_find_unused_parameters": True,
        "ddp_broadcast_buffers": True,
        "ddp_bucket_cap_mb": 3,
        "dataloader_num_workers": 2,
        "dataloader_pin_memory": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "logging_steps": 4,
        "save_strategy": "epoch",
        "save_steps": 6,
        "metric_for_best_model": "eval_rougeL",
    }
    args = arguments(tmp_path, **typed)
    there_is_no_gpu = {"dataloader_pin_memory": False}
    assert {name: getattr(args, name) for name in typed} == typed | there_is_no_gpu and args.greater_is_better


def test_further_fields_win_over_what_we_set(tmp_path: Path) -> None:
    extra = {
        "adam_beta1": 0.8,
        "greater_is_better": True,
        "logging_nan_inf_filter": True,
        "logging_strategy": "epoch",
        "eval_on_start": True,
    }
    args = arguments(tmp_path, extra=extra | {"disable_tqdm": True, "report_to": "none"})
    assert {name: getattr(args, name) for name in extra} == extra and args.report_to == []


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "num_decay_steps"),
        ({"lr_scheduler_type": "linear", "extra": {"lr_scheduler_kwargs": {"nonsense": 1}}}, "nonsense"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_loading(train: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        arguments(tmp_path, **train)
    assert words in caught.value.render()


def test_weight_decay_excludes_vectors_and_the_states_of_recurrent_layers() -> None:
    """As the authors of each family do; the base class looks at names alone."""
    trainer = SftTrainer.__new__(SftTrainer)
    for family, never, always in (
        (
            "mamba2",
            ("A_log", "D", "dt_bias", "norm_f.weight", "norm.weight", "conv1d.bias"),
            ("in_proj.weight", "conv1d.weight"),
        ),
        ("mamba", ("A_log", "D", "norm_f.weight"), ("x_proj.weight", "dt_proj.weight")),
        ("qwen3_next", ("A_log", "dt_bias", "norm.weight"), ("gate_up_proj", "q_proj.weight")),
        ("gpt_oss", ("sinks", "gate_up_proj_bias"), ("gate_up_proj", "router.weight")),
        (
            "llama",
            ("input_layernorm.weight", "norm.weight"),
            ("embed_tokens.weight", "down_proj.weight", "lm_head.weight"),
        ),
    ):
        model = tiny_model(family)
        decayed = set(trainer.get_decay_parameter_names(model))
        names = dict(model.named_parameters())
        assert not [name for name in decayed if name.endswith(never)], family
        assert all(any(name.endswith(end) and name in decayed for name in names) for end in always), family
