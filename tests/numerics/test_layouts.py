"""Which families keep the rows of a line apart, or padded ones without a mask: found by computing with every family,
both ways.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sft_play.data.batches import Collator
from sft_play.model import kernels
from sft_play.plan.shape import (
    FLATTENED_MODEL_TYPES,
    SINK_MODEL_TYPES,
    UNMASKED_MODEL_TYPES,
    VARLEN_MODEL_TYPES,
)
from sft_play.training.loss import NOT_FOR_THE_MODEL
from tests import varlen_on_cpu
from tests.families import FAMILIES, plain_attention, tiny_model
from tests.numerics.slice_ranks import ROWS

SPARSE = {"index_topk": 8, "index_n_heads": 64}
"""As many indexing heads as are published. Of few, all may score 0, and which of equal scores are selected depends on
what lies behind.
"""
EXACT, LEAK = 2e-5, 1e-3
"""Relative deviations: below the one nothing is mixed, above the other something is. Nothing lies between."""


def random_model(kind: str, attention: str) -> Any:
    """Return a random model of a family as training prepares it, with weights large enough to show what leaks."""
    kernels.register()
    varlen_on_cpu.register()
    model = tiny_model(kind, attention=attention, **(SPARSE if kind in ("deepseek_v32", "glm_moe_dsa") else {})).train()
    kernels.keep_rows_apart(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return model


def computed(
    model: Any, batches: list[list[list[int]]], layout: str, device: str = "cpu"
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the logits of each row's positions but the last, and the gradient of the loss of all rows."""
    collate, logits_of_rows = Collator(layout, 0, model.config._attn_implementation, device), []
    model.zero_grad()
    for rows in batches:
        batch = collate([{"input_ids": row, "labels": row, "row": i} for i, row in enumerate(rows)])
        keep = batch["logits_to_keep"].tolist()
        logits = model(
            **{name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}, use_cache=False
        ).logits
        targets = batch["targets"].reshape(-1)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100, reduction="sum").backward()
        if layout == "flattened":
            logits_of_rows += logits[0].detach().split([len(row) - 1 for row in rows if len(row) > 1])
        else:
            logits_of_rows += [
                logits[i, [keep.index(p) for p in range(len(row) - 1)]].detach()
                for i, row in enumerate(rows)
                if len(row) > 1
            ]
    return logits_of_rows, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def mixes(model: Any, alone: tuple[list[torch.Tensor], torch.Tensor], layout: str, device: str = "cpu") -> bool:
    """Return whether rows of a batch have other logits or gradients than alone, or the kernel fails."""
    try:
        logits, gradient = computed(model, [ROWS], layout, device)
    except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        assert model.config._attn_implementation == "varlen", error
        return True
    pairs = [*zip(logits, alone[0], strict=True), (gradient, alone[1])]
    worst = max(float((mine - own).norm() / own.norm()) for mine, own in pairs)
    assert worst < EXACT or worst > LEAK, f"{layout}, {device}: {worst:.1e} is neither exact nor a leak"
    return worst > LEAK


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.broad_but("gemma3_text", "qwen3_moe", "mamba2", "falcon_h1")
def test_the_lists_are_what_every_family_computes(kind: str) -> None:
    """Under every kernel, logits and gradients of rows in a batch are those of each row alone exactly if the lists say
    so.

    `varlen` runs as on CPUs, and as on GPUs with the kernels of `tests.varlen_on_cpu`. Flattened rows are recomputed.
    """
    kernels = list(dict.fromkeys((plain_attention(kind), "eager")))
    models = {kernel: random_model(kind, kernel) for kernel in kernels}
    alone = computed(models[kernels[0]], [[row] for row in ROWS if len(row) > 1], "unmasked")
    for layout in ("unmasked", "padded"):
        assert (kind in UNMASKED_MODEL_TYPES) is not any(mixes(model, alone, layout) for model in models.values())
    for model in models.values():
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert (kind in FLATTENED_MODEL_TYPES) is not any(mixes(model, alone, "flattened") for model in models.values())
    try:
        varied = random_model(kind, "varlen")
    except (KeyError, ValueError):  # transformers lets it have its own kernels only
        assert kind not in VARLEN_MODEL_TYPES
        return
    varied.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert (kind in VARLEN_MODEL_TYPES) is not any(
        mixes(varied, alone, "flattened", device) for device in ("cpu", "cuda")
    )
    sinks = any("sink" in name for name, _ in varied.named_parameters())
    assert (kind in SINK_MODEL_TYPES) is (sinks and kind in VARLEN_MODEL_TYPES)


@pytest.mark.pinned
def test_every_family_of_the_lists_is_tried() -> None:
    assert UNMASKED_MODEL_TYPES >= FLATTENED_MODEL_TYPES | VARLEN_MODEL_TYPES and set(FAMILIES) >= UNMASKED_MODEL_TYPES


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_in_fp32_are_cast_for_the_kernel_as_autocast_casts_for_sdpa(device: str) -> None:
    """Trained norms of queries and keys return fp32 under autocast, while values are in bf16."""
    dtypes = []
    for attention in ("varlen", "sdpa"):
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(computed(random_model("qwen3", attention), [ROWS], "flattened", device)[1])
    assert (dtypes[0] - dtypes[1]).norm() / dtypes[1].norm() < 0.02
