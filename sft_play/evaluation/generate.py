"""Answers to held-out prompts, shared out over the ranks, and their scores.

Batches are formed before they are shared out, so a prompt meets the same companions on any number of ranks and the scores
are the same. Ranks that have fewer batches run dummies where every forward pass is a collective (ZeRO-3, FSDP2).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed.fsdp import FSDPModule

from sft_play.config.metrics import short_name
from sft_play.config.schema import Config
from sft_play.errors import DataError
from sft_play.evaluation.answering import Answer, AnswerSettings, answer_batch, refills, use_our_settings
from sft_play.evaluation.scores import DEFAULT_METRICS, ROUGE, Interval, Scored, score_answers, without_words
from sft_play.plan.shape import VARLEN
from sft_play.text import Show
from sft_play.training.ranks import Ranks
from sft_play.training.stopping import StopOnRequest

ALONE = Ranks()


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
    """Metric -> score of all answers with its bootstrap interval."""
    asked: int
    """Rows that were to be answered; more than there are `predictions` where the time was over first."""
    seconds: float
    """Of generating alone, until the last rank was ready."""
    warnings: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every row was answered."""
        return len(self.predictions) == self.asked

    def metrics(self) -> dict[str, float]:
        """Return `eval_NAME` of every metric and what describes the answers, for `metrics.jsonl`."""
        count = len(self.predictions)
        return {
            **{f"eval_{name}": interval.mean for name, interval in self.scores.items()},
            "eval_answers": count,
            "eval_answers_asked": self.asked,
            "eval_answer_tokens": sum(p.tokens for p in self.predictions) / count,
            "eval_stopped": sum(p.stopped for p in self.predictions) / count,
            **{f"eval_{name}": value for name, value in self.speed().items()},
        }

    def speed(self) -> dict[str, float]:
        """Return how long generating took, over all ranks, and how much came of it."""
        return {
            "generation_seconds": self.seconds,
            "answers_per_second": len(self.predictions) / self.seconds,
            "answer_tokens_per_second": sum(p.tokens for p in self.predictions) / self.seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Time for generating; rank 0's clock counts."""

    seconds: float | None = None
    seed: int = 0
    """Chooses the order in which batches are answered when there is a limit."""
    clock: Callable[[], float] = time.perf_counter

    def over(self, started: float, turns: int, ranks: Ranks) -> bool:
        """Return whether another round would probably end past the limit: the same on every rank. The first is always run."""
        if self.seconds is None or turns == 0:
            return False
        elapsed = self.clock() - started
        return bool(ranks.broadcast(elapsed + elapsed / turns > self.seconds))


def decide(
    config: Config,
    *,
    purpose: Literal["train", "eval"] = "train",
    validation_rows: int | None = None,
    answerable_rows: int | None = None,
) -> tuple[bool, str]:
    """Return whether answers are generated and scored, and why, as a sentence for the user.

    `answerable_rows`: how many of the validation rows ask for an answer, where that is known.
    """
    asked = config.train.predict_with_generate
    if validation_rows == 0:
        return False, "loss only: there are no validation rows (`data.validation`)"
    if asked is False:
        return False, "loss only: `train.predict_with_generate` is `false`"
    if config.eval.samples == 0:
        return False, "loss only: `eval.samples` is 0"
    if not config.eval.metrics:
        return False, "loss only: `eval.metrics` is empty"
    if asked == "auto" and purpose == "train":
        return False, "loss only while training: `train.predict_with_generate` is `auto`; `make eval` scores answers as well"
    if answerable_rows == 0:
        return False, "loss only: no validation row asks for an answer (documents, plain text and tokens have no reference)"
    known = validation_rows if answerable_rows is None else answerable_rows
    rows = config.eval.samples if known is None else min(config.eval.samples, known)
    how = "greedy" if config.train.generation_num_beams == 1 else f"{config.train.generation_num_beams} beams"
    said = f"{_names(config.eval.metrics)} of {rows} answers, {how}, at most {config.train.generation_max_new_tokens} new tokens"
    if config.eval.max_seconds is not None:
        said += f", about {config.eval.max_seconds:g} s"
    if validation_rows is not None and answerable_rows is not None and answerable_rows < validation_rows:
        said += f"; {validation_rows - answerable_rows} of {validation_rows} validation rows have no reference and count for loss only"
    return True, said


def _names(metrics: Sequence[str]) -> str:
    """Return the metrics in words; all of ROUGE by one."""
    others = [short_name(metric) for metric in metrics if metric not in ROUGE]
    return ", ".join((["ROUGE"] if len(others) < len(metrics) else []) + others)


def score_by_generation(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    settings: AnswerSettings,
    *,
    metrics: Sequence[str] = DEFAULT_METRICS,
    budget: Budget | None = None,
    ranks: Ranks = ALONE,
    synced: bool = False,
    progress: Show | None = None,
    stop: StopOnRequest | None = None,
    alive: Callable[[], None] | None = None,
) -> GenerationResult:
    """Answers every row's `prompt_ids` and scores the answers against its `reference` by `metrics` (`eval.metrics`).

    `rows` hold `row` (an id, unique), `prompt_ids` and `reference`, the same on every rank. `synced` says that a forward pass
    is a collective operation (ZeRO-3, FSDP2). `progress(done, all)` is called with the batches of this rank, `alive` of every forward
    pass. `stop` may end it on all ranks with an exception. All ranks must call this together and get the same result.
    Raise `ValueError` when there are no rows, `DataError` when a metric fails.
    """
    if not rows:
        raise ValueError("no rows to answer")
    budget = budget or Budget()
    prompts = [list(row["prompt_ids"]) for row in rows]
    spread_by = None if budget.seconds is None else budget.seed
    answers: list[tuple[int, Answer]] = []
    together_only = synced or budget.seconds is not None  # ranks meet before each batch, so that none may leave alone
    started = budget.clock()
    enough = stop.asked_here if stop else None
    if stop:
        stop.begin_evaluation()
    with _ready_to_generate(model, synced=synced, alive=alive) as ready:
        together = share_size(len(rows), settings.batch_size) if refills(ready, settings, synced=synced) else settings.batch_size
        lengths = [len(prompt) for prompt in prompts]
        mine, rounds = share_batches(lengths, together, *ranks.model, spread_by=spread_by)
        for turn in range(rounds):
            if stop and together_only:
                stop.between_batches()
            elif stop and stop.asked_here():
                break
            if budget.over(started, turn, ranks):
                break
            batch = mine[turn] if turn < len(mine) else []
            if not batch and not synced:
                continue
            # Ranks that have run out of batches keep the others company: every forward pass is a collective.
            asked = [prompts[index] for index in batch] or [prompts[0][:1]]
            given = answer_batch(
                ready, tokenizer, asked, settings, device=ranks.device, synced=synced and ranks.world > 1, enough=enough
            )
            answers += zip(batch, given[: len(batch)], strict=True)
            if progress:
                progress(turn + 1, rounds)
    if stop:
        stop.after_batches()
    told = ranks.gather([(index, asdict(answer)) for index, answer in answers])[:: ranks.copies]
    everywhere = sorted(((index, Answer(**answer)) for part in told for index, answer in part), key=lambda part: part[0])
    generated = budget.clock()
    assert len({index for index, _ in everywhere}) == len(everywhere), "no row is answered twice"
    assert budget.seconds is not None or len(everywhere) == len(rows), "every row is answered"
    references, texts = [rows[index]["reference"] for index, _ in everywhere], [answer.text for _, answer in everywhere]
    scored = _score(metrics, references, texts, ranks)
    predictions = tuple(
        _prediction(tokenizer, rows[index], answer, scores)
        for (index, answer), scores in zip(everywhere, scored.each, strict=True)
    )
    return GenerationResult(
        predictions=predictions,
        scores=scored.intervals,
        asked=len(rows),
        seconds=max(generated - started, 1e-9),
        warnings=_warnings(predictions, list(scored.intervals), asked=len(rows), seconds=budget.seconds),
    )


def _score(metrics: Sequence[str], references: Sequence[str], texts: Sequence[str], ranks: Ranks) -> Scored:
    """Return the scores, computed once, on rank 0: metrics of strangers may be slow, or differ from one time to the next. Collective."""
    found: dict[str, Any] = {}
    if ranks.first:
        try:
            found = {"scored": asdict(score_answers(metrics, references, texts))}
        except DataError as error:  # the others wait for it
            found = {"problem": {"message": error.message, "place": error.place, "hint": error.hint}}
    found = ranks.broadcast(found)
    if "problem" in found:
        raise DataError(**found["problem"])
    intervals = {name: Interval(**interval) for name, interval in found["scored"]["intervals"].items()}
    return Scored(each=tuple(found["scored"]["each"]), intervals=intervals)


def _prediction(tokenizer: Any, row: Mapping[str, Any], answer: Answer, scores: Mapping[str, float]) -> Prediction:
    return Prediction(
        row=int(row["row"]),
        prompt=tokenizer.decode(list(row["prompt_ids"]), skip_special_tokens=False),
        reference=row["reference"],
        answer=answer.text,
        tokens=answer.tokens,
        stopped=answer.stopped,
        scores=scores,
    )


def _warnings(predictions: Sequence[Prediction], metrics: Sequence[str], *, asked: int, seconds: float | None) -> tuple[str, ...]:
    count = len(predictions)
    wordless = without_words([p.reference for p in predictions]) if set(metrics) & set(ROUGE) else 0
    cut = sum(not p.stopped for p in predictions)
    found = []
    if count < asked:
        found.append(f"scored {count} of {asked}: `eval.max_seconds` is {seconds:g}; they are spread over all lengths")
    if wordless:
        found.append(f"{wordless} of {count} references have no word of a-z or 0-9; ROUGE counts them as 0")
    if cut > count // 2:
        found.append(f"{cut} of {count} answers reached `train.generation_max_new_tokens` before the model ended its turn")
    return tuple(found)


@contextmanager
def _ready_to_generate(model: Any, *, synced: bool, alive: Callable[[], None] | None) -> Iterator[Any]:
    """Yield the model inside any wrapper, in evaluation mode, with only our generation settings; puts all back afterwards.

    `generate` of an adapter model calls the causal model below FSDP2's root, so the root's own parameters are gathered here
    and stay so meanwhile; the layers gather and free theirs as usual.
    """
    while not hasattr(model, "generate"):
        model = model.module
    was_training = model.training
    kept = model.generation_config
    bare = getattr(model, "get_base_model", lambda: model)()
    bare_kept, attention = bare.generation_config, bare.config._attn_implementation
    model.eval()
    use_our_settings(model)
    if attention == VARLEN:  # it knows neither padding on the left nor a cache
        bare.config._attn_implementation = "sdpa" if bare._supports_sdpa else "eager"
    root = model if synced and isinstance(model, FSDPModule) else None
    if root is not None:
        root.unshard()
    # Every pass of the model is progress, one that only keeps other ranks company too.
    hook = bare.register_forward_pre_hook(lambda *_: alive()) if alive else None
    try:
        yield model
    finally:
        if hook is not None:
            hook.remove()
        if root is not None:
            root.reshard()
        model.generation_config, bare.generation_config = kept, bare_kept
        bare.config._attn_implementation = attention
        model.train(was_training)


def choose_rows(count: int, samples: int, seed: int) -> list[int]:
    """Return the indices (ascending) of the rows to answer: all, or `samples` of `count` chosen by `seed`."""
    if samples >= count:
        return list(range(count))
    return sorted(random.Random(seed).sample(range(count), samples))


def share_size(count: int, batch_size: int) -> int:
    """Return how many prompts are given to a rank together, where `batch_size` at once are answered and others wait.

    Four to eight batches, or one where rows are few. The more of them, the less a batch runs half empty at its end; but there are at
    least four shares for the ranks. Does not depend on the number of ranks, so neither do the answers.
    """
    batches = min(8, count // (4 * batch_size))
    return batch_size * (batches if batches >= 4 else 1)


def share_batches(
    lengths: Sequence[int],
    batch_size: int,
    rank: int,
    world: int,
    *,
    groups: Sequence[int] | None = None,
    spread_by: int | None = None,
) -> tuple[list[list[int]], int]:
    """Return this rank's batches of row indices, and how many batches every rank must run.

    Batches hold rows of similar length, the longest first, so that a shortage of memory shows at once; with `groups` (one number
    a row) each holds rows of one group only. Batch i goes to rank i modulo the world size. A seed in `spread_by` keeps the batches
    and changes their order: any first part of it is spread evenly over all lengths, each batch as likely to be in it as any other.
    """
    kinds = groups or [0] * len(lengths)
    batches = []
    for kind in sorted(set(kinds)):
        order = sorted((i for i, own in enumerate(kinds) if own == kind), key=lambda index: (-lengths[index], index))
        batches += [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    if spread_by is not None:
        batches = [batches[index] for index in spread(len(batches), spread_by)]
    return batches[rank::world], math.ceil(len(batches) / world)


def spread(count: int, seed: int) -> list[int]:
    """Return a permutation of `range(count)` of which any first part is spread evenly: van der Corput's order, begun anywhere."""
    bits = max(1, (count - 1).bit_length())
    places = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(2**bits))
    start = random.Random(seed).randrange(count) if count else 0
    return [(place + start) % count for place in places if place < count]


def answerable(rows: Any) -> list[int]:
    """Return the indices of the rows that ask for an answer; documents and plain text do not."""
    return [index for index, prompt in enumerate(rows["prompt_ids"]) if len(prompt)]
