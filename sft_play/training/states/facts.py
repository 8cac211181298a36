"""Save and restore states of a few numbers, exactly, as JSON.

They are parameter groups, scheduler, loss scaler, DeepSpeed's counters and random states.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer

from sft_play.errors import CheckpointError
from sft_play.runs.checkpoints import step_of
from sft_play.runs.manifest import random_file
from sft_play.training.ranks import TrainContext
from sft_play.training.states.files import MALFORMED, readable

NOT_KEPT = frozenset({"params", "fused", "foreach", "capturable", "differentiable", "maximize", "param_names"})
"""Keys of a parameter group that describe how this process computes, or that a new process sets itself."""
ENGINE = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
ELEMENTWISE = frozenset(
    [
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "DeepSpeedCPUAdagrad",
        "DeepSpeedCPUAdam",
        "DeepSpeedCPULion",
        "FusedAdam",
        "FusedLion",
        "Lion",
        "NAdam",
        "RAdam",
        "RMSprop",
        "SGD",
    ]
)
"""Optimizers that update each element independently, so that it does not matter how parameters are sliced."""


def to_plain(value: Any, what: str) -> Any:
    """Return `value` in JSON's types, tuples as lists, one-element tensors as numbers. Raise `CheckpointError`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item, what) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_plain(item, f"{what}.{name}") for name, item in value.items()}
    if isinstance(value, (Tensor, numpy.ndarray, numpy.generic)) and math.prod(value.shape) == 1:
        return to_plain(value.item(), what)
    raise CheckpointError(
        f"`{what}` is a {type(value).__name__}, which cannot be saved without a pickle",
        hint="choose another `train.optim` or `train.lr_scheduler_type`, or set `train.save_strategy: no`",
    )


def from_plain(value: Any) -> Any:
    """Invert `to_plain` for the floats that JSON lacks."""
    if isinstance(value, Mapping):
        if set(value) == {"float"}:
            return float(value["float"])
        return {name: from_plain(item) for name, item in value.items()}
    return [from_plain(item) for item in value] if isinstance(value, list) else value


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters of an optimizer's groups, without groups that were always empty."""
    return [
        {name: _of_group(value, f"param_groups.{name}") for name, value in group.items() if name not in NOT_KEPT}
        for group in _groups(optimizer)
    ]


def _of_group(value: Any, what: str) -> Any:
    """Return a hyperparameter in JSON's types; a tensor with its dtype, since some optimizers count steps in one."""
    plain = to_plain(value, what)
    return {"tensor": plain, "dtype": str(value.dtype).removeprefix("torch.")} if isinstance(value, Tensor) else plain


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    filled = [group for group in groups if group["params"]]
    # ZeRO-3 keeps all groups empty between steps, and drops a group without parameters at the start.
    return filled or groups


def set_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Restore hyperparameters. Raise `CheckpointError` if the number of groups differs."""
    mine = _groups(optimizer)
    if len(mine) != len(groups):
        raise CheckpointError(f"the checkpoint has {len(groups)} parameter groups, and the optimizer has {len(mine)}")
    for group, saved in zip(mine, groups, strict=True):
        for name, plain in from_plain(saved).items():
            now, value = group.get(name), plain
            if isinstance(plain, Mapping) and "tensor" in plain:
                value = torch.tensor(plain["tensor"], dtype=getattr(torch, plain["dtype"]))
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def scheduler_of(scheduler: Any, optimizer: Any) -> dict[str, Any] | None:
    """Return a scheduler's state, and which of its groups have parameters, since DeepSpeed drops empty groups."""
    if scheduler is None:
        return None
    return {"state": to_plain(scheduler.state_dict(), "scheduler"), "filled": _have_parameters(optimizer)}


def set_scheduler(scheduler: Any, optimizer: Any, saved: dict[str, Any] | None) -> None:
    """Restore a scheduler's state; its values for groups without parameters here do not change."""
    if scheduler is None or saved is None:
        return
    state, now, filled = from_plain(saved["state"]), scheduler.state_dict(), _have_parameters(optimizer)
    if len(filled) != len(saved["filled"]):
        for name, value in state.items():
            if isinstance(value, list) and len(value) == len(saved["filled"]):
                mine = iter([item for item, has in zip(value, saved["filled"], strict=True) if has])
                state[name] = [next(mine) if has else item for item, has in zip(now[name], filled, strict=True)]
    scheduler.load_state_dict(state)
    _follow(scheduler)


def _follow(scheduler: Any) -> None:
    """Set the groups' learning rate to this run's schedule at this step, which an extended run has changed.

    Only for schedules that are functions of the step; with an unchanged length the number is the same to the bit.
    """
    while not isinstance(scheduler, LRScheduler) and hasattr(scheduler, "scheduler"):
        scheduler = scheduler.scheduler  # accelerate's wrapper
    if not isinstance(scheduler, LambdaLR):
        return
    rates = [
        base * rule(scheduler.last_epoch) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = rates


def _have_parameters(optimizer: Any) -> list[bool]:
    filled = [bool(group["params"]) for group in optimizer.param_groups]
    return filled if any(filled) else [True] * len(filled)


def loss_scaler(trainer: Trainer) -> Any:
    """Return the fp16 loss scaler of accelerate or DeepSpeed, or `None` without one."""
    if trainer.is_deepspeed_enabled:
        return getattr(trainer.model_wrapped.optimizer, "loss_scaler", None)
    return getattr(trainer.accelerator, "scaler", None)


def scaler_of(trainer: Trainer) -> dict[str, Any] | None:
    """Return the loss scaler's values for a checkpoint; DeepSpeed's scaler has no `state_dict`."""
    scaler = loss_scaler(trainer)
    if scaler is None or not trainer.is_deepspeed_enabled:
        return None if scaler is None else to_plain(scaler.state_dict(), "scaler")
    return {
        name: value
        for name, value in vars(scaler).items()
        if isinstance(value, (bool, int, float)) and "__" not in name
    }


def set_scaler(trainer: Trainer, saved: dict[str, Any] | None) -> None:
    """Restore the loss scaler's state, if the run has a scaler now."""
    scaler = loss_scaler(trainer)
    if not saved or scaler is None:
        return
    if trainer.is_deepspeed_enabled:
        for name, value in saved.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
    elif "growth_factor" in saved:
        scaler.load_state_dict(from_plain(saved))


def engine_of(trainer: Trainer) -> dict[str, Any] | None:
    """Return DeepSpeed's counters."""
    return (
        {name: int(getattr(trainer.model_wrapped, name)) for name in ENGINE} if trainer.is_deepspeed_enabled else None
    )


def set_engine(trainer: Trainer, saved: dict[str, Any] | None) -> None:
    """Restore DeepSpeed's counters; micro-steps are computed, since another world size divides a batch differently."""
    if saved and trainer.is_deepspeed_enabled:
        engine = trainer.model_wrapped
        for name in ENGINE:
            setattr(engine, name, saved[name])
        engine.micro_steps = saved["global_steps"] * engine.gradient_accumulation_steps()


def random_states() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the states of this process's random number generators: tensors, and their other values as metadata."""
    version, inner, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    tensors = {
        "python": torch.tensor(inner, dtype=torch.int64),
        "numpy": torch.from_numpy(numpy.array(keys, dtype=numpy.uint32)),
        "torch": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    facts = {
        "python": [version, gauss],
        "numpy": [str(name), int(position), int(has_gauss), float(cached)],
    }
    return tensors, {"facts": json.dumps(facts)}


def set_random_states(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Set the random states of this process to those of `random_states`."""
    facts = json.loads(metadata["facts"])
    (version, gauss), (name, *numbers) = facts["python"], facts["numpy"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    numpy.random.set_state((name, tensors["numpy"].numpy(), *numbers))
    torch.random.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore the random states after the body."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(*states)


def restore_random(context: TrainContext, checkpoint: Path) -> None:
    """Restore this rank's random states, or seed them by `fresh_seed` if a checkpoint of fewer ranks has none."""
    rank = context.ranks.rank
    rank -= rank % context.plan.tensor_parallel  # ranks with slices of a layer must draw the same numbers
    path = checkpoint / random_file(rank)
    if not path.is_file():
        number = fresh_seed(context.config.train.seed, rank, step_of(checkpoint))
        random.seed(number)
        numpy.random.seed(number % 2**32)
        torch.manual_seed(number)
        return
    with readable(path, MALFORMED), safe_open(path, framework="pt", device="cpu") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
        set_random_states(tensors, file.metadata())


def fresh_seed(seed: int, rank: int, step: int) -> int:
    """Return the seed of a rank that joins a run at `step`: 63 bits of the sha256 of `seed/rank/step`."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}/{step}".encode()).digest()[:8], "big") >> 1
