"""Head and loss in chunks: the same loss and gradients as all at once, and never more logits than one chunk's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from sft_play.data.batches import Collator
from sft_play.model.kernels import chunk_head
from sft_play.plan.shape import CHUNKED_HEAD_MODEL_TYPES
from sft_play.training.loss import token_loss_sum
from tests.families import FAMILIES, tiny_model
from tests.numerics.test_layouts import ROWS as SHORT_ROWS
from tests.numerics.test_layouts import random_model
from tests.numerics.test_loss import ROWS

CHUNK = 7
FACTOR = 0.37
"""What a step multiplies the sum by: gradients must follow it."""


def tuned(kind: str, way: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model that is tuned in one of the ways that a run can be, with adapters that are not zero."""
    model = tiny_model(kind, tie_word_embeddings=tied).to(dtype).train()
    if way == "frozen head":
        model.requires_grad_(False)
        model.get_decoder().layers[0].requires_grad_(True)
    if way.startswith("lora"):
        targets = ["q_proj", "lm_head"] if way.endswith("head") else ["q_proj", "v_proj"]
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return model


def outcome(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and all gradients of one backward pass."""
    model.zero_grad()
    total = token_loss_sum(model, batch)
    (total * FACTOR).backward()
    return total.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model: Any, batch: dict[str, Any], *, chunk: int = CHUNK, tolerance: float = 1e-5) -> None:
    """Compare all at once with chunks of the same model."""
    chunked = copy.deepcopy(model)
    chunk_head(chunked, chunk)
    (total, gradients), (mine, computed) = outcome(model, batch), outcome(chunked, batch)
    assert mine.dtype == torch.float32 and float(mine) == pytest.approx(float(total), rel=tolerance)
    assert set(computed) == set(gradients)
    for name, expected in gradients.items():
        assert computed[name].dtype == expected.dtype
        assert float((computed[name] - expected).norm()) <= tolerance * float(expected.norm()), name


@pytest.mark.parametrize("layout", ["flattened", "padded"])
@pytest.mark.parametrize(
    ("kind", "way", "tied"),
    [
        ("llama", "full", True),
        ("llama", "full", False),
        ("gpt2", "full", True),
        ("llama", "frozen head", False),
        ("llama", "lora", False),
        ("llama", "lora on the head", False),
    ],
)
def test_chunks_give_the_loss_and_gradients_of_all_logits(kind: str, way: str, tied: bool, layout: str) -> None:
    model = tuned(kind, way, tied=tied)
    for rows in (ROWS, ROWS[:1]):  # several chunks with a rest, and fewer labels than one
        assert_same(model, Collator(layout, 3)(rows))


CHANGES = {"final_logit_softcapping": 2.0, "logits_scaling": 4.0, "logit_scale": 3.0, "lm_head_multiplier": 0.3}
"""What families do to logits after the head, stronger than in their tiny models."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_that_the_plan_chunks(kind: str) -> None:
    """Also those that scale or bend their logits after the head: scaled up here, so that it matters."""
    assert kind in CHUNKED_HEAD_MODEL_TYPES
    model = random_model(kind, "eager")
    text = model.config.get_text_config()
    for name, value in CHANGES.items():
        for owner in (text, *model.modules()):  # some modules copy what they multiply by
            if name in vars(owner):
                setattr(owner, name, value)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    batch = Collator("unmasked", 0)([{"input_ids": row, "labels": row, "row": i} for i, row in enumerate(SHORT_ROWS)])
    (total, expected), _ = outcome(model, batch), chunk_head(model, 5)
    mine, computed = outcome(model, batch)
    # Of all weights together: the gradients of some, like a bias of keys, are nothing but rounding.
    gradient, chunked = (torch.cat([part.flatten() for part in parts.values()]) for parts in (expected, computed))
    assert (
        float(mine) == pytest.approx(float(total), rel=1e-5) and (chunked - gradient).norm() <= 1e-5 * gradient.norm()
    )


@pytest.mark.parametrize("way", ["full", "lora"])
def test_bf16_and_autocast_agree_to_their_precision(way: str) -> None:
    batch = Collator("flattened", 3)(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(tuned("llama", way), batch, tolerance=0.02)
    assert_same(tuned("llama", way, dtype=torch.bfloat16), batch, tolerance=0.02)


def test_chunking_does_not_depend_on_how_the_output_is_used() -> None:
    """FSDP2 rounds outputs to the computation's type: a loss of thousands would lose its digits, and so would its
    gradient's factor.
    """
    batch, model = Collator("flattened", 3)(ROWS), tuned("llama", "full")
    total, expected = outcome(model, batch)
    chunk_head(model, CHUNK)
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: output.bfloat16() * 3)
    mine, computed = outcome(model, batch)
    assert float(mine) == pytest.approx(float(total), rel=1e-6)
    assert all(
        float((computed[name] - expected[name]).norm()) <= 1e-5 * float(expected[name].norm()) for name in expected
    )


def test_fp16_keeps_small_gradients() -> None:
    """Compared with fp32, at a gradient whose loss scaling keeps the whole computation right."""
    batch = Collator("flattened", 3)(ROWS)
    exact = outcome(tuned("llama", "frozen head"), batch)[1]
    model = tuned("llama", "frozen head", dtype=torch.float16)
    chunk_head(model, CHUNK)
    for name, gradient in outcome(model, batch)[1].items():
        assert float((gradient.float() - exact[name]).norm()) <= 0.01 * float(exact[name].norm()), name
