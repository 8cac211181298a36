"""A row computes the same in every company: alone, in micro-batches, in one line, padded, evaluated and prompted in
batches.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sft_play.data.batches import Collator
from sft_play.evaluation.generation import AnswerSettings, answer_all
from sft_play.model.rope import choose_factors_by_row, switch_length
from sft_play.training.loss import token_loss_sum
from sft_play.training.noise import RowNoise
from tests.families import VOCAB, tiny_model

SWITCH = 24
HALF = 8
"""Rotary frequencies of a tiny model's head."""


def long_rope(name: str) -> dict[str, Any]:
    """Returns LongRoPE's settings, as Phi-3.5's, for rows of more than `SWITCH` tokens."""
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * HALF,
        "original_max_position_embeddings": SWITCH,
        "long_factor": [1.0 + index for index in range(HALF)],
        "factor": 8.0,
    }
    if name == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
    own = {} if name == "phimoe" else {"original_max_position_embeddings": SWITCH}
    return {"rope_parameters": rope, "max_position_embeddings": 8 * SWITCH, **own}


def large(name: str) -> Any:
    """Returns a random model with weights large enough to show where a token stands."""
    model = tiny_model(name, attention="sdpa", **long_rope(name)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    return model


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Rows of 8 to 44 tokens, on both sides of the switch and at it."""
    chance = random.Random(5)
    made = [[chance.randrange(3, VOCAB) for _ in range(length)] for length in (8, 44, 24, 25, 12, 30, 23, 40)]
    return [
        {"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :], "row": i}
        for i, ids in enumerate(made)
    ]


def losses(model: Any, layout: str, batches: list[list[dict[str, Any]]]) -> list[float]:
    collate = Collator(layout, 0)
    with torch.no_grad():
        return [float(token_loss_sum(model, collate(batch))) for batch in batches]


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_longrope_factors_go_by_each_row(name: str, rows: list[dict[str, Any]]) -> None:
    plain = large(name)
    with torch.no_grad():  # transformers' own, each row in a pass of its own
        wanted = sum(
            float(
                torch.nn.functional.cross_entropy(
                    plain(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float(),
                    torch.tensor(row["labels"][1:]),
                    reduction="sum",
                )
            )
            for row in rows
        )
    model = large(name)
    assert switch_length(model) == SWITCH
    apart = abs(sum(losses(model, "flattened", [rows])) - wanted)
    choose_factors_by_row(model)
    for layout in ("flattened", "padded"):
        for micro in (1, 3, 8):
            cut = [rows[start : start + micro] for start in range(0, len(rows), micro)]
            assert sum(losses(model, layout, cut)) == pytest.approx(wanted, rel=1e-5), (layout, micro)
    assert apart > 1e-4 * wanted, "the factors of these rows make a difference"


def test_longrope_answers_do_not_depend_on_their_batch(rows: list[dict[str, Any]], tiny: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = large("phi3")
    prompts = [row["input_ids"][:22] for row in rows]  # answers cross the switch
    alone = [
        model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    choose_factors_by_row(model)
    together = answer_all(model, tokenizer, AnswerSettings(max_new_tokens=8, num_beams=1, batch_size=8), prompts)
    assert [answer.tokens for answer in together] == [
        len([t for t in one if t != tokenizer.eos_token_id]) for one in alone
    ]
    texts = [tokenizer.decode(one, skip_special_tokens=True).strip() for one in alone]
    assert [answer.text.strip() for answer in together] == texts


@pytest.mark.parametrize("layout", ["flattened", "padded"])
def test_noise_goes_by_each_row_and_is_of_neftunes_size(layout: str, rows: list[dict[str, Any]]) -> None:
    embedding = torch.nn.Embedding(VOCAB, 32)
    holder = torch.nn.Module()
    holder.get_input_embeddings = lambda: embedding  # type: ignore[assignment]
    noise, collate = RowNoise(holder, 5.0, 1, (0, 1)), Collator(layout, 0)

    def added(batch: list[dict[str, Any]], step: int = 3) -> list[torch.Tensor]:
        made = collate(batch)
        noise.begin(made, step)
        found = embedding(made["input_ids"]) - embedding.weight[made["input_ids"]]
        lengths = [len(row["input_ids"]) for row in batch]
        lines = (
            found[0].split(lengths)
            if layout == "flattened"
            else [line[:length] for line, length in zip(found, lengths, strict=True)]
        )
        return [line.detach() for line in lines]

    for row, together in zip(rows, added(rows), strict=True):
        torch.testing.assert_close(together, added([row])[0])
        most = 5.0 / (len(row["input_ids"]) * 32) ** 0.5  # transformers' size, of a row that is alone in its pass
        assert 0.9 * most < float(together.abs().max()) <= most * (1 + 1e-6)
        assert not torch.equal(together, added([row], step=4)[0])
    embedding.eval()
    assert not any(line.any() for line in added(rows))
