"""Rows in one flattened line give each row's own logits, for every family that the plan flattens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sft_play.data.collate import Collator
from sft_play.plan.layouts import FLATTENED_MODEL_TYPES

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
    # Shorter windows than the rows, and both kinds of layers.
    "gemma3_text": SMALL | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": SMALL | {"sliding_window": 4},
    "smollm3": SMALL | {"no_rope_layers": [1, 0, 1]},
}  # fmt: skip
ROWS = [[5, 9, 11, 30, 7, 21, 8], [6, 40], [17, 3, 3, 60, 61, 62, 63, 64, 65, 12, 11]]


def random_model(kind: str, attention: str) -> Any:
    """Returns a random causal model of a family, a multimodal one's with its tower."""
    from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    if kind == "gemma3":
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        }
        config = Gemma3Config(
            text_config=OWN["gemma3_text"], vision_config=vision, mm_tokens_per_image=4, image_token_index=90, boi_token_index=91, eoi_token_index=92
        )  # fmt: skip
        config._attn_implementation = attention
        return Gemma3ForConditionalGeneration(config).train()  # its masks differ while it trains; it has no dropout
    config = AutoConfig.for_model(kind, **OWN.get(kind, SMALL))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def logits_of(model: Any, rows: list[list[int]], layout: str) -> list[torch.Tensor]:
    """Returns the logits of each row's positions but the last, from one batch of all rows."""
    examples = [{"input_ids": row, "labels": row, "row": i} for i, row in enumerate(rows)]
    batch = Collator(layout, 0)(examples)
    keep = batch["logits_to_keep"].tolist()
    with torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name not in ("targets", "rows")}
        found = model(**inputs, use_cache=False).logits
    if layout == "padded":
        return [torch.stack([found[i, keep.index(p)] for p in range(len(row) - 1)]) for i, row in enumerate(rows)]
    start, parts = 0, []
    for row in rows:
        parts.append(found[0, start : start + len(row) - 1])
        start += len(row) - 1
    return parts


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", sorted(FLATTENED_MODEL_TYPES))
def test_rows_do_not_see_each_other(kind: str, attention: str) -> None:
    model = random_model(kind, attention)
    alone = [logits_of(model, [row], "flattened")[0] for row in ROWS]
    for layout in ("flattened", "padded"):
        for row, (mine, own) in enumerate(zip(logits_of(model, ROWS, layout), alone, strict=True)):
            torch.testing.assert_close(mine, own, rtol=2e-5, atol=2e-6, msg=lambda text, row=row: f"row {row}, {layout}: {text}")  # noqa: B023


def test_the_comparison_sees_a_family_that_mixes_rows() -> None:
    """A state space model carries its state on: position ids do not stop it, so it is not on the list."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert "mamba" not in FLATTENED_MODEL_TYPES
    torch.manual_seed(0)
    config = AutoConfig.for_model("mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        alone = model(torch.tensor([ROWS[0]])).logits[0]
        after = model(torch.tensor([ROWS[2] + ROWS[0]])).logits[0, len(ROWS[2]) :]
    assert not torch.allclose(alone, after, atol=1e-4)
