"""A DeepSpeed engine in bf16 on the CPU, which the product does not support: its states are written by one world and
read by another.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.zero_engine write bf16-zero2 FOLDER

`write` makes a few updates and writes a checkpoint; `read FOLDER NEW` restores it and writes what it then holds to NEW.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

import deepspeed
from sft_play.launch.deepspeed import batch_numbers, deepspeed_settings
from sft_play.training.ranks import Ranks
from sft_play.training.states import collect, restore
from tests.contexts import context_of
from tests.plans import simple_plan

deepspeed.ops.__compatible_ops__ = {}  # as a run does: nothing is compiled
ENGINES: dict[str, dict[str, Any]] = {
    "bf16-zero1": {"stage": 1},
    "bf16-zero1-own-gradients": {"stage": 1, "data_types": {"grad_accum_dtype": "bf16"}},
    "bf16-zero2": {"stage": 2, "round_robin_gradients": True},
    "bf16-zero2-offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "bf16-zero3": {"stage": 3, "stage3_param_persistence_threshold": 50, "sub_group_size": 300},
    "bf16-zero3-offload": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


class Model(torch.nn.Module):  # type: ignore[misc]
    """Sizes that no world divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.second = torch.nn.Linear(7, 13), torch.nn.Linear(13, 13), torch.nn.Linear(13, 5)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(torch.tanh(self.frozen(torch.tanh(self.first(rows)))))


def trainer_of(name: str) -> Any:
    """Return what `collect` and `restore` ask of a trainer, around a fresh engine."""
    zero = dict(ENGINES[name])
    world = distributed.get_world_size()
    batch = batch_numbers(micro_batch=1, accumulation=1, world_size=world)
    settings = deepspeed_settings(
        stage=zero["stage"], device="cpu", precision="bf16", batch=batch, clipping=0.0, hidden_size=13
    )
    settings |= {"data_types": zero.pop("data_types")} if "data_types" in zero else {}
    settings["zero_optimization"] |= zero
    torch.manual_seed(0)
    model = Model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return SimpleNamespace(
        model=model,
        model_wrapped=engine,
        optimizer=wrapped,
        lr_scheduler=None,
        is_deepspeed_enabled=True,
        is_fsdp_enabled=False,
    )


def update(trainer: Any, times: int) -> None:
    """Train on the same few rows on every rank."""
    engine = trainer.model_wrapped
    rows = torch.linspace(-1, 1, 28).view(4, 7).bfloat16()
    for _ in range(times):
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()


def weights(trainer: Any) -> dict[str, list[float]]:
    """Return the weights that the model computes with."""
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        return {
            name: parameter.detach().float().reshape(-1).tolist()
            for name, parameter in trainer.model.named_parameters()
        }


def main() -> None:
    verb, name, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    deepspeed.init_distributed("gloo")
    trainer = trainer_of(name)
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size())
    plan = simple_plan(strategy=f"zero{ENGINES[name]['stage']}", world_size=ranks.world)
    context = context_of(folder.parent, ranks, plan=plan, tuning={"mode": "full"}, train={"seed": 1})
    if verb == "write":
        update(trainer, 3)
        trainer.model_wrapped.optimizer.optimizer.param_groups[0]["lr"] = 0.03125
    else:
        restore(context, trainer, None, folder)
        folder = Path(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    collect(context, trainer, None, {"steps": trainer.model_wrapped.global_steps}, clone=True, average={}).write(folder)
    now = weights(trainer)
    if distributed.get_rank() == 0:
        (folder / "weights.json").write_text(json.dumps(now))
    update(trainer, 1)  # what was put back can be trained on
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
