"""The loss: equal to the model's own mean over label tokens, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from sft_play.config.schema import TrainConfig
from sft_play.data.batches import Collator
from sft_play.model.kernels import chunk_head
from sft_play.model.objective import objective_of
from sft_play.training.loss import NOT_FOR_THE_MODEL, label_tokens, label_weight, token_loss_sum
from tests.families import tiny_model

ROWS = [
    {"input_ids": list(range(10, 10 + n)), "labels": [-100] * k + list(range(10 + k, 10 + n)), "row": i}
    for i, (n, k) in enumerate([(5, 4), (30, 3), (12, 11), (21, 1)])
]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param).train()


def by_hand(model: Any) -> tuple[float, int]:
    """Return the summed loss and label tokens, one row at a time by transformers' own loss."""
    total, count = 0.0, 0
    for row in ROWS:
        labels = torch.tensor([row["labels"]])
        tokens = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss) * tokens
        count += tokens
    return total, count


@pytest.mark.parametrize("layout", ["flattened", "padded", "unmasked"])
def test_the_loss_is_that_of_transformers_over_single_rows(layout: str, model: Any) -> None:
    batch = Collator(layout, pad_token_id=3)(ROWS)
    total, count = by_hand(model)
    assert int(label_tokens(batch)) == count == 1 + 27 + 1 + 20
    assert float(token_loss_sum(model, batch)) == pytest.approx(total, rel=1e-5)


def trls_dft(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the loss of TRL 1.16 (`SFTTrainer.compute_loss`): `per_token_loss * log_probs.exp().detach()`, summed."""
    logs = torch.log_softmax(logits, -1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (-logs * logs.exp().detach() * (targets >= 0)).sum()


def smoothed(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute transformers' loss with a sum over tokens for its mean."""
    smoother = LabelSmoother(epsilon=0.1)
    return smoother({"logits": logits}, targets.clone(), num_items_in_batch=torch.tensor(1))


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("layout", ["flattened", "padded"])
@pytest.mark.parametrize(
    ("keys", "reference"),
    [({"loss": "dft"}, trls_dft), ({"label_smoothing_factor": 0.1}, smoothed)],
    ids=["dft", "smoothing"],
)
def test_losses_and_gradients_are_those_of_their_authors(
    keys: dict[str, Any], reference: Any, layout: str, chunk: int
) -> None:
    batch, losses = Collator(layout, pad_token_id=3)(ROWS), []
    for ours in (True, False):
        model = tiny_model("llama").train()
        if ours and chunk:
            chunk_head(model, chunk)
        if ours:
            total = token_loss_sum(model, batch, objective_of(TrainConfig(**keys)))
        else:
            inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_MODEL}
            logits = model(**inputs, use_cache=False).logits.float()
            total = reference(logits.flatten(0, 1), batch["targets"].flatten())
        (total / 49).backward()
        losses.append(
            (float(total.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    (mine, gradient), (theirs, expected) = losses
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6
    assert abs(mine - float(token_loss_sum(tiny_model("llama"), batch))) > 0.01, "it is another loss"


def with_weights(*weights: float | None) -> list[dict[str, Any]]:
    return [
        row if weight is None else {**row, "weights": [weight * (label != -100) for label in row["labels"]]}
        for row, weight in zip(ROWS, weights, strict=True)
    ]


def trained_on(rows: list[dict[str, Any]], layout: str, chunk: int, **keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return loss and gradient of a step."""
    model, batch = tiny_model("llama").train(), Collator(layout, pad_token_id=3)(rows)
    if chunk:
        chunk_head(model, chunk)
    loss = token_loss_sum(model, batch, objective_of(TrainConfig(**keys))) / label_weight(batch).float()
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("layout", ["flattened", "padded", "unmasked"])
def test_weights_count_as_in_plain_torch(layout: str, chunk: int) -> None:
    """By hand: each row alone, its mean of transformers' own loss, over the sum of all weights."""
    weights = (0.3, None, 0.05, 0.7)
    loss, gradient = trained_on(with_weights(*weights), layout, chunk)
    model, total, whole = tiny_model("llama").train(), torch.zeros(()), 0.0
    for row, weight in zip(ROWS, (0.3, 1.0, 0.05, 0.7), strict=True):
        labels = torch.tensor([row["labels"]])
        tokens = int((labels[:, 1:] != -100).sum())
        mean = model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss
        total, whole = total + weight * tokens * mean, whole + weight * tokens
    (total / whole).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float(loss) == pytest.approx(float(total.detach()) / whole, rel=1e-6)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    "keys", [{}, {"loss": "dft"}, {"label_smoothing_factor": 0.1}], ids=["nll", "dft", "smoothing"]
)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("layout", ["flattened", "padded"])
def test_equal_weights_equal_no_weights_bit_for_bit(layout: str, chunk: int, keys: dict[str, Any]) -> None:
    none = trained_on(ROWS, layout, chunk, **keys)
    for weight in (1.0, 0.5, 0.25):
        for mine, theirs in zip(trained_on(with_weights(*[weight] * 4), layout, chunk, **keys), none, strict=True):
            assert torch.equal(mine, theirs)


def test_evaluations_weigh_every_token_equally(model: Any) -> None:
    weighted, plain = (Collator("flattened", pad_token_id=3)(rows) for rows in (with_weights(0.3, 1, 0.1, 1), ROWS))
    assert torch.equal(token_loss_sum(model, weighted), token_loss_sum(model, plain))
    assert "weights" not in plain


@pytest.mark.parametrize("layout", ["flattened", "padded", "unmasked"])
def test_a_micro_step_without_rows_has_no_loss_and_no_gradient(layout: str, model: Any) -> None:
    batch = Collator(layout, pad_token_id=3)([])
    model.zero_grad()
    total = token_loss_sum(model, batch)
    total.backward()
    assert float(total.detach()) == 0.0 and int(label_tokens(batch)) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
