"""What a soak trains: the user's configuration, or a tiny model from scratch with made-up rows, ready within seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sft_play.files import write_json, write_text

TRAIN_ROWS, VALIDATION_ROWS = 400, 12
SAVE_STEPS, EVAL_STEPS, STEPS = 5, 8, 60
"""A save every 5 steps and an evaluation with answers every 8, so that they fall on one step (40) and mostly on different ones."""
SUBJECTS = (
    "the river",
    "a clock",
    "my neighbour",
    "the north wind",
    "an old ship",
    "the second house",
    "a small bell",
    "the road",
)
VERBS = ("turns", "waits for", "carries", "remembers", "leaves", "follows", "measures", "calls")


def write_material(folder: Path, seed: int) -> Path:
    """Writes rows and a configuration into `folder`; returns the configuration's file."""
    chance = random.Random(seed)
    for name, count in (("train", TRAIN_ROWS), ("validation", VALIDATION_ROWS)):
        rows = [_row(chance, f"{name}-{number}") for number in range(count)]
        write_text(folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "soak.yaml"  # JSON is YAML
    write_json(path, configuration(folder))
    return path


def configuration(folder: Path) -> dict[str, Any]:
    """Returns the configuration over the rows in `folder`. Dropout is on, so that random states count."""
    return {
        "model": {
            "init": "random", "vocab_size": 320, "hidden_size": 64, "attention_heads": 4, "layers": 2, "max_seq_len": 128,
            "tokenizer": "train",
        },
        "tuning": {"mode": "full"},
        "data": {
            "train_path": str(folder / "train.jsonl"), "val_path": str(folder / "validation.jsonl"), "chat_template": "chatml",
        },
        "train": {
            "global_batch_size": 8, "batch_size": 2, "max_steps": STEPS, "learning_rate": 2e-3, "save_steps": SAVE_STEPS,
            "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": EVAL_STEPS, "predict_with_generate": True,
            "generation_max_new_tokens": 12,
        },
    }  # fmt: skip


def _row(chance: random.Random, name: str) -> dict[str, Any]:
    def sentence() -> str:
        return f"{chance.choice(SUBJECTS)} {chance.choice(VERBS)} {chance.choice(SUBJECTS)}"

    question = f"{name}: " + ", ".join(sentence() for _ in range(chance.randint(1, 2)))
    answer = " and ".join(sentence() for _ in range(chance.randint(1, 3)))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
