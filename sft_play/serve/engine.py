"""One thread that answers all requests together: a waiting one joins the batch at the next token, an answer that has
ended leaves it.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from sft_play.data.answers import AnswerParts
from sft_play.errors import UserError
from sft_play.evaluation.generation import (
    AnswerBatch,
    AnswerSettings,
    admit,
    advance,
    context_length,
    generation_settings,
    pad_left,
    refillable,
    settings_for,
    use_our_settings,
)
from sft_play.model.tokenizer import ends_of_answers

LONGEST_ANSWER_SECONDS = 600
"""From its first token; what is there by then is the answer."""
BLANKS = r"( |\n[ ]{0,16})?"
"""Between the parts of JSON: without an end an untrained model writes nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of one answer are chosen and when it ends."""

    max_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: of all tokens."""
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    """Added to a token's logit."""
    stops: tuple[str, ...] = ()
    """Texts that end the answer and are no part of it."""
    logprobs: int | None = None
    """Number of likeliest tokens that are reported with each token; `None` for no log-probabilities."""
    grammar: str | None = None
    """What the answer keeps to."""


class Chosen(NamedTuple):
    """A token's log-probability before temperature and penalties, and the likeliest in its place."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]


class Answering:
    """An answer that is being made. `notify` is called in the engine's thread at each token and at the end."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        parse: Callable[[Sequence[int]], AnswerParts],
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.prompt, self.sampling, self.notify = prompt, sampling, notify
        self.tokens: list[int] = []
        """Without the one that ends the turn."""
        self.chosen: list[Chosen] = []
        self.finish: Literal["stop", "length"] | None = None
        self.error: str | None = None
        self.cancelled = False
        self.matcher: Any = None
        """Holds the answer to its schema."""
        self.ends_at = float("inf")
        self._parse = parse
        self._random = torch.Generator()
        self._random.seed() if sampling.seed is None else self._random.manual_seed(sampling.seed)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None or self.cancelled

    def fail(self, why: str) -> None:
        self.error = why
        self.notify()

    def choose(self, scores_V: Tensor, stops: set[int]) -> int:
        """Return the next token by this answer's settings, and keep it."""
        how, raw_V = self.sampling, scores_V
        scores_V = self._allowed(self._weighed(raw_V))
        token = int(scores_V.argmax()) if how.temperature == 0 else self._sampled(scores_V)
        if token in stops:
            self.finish = "stop"
        else:
            if how.logprobs is not None:
                self.chosen.append(_chosen(raw_V, token, how.logprobs))
            self._keep(token)
        self.notify()
        return token

    def _keep(self, token: int) -> None:
        self.tokens.append(token)
        if self.matcher is not None and not self.matcher.consume_token(token):
            self.error = f"the schema cannot be followed further: {self.matcher.get_error()}"
        if self.sampling.stops and any(stop in self._parse(self.tokens).text for stop in self.sampling.stops):
            self.finish = "stop"
        elif len(self.tokens) >= self.sampling.max_tokens or time.monotonic() > self.ends_at:
            self.finish = "length"

    def _weighed(self, scores_V: Tensor) -> Tensor:
        how = self.sampling
        if not (how.bias or how.presence_penalty or how.frequency_penalty):
            return scores_V
        scores_V = scores_V.clone()
        for token, count in Counter(self.tokens).items():
            scores_V[token] -= how.presence_penalty + how.frequency_penalty * count
        for token, bias in how.bias.items():
            scores_V[token] += bias
        return scores_V

    def _allowed(self, scores_V: Tensor) -> Tensor:
        """Return the scores with nothing left but what the schema allows here."""
        if self.matcher is None:
            return scores_V
        bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()[: len(scores_V)].bool()
        return scores_V.masked_fill(~allowed.to(scores_V.device), float("-inf"))

    def _sampled(self, scores_V: Tensor) -> int:
        how = self.sampling
        sorted_V, order_V = (scores_V.float().cpu() / how.temperature).sort(descending=True)
        share_V = sorted_V.softmax(-1)
        candidates = int(((share_V.cumsum(-1) - share_V) < how.top_p).sum())
        candidates = min(candidates, how.top_k) if how.top_k else candidates
        return int(order_V[torch.multinomial(share_V[:candidates], 1, generator=self._random)])


def _chosen(raw_V: Tensor, token: int, likeliest: int) -> Chosen:
    logprobs_V = raw_V.float().log_softmax(-1)
    top = logprobs_V.topk(likeliest)
    return Chosen(token, float(logprobs_V[token]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))


class Engine:
    """A model with its tokenizer, and the answers that it is making."""

    def __init__(self, model: Any, tokenizer: Any, *, at_once: int) -> None:
        use_our_settings(model)
        self.model, self.tokenizer = model, tokenizer
        self.positions = context_length(model)
        longest = min(self.positions, 2**20)
        self._at_once = settings_for(model, AnswerSettings(batch_size=max(1, at_once)), longest=longest).batch_size
        self._ends = ends_of_answers(tokenizer)
        self.waiting: queue.SimpleQueue[Answering] = queue.SimpleQueue()
        """Requests that are answered as soon as there is room."""
        self._live: dict[int, Answering] = {}
        self._numbers = itertools.count()
        self._refills = True
        """Whether this model's batches take requests in on the way; known after its first one."""
        self.stopped = False
        self._schemas: Any = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Cut all answers off and wait for the thread to end."""
        self.stopped = True
        self._thread.join(seconds)

    def grammar_of(self, schema: Mapping[str, Any]) -> str:
        """Return the grammar of a JSON schema. Raise `ValueError` for one that cannot be followed."""
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_pattern": BLANKS})
        if problem := LLMatcher.validate_grammar(grammar, self._schema_tokenizer()):
            raise ValueError(problem.splitlines()[0])
        return str(grammar)

    def _schema_tokenizer(self) -> Any:
        if self._schemas is None:
            import llguidance.hf

            width = self.model.get_output_embeddings().weight.shape[0]
            self._schemas = llguidance.hf.from_tokenizer(
                self.tokenizer, n_vocab=max(width, len(self.tokenizer)), eos_token=self._ends["eos_token_id"]
            )
        return self._schemas

    def _run(self) -> None:
        batch: AnswerBatch | None = None
        with torch.no_grad():
            while not self.stopped:
                try:
                    batch = self._step(batch)
                except Exception as error:  # noqa: BLE001  # one bad request must not end the server
                    batch = None
                    why = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                    if isinstance(error, torch.OutOfMemoryError):
                        self._at_once = max(1, self._at_once // 2)
                        why = f"the device ran out of memory; from now on {self._at_once} are answered together"
                    for answering in self._live.values():
                        answering.fail(why)
                    self._live.clear()

    def _step(self, batch: AnswerBatch | None) -> AnswerBatch | None:
        """Let waiting requests in and generate until the batch is to be changed."""
        generation = generation_settings(self.tokenizer, AnswerSettings(), room=1)
        device = self.model.device
        if new := self._taken(batch):
            prompts = {number: answering.prompt for number, answering in new.items()}
            joining = pad_left(prompts, list(new), 1, generation.pad_token_id, device)
            joining.tokens_left = torch.tensor(
                [answering.sampling.max_tokens for answering in new.values()], device=device
            )
            batch = admit(self.model, batch, joining)
        if batch is None:
            return None
        rows = [self._live[number] for number in batch.places]
        stops = set(self._ends["eos_token_id"])
        batch = advance(
            self.model,
            batch,
            generation,
            torch.tensor(sorted(stops), device=device),
            StoppingCriteriaList([_Interrupt(self, batch, rows)]),
            processors=LogitsProcessorList([_Choice(rows, stops)]),
        )
        self._live = {number: self._live[number] for number in (batch.places if batch else ())}
        self._refills = self._refills if batch is None else refillable(batch.cache)
        return batch

    def _taken(self, batch: AnswerBatch | None) -> dict[int, Answering]:
        """Return requests that have room now, under new numbers; wait for one where there is nothing to do."""
        taken: dict[int, Answering] = {}
        room = self._at_once if batch is None else self.room_in(batch)
        while len(taken) < room:
            try:
                answering = self.waiting.get(block=batch is None and not taken, timeout=0.2)
            except queue.Empty:
                break
            if not answering.cancelled:
                number = next(self._numbers)
                taken[number] = self._live[number] = answering
                answering.ends_at = time.monotonic() + LONGEST_ANSWER_SECONDS
                if answering.sampling.grammar is not None:
                    from llguidance import LLMatcher

                    answering.matcher = LLMatcher(self._schema_tokenizer(), answering.sampling.grammar)
        return taken

    def room_in(self, batch: AnswerBatch) -> int:
        """Return how many requests may join the batch when it is interrupted."""
        return self._at_once - len(batch.places) if self._refills else 0


class _Choice(LogitsProcessor):  # type: ignore[misc]
    """Leaves `generate`, which takes the largest score, the token that each answer has chosen."""

    def __init__(self, rows: Sequence[Answering], stops: set[int]) -> None:
        self.rows, self.stops = rows, stops

    def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
        tokens = [answering.choose(row_V, self.stops) for answering, row_V in zip(self.rows, scores, strict=True)]
        chosen = torch.full_like(scores, float("-inf"))
        return chosen.scatter(1, torch.tensor(tokens, device=scores.device)[:, None], 0.0)


class _Interrupt(StoppingCriteria):  # type: ignore[misc]
    """Ends `generate` where an answer has ended, or where a request waits that may join."""

    def __init__(self, engine: Engine, batch: AnswerBatch, rows: Sequence[Answering]) -> None:
        self.engine, self.batch, self.rows = engine, batch, rows
        self.has_room = engine.room_in(batch) > 0

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        ended = [row for row, answering in enumerate(self.rows) if answering.done]
        self.batch.tokens_left[ended] = 0
        interrupted = bool(ended) or self.engine.stopped or (self.has_room and not self.engine.waiting.empty())
        return torch.full((len(input_ids),), interrupted, device=input_ids.device)
