"""Answering conversations: template, batches, generation to the end of the turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from sft_play.errors import DataError
from sft_play.model.tokenizer import end_of_turn_ids

Message = Mapping[str, str]
SHARE_STOPPED = 0.25
"""Share of a batch that must have ended its turn before the rest goes on without it: each change costs a copy of the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One completion."""

    text: str
    tokens: int
    """Tokens of the answer, without the one that ends the turn."""
    stopped: bool
    """Whether the model ended its turn itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSettings:
    """How answers are made; greedy, or by beams."""

    max_new_tokens: int = 128
    num_beams: int = 1
    batch_size: int = 8
    """Prompts answered together."""


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Returns the tokens of a conversation up to where the assistant begins to speak.

    Raises `DataError` when the chat template refuses the conversation (roles that it does not know, or in a wrong order).
    """
    import jinja2

    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise DataError(f"the chat template does not take this conversation: {error}") from error
    # The template writes its own special tokens; the tokenizer must not add a second BOS.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def context_length(model: Any) -> int:
    """Returns the most positions that the model knows; a huge number where its configuration names none."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31)


def generation_settings(tokenizer: Any, settings: AnswerSettings, *, room: int) -> GenerationConfig:
    """Returns greedy (or beam) settings that end at the template's end of turn and within `room` more tokens."""
    stops = end_of_turn_ids(tokenizer)
    pad = tokenizer.pad_token_id
    return GenerationConfig(
        max_new_tokens=max(1, min(settings.max_new_tokens, room)),
        num_beams=settings.num_beams,
        do_sample=False,
        eos_token_id=list(stops),
        pad_token_id=stops[0] if pad is None else pad,
        use_cache=True,
    )


def use_our_settings(model: Any) -> None:
    """Drops the folder's own generation settings: transformers would take from them (sampling, penalties) what a call omits."""
    for part in (model, getattr(model, "get_base_model", lambda: model)()):
        part.generation_config = GenerationConfig()


def answer_all(
    model: Any,
    tokenizer: Any,
    settings: AnswerSettings,
    prompts: Sequence[Sequence[int]],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """Answers prompts (lists of tokens) in batches of similar length, padded on the left; returns answers in the given order."""
    use_our_settings(model)
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), settings.batch_size):
        batch = order[start : start + settings.batch_size]
        answers.update(zip(batch, answer_batch(model, tokenizer, [prompts[i] for i in batch], settings), strict=True))
        if progress:
            progress(len(answers), len(prompts))
    return [answers[index] for index in range(len(prompts))]


def answer_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    settings: AnswerSettings,
    *,
    device: torch.device | str | None = None,
    synced: bool = False,
) -> list[Answer]:
    """Answers prompts together, padded on the left. `synced` keeps forward passes in step with other ranks (ZeRO-3, FSDP2)."""
    longest = max(map(len, prompts))
    generation = generation_settings(tokenizer, settings, room=context_length(model) - longest)
    device = device or model.device
    input_ids = torch.full((len(prompts), longest), generation.pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for index, prompt in enumerate(prompts):
        input_ids[index, longest - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.long)
        attention_mask[index, longest - len(prompt) :] = 1
    with torch.no_grad():
        inputs = input_ids.to(device), attention_mask.to(device)
        if synced or settings.num_beams > 1 or len(prompts) == 1 or "generate" in vars(model):
            # Ranks must take equally many steps, beams need each other, and Unsloth puts a generate of its own in the object.
            output = model.generate(
                input_ids=inputs[0], attention_mask=inputs[1], generation_config=generation, synced_gpus=synced
            )[:, longest:].tolist()
        else:
            output = _generate_in_parts(model, *inputs, generation)
    stops = set(generation.eos_token_id)
    return [_answer(tokenizer, tokens, stops) for tokens in output]


class _EnoughStopped(StoppingCriteria):
    """Interrupts generation when `SHARE_STOPPED` of the batch has ended its turn."""

    def __init__(self, stops: torch.Tensor, batch: int) -> None:
        self.stops, self.stopped = stops, torch.zeros(batch, dtype=torch.bool, device=stops.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.stopped |= torch.isin(input_ids[:, -1], self.stops)
        return (self.stopped.float().mean() >= SHARE_STOPPED).expand(len(self.stopped))


def _generate_in_parts(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation: GenerationConfig
) -> list[list[int]]:
    """Returns each prompt's new tokens [B, steps that it took], greedily.

    transformers computes a batch to the end of its longest answer. Here answers that have ended leave it, with their part of the
    cache, whenever they are `SHARE_STOPPED` of what is left; which ones do depends on the batch alone, so ranks do not matter.
    """
    stops = torch.tensor(generation.eos_token_id, device=input_ids.device)
    found: list[list[int]] = [[] for _ in range(len(input_ids))]
    live = torch.arange(len(input_ids), device=input_ids.device)
    cache, selectable, left = None, True, generation.max_new_tokens
    generation.return_dict_in_generate = True
    while True:
        generation.max_new_tokens = left
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=generation,
            past_key_values=cache,
            stopping_criteria=StoppingCriteriaList([_EnoughStopped(stops, len(live))] if selectable and len(live) > 1 else []),
        )
        new = output.sequences[:, input_ids.shape[1] :]
        for place, tokens in zip(live.tolist(), new.tolist(), strict=True):
            found[place] += tokens
        left -= new.shape[1]
        keep = (~torch.isin(new, stops).any(dim=1)).nonzero()[:, 0]
        if left <= 0 or not len(keep):
            return found
        live, input_ids = live[keep], output.sequences[keep]
        attention_mask = torch.cat([attention_mask, torch.ones_like(new)], dim=1)[keep]
        cache = output.past_key_values
        selectable = isinstance(cache, DynamicCache)  # others (recurrent states) are made again from the tokens, once
        if isinstance(cache, DynamicCache):
            cache.batch_select_indices(keep)
        else:
            cache = None


def _answer(tokenizer: Any, tokens: Sequence[int], stops: set[int]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    return Answer(text=tokenizer.decode(kept, skip_special_tokens=True).strip(), tokens=len(kept), stopped=end is not None)
