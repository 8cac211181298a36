"""States that are a few numbers come back exactly; those of an optimizer that cannot be cut are refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_play.errors import CheckpointError
from sft_play.runs.manifest import check_states, optimizer_file
from sft_play.training.states.facts import (
    groups_of,
    scaler_of,
    scheduler_of,
    set_groups,
    set_scaler,
    set_scheduler,
)
from sft_play.training.states.files import StateFiles, write_tensors
from sft_play.training.stopping import scale_of


def scaled_steps(scaler: torch.amp.GradScaler, gradients: list[float]) -> list[float]:
    """Return the scale after each step of a model of one weight with such gradients."""
    weight, scales = torch.nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("metadata", [{}, {"index": "{"}, {"index": '{"pieces": [{}]}'}])
def test_a_state_file_that_is_not_ours_is_named(metadata: dict[str, str], tmp_path: Path) -> None:
    write_tensors(tmp_path / optimizer_file(0), {"a": torch.ones(2)}, metadata)
    with pytest.raises(CheckpointError) as refused:
        StateFiles(tmp_path, [0])
    assert refused.value.place == str(tmp_path / optimizer_file(0))


def test_a_loss_scaler_continues_where_it_was() -> None:
    """accelerate's: the scale that it has found, and how far it is from the next one."""

    def new_trainer() -> Any:
        scaler = torch.amp.GradScaler("cpu", growth_interval=3)
        return SimpleNamespace(is_deepspeed_enabled=False, accelerator=SimpleNamespace(scaler=scaler))

    first, second = new_trainer(), new_trainer()
    assert scaled_steps(first.accelerator.scaler, [math.inf, math.inf, 1.0, 1.0]) == [
        32768.0,
        16384.0,
        16384.0,
        16384.0,
    ]
    saved = json.loads(json.dumps(scaler_of(first), allow_nan=False))
    set_scaler(second, saved)
    assert scale_of(second) == scale_of(first) == 16384.0
    rest = [1.0, math.inf, 1.0]
    expected = scaled_steps(first.accelerator.scaler, rest)
    assert scaled_steps(second.accelerator.scaler, rest) == expected == [32768.0, 16384.0, 16384.0]
    assert scaled_steps(new_trainer().accelerator.scaler, rest) != expected
    none = SimpleNamespace(is_deepspeed_enabled=False, accelerator=SimpleNamespace(scaler=None))
    set_scaler(none, saved)
    assert scaler_of(none) is None and scale_of(none) is None


def test_deepspeeds_loss_scaler_continues_where_it_was() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    def new_trainer() -> Any:
        scaler = DynamicLossScaler(65536.0, 3, 1.0, 2, False)
        return SimpleNamespace(
            is_deepspeed_enabled=True, model_wrapped=SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=scaler))
        )

    def scales(trainer: Any) -> list[float | None]:
        values = []
        for _ in range(6):  # without an overflow, which DeepSpeed tells of through its process group
            trainer.model_wrapped.optimizer.loss_scaler.update_scale(False)
            values.append(scale_of(trainer))
        return values

    first, second = new_trainer(), new_trainer()
    scaler = first.model_wrapped.optimizer.loss_scaler
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = 4096.0, 11, 9, 1
    set_scaler(second, json.loads(json.dumps(scaler_of(first), allow_nan=False)))
    assert scale_of(second) == 4096.0 and vars(second.model_wrapped.optimizer.loss_scaler) == vars(scaler)
    expected = scales(first)
    assert scales(second) == expected and expected[-1] == 16384.0
    assert scales(new_trainer()) != expected


STATES = {
    "format": 1,
    "strategy": "zero2",
    "world_size": 2,
    "optimizer": "Adafactor",
    "reshardable": False,
    "files": 2,
    "groups": [],
    "scheduler": None,
    "scaler": None,
    "engine": None,
    "counters": {},
}


@pytest.mark.parametrize(
    ("written", "strategy", "world", "allowed"),
    [
        ({}, "zero2", 2, True),
        ({}, "zero2", 3, False),
        ({"reshardable": True}, "zero3", 3, True),
        ({"strategy": "ddp"}, "ddp", 3, True),
        ({"strategy": "ddp"}, "fsdp2", 2, False),
    ],
)
def test_states_that_cannot_be_resharded_are_refused_by_name(
    written: dict[str, Any], strategy: str, world: int, allowed: bool, tmp_path: Path
) -> None:
    (tmp_path / "states.json").write_text(json.dumps(STATES | written))
    if allowed:
        check_states(tmp_path, strategy=strategy, world_size=world)
        return
    with pytest.raises(CheckpointError, match="`Adafactor` cannot be resharded") as caught:
        check_states(tmp_path, strategy=strategy, world_size=world)
    assert "NUM_GPUS=2" in caught.value.render()


@pytest.mark.parametrize("steps", [8, 12])
def test_an_extended_run_uses_the_new_schedule_from_its_first_step(steps: int) -> None:
    """`linear` ends at 0.0, which the groups of the last checkpoint hold; for a run of the same length nothing changes
    to the bit.
    """
    from transformers import get_scheduler

    def stepper(total: int) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=3e-4)
        return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=1, num_training_steps=total)

    def stepped(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> float:
        for _ in range(count):
            optimizer.step()
            scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    step = 8 if steps > 8 else 5
    old, old_schedule = stepper(8)
    stepped(old, old_schedule, step)
    new, new_schedule = stepper(steps)
    set_groups(new, json.loads(json.dumps(groups_of(old))))
    set_scheduler(new_schedule, new, json.loads(json.dumps(scheduler_of(old_schedule, old))))
    undisturbed = stepped(*stepper(steps), step)
    assert undisturbed > 0
    assert new.param_groups[0]["lr"] == undisturbed == new_schedule.get_last_lr()[0]
    assert stepped(new, new_schedule, 1) == stepped(*stepper(steps), step + 1)
