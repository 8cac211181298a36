"""Write the large model of the acceptance without a download.

    python -m benchmarks.acceptance_model FOLDER TOKENIZER_FOLDER [layers=32 ...]

It is a Llama of Llama-3.1-8B's shape with random bfloat16 weights, a local model's tokenizer, and conversations of
varying length. Speed and memory depend only on shapes and lengths, so they are those of the published model.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from sft_play.files import write_json, write_text

SHAPE = {"layers": 32, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 128256}
LONGEST_WORDS = 1400
WORDS = re.findall(
    r"\w+", "the model learns a row of words and says them again in order while the loss goes down on every card"
)


def parameters(shape: Mapping[str, int]) -> int:
    """Return the number of weights that every token passes: all except the embedding."""
    hidden, head = shape["hidden"], shape["hidden"] // shape["heads"]
    attention = 2 * hidden * head * (shape["heads"] + shape["kv_heads"])
    return shape["layers"] * (attention + 3 * hidden * shape["inner"]) + hidden * shape["vocabulary"]


def make(folder: Path, tokenizer: Path, shape: Mapping[str, int], *, weights: bool = True, batch: int = 64) -> None:
    """Write model, rows and `8b.yaml` with `batch` rows per step into `folder`; draw weights on the GPU, if any."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    model = folder / "m8b"
    shutil.rmtree(model, ignore_errors=True)
    if weights:
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        network.save_pretrained(model, max_shard_size="4GB")
    else:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(model)
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "generation_config")) or path.suffix == ".jinja":
            shutil.copy(path, model / path.name)
    chance = random.Random(0)
    write_text(folder / "rows.jsonl", "".join(json.dumps(row(chance)) + "\n" for _ in range(25 * batch)))
    settings = {
        "model": {"name": str(model), "max_seq_len": 2048},
        "tuning": {"mode": "lora", "lora": {"r": 16, "alpha": 32}},
        "data": {"train_path": str(folder / "rows.jsonl"), "overlong": "drop"},
        "train": {
            "global_batch_size": batch,
            "max_steps": 12,
            "loss_on": "all",
            "eval_strategy": "no",
            "save_strategy": "no",
        },
    }
    write_json(folder / "8b.yaml", settings)  # JSON is YAML


def row(chance: random.Random) -> dict[str, object]:
    """Return a conversation of lognormal length, as in instruction data."""
    count = min(LONGEST_WORDS, max(16, int(chance.lognormvariate(5.6, 0.8))))
    turns = [" ".join(chance.choices(WORDS, k=part)) for part in (count // 4, 3 * count // 4)]
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]
    }


if __name__ == "__main__":
    typed = dict(argument.split("=") for argument in sys.argv[3:])
    make(Path(sys.argv[1]), Path(sys.argv[2]), SHAPE | {name: int(value) for name, value in typed.items()})
