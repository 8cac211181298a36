"""Runs that need much memory in one step: a tiny model whose attention keeps every score of a few long rows."""

from __future__ import annotations

import json
import random
from pathlib import Path

from sft_play.plan.epoch import RowOrder
from tests.tiny_models import build_tiny_llama

GLOBAL_BATCH, STEPS, HEAVY_STEP = 8, 3, 2
HEADS, LONGEST = 8, 1400
SEED = 42


def heavy_config(folder: Path) -> Path:
    """Write model, rows and configuration. All rows of step 2 have about 1,150 tokens, all others about 20.

    With eager attention a long row keeps 8 heads x 1,150^2 scores per layer, several times: eight of them 2 GB, four 1
    GB.
    """
    from pydoc_data.topics import topics

    base = build_tiny_llama(
        folder / "model", max_position_embeddings=2048, num_attention_heads=HEADS, num_key_value_heads=HEADS
    )
    order = RowOrder(rows=GLOBAL_BATCH * STEPS, seed=SEED)(0)
    heavy = set(order[GLOBAL_BATCH * (HEAVY_STEP - 1) : GLOBAL_BATCH * HEAVY_STEP])
    words = " ".join(list(topics.values())[:30]).split()
    chance, rows = random.Random(0), []
    for index in range(GLOBAL_BATCH * STEPS):
        start = chance.randrange(len(words) - 1000)
        text = words[start : start + (540 if index in heavy else 8)]
        rows.append({"prompt": " ".join(text[:-4]), "completion": " ".join(text[-4:])})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = folder / "heavy.yaml"
    config.write_text(
        f"model: {{name: {base}, max_seq_len: {LONGEST}, attn_implementation: eager}}\ntuning: {{mode: lora, lora: {{r:"
        f" 4}}}}\ndata: {{train_path: {path}}}\ntrain: {{global_batch_size: {GLOBAL_BATCH}, max_steps: {STEPS},"
        f" save_steps: 1, seed: {SEED}, learning_rate: 5.0e-3, report_to: none}}\n",
        encoding="utf-8",
    )
    return config
