"""Answer conversations: apply the template, keep batches full, generate to the end of the turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer

from sft_play.data import Message
from sft_play.data.answers import AnswerParts, marks_of, parts_of
from sft_play.data.written_tools import check_written, has_tools
from sft_play.model.rope import switch_length, switches_within
from sft_play.model.tokenizer import ends_of_answers, write_chat
from sft_play.plan.shape import PROMPTED_ALONE
from sft_play.text import Show


class Answer(NamedTuple):
    """One completion."""

    parts: AnswerParts
    tokens: int
    """Tokens of the answer, without the one that ends the turn."""
    stopped: bool
    """Whether the model ended its turn itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSettings:
    """How answers are generated: greedily, or by beam search."""

    max_new_tokens: int = 128
    num_beams: int = 1
    batch_size: int = 8
    """Prompts answered together."""


def prompt_ids(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None, **variables: Any
) -> list[int]:
    """Return the tokens of a conversation, which may call `tools`, up to the start of the assistant's turn.

    `variables` are passed to the chat template.

    Raise `DataError` if the chat template refuses the conversation (roles that it does not know, or in a wrong order)
    or omits its tools, a call or a result.
    """

    def render(turns: Sequence[Message], offered: Sequence[Any] | None, prompt: bool) -> str:
        options: dict[str, Any] = {"tools": list(offered)} if offered else {}
        return write_chat(tokenizer, turns, add_generation_prompt=prompt, **options, **variables)

    if has_tools(messages, tools):
        check_written(messages, tools, render)
    text = render(messages, tools, True)
    # The template writes its own special tokens; the tokenizer must not add a second BOS.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def context_length(model: Any) -> int:
    """Return the model's maximum number of positions, or a huge number if its configuration names none."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)


def generation_settings(tokenizer: Any, settings: AnswerSettings, *, room: int) -> GenerationConfig:
    """Return greedy or beam settings that stop at the end of a turn, and after `room` tokens at the latest."""
    return GenerationConfig(
        max_new_tokens=max(1, min(settings.max_new_tokens, room)),
        num_beams=settings.num_beams,
        do_sample=False,
        use_cache=True,
        **ends_of_answers(tokenizer),
    )


def use_our_settings(model: Any) -> None:
    """Drop the model folder's own generation settings, with which transformers would fill in sampling and penalties."""
    for part in (model, getattr(model, "get_base_model", lambda: model)()):
        part.generation_config = GenerationConfig()


def answer_all(
    model: Any,
    tokenizer: Any,
    settings: AnswerSettings,
    prompts: Sequence[Sequence[int]],
    *,
    progress: Show | None = None,
) -> list[Answer]:
    """Answer prompts (lists of tokens) in left-padded batches of similar length; keep the order of `prompts`."""
    use_our_settings(model)
    settings = settings_for(model, settings, longest=max(map(len, prompts), default=0))
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), settings.batch_size):
        batch = order[start : start + settings.batch_size]
        answers.update(zip(batch, answer_batch(model, tokenizer, [prompts[i] for i in batch], settings), strict=True))
        if progress:
            progress(len(answers), len(prompts))
    return [answers[index] for index in range(len(prompts))]


def settings_for(model: Any, settings: AnswerSettings, *, longest: int) -> AnswerSettings:
    """Return the settings for prompts of at most `longest` tokens.

    The batch size is 1 if rotary factors may change within an answer, or if padding before a prompt changes it.
    """
    alone = model.config.get_text_config().model_type in PROMPTED_ALONE
    return (
        replace(settings, batch_size=1)
        if alone or switches_within(model, longest + settings.max_new_tokens)
        else settings
    )


def answer_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: AnswerSettings,
    *,
    device: torch.device | str | None = None,
    synced: bool = False,
    enough: Enough | None = None,
) -> list[Answer]:
    """Answer left-padded prompts: `settings.batch_size` at a time if the model `refills`, else all of them together.

    `synced` keeps forward passes in step with other ranks (ZeRO-3, FSDP2). `enough` is called at each token; the
    answers are cut when it returns true.
    """
    generation = generation_settings(tokenizer, settings, room=context_length(model) - max(map(len, prompts)))
    device = device or model.device
    with torch.no_grad():
        if refills(model, settings, synced=synced):
            output = generate_refilling(
                model, prompts, generation, at_once=max(1, settings.batch_size), device=device, enough=enough
            )
        else:
            batch = pad_left(prompts, range(len(prompts)), 0, generation.pad_token_id, device)
            output = model.generate(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                generation_config=generation,
                synced_gpus=synced,
                stopping_criteria=cut_when(enough),
            )[:, batch.ids.shape[1] :].tolist()
    return [_answer(tokenizer, tokens, set(generation.eos_token_id)) for tokens in output]


def refills(model: Any, settings: AnswerSettings, *, synced: bool) -> bool:
    """Return whether prompts can replace finished answers in a batch, so that more than one batch may be passed.

    They cannot if ranks must take equally many steps, with beam search, if the model's own `generate` changes rotary
    factors, or with Unsloth's `generate`.
    """
    return not synced and settings.num_beams == 1 and "generate" not in vars(model) and switch_length(model) is None


def _answer(tokenizer: Any, tokens: Sequence[int], stops: set[int]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    answer_tokens = tokens if end is None else tokens[:end]
    return Answer(parts_of(tokenizer, answer_tokens), len(answer_tokens), end is not None)


class Stream:
    """Print an answer while it is generated, without the thought before it; `said` holds its parts."""

    def __init__(self, tokenizer: Any, stops: set[int]) -> None:
        self.parts = AnswerParts("")
        self._tokenizer, self._stops, self._marks = tokenizer, stops, marks_of(tokenizer)
        self._tokens: list[int] | None = None
        """`None` until the prompt has arrived."""
        self._shown = ""

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each token, from `generate`."""
        if self._tokens is None:
            self._tokens = []
            return
        self._tokens += [token for token in value.flatten().tolist() if token not in self._stops]
        self.parts = parts_of(self._tokenizer, self._tokens)
        if not self._marks.awaits(self._tokenizer.decode(self._tokens)):
            # The replacement character is a letter whose other bytes are still to come.
            self._show(self.parts.text.removesuffix("\ufffd"))

    def end(self) -> None:
        """Print the rest at the end of `generate`."""
        if not self.parts.shown.startswith(self._shown):  # the text shown so far turned out not to be the answer
            print()
            self._shown = ""
        self._show(self.parts.shown)
        print(flush=True)

    def _show(self, text: str) -> None:
        if text.startswith(self._shown):
            print(text[len(self._shown) :], end="", flush=True)
            self._shown = text


# A batch is kept full: waiting prompts replace finished answers. transformers computes a batch to the end of its
# longest answer, which is mostly wasted when answers differ in length. Its own `generate` does every step here; it is
# interrupted, the batch and its cache are changed, and it continues.


SHARE_STOPPED = 0.25
"""Share of a batch that must have ended before it is changed: each change costs a copy of the cache."""


Enough = Callable[[], bool]
"""Called at each token; all answers are cut when it returns true."""


class _Cut(StoppingCriteria):
    def __init__(self, enough: Enough) -> None:
        self.enough = enough

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self.enough(), device=input_ids.device)


def cut_when(enough: Enough | None) -> StoppingCriteriaList:
    """Return the criterion that ends all answers when `enough` returns true, or no criterion without `enough`."""
    return StoppingCriteriaList([_Cut(enough)] if enough else [])


@dataclass(slots=True)
class AnswerBatch:
    """The prompts that are being answered, left-padded; T grows with their answers."""

    ids: Tensor
    """[B, T]"""
    mask: Tensor
    """[B, T], 0 if padded."""
    places: list[int]
    """Index of each row's prompt."""
    tokens_left: Tensor
    """[B] new tokens that each row may still get."""
    cache: Any = field(default=None)
    """Keys and values of the first T - 1 tokens; `None` if they must be computed (again)."""


class _EnoughStopped(StoppingCriteria):
    """Interrupt generation when enough rows have ended, by a stop token or by their own limit."""

    def __init__(self, stops: Tensor, tokens_left: Tensor) -> None:
        self.stops, self.tokens_left, self.steps = stops, tokens_left, 0
        self.stopped = torch.zeros(len(tokens_left), dtype=torch.bool, device=tokens_left.device)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.steps += 1
        self.stopped |= torch.isin(input_ids[:, -1], self.stops) | (self.tokens_left <= self.steps)
        return (self.stopped.float().mean() >= SHARE_STOPPED).expand(len(self.stopped))


def generate_refilling(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    *,
    at_once: int,
    device: Any,
    enough: Enough | None = None,
) -> list[list[int]]:
    """Return each prompt's new tokens, with its stop token if it has one; at most `generation.max_new_tokens`.

    The batches depend only on `prompts`, their order, and `at_once`. Caches other than plain keys and values (recurrent
    states, sliding windows) are not refilled: such a batch only shrinks, or is computed again from its tokens.
    """
    limit = int(generation.max_new_tokens)
    stops = torch.tensor(generation.eos_token_id, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    waiting = list(range(len(prompts)))
    batch: AnswerBatch | None = None
    while (waiting or batch is not None) and not (enough and enough()):
        room = at_once - (len(batch.places) if batch else 0)
        if waiting and room and (batch is None or refillable(batch.cache)):
            chosen, waiting = waiting[:room], waiting[room:]
            batch = admit(model, batch, pad_left(prompts, chosen, limit, generation.pad_token_id, device))
        assert batch is not None, "a missing batch always admits prompts"
        criteria = StoppingCriteriaList([*cut_when(enough), _EnoughStopped(stops, batch.tokens_left)])
        batch = advance(model, batch, generation, stops, criteria, answers=answers)
    return [tokens[:limit] for tokens in answers]


def pad_left(
    prompts: Sequence[Sequence[int]] | Mapping[int, Sequence[int]],
    chosen: Sequence[int],
    limit: int,
    pad_token: int,
    device: Any,
) -> AnswerBatch:
    """Return a batch of the `chosen` prompts, each with at most `limit` new tokens."""
    longest = max(len(prompts[place]) for place in chosen)
    ids = torch.full((len(chosen), longest), pad_token, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, place in enumerate(chosen):
        ids[row, longest - len(prompts[place]) :] = torch.tensor(list(prompts[place]), dtype=torch.long)
        mask[row, longest - len(prompts[place]) :] = 1
    tokens_left = torch.full((len(chosen),), limit, device=device)
    return AnswerBatch(ids=ids.to(device), mask=mask.to(device), places=list(chosen), tokens_left=tokens_left)


def admit(model: Any, batch: AnswerBatch | None, new: AnswerBatch) -> AnswerBatch:
    """Return `batch` with `new` added, after computing the keys and values of the new prompts up to the last token."""
    if batch is None:
        return new
    positions = (new.mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]
    new.cache = DynamicCache()
    if new.ids.shape[1] < 2:  # there is nothing before the last token
        new.ids, new.mask = pad(new.ids, (1, 0)), pad(new.mask, (1, 0))
        positions = torch.zeros_like(new.ids[:, :-1])
    model(
        input_ids=new.ids[:, :-1],
        attention_mask=new.mask[:, :-1],
        position_ids=positions,
        past_key_values=new.cache,
        use_cache=True,
        logits_to_keep=1,
    )
    width = max(batch.ids.shape[1], new.ids.shape[1])
    batch, new = _widen(batch, width), _widen(new, width)
    for layer, added in zip(batch.cache.layers, new.cache.layers, strict=True):
        layer.keys, layer.values = torch.cat([layer.keys, added.keys]), torch.cat([layer.values, added.values])
    return AnswerBatch(
        ids=torch.cat([batch.ids, new.ids]),
        mask=torch.cat([batch.mask, new.mask]),
        places=batch.places + new.places,
        tokens_left=torch.cat([batch.tokens_left, new.tokens_left]),
        cache=batch.cache,
    )


def _widen(batch: AnswerBatch, width: int) -> AnswerBatch:
    """Return the batch, cache included, padded or cut on the left to `width` columns."""
    padding = width - batch.ids.shape[1]
    if padding:
        batch.ids, batch.mask = pad(batch.ids, (padding, 0)), pad(batch.mask, (padding, 0))
        for layer in batch.cache.layers if batch.cache is not None else ():
            layer.keys, layer.values = (pad(part, (0, 0, padding, 0)) for part in (layer.keys, layer.values))
    return batch


def advance(
    model: Any,
    batch: AnswerBatch,
    generation: GenerationConfig,
    stops: Tensor,
    criteria: StoppingCriteriaList,
    *,
    answers: list[list[int]] | None = None,
    processors: LogitsProcessorList | None = None,
) -> AnswerBatch | None:
    """Generate until `criteria` interrupt, and add the tokens to `answers`; return the rows that continue, if any."""
    generation.max_new_tokens = int(batch.tokens_left.max())
    generation.return_dict_in_generate = True
    output = model.generate(
        input_ids=batch.ids,
        attention_mask=batch.mask,
        generation_config=generation,
        past_key_values=batch.cache,
        stopping_criteria=criteria,
        logits_processor=processors,
    )
    new = output.sequences[:, batch.ids.shape[1] :]
    for place, tokens, limit in zip(batch.places, new.tolist(), batch.tokens_left.tolist(), strict=True):
        if answers is not None:
            answers[place] += tokens[:limit]
    keep = (~torch.isin(new, stops).any(dim=1) & (batch.tokens_left > new.shape[1])).nonzero()[:, 0]
    if not len(keep):
        return None
    rest = AnswerBatch(
        ids=output.sequences[keep],
        mask=torch.cat([batch.mask, torch.ones_like(new)], dim=1)[keep],
        places=[batch.places[row] for row in keep.tolist()],
        tokens_left=batch.tokens_left[keep] - new.shape[1],
        cache=output.past_key_values if _selectable(output.past_key_values) else None,
    )
    if rest.cache is not None:
        rest.cache.batch_select_indices(keep)
        if refillable(rest.cache):
            # Padding common to all rows is dropped, so that the batch is never wider than its longest row.
            return _widen(rest, rest.ids.shape[1] - int(rest.mask.any(dim=0).int().argmax()))
    return rest


def _selectable(cache: Any) -> bool:
    """Return whether rows can be removed from a cache; states of linear attention do not allow it."""
    return isinstance(cache, DynamicCache) and all(hasattr(layer, "batch_select_indices") for layer in cache.layers)


def refillable(cache: Any) -> bool:
    """Return whether rows can be added to a cache: every layer holds plain keys and values of all tokens."""
    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)
