"""Answers do not depend on batch size, ranks, DDP or FSDP2, and end at the end of the turn."""

from __future__ import annotations

import itertools
import logging
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sft_play.config.metrics import OF_ANSWERS
from sft_play.evaluation.generation import AnswerSettings, prompt_ids
from sft_play.evaluation.held_out_answers import Budget, score_by_generation
from sft_play.model.tokenizer import load_tokenizer
from tests.numerics.rank_processes import results_of_ranks
from tests.places import WORDS
from tests.tiny_models import build_tiny_llama


def load(folder: Path) -> tuple[Any, Any]:
    """Return a tiny Llama with adapters that are not the zero function, and its tokenizer."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora), load_tokenizer(folder)


def rows(count: int = 13) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [
        {
            "row": 100 + index,
            "prompt_ids": [rng.randrange(300, 1000) for _ in range(rng.randrange(3, 30))],
            "reference": " ".join(rng.sample(WORDS, 6)),
        }
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("generation") / "tiny")


def test_a_long_prompt_is_read_without_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.model_max_length = 8
    log = logging.getLogger("transformers")
    log.addHandler(caplog.handler)
    try:
        assert len(prompt_ids(tokenizer, [{"role": "user", "content": "word " * 50}])) > 8
    finally:
        log.removeHandler(caplog.handler)
    assert not caplog.records, "the limit of the context is checked, and said, elsewhere"


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return score_by_generation(
        *load(folder), rows(), AnswerSettings(batch_size=4, max_new_tokens=10), metrics=OF_ANSWERS
    )


def test_a_models_own_answers_match_exactly_on_two_ranks(folder: Path, tmp_path: Path) -> None:
    assert results_of_ranks("answer_ranks", tmp_path, 2, [str(folder)]) == [{"exact_match": 1.0}] * 2


@pytest.mark.parametrize("batch_size", [1, 3, 13, 50])
def test_greedy_answers_do_not_depend_on_the_batch_size(folder: Path, alone: Any, batch_size: int) -> None:
    settings = AnswerSettings(batch_size=batch_size, max_new_tokens=10)
    other = score_by_generation(*load(folder), rows(), settings, metrics=OF_ANSWERS)
    assert other.predictions == alone.predictions and other.scores == alone.scores
    assert len({p.answer for p in alone.predictions}) > 5, "a model that says the same everywhere would prove nothing"


def test_answer_ends_with_the_turn_and_holds_only_the_completion(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer("<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    expected = tokenizer("the return value<|im_end|>", add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt + expected])
    labels = torch.tensor([[-100] * len(prompt) + expected])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    rows_ = [
        {"row": 7, "prompt_ids": prompt, "reference": "the return value"},
        {"row": 3, "prompt_ids": [*prompt, *prompt], "reference": "x"},
    ]
    # The folder's own settings would sample and forbid repetition; answers are greedy all the same.
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=50.0)
    result = score_by_generation(model, tokenizer, rows_, AnswerSettings(batch_size=2, max_new_tokens=30))
    assert [p.row for p in result.predictions] == [7, 3]
    answer = result.predictions[0]
    assert (answer.answer, answer.tokens, answer.stopped) == ("the return value", len(expected) - 1, True)
    assert answer.scores == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert answer.prompt == tokenizer.decode(prompt)
    assert model.generation_config.temperature == 5.0, "the model's settings are put back"
    short = score_by_generation(model, tokenizer, rows_[:1], AnswerSettings(batch_size=1, max_new_tokens=2))
    assert short.predictions[0].tokens == 2 and not short.predictions[0].stopped
    assert "generation_max_new_tokens" in short.warnings[-1]


def test_answers_never_exceed_the_context(tmp_path: Path) -> None:
    small = build_tiny_llama(tmp_path / "small", max_position_embeddings=32)
    model, tokenizer = load(small)
    long_row = {"row": 0, "prompt_ids": list(range(300, 329)), "reference": "the"}
    result = score_by_generation(model, tokenizer, [long_row], AnswerSettings(batch_size=1, max_new_tokens=50))
    assert result.predictions[0].tokens <= 3


def test_a_time_budget_answers_a_reported_sample_of_all_lengths(folder: Path) -> None:
    def scored(seconds: float | None, seed: int = 0) -> Any:
        budget = Budget(seconds=seconds, seed=seed, clock=itertools.count(1.0).__next__)
        return score_by_generation(
            *load(folder), rows(40), AnswerSettings(batch_size=4, max_new_tokens=4), budget=budget
        )

    part, whole = scored(3.0), scored(None)
    assert (len(part.predictions), part.asked, part.complete) == (12, 40, False)
    assert part.warnings[0] == "scored 12 of 40 answers, spread over all lengths: `eval.max_seconds` is 3"
    answers = {p.row: p.answer for p in whole.predictions}
    assert all(p.answer == answers[p.row] for p in part.predictions), "the same batches, in another order"
    assert part.metrics()["eval_answers_asked"] == 40 and part.scores["rougeL"].n == 12
    assert {p.row for p in part.predictions} == {p.row for p in scored(3.0).predictions}
    assert {p.row for p in part.predictions} != {p.row for p in scored(3.0, seed=5).predictions}
    lengths = sorted((len(row["prompt_ids"]), row["row"]) for row in rows(40))
    thirds = [{row for _, row in lengths[start : start + 13]} for start in (0, 13, 26)]
    assert all(third & {p.row for p in part.predictions} for third in thirds)
    assert len(scored(1e-9).predictions) == 4, "one round is always made"
    assert scored(1e9).complete


@pytest.mark.parametrize("synced", [False, True])
def test_every_forward_pass_of_an_evaluation_with_answers_is_progress(folder: Path, synced: bool) -> None:
    """A healthy evaluation that takes hours must never look like one that hangs."""
    passes: list[str] = []
    model, tokenizer = load(folder)
    alive = partial(passes.append, "alive")
    result = score_by_generation(
        model, tokenizer, rows()[:4], AnswerSettings(batch_size=4, max_new_tokens=10), synced=synced, alive=alive
    )
    count = len(passes)
    assert count >= max(answer.tokens for answer in result.predictions) > 2, (
        "at least one for each token of the longest answer"
    )
    model(torch.tensor([[300]]))
    assert len(passes) == count, "what watched the model is gone again"
