"""One of two ranks that hold slices of a model's layers: run by `test_tensor_parallel.py`.

    python -m tests.numerics.layer_ranks RANK WORLD MEETING_FILE OUT_FILE MODE FAMILY...

`OUT_FILE` gets a JSON object: of each family the relative deviations of loss, gradients and their norm from one process, and which share of
the weights the rank holds. `MODE` is `full` or `lora`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from sft_play.config.schema import LoraSettings
from sft_play.model import lora
from sft_play.model.tensor_parallel import Slicer, families_plan, slice_of
from sft_play.trace.build import BASE
from tests.families import tiny_model

IDS = torch.randint(10, 900, (2, 24), generator=torch.Generator().manual_seed(1))


def prepared(kind: str, mode: str) -> Any:
    """Returns a tiny model to train; adapters hold what a step would have put there."""
    model = tiny_model(kind).train()
    lora.free_text_part(model)
    if mode == "lora":
        model.requires_grad_(False)
        plan = families_plan(model.config.get_text_config())
        targets = sorted({name.rpartition(".")[2] for name, style in plan.items() if style != "replicated_with_grad_allreduce"})
        torch.manual_seed(3)
        model, _ = lora.add_adapters(model, LoraSettings(r=4, alpha=8, target_modules=targets), BASE, torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        lora.fuse_adapters(model)
    return model


def deviations(kind: str, mode: str, rank: int, world: int, group: Any) -> dict[str, float]:
    """Returns what the module's docstring says of a family."""
    whole, mine = prepared(kind, mode), prepared(kind, mode)
    wanted = whole(input_ids=IDS, labels=IDS).loss
    wanted.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in whole.named_parameters() if parameter.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    slicer = Slicer(rank, world, group)
    slicer.cut(mine)
    found = mine(input_ids=IDS, labels=IDS).loss
    found.backward()
    slicer.share_gradients()
    worst = 0.0
    for name, parameter in mine.named_parameters():
        if name not in gradients:
            continue
        part, largest = slice_of(parameter), float(gradients[name].abs().max())
        expected = part.of(gradients[name]) if part else gradients[name]
        worst = max(worst, float((parameter.grad - expected).abs().max()) / max(largest, 1e-9))
    clipped = slicer.clip(mine.parameters(), 1.0)
    held, all_of_it = (sum(parameter.numel() for parameter in model.parameters()) for model in (mine, whole))
    return {
        "loss": abs(float(found - wanted)), "gradients": worst, "norm": abs(float(clipped - norm)) / float(norm), "held": held / all_of_it,
    }  # fmt: skip


if __name__ == "__main__":
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world)
    torch.set_num_threads(1)
    answer = {kind: deviations(kind, sys.argv[5], rank, world, distributed.group.WORLD) for kind in sys.argv[6:]}
    Path(sys.argv[4]).write_text(json.dumps(answer))
    distributed.destroy_process_group()
