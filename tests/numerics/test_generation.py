"""Answers do not depend on how they are shared out: batch size, ranks, DDP or FSDP2; they end where the turn ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM

from sft_play.config.metrics import OF_ANSWERS
from sft_play.config.schema import Config, EvalConfig, ModelConfig
from sft_play.evaluation import answering
from sft_play.evaluation.answering import AnswerSettings, answer_batch
from sft_play.evaluation.generate import Budget, decide, score_by_generation
from sft_play.evaluation.results import HeldOut, write_evaluation
from sft_play.model.tokenizer import load_tokenizer
from tests.numerics.generation_ranks import Ticks, load, rows
from tests.tiny_models import build_tiny_llama

LOSS = HeldOut(loss=1.5, label_tokens=99, sources={}, rows=9, seconds=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama(tmp_path_factory.mktemp("generation") / "tiny")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    return score_by_generation(*load(folder), rows(), AnswerSettings(batch_size=4, max_new_tokens=10), metrics=OF_ANSWERS)


@pytest.mark.parametrize("batch_size", [1, 3, 13, 50])
def test_greedy_answers_do_not_depend_on_the_batch_size(folder: Path, alone: Any, batch_size: int) -> None:
    other = score_by_generation(
        *load(folder), rows(), AnswerSettings(batch_size=batch_size, max_new_tokens=10), metrics=OF_ANSWERS
    )
    assert [(p.row, p.answer, p.tokens) for p in other.predictions] == [(p.row, p.answer, p.tokens) for p in alone.predictions]
    assert other.scores == alone.scores
    assert len({p.answer for p in alone.predictions}) > 5, "a model that says the same everywhere would prove nothing"


@pytest.mark.parametrize("world", [2, 3])
def test_scores_are_the_same_on_any_number_of_ranks_under_ddp_and_fsdp2(
    folder: Path, alone: Any, world: int, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.numerics.generation_ranks", str(folder), str(tmp_path)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    parts = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    for kind in ("ddp", "fsdp2"):
        for part in parts:
            assert part[kind]["answers"] == [[p.row, p.answer] for p in alone.predictions]
            assert part[kind]["scores"] == {name: interval.to_json() for name, interval in alone.scores.items()}
        assert sum(part[kind]["answered_here"] for part in parts) == len(rows())
        part_rows = [row for row, _ in parts[0][kind]["part"]]
        assert len(set(part_rows)) == len(part_rows) == sum(part[kind]["part_here"] for part in parts)
        assert len(part_rows) in (4 * world, 4 * world - 1), "two rounds of two rows a rank; one batch holds only the 13th"
        assert all(part[kind]["part"] == parts[0][kind]["part"] for part in parts), "every rank stops at the same round"
        assert parts[0][kind]["part_warning"].startswith(f"scored {len(part_rows)} of 13: `eval.max_seconds` is 2.5")
        assert min(part[kind]["answered_here"] for part in parts) > 0
    whole = parts[0]["ddp"]["elements"]
    assert all(part["fsdp2"]["elements"] < 0.6 * whole for part in parts), "the shards stay shards after answering"


def test_answer_ends_with_the_turn_and_holds_only_the_completion(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    prompt = tokenizer("<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    wanted = tokenizer("the return value<|im_end|>", add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt + wanted])
    labels = torch.tensor([[-100] * len(prompt) + wanted])
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
    assert (answer.answer, answer.tokens, answer.stopped) == ("the return value", len(wanted) - 1, True)
    assert answer.scores == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert answer.prompt == tokenizer.decode(prompt)
    assert model.generation_config.temperature == 5.0, "the model's settings are put back"
    short = score_by_generation(model, tokenizer, rows_[:1], AnswerSettings(batch_size=1, max_new_tokens=2))
    assert short.predictions[0].tokens == 2
    assert not short.predictions[0].stopped
    assert "generation_max_new_tokens" in short.warnings[-1]


def test_answers_never_outgrow_the_context(tmp_path: Path) -> None:
    small = build_tiny_llama(tmp_path / "small", max_position_embeddings=32)
    model, tokenizer = load(small)
    long_row = {"row": 0, "prompt_ids": list(range(300, 329)), "reference": "the"}
    result = score_by_generation(model, tokenizer, [long_row], AnswerSettings(batch_size=1, max_new_tokens=50))
    assert result.predictions[0].tokens <= 3


def test_files_are_enough_to_compute_the_scores_again(alone: Any, tmp_path: Path) -> None:
    scores = write_evaluation(tmp_path / "eval", LOSS, alone, step=40, settings={"key": "k"})
    assert json.loads((tmp_path / "eval" / "scores.json").read_text()) == scores
    lines = [json.loads(line) for line in (tmp_path / "eval" / "predictions.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [row["row"] for row in rows()]
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=scores["settings"]["use_stemmer"])
    for name in ("rouge1", "rouge2", "rougeL"):
        again = [scorer.score(line["reference"], line["answer"])[name].fmeasure for line in lines]
        assert sum(again) / len(again) == pytest.approx(scores[name]["mean"], abs=1e-12)
    assert alone.scores["rouge1"].mean > 0, "scores of 0 would prove nothing"


def test_a_time_budget_answers_a_part_that_is_spread_over_lengths_and_says_so(folder: Path, tmp_path: Path) -> None:
    def scored(seconds: float | None, seed: int = 0) -> Any:
        budget = Budget(seconds=seconds, seed=seed, clock=Ticks(1.0))
        return score_by_generation(*load(folder), rows(40), AnswerSettings(batch_size=4, max_new_tokens=4), budget=budget)

    part, whole = scored(3.0), scored(None)
    assert (len(part.predictions), part.asked, part.complete) == (12, 40, False)
    assert part.warnings[0] == "scored 12 of 40: `eval.max_seconds` is 3; they are spread over all lengths"
    answers = {p.row: p.answer for p in whole.predictions}
    assert all(p.answer == answers[p.row] for p in part.predictions), "the same batches, in another order"
    assert part.metrics()["eval_answers_asked"] == 40
    assert part.scores["rougeL"].n == 12
    assert {p.row for p in part.predictions} == {p.row for p in scored(3.0).predictions}
    assert {p.row for p in part.predictions} != {p.row for p in scored(3.0, seed=5).predictions}
    lengths = sorted((len(row["prompt_ids"]), row["row"]) for row in rows(40))
    thirds = [{row for _, row in lengths[start : start + 13]} for start in (0, 13, 26)]
    assert all(third & {p.row for p in part.predictions} for third in thirds)
    assert len(scored(1e-9).predictions) == 4, "one round is always made"
    assert scored(1e9).complete
    scores = write_evaluation(tmp_path / "eval", LOSS, part, step=1, settings={})
    assert (scores["complete"], scores["answers"], scores["answers_asked"]) == (False, 12, 40)


@pytest.mark.parametrize("stops", [(), tuple(range(300, 600))], ids=["none ends", "most end early"])
def test_prompts_that_wait_take_the_places_of_answers_that_have_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...]
) -> None:
    model, tokenizer = load(folder)
    answering.use_our_settings(model.eval())
    if stops:
        monkeypatch.setattr(answering, "end_of_turn_ids", lambda _: stops)
    calls: list[tuple[int, int]] = []
    inner = model.get_base_model().model
    forward = inner.forward
    monkeypatch.setattr(inner, "forward", lambda *a, **k: calls.append(tuple(k["input_ids"].shape)) or forward(*a, **k))
    prompts = [row["prompt_ids"] for row in rows(30)] + [[400], [401, 402]]

    def answered(batch_size: int, chosen: list[list[int]]) -> list[Any]:
        calls.clear()
        return answer_batch(model, tokenizer, chosen, AnswerSettings(max_new_tokens=40, batch_size=batch_size))

    alone = [answered(1, [prompt])[0] for prompt in prompts]
    steps_in_order = sum(max(a.tokens for a in alone[start : start + 8]) for start in range(0, len(alone), 8))
    for batch_size in (3, 8, 32):
        assert answered(batch_size, prompts) == alone
        assert max(rows_ for rows_, _ in calls) <= batch_size
    answered(8, prompts)
    steps = [rows_ for rows_, width in calls if width == 1]
    if stops:
        assert len({answer.tokens for answer in alone}) > 4
        assert len(steps) < steps_in_order, (
            "fewer steps than by batches that wait for their longest answer, and fewer rows in them"
        )
        assert sum(steps) < 0.8 * 8 * steps_in_order
    else:
        assert {answer.tokens for answer in alone} == {40}


def test_rows_without_a_reference_count_for_loss_only() -> None:
    config = Config(model=ModelConfig(name="x"), eval=EvalConfig(metrics=["rougeL", "bleu"], max_seconds=30))
    assert decide(config, purpose="eval", validation_rows=30, answerable_rows=12) == (
        True,
        "ROUGE, bleu of 12 answers, greedy, at most 128 new tokens, about 30 s; "
        "18 of 30 validation rows have no reference and count for loss only",
    )
    generate, reason = decide(config, purpose="eval", validation_rows=30, answerable_rows=0)
    assert not generate
    assert reason == "loss only: no validation row asks for an answer (documents, plain text and tokens have no reference)"


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
    assert count >= max(answer.tokens for answer in result.predictions) > 2, "at least one for each token of the longest answer"
    model(torch.tensor([[300]]))
    assert len(passes) == count, "what watched the model is gone again"
