"""The loss: equal to the model's own mean over label tokens, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sft_play.data.batches import Collator
from sft_play.training.loss import label_tokens, token_loss_sum
from tests.families import tiny_model

ROWS = [
    {"input_ids": list(range(10, 10 + n)), "labels": [-100] * k + list(range(10 + k, 10 + n)), "row": i}
    for i, (n, k) in enumerate([(5, 4), (30, 3), (12, 11), (21, 1)])
]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param).train()


def by_hand(model: Any) -> tuple[float, int]:
    """Returns the summed loss and label tokens, one row at a time by transformers' own loss."""
    total, count = 0.0, 0
    for row in ROWS:
        labels = torch.tensor([row["labels"]])
        tokens = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss) * tokens
        count += tokens
    return total, count


@pytest.mark.parametrize("layout", ["flattened", "padded", "unmasked"])
def test_it_is_transformers_own_loss_over_rows_alone(layout: str, model: Any) -> None:
    batch = Collator(layout, pad_token_id=3)(ROWS)
    total, count = by_hand(model)
    assert int(label_tokens(batch)) == count == 1 + 27 + 1 + 20
    assert float(token_loss_sum(model, batch)) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("layout", ["flattened", "padded", "unmasked"])
def test_a_micro_step_without_rows_has_no_loss_and_no_gradient(layout: str, model: Any) -> None:
    batch = Collator(layout, pad_token_id=3)([])
    model.zero_grad()
    total = token_loss_sum(model, batch)
    total.backward()
    assert float(total.detach()) == 0.0 and int(label_tokens(batch)) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
