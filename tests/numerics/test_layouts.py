"""Rows in one flattened line, or padded without a mask, give each row's own logits and gradients, for every family that the plan flattens."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from sft_play.data.collate import Collator
from sft_play.model import varlen
from sft_play.plan.layouts import FLATTENED_MODEL_TYPES, VARLEN_MODEL_TYPES, WITHOUT_FLASH_ATTENTION, WITHOUT_SDPA
from sft_play.training.loss import NOT_FOR_THE_MODEL, token_loss_sum
from tests import varlen_on_cpu

VOCABULARY = 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2,
             "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    # Shorter windows than the rows, and both kinds of layers.
    "gemma3_text": SMALL | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    **{kind: SMALL | {"sliding_window": 4} for kind in ("mistral", "gemma2", "cohere2", "exaone4", "ministral3", "olmo3", "phi3", "starcoder2")},
    **{kind: SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} for kind in ("qwen2", "qwen3")},
    **{kind: SMALL | EXPERTS | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1} for kind in ("qwen2_moe", "qwen3_moe")},
    "olmoe": SMALL | EXPERTS,
    "mixtral": SMALL | {"num_local_experts": 4, "sliding_window": 4},
    "smollm3": SMALL | {"no_rope_layers": [1, 0, 1]},
}  # fmt: skip
ROWS = [[5, 9, 11, 30, 7, 21, 8], [6, 40], [17, 3, 3, 60, 61, 62, 63, 64, 65, 12, 11]]


def random_model(kind: str, attention: str) -> Any:
    """Returns a random causal model of a family, a multimodal one's with its tower."""
    from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    if attention == "varlen":
        varlen.register()
        varlen_on_cpu.register()
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


def logits_of(model: Any, rows: list[list[int]], layout: str, device: str = "cpu") -> list[torch.Tensor]:
    """Returns the logits of each row's positions but the last, from one batch of all rows."""
    examples = [{"input_ids": row, "labels": row, "row": i} for i, row in enumerate(rows)]
    batch = Collator(layout, 0, model.config._attn_implementation, device)(examples)
    keep = batch["logits_to_keep"].tolist()
    with torch.no_grad():
        inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}
        found = model(**inputs, use_cache=False).logits
    if layout != "flattened":
        return [torch.stack([found[i, keep.index(p)] for p in range(len(row) - 1)]) for i, row in enumerate(rows)]
    start, parts = 0, []
    for row in rows:
        parts.append(found[0, start : start + len(row) - 1])
        start += len(row) - 1
    return parts


def gradient_of(model: Any, batches: list[list[list[int]]], layout: str, device: str = "cpu") -> torch.Tensor:
    """Returns the gradient of the summed loss of rows that are learnt from their middle on."""
    collate = Collator(layout, 0, model.config._attn_implementation, device)
    model.zero_grad()
    for rows in batches:
        examples = [
            {"input_ids": row, "labels": [-100] * (len(row) // 2) + row[len(row) // 2 :], "row": i} for i, row in enumerate(rows)
        ]
        token_loss_sum(model, collate(examples)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


CASES = [
    (kind, name)
    for kind in sorted(FLATTENED_MODEL_TYPES)
    for name in ("sdpa", "eager")
    if name != "sdpa" or kind not in WITHOUT_SDPA
]


@pytest.mark.parametrize(("kind", "attention"), CASES)
def test_rows_do_not_see_each_other(kind: str, attention: str) -> None:
    model = random_model(kind, attention)
    alone = [logits_of(model, [row], "flattened")[0] for row in ROWS]
    for layout in ("flattened", "padded", "unmasked"):
        for row, (mine, own) in enumerate(zip(logits_of(model, ROWS, layout), alone, strict=True)):
            torch.testing.assert_close(mine, own, rtol=2e-5, atol=2e-6, msg=lambda text, row=row: f"row {row}, {layout}: {text}")  # noqa: B023


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", sorted(FLATTENED_MODEL_TYPES))
def test_row_lengths_reach_every_layer_of_the_families_that_say_so(kind: str, device: str) -> None:
    """Rows of one line under `varlen` have the logits and gradients that they have alone under sdpa; layers recomputed.

    As computed on CPUs, and as on GPUs, in place of whose kernels are those of `tests.varlen_on_cpu`.
    """
    model = random_model(kind, "eager" if kind in WITHOUT_SDPA else "sdpa").train()
    wanted, gradient = logits_of(model, [ROWS[2]], "flattened")[0], gradient_of(model, [[row] for row in ROWS], "flattened")
    varied = random_model(kind, "varlen").train()
    with contextlib.nullcontext() if kind in VARLEN_MODEL_TYPES else pytest.raises(AssertionError):
        torch.testing.assert_close(logits_of(varied, ROWS, "flattened", device)[2], wanted, rtol=2e-5, atol=2e-6)
        varied.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert (gradient_of(varied, [ROWS], "flattened", device) - gradient).norm() / gradient.norm() < 2e-6


@pytest.mark.parametrize("kind", sorted(FLATTENED_MODEL_TYPES))
def test_padding_on_the_right_needs_no_mask(kind: str) -> None:
    model = random_model(kind, "eager" if kind in WITHOUT_SDPA else "sdpa").train()
    masked, unmasked = (gradient_of(model, [ROWS], layout) for layout in ("padded", "unmasked"))
    assert (masked - unmasked).norm() / masked.norm() < 2e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_in_fp32_are_cast_for_the_kernel_as_autocast_casts_for_sdpa(device: str) -> None:
    """Trained norms of queries and keys return fp32 under autocast, beside values in bf16."""
    found = []
    for attention in ("varlen", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradient_of(random_model("qwen3", attention).train(), [ROWS], "flattened", device))
    assert (found[0] - found[1]).norm() / found[1].norm() < 0.02


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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_moe"])
def test_gradients_of_a_flattened_batch_are_the_sum_of_the_rows_own(kind: str, recompute: bool) -> None:
    """As training computes them: in training mode, the head at label positions only, with and without recomputation."""
    model = random_model(kind, "sdpa").train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    alone, together = gradient_of(model, [[row] for row in ROWS], "flattened"), gradient_of(model, [ROWS], "flattened")
    assert (together - alone).norm() / alone.norm() < 2e-6


def test_what_families_lack_is_what_transformers_says() -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    names = {**modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    classes = {kind: getattr(transformers, name if isinstance(name, str) else name[0]) for kind, name in names.items()}
    assert {kind for kind, found in classes.items() if not found._supports_sdpa} == WITHOUT_SDPA
    assert {kind for kind, found in classes.items() if not found._supports_flash_attn} == WITHOUT_FLASH_ATTENTION
