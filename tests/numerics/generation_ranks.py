"""What each process of `test_generation.py` does: the same rows answered under DDP and under FSDP2."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch


def load(folder: Path) -> tuple[Any, Any]:
    """Returns a tiny Llama with adapters that are not the zero function, and its tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sft_play.model.tokenizer import load_tokenizer

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora), load_tokenizer(folder)


def rows(count: int = 13) -> list[dict[str, Any]]:
    rng = random.Random(0)
    words = ["the", "a", "return", "value", "object", "file", "of", "name", "module", "and", "to", "in", "is"]
    return [
        {
            "row": 100 + index,
            "prompt_ids": [rng.randrange(300, 1000) for _ in range(rng.randrange(3, 30))],
            "reference": " ".join(rng.sample(words, 6)),
        }
        for index in range(count)
    ]


class Ticks:
    """A clock that goes on by so many seconds whenever it is read."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        self.now += self.seconds
        return self.now


def main() -> None:
    """Joins the group that the environment describes and writes what this rank got."""
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    from sft_play.config.metrics import OF_ANSWERS
    from sft_play.evaluation.answering import AnswerSettings
    from sft_play.evaluation.generate import Budget, score_by_generation
    from sft_play.training.ranks import Ranks

    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group("gloo")
    ranks, results = Ranks(rank, world), {}
    for kind in ("ddp", "fsdp2"):
        model, tokenizer = load(folder)
        inner: Any = model
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.get_base_model().model.layers:
                fully_shard(layer)
            fully_shard(model)
        _step(model)
        model.train()
        result = score_by_generation(
            model,
            tokenizer,
            rows(),
            AnswerSettings(batch_size=4, max_new_tokens=10),
            metrics=OF_ANSWERS,
            ranks=ranks,
            synced=kind == "fsdp2",
        )
        # Every rank's own clock would stop at another round; rank 0's counts.
        part = score_by_generation(
            model,
            tokenizer,
            rows(),
            AnswerSettings(batch_size=2, max_new_tokens=4),
            budget=Budget(seconds=2.5, seed=3, clock=Ticks(1.0 if rank == 0 else 100.0 * (rank - 1))),
            ranks=ranks,
            synced=kind == "fsdp2",
        )
        assert model.training, "the model trains on after answering"
        _step(model)
        results[kind] = {
            "answers": [(p.row, p.answer) for p in result.predictions],
            "scores": {name: interval.to_json() for name, interval in result.scores.items()},
            "answered_here": result.answered_here,
            "part": [(p.row, p.answer) for p in part.predictions],
            "part_here": part.answered_here,
            "part_warning": part.warnings[0],
            "elements": sum(_local(p).numel() for p in inner.parameters()),
        }
    (out / f"rank{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def _step(model: Any) -> None:
    """One forward and backward pass, as between two evaluations."""
    ids = torch.tensor([[5, 6, 7, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


if __name__ == "__main__":
    main()
