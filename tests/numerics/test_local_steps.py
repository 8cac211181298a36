"""Local steps: when they are there, what goes with them, groups of weights, and states of several ranks read as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_play.config.rules import check_rules
from sft_play.config.schema import Config, LaunchConfig, ModelConfig, TrainConfig
from sft_play.errors import UserError
from sft_play.runs.checkpoints import rotate_own
from sft_play.runs.folder import RunFolder
from sft_play.training.states.files import INDEX, Piece, Shelf, write_tensors
from sft_play.training.states.per_rank import MeanShelf
from tests.unit.test_plan_make import plan_of


def config_of(*, fp16: bool = False, **launch: Any) -> Config:
    return Config(model=ModelConfig(name="m"), train=TrainConfig(fp16=fp16), launch=LaunchConfig(**launch))


def problems(config: Config) -> list[str]:
    return [problem.render() for problem in check_rules(config, {})]


@pytest.mark.parametrize(
    ("launch", "keys"),
    [
        ({"strategy": "zero2", "local_steps": 8}, ["launch.local_steps"]),
        ({"strategy": "fsdp2", "compression": "fp16"}, ["launch.compression"]),
        ({"strategy": "zero3", "compression": "bf16", "local_steps": 2}, ["launch.compression", "launch.local_steps"]),
        ({"compression": "powersgd", "local_steps": 2}, ["launch.compression"]),
        ({"fp16": True, "local_steps": 2}, ["launch.local_steps"]),
        ({"fp16": True, "compression": "powersgd"}, ["launch.compression"]),
        ({"strategy": "ddp", "compression": "fp16", "local_steps": 16}, []),
        ({"fp16": True, "compression": "fp16"}, []),
        ({"strategy": "zero3"}, []),
    ],
)
def test_what_does_not_go_together_is_named(launch: dict[str, Any], keys: list[str]) -> None:
    found = problems(config_of(**launch))
    assert len(found) == len(keys)
    for key, text in zip(keys, found, strict=True):
        assert f"`{key}` is" in text and "hint:" in text


def write_states(folder: Path, rank: int, moment: list[float], step: float) -> Path:
    pieces = [
        Piece(key="exp_avg/w", parameter="w", state="exp_avg", kind="slice", start=0, end=3, shape=(3,), dtype="float32"),
        Piece(key="step/w", parameter="w", state="step", kind="whole", start=0, end=3, shape=(3,), dtype="float32"),
    ]
    path = folder / f"optimizer-rank{rank}.safetensors"
    tensors = {"exp_avg/w": torch.tensor(moment), "step/w": torch.tensor(step)}
    write_tensors(path, tensors, {INDEX: json.dumps({"pieces": [piece.facts() for piece in pieces], "values": {}})})
    return path


def test_a_rank_without_states_of_its_own_takes_the_mean_of_all(tmp_path: Path) -> None:
    paths = [write_states(tmp_path, 0, [1.0, 2.0, 3.0], 7.0), write_states(tmp_path, 1, [3.0, 2.0, 1.0], 6.0)]
    mean = MeanShelf([Shelf(tmp_path, 0, only=path) for path in paths])
    target = torch.zeros(2)
    mean.fill(target, "w", "exp_avg", 0, 2)
    assert target.tolist() == [2.0, 2.0]
    assert mean.states("w") == ["exp_avg", "step"]
    assert mean.whole(mean.pieces("w", "step")[0]).item() == 7.0, "counts are the first rank's"


def test_a_machine_with_a_folder_of_its_own_keeps_states_of_the_newest_steps_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (2, 4, 6, 8):
        write_states_at(run.random_states(step))
    rotate_own(run, None, 8)
    assert len(list((tmp_path / "random").iterdir())) == 4, "where no checkpoint is removed"
    rotate_own(run, 1, 8)
    assert sorted(path.name for path in (tmp_path / "random").iterdir()) == ["step-000006", "step-000008"]
    rotate_own(RunFolder(tmp_path / "none"), 1, 8)


def write_states_at(folder: Path) -> None:
    folder.mkdir(parents=True)
    write_states(folder, 1, [0.0, 0.0, 0.0], 1.0)


@pytest.mark.parametrize("command", ["zero", "fsdp2"])
def test_a_command_that_shares_out_weights_or_states_refuses_them(command: Any) -> None:
    with pytest.raises(UserError, match=r"`launch.local_steps` is 4, but (zero2|fsdp2) has its own way to exchange"):
        plan_of("24GB+24GB", command_strategy=command, local_steps=4)
    with pytest.raises(UserError, match=r"`launch\.compression` is `fp16`") as caught:
        plan_of("24GB+24GB", command_strategy=command, compression="fp16")
    assert "make train-distributed" in str(caught.value.hint)
