"""Local steps: when they are there, what goes with them, groups of weights, and states of several ranks read as one."""

from __future__ import annotations

from typing import Any

import pytest

from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, LaunchConfig, ModelConfig, TrainConfig


def config_of(*, fp16: bool = False, **launch: Any) -> Config:
    return Config(model=ModelConfig(name="m"), train=TrainConfig(fp16=fp16), launch=LaunchConfig(**launch))


def problems(config: Config) -> list[str]:
    return [problem.render() for problem in check_rules(config, {})]


@pytest.mark.parametrize(
    ("launch", "keys"),
    [
        ({"strategy": "zero2", "local_steps": 8}, ["launch.local_steps"]),
        ({"strategy": "zero3", "compression": "bf16", "local_steps": 2}, ["launch.compression", "launch.local_steps"]),
        ({"compression": "powersgd", "local_steps": 2}, ["launch.compression"]),
        ({"fp16": True, "local_steps": 2}, ["launch.local_steps"]),
        ({"strategy": "ddp", "compression": "fp16", "local_steps": 16}, []),
    ],
)
def test_what_does_not_go_together_is_named(launch: dict[str, Any], keys: list[str]) -> None:
    found = problems(config_of(**launch))
    assert len(found) == len(keys)
    for key, text in zip(keys, found, strict=True):
        assert f"`{key}` is" in text and "hint:" in text
