"""Answer held-out rows over the ranks, and score the answers.

Batches are formed before they are distributed, so a prompt has the same neighbours on any number of ranks and the
scores are the same. Ranks with fewer batches run dummy batches if every forward pass is a collective (ZeRO-3, FSDP2).
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
from sft_play.data.answers import AnswerParts, compare_parts
from sft_play.evaluation.generation import Answer, AnswerSettings, answer_batch, refills, settings_for, use_our_settings
from sft_play.evaluation.scores import (
    DEFAULT_METRICS,
    ROUGE,
    Interval,
    Scored,
    score_parts,
    without_words,
)
from sft_play.plan.shape import VARLEN
from sft_play.text import Show, plural
from sft_play.training.faults import ran_out_of_memory
from sft_play.training.ranks import PeerError, Ranks, named
from sft_play.training.stopping import StopOnRequest


def answer_rows(
    model: Any, tokenizer: Any, rows: Any, ready: Sequence[int], config: Config, *, batch_size: int, **where: Any
) -> GenerationResult:
    """Answer and score `eval.samples` of the `ready` row indices, by the settings of `config`.

    `where` is passed to `score_by_generation`: ranks and the like.
    """
    chosen = sorted(random.Random(config.train.seed).sample(ready, min(config.eval.samples, len(ready))))
    return score_by_generation(
        model,
        tokenizer,
        [rows[index] for index in chosen],
        AnswerSettings(
            max_new_tokens=config.train.generation_max_new_tokens,
            num_beams=config.train.generation_num_beams,
            batch_size=batch_size,
        ),
        metrics=config.eval.metrics,
        budget=Budget(seconds=config.eval.max_seconds, seed=config.train.seed),
        **where,
    )


ALONE = Ranks()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One line of `predictions.jsonl`."""

    row: int
    """Among the rows that were read for the split, from 0."""
    place: str
    """Where it stands: `file:line`; empty if an earlier version prepared the rows."""
    prompt: str
    """The prompt as the model saw it, template and special tokens included."""
    reference: str
    answer: str
    """The visible answer, and each tool call as a line of JSON; without the thought before it."""
    thought: str
    tokens: int
    """Tokens of the answer, without the one that ends the turn."""
    stopped: bool
    """Whether the model ended its turn itself, before `generation_max_new_tokens`."""
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The answers of all ranks, in the order of the rows; the same on every rank."""

    predictions: tuple[Prediction, ...]
    scores: Mapping[str, Interval]
    """Metric -> score of all answers with its bootstrap interval."""
    asked: int
    """Rows that were to be answered; more than `predictions` if the time budget ended first."""
    seconds: float
    """Time spent on generation until the last rank was done."""
    warnings: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every row was answered."""
        return len(self.predictions) == self.asked

    def metrics(self) -> dict[str, float]:
        """Return `eval_NAME` of every metric and the statistics of the answers, for `metrics.jsonl`."""
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
        """Return the duration and rates of generation over all ranks."""
        return {
            "generation_seconds": self.seconds,
            "answers_per_second": len(self.predictions) / self.seconds,
            "answer_tokens_per_second": sum(p.tokens for p in self.predictions) / self.seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Time limit of generation, by rank 0's clock."""

    seconds: float | None = None
    seed: int = 0
    """Chooses the order of the batches if there is a limit."""
    clock: Callable[[], float] = time.perf_counter

    def over(self, started: float, turns: int, ranks: Ranks) -> bool:
        """Return whether another round would probably end past the limit, the same on every rank; one always runs."""
        if self.seconds is None or turns == 0:
            return False
        elapsed = self.clock() - started
        return bool(ranks.broadcast(elapsed + elapsed / turns > self.seconds))


def decide(config: Config, *, rows: int, ready: int, purpose: Literal["train", "eval"] = "train") -> tuple[bool, str]:
    """Return whether answers are generated and scored, and the reason; `ready` of the `rows` have a reference."""
    asked = config.train.predict_with_generate
    reasons = (
        (not rows, "there are no validation rows (`data.validation`)"),
        (asked is False, "`train.predict_with_generate` is `false`; TRAIN_PREDICT_WITH_GENERATE=true scores answers"),
        (not config.eval.metrics, "`eval.metrics` is empty"),
        (not ready, "no validation row has a reference answer (documents, plain text and tokens have none)"),
        (
            asked == "auto" and purpose == "train",
            "`make eval` scores answers; `train.predict_with_generate: true` scores them while training too",
        ),
    )
    for holds, reason in reasons:
        if holds:
            return False, f"loss only; {reason}"
    how = "greedy" if config.train.generation_num_beams == 1 else f"{config.train.generation_num_beams} beams"
    sentence = f"{_names(config.eval.metrics)} of {min(config.eval.samples, ready)} answers, {how}, "
    sentence += f"at most {config.train.generation_max_new_tokens} new tokens"
    if config.eval.max_seconds is not None:
        sentence += f", about {config.eval.max_seconds:g} s"
    if ready < rows:
        sentence += f"; {rows - ready} of {rows} validation rows have no reference and count only for the loss"
    return True, sentence


def _names(metrics: Sequence[str]) -> str:
    """Return the metrics in words, with all ROUGE scores as `ROUGE`."""
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
    """Answer every row's `prompt_ids` and score the answers against its `reference` by `metrics` (`eval.metrics`).

    `rows` hold `row` (a unique id), `prompt_ids` and `reference`, the same on every rank. `synced` means that a forward
    pass is a collective (ZeRO-3, FSDP2). `progress(answers, all)` is called after each batch of this rank, `alive` at
    each forward pass. `stop` may end the evaluation on all ranks with an exception. All ranks must call this together
    and get the same result. Raise `ValueError` if there are no rows. A failure on some ranks raises `PeerError` on all,
    unless it happens inside a collective pass or is a shortage of memory: these are raised where they happen.
    """
    if not rows:
        raise ValueError("no rows to answer")
    budget = budget or Budget()
    prompts = [list(row["prompt_ids"]) for row in rows]
    started = budget.clock()
    if stop:
        stop.begin_evaluation()
    answers, failure = _answers_here(
        model,
        tokenizer,
        prompts,
        settings,
        budget=budget,
        started=started,
        ranks=ranks,
        synced=synced,
        progress=progress,
        stop=stop,
        alive=alive,
    )
    if stop:
        stop.after_batches()
    if problem := ranks.first_problem(named(failure) if failure else None):
        raise PeerError(problem) from failure
    gathered = ranks.gather([(index, *answer.parts, answer.tokens, answer.stopped) for index, answer in answers])
    everywhere = sorted(
        (index, Answer(AnswerParts(text, thought, tuple(calls)), tokens, stopped))
        for part in gathered[:: ranks.copies]
        for index, text, thought, calls, tokens, stopped in part
    )
    generated = budget.clock()
    assert len({index for index, _ in everywhere}) == len(everywhere), "a row was answered twice"
    assert budget.seconds is not None or len(everywhere) == len(rows), "a row was not answered"
    pairs = ranks.attempt(lambda: [compare_parts(tokenizer, rows[index], answer.parts) for index, answer in everywhere])
    scored = _score(metrics, pairs, ranks)
    predictions = tuple(
        Prediction(
            row=int(rows[index]["row"]),
            place=rows[index].get("place", ""),
            prompt=tokenizer.decode(prompts[index], skip_special_tokens=False),
            reference=reference.shown,
            answer=answer_parts.shown,
            thought=answer_parts.thought,
            tokens=answer.tokens,
            stopped=answer.stopped,
            scores=scores,
        )
        for (index, answer), (reference, answer_parts), scores in zip(everywhere, pairs, scored.each, strict=True)
    )
    return GenerationResult(
        predictions=predictions,
        scores=scored.intervals,
        asked=len(rows),
        seconds=max(generated - started, 1e-9),
        warnings=(
            *scored.warnings,
            *_warnings(predictions, list(scored.intervals), asked=len(rows), seconds=budget.seconds),
        ),
    )


def _answers_here(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: AnswerSettings,
    *,
    budget: Budget,
    started: float,
    ranks: Ranks,
    synced: bool,
    progress: Show | None,
    stop: StopOnRequest | None,
    alive: Callable[[], None] | None,
) -> tuple[list[tuple[int, Answer]], Exception | None]:
    """Return this rank's answers, each with the index of its prompt, and the failure after which it made no more."""
    answers: list[tuple[int, Answer]] = []
    failure: Exception | None = None
    # With collectives or a budget the ranks meet before each batch, so none may leave alone.
    together_only = synced or budget.seconds is not None
    with _ready_to_generate(model, synced=synced, alive=alive) as ready:
        lengths = [len(prompt) for prompt in prompts]
        settings = settings_for(ready, settings, longest=max(lengths))
        refilled = refills(ready, settings, synced=synced)
        together = share_size(len(prompts), settings.batch_size) if refilled else settings.batch_size
        spread_by = None if budget.seconds is None else budget.seed
        mine, rounds = share_batches(lengths, together, *ranks.model, spread_by=spread_by)
        for turn in range(rounds):
            if stop and together_only:
                stop.between_batches()
            elif stop and stop.asked_here():
                break
            if budget.over(started, turn, ranks):
                break
            batch = mine[turn] if turn < len(mine) and failure is None else []
            if not batch and not synced:
                continue
            # Every forward pass is a collective, so ranks that are out of batches run a dummy.
            asked = [prompts[index] for index in batch] or [prompts[0][:1]]
            try:
                batch_answers = answer_batch(
                    ready,
                    tokenizer,
                    asked,
                    settings,
                    device=ranks.device,
                    synced=synced and ranks.world > 1,
                    enough=stop.asked_here if stop else None,
                )
            except Exception as error:
                if ranks.world == 1 or synced or ran_out_of_memory(error):
                    raise
                failure = error
                continue
            answers += zip(batch, batch_answers[: len(batch)], strict=True)
            if progress:
                progress(len(answers), sum(map(len, mine)))
    return answers, failure


def _score(metrics: Sequence[str], pairs: Sequence[tuple[AnswerParts, AnswerParts]], ranks: Ranks) -> Scored:
    """Return the scores, computed once on rank 0, since library metrics may be slow or not repeatable. Collective."""
    scored = ranks.broadcast(ranks.attempt(lambda: asdict(score_parts(metrics, pairs)) if ranks.first else {}))
    intervals = {name: Interval(**interval) for name, interval in scored["intervals"].items()}
    return Scored(each=tuple(scored["each"]), intervals=intervals, warnings=tuple(scored["warnings"]))


def _warnings(
    predictions: Sequence[Prediction], metrics: Sequence[str], *, asked: int, seconds: float | None
) -> tuple[str, ...]:
    count = len(predictions)
    wordless = without_words([p.reference for p in predictions]) if set(metrics) & set(ROUGE) else 0
    cut = sum(not p.stopped for p in predictions)
    warnings = []
    if count < asked:
        warnings.append(
            f"scored {count} of {plural(asked, 'answer')}, spread over all lengths: `eval.max_seconds` is {seconds:g}"
        )
    if wordless:
        warnings.append(f"{wordless} of {count} references have no word of a-z or 0-9; ROUGE scores them as 0")
    if cut > count // 2:
        warnings.append(
            f"{cut} of {plural(count, 'answer')} reached `train.generation_max_new_tokens` before the model ended its"
            " turn"
        )
    return tuple(warnings)


@contextmanager
def _ready_to_generate(model: Any, *, synced: bool, alive: Callable[[], None] | None) -> Iterator[Any]:
    """Yield the unwrapped model in evaluation mode with only our generation settings; restore everything afterwards.

    `generate` of an adapter model calls the causal model below FSDP2's root, so the root's own parameters are gathered
    here and stay gathered meanwhile; the layers gather and free theirs as usual.
    """
    while not hasattr(model, "generate"):
        model = model.module
    was_training = model.training
    own_settings = model.generation_config
    bare = getattr(model, "get_base_model", lambda: model)()
    bare_settings, attention = bare.generation_config, bare.config._attn_implementation
    model.eval()
    use_our_settings(model)
    if attention == VARLEN:  # it supports neither left padding nor a cache
        bare.config._attn_implementation = "sdpa" if bare._supports_sdpa else "eager"
    root = model if synced and isinstance(model, FSDPModule) else None
    if root is not None:
        root.unshard()
    # Every forward pass is progress, a dummy one too.
    hook = bare.register_forward_pre_hook(lambda *_: alive()) if alive else None
    try:
        yield model
    finally:
        if hook is not None:
            hook.remove()
        if root is not None:
            root.reshard()
        model.generation_config, bare.generation_config = own_settings, bare_settings
        bare.config._attn_implementation = attention
        model.train(was_training)


def share_size(count: int, batch_size: int) -> int:
    """Return how many prompts a rank gets at a time, of which `batch_size` are answered at once while the others wait.

    This is four to eight batches, or one if there are few rows. With more batches a rank runs half empty less often at
    the end of its share, but at least four shares must be there for the ranks. The number does not depend on the number
    of ranks, so neither do the answers.
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

    Batches hold rows of similar length, the longest first, so that a shortage of memory shows at once. With `groups`
    (one number per row) each batch holds rows of one group. Batch i goes to rank i modulo the world size. The seed
    `spread_by` changes only the order of the batches: any prefix is spread evenly over all lengths, and contains each
    batch with equal probability.
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
    """Return a permutation of `range(count)` with evenly spread prefixes: van der Corput's, from a random start."""
    bits = max(1, (count - 1).bit_length())
    places = (int(f"{index:0{bits}b}"[::-1], 2) for index in range(2**bits))
    start = random.Random(seed).randrange(count) if count else 0
    return [(place + start) % count for place in places if place < count]


def answerable(rows: Any) -> list[int]:
    """Return the indices of the rows that have a prompt; documents and plain text do not."""
    return [index for index, prompt in enumerate(rows["prompt_ids"]) if len(prompt)]
