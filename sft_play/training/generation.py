"""Answers to held-out prompts, shared out over the ranks, and their ROUGE.

Batches are formed before they are shared out, so a prompt meets the same companions on any number of ranks and the scores
are the same. Ranks that have fewer batches run dummies where every forward pass is a collective (ZeRO-3, FSDP2).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from sft_play.config.schema import Config
from sft_play.files import write_json, write_text
from sft_play.training.answering import Answer, AnswerSettings, answer_batch, use_our_settings
from sft_play.training.scores import (
    CONFIDENCE,
    METRICS,
    RESAMPLES,
    USE_STEMMER,
    Interval,
    mean_scores,
    perplexity,
    rouge,
    without_words,
)
from sft_play.training.shares import share_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One line of `predictions.jsonl`."""

    row: int
    prompt: str
    """The prompt as the model saw it, template and special tokens included."""
    reference: str
    answer: str
    """The completion only, cut at the end of the turn."""
    tokens: int
    """Tokens of the answer, without the one that ends the turn."""
    stopped: bool
    """Whether the model ended its turn itself, before `generation_max_new_tokens`."""
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The answers of all ranks, in the order of the rows that were asked; the same on every rank."""

    predictions: tuple[Prediction, ...]
    scores: Mapping[str, Interval]
    """`rouge1`, `rouge2`, `rougeL`: mean F-measure (0 to 1) with its bootstrap interval."""
    answered_here: int
    """Prompts that this rank answered, dummies left out."""
    seconds: float
    warnings: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        """Returns `eval_rouge1`, `eval_rouge2`, `eval_rougeL` and what describes the answers, for `metrics.jsonl`."""
        count = len(self.predictions)
        return {
            **{f"eval_{name}": self.scores[name].mean for name in METRICS},
            "eval_answers": count,
            "eval_answer_tokens": sum(p.tokens for p in self.predictions) / count,
            "eval_stopped": sum(p.stopped for p in self.predictions) / count,
            "eval_generation_seconds": self.seconds,
        }


def decide(
    config: Config, *, purpose: Literal["train", "eval"] = "train", validation_rows: int | None = None
) -> tuple[bool, str]:
    """Returns whether answers are generated and scored, and why, as a sentence for the user."""
    asked = config.train.predict_with_generate
    if validation_rows == 0:
        return False, "loss only: there are no validation rows (`data.validation`)"
    if asked is False:
        return False, "loss only: `train.predict_with_generate` is `false`"
    if config.eval.samples == 0:
        return False, "loss only: `eval.samples` is 0"
    if asked == "auto" and purpose == "train":
        return False, "loss only while training: `train.predict_with_generate` is `auto`; `make eval` scores answers as well"
    rows = config.eval.samples if validation_rows is None else min(config.eval.samples, validation_rows)
    how = "greedy" if config.train.generation_num_beams == 1 else f"{config.train.generation_num_beams} beams"
    return True, f"ROUGE of {rows} answers, {how}, at most {config.train.generation_max_new_tokens} new tokens"


def score_by_generation(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    batch_size: int,
    max_new_tokens: int,
    num_beams: int = 1,
    rank: int = 0,
    world_size: int = 1,
    synced: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> GenerationResult:
    """Answers every row's `prompt_ids` and scores the answers against its `reference`.

    `rows` hold `row` (an id, unique), `prompt_ids` and `reference`, the same on every rank. `synced` says that a forward pass
    is a collective operation (ZeRO-3, FSDP2). `progress(done, all)` is told the batches of this rank. All ranks must call this
    together and get the same result. Raises `ValueError` when there are no rows.
    """
    if not rows:
        raise ValueError("no rows to answer")
    started = time.perf_counter()
    prompts = [list(row["prompt_ids"]) for row in rows]
    mine, rounds = share_batches([len(prompt) for prompt in prompts], batch_size, rank, world_size)
    settings = AnswerSettings(max_new_tokens=max_new_tokens, num_beams=num_beams, batch_size=batch_size)
    answers: list[tuple[int, Answer]] = []
    with _ready_to_generate(model, synced=synced) as ready:
        for turn in range(rounds if synced else len(mine)):
            batch = mine[turn] if turn < len(mine) else []
            # Ranks that have run out of batches keep the others company: every forward pass is a collective.
            asked = [prompts[index] for index in batch] or [prompts[0][:1]]
            given = answer_batch(ready, tokenizer, asked, settings, device=device, synced=synced and world_size > 1)
            answers += zip(batch, given[: len(batch)], strict=True)
            if progress:
                progress(turn + 1, rounds)
    everywhere = _gather(answers, world_size)
    predictions = tuple(
        _prediction(tokenizer, rows[index], answer) for index, answer in sorted(everywhere, key=lambda part: part[0])
    )
    assert len(predictions) == len(rows), "every row is answered once"
    return GenerationResult(
        predictions=predictions,
        scores=mean_scores([p.scores for p in predictions]),
        answered_here=len(answers),
        seconds=time.perf_counter() - started,
        warnings=_warnings(predictions),
    )


def write_evaluation(
    folder: Path,
    *,
    step: int,
    loss: float,
    label_tokens: int,
    result: GenerationResult | None,
    settings: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Publishes `predictions.jsonl` and then `scores.json` in `folder`, on one rank only; returns the content of `scores.json`.

    `settings` says how the answers were made (rows, batch, beams, ...) and identifies model and data; `facts` is
    what else is known (loss per source, speed). A folder without `scores.json` is an evaluation that was never finished.
    """
    scores: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "perplexity": perplexity(loss),
        "label_tokens": label_tokens,
        **(facts or {}),
        **({name: result.scores[name].to_json() for name in METRICS} if result else {}),
        "answers": len(result.predictions) if result else 0,
        "settings": {**settings, "use_stemmer": USE_STEMMER, "bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE}},
    }
    if result:
        write_predictions(folder / "predictions.jsonl", result.predictions)
    write_json(folder / "scores.json", scores)
    return scores


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    """Publishes one JSON object a line."""
    write_text(path, "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in predictions))


def _prediction(tokenizer: Any, row: Mapping[str, Any], answer: Answer) -> Prediction:
    return Prediction(
        row=int(row["row"]),
        prompt=tokenizer.decode(list(row["prompt_ids"]), skip_special_tokens=False),
        reference=row["reference"],
        answer=answer.text,
        tokens=answer.tokens,
        stopped=answer.stopped,
        scores=rouge(row["reference"], answer.text),
    )


def _warnings(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    count = len(predictions)
    wordless = without_words([p.reference for p in predictions])
    cut = sum(not p.stopped for p in predictions)
    found = []
    if wordless:
        found.append(f"{wordless} of {count} references have no word of a-z or 0-9; ROUGE counts them as 0")
    if cut > count // 2:
        found.append(f"{cut} of {count} answers reached `train.generation_max_new_tokens` before the model ended its turn")
    return tuple(found)


def _gather(answers: list[Any], world_size: int) -> list[Any]:
    if world_size == 1:
        return answers
    parts: list[list[Any]] = [[] for _ in range(world_size)]
    distributed.all_gather_object(parts, answers)
    return [answer for part in parts for answer in part]


@contextmanager
def _ready_to_generate(model: Any, *, synced: bool) -> Iterator[Any]:
    """Yields the model inside any wrapper, in evaluation mode, with only our generation settings; puts all back afterwards.

    `generate` of an adapter model calls the causal model below FSDP2's root, so the root's own parameters are gathered here
    and stay so meanwhile; the layers gather and free theirs as usual.
    """
    while not hasattr(model, "generate"):
        model = model.module
    was_training = model.training
    kept = model.generation_config
    bare = getattr(model, "get_base_model", lambda: model)()
    bare_kept = bare.generation_config
    model.eval()
    use_our_settings(model)
    root = model if synced and isinstance(model, FSDPModule) else None
    if root is not None:
        root.unshard()
    try:
        yield model
    finally:
        if root is not None:
            root.reshard()
        model.generation_config, bare.generation_config = kept, bare_kept
        model.train(was_training)
