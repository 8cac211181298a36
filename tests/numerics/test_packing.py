"""Rows packed as the sampler packs them give the loss and the gradients that each gives alone; logits of all families:
test_layouts.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sft_play.data.batches import Collator, GlobalBatchSampler
from sft_play.plan.epoch import RowOrder
from sft_play.training.loss import token_loss_sum
from tests.families import VOCAB
from tests.numerics.test_layouts import random_model

LIMIT, COUNT = 48, 14
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Return rows of 1 to 40 tokens, learnt from their middle on."""
    chance = random.Random(5)
    lengths = [1, 2, 40, *(chance.randint(3, 36) for _ in range(COUNT - 3))]
    rows_of_tokens = [[chance.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    return [
        {"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :], "row": i}
        for i, ids in enumerate(rows_of_tokens)
    ]


def packed(rows: list[dict[str, Any]], micro: int) -> list[list[dict[str, Any]]]:
    """Return the micro-batches of a step with all rows."""
    lengths = [len(row["input_ids"]) for row in rows]
    sampler = GlobalBatchSampler(
        RowOrder(rows=COUNT, seed=0), COUNT, [(micro, COUNT)], 0, lengths=lengths, pack_tokens=LIMIT
    )
    packs = [[rows[index] for index in batch] for batch in sampler if batch]
    assert sum(map(len, packs)) == COUNT and len(packs) < COUNT // 2
    return packs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_packed_step_has_the_gradient_of_an_unpacked_one(kind: str, device: str, rows: list[dict[str, Any]]) -> None:
    model = random_model(kind, "sdpa").to(device)
    collate = Collator("flattened", 0)

    def step(batches: list[list[dict[str, Any]]]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = 0.0
        for batch in batches:
            inputs = {
                name: value.to(device) if torch.is_tensor(value) else value for name, value in collate(batch).items()
            }
            loss = token_loss_sum(model, inputs)
            loss.backward()
            total += float(loss.detach())
        return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    expected, gradient = step([[row] for row in rows])
    for micro in (1, 2):
        total, packed_gradient = step(packed(rows, micro))
        assert total == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(packed_gradient, gradient, rtol=1e-4, atol=1e-5)
