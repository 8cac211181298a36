"""One of two ranks that hold slices of a model's layers: run by `test_tensor_parallel.py`.

    torchrun -m tests.numerics.layer_ranks FOLDER MODE FAMILY...

`FOLDER/RANK.json` gets a JSON object: of each family the relative deviations of loss, gradients and their norm from one
process, which share of the weights the rank holds, whether another token in a row changes the logits of other rows in
its line, and whether the gradients of what all ranks hold are the same bits on each. `MODE` is `full` or `lora`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from sft_play.config.schema import LoraSettings
from sft_play.data.batches import Collator
from sft_play.model import lora
from sft_play.model.parallel import Slicer, slice_of
from sft_play.trace.build import BASE
from tests.families import tiny_model
from tests.numerics.rank_processes import answer
from tests.numerics.slice_ranks import ROWS, batch_of

IDS = torch.randint(10, 900, (2, 24), generator=torch.Generator().manual_seed(1))


def prepared(kind: str, mode: str) -> Any:
    """Return a tiny model to train; adapters hold what a step would have put there."""
    model = tiny_model(kind).train()
    lora.free_text_part(model)
    if mode == "lora":
        model.requires_grad_(False)
        plan = model.config.get_text_config().base_model_tp_plan
        targets = sorted(
            {name.rpartition(".")[2] for name, style in plan.items() if style != "replicated_with_grad_allreduce"}
        )
        torch.manual_seed(3)
        model = lora.add_adapters(model, LoraSettings(r=4, alpha=8, target_modules=targets), BASE, torch.float32)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
        lora.fuse_adapters(model)
    return model


def logits_of(model: Any, first: int) -> Tensor:
    """Return the logits [T, V] of rows in one line, of which the first begins with token `first`."""
    _, inputs = batch_of(Collator("flattened", 0, "sdpa", "cpu"), first)
    with torch.no_grad():
        logits: Tensor = model(**inputs, use_cache=False).logits[0]
    return logits


def alike(tensors: list[Tensor], world: int) -> bool:
    """Return whether these are the same bits on all ranks."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    parts = [torch.empty_like(flat) for _ in range(world)]
    distributed.all_gather(parts, flat)
    return all(torch.equal(tensor, flat) for tensor in parts)


def deviations(kind: str, mode: str, rank: int, world: int, group: Any) -> dict[str, float]:
    """Return the figures of a family that the module's docstring describes."""
    whole, mine = prepared(kind, mode), prepared(kind, mode)
    whole_loss = whole(input_ids=IDS, labels=IDS).loss
    whole_loss.backward()
    gradients = {
        name: parameter.grad.clone() for name, parameter in whole.named_parameters() if parameter.grad is not None
    }
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
    slicer = Slicer(rank, world, group)
    slicer.cut(mine)
    loss = mine(input_ids=IDS, labels=IDS).loss
    loss.backward()
    slicer.share_gradients()
    worst = 0.0
    for name, parameter in mine.named_parameters():
        if name not in gradients:
            continue
        part, largest = slice_of(parameter), float(gradients[name].abs().max())
        expected = part.of(gradients[name]) if part else gradients[name]
        worst = max(worst, float((parameter.grad - expected).abs().max()) / max(largest, 1e-9))
    common = [weight.grad for weight in mine.parameters() if weight.grad is not None and slice_of(weight) is None]
    same = alike(common, world)
    own, first, other = len(ROWS[0]), logits_of(mine, 5), logits_of(mine, 6)
    clipped = slicer.clip(mine.parameters(), 1.0)
    mine_count, all_of_it = (sum(parameter.numel() for parameter in model.parameters()) for model in (mine, whole))
    return {
        "loss": abs(float(loss - whole_loss)),
        "gradients": worst,
        "norm": abs(float(clipped - norm)) / float(norm),
        "held": mine_count / all_of_it,
        "apart": torch.equal(first[own:], other[own:]) and not torch.equal(first[:own], other[:own]),
        "alike": same,
    }


def work(rank: int, world: int, words: list[str]) -> dict[str, Any]:
    mode, *families = words
    return {kind: deviations(kind, mode, rank, world, distributed.group.WORLD) for kind in families}


if __name__ == "__main__":
    answer(work)
