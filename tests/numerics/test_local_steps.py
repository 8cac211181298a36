"""Local steps and compression: what does not go together is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, LaunchConfig, ModelConfig, TrainConfig


@pytest.mark.parametrize(
    ("fp16", "launch", "keys"),
    [
        (False, {"strategy": "zero3", "compression": "bf16", "local_steps": 2}, ["launch.compression", "launch.local_steps"]),
        (False, {"compression": "powersgd", "local_steps": 2}, ["launch.compression"]),
        (True, {"local_steps": 2}, ["launch.local_steps"]),
        (False, {"strategy": "ddp", "compression": "fp16", "local_steps": 16}, []),
    ],
)
def test_what_does_not_go_together_is_named(fp16: bool, launch: dict[str, Any], keys: list[str]) -> None:
    config = Config(model=ModelConfig(name="m"), train=TrainConfig(fp16=fp16), launch=LaunchConfig(**launch))
    found = [problem.render() for problem in check_rules(config, {})]
    assert len(found) == len(keys)
    for key, text in zip(keys, found, strict=True):
        assert f"`{key}` is" in text and "hint:" in text
