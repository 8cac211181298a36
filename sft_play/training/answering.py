"""Answering conversations: template, batches, generation to the end of the turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from sft_play.data.calls import check_written, has_tools
from sft_play.data.example import Message
from sft_play.errors import DataError
from sft_play.model.rendering import write_chat
from sft_play.model.tokenizer import end_of_turn_ids
from sft_play.training.refill import Enough, cut_when, generate_refilling


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


def prompt_ids(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
    """Returns the tokens of a conversation, which may call `tools`, up to where the assistant begins to speak.

    Raises `DataError` when the chat template refuses the conversation (roles that it does not know, or in a wrong order) or leaves out
    its tools, a call or a result.
    """
    import jinja2

    def render(turns: Sequence[Message], offered: Sequence[Any] | None, prompt: bool) -> str:
        return write_chat(tokenizer, turns, add_generation_prompt=prompt, **({"tools": list(offered)} if offered else {}))

    try:
        if has_tools(messages, tools):
            check_written(messages, tools, render)
        text = render(messages, tools, True)
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
    enough: Enough | None = None,
) -> list[Answer]:
    """Answers prompts, padded on the left: `settings.batch_size` at once where `refills`, else all of them together.

    `synced` keeps forward passes in step with other ranks (ZeRO-3, FSDP2). `enough` is asked at each token: when it says yes, the
    answers are cut there.
    """
    longest = max(map(len, prompts))
    generation = generation_settings(tokenizer, settings, room=context_length(model) - longest)
    device = device or model.device
    with torch.no_grad():
        if refills(model, settings, synced=synced):
            output = generate_refilling(
                model, prompts, generation, at_once=max(1, settings.batch_size), device=device, enough=enough
            )
        else:
            output = _generate_together(model, prompts, generation, device=device, synced=synced, enough=enough)
    stops = set(generation.eos_token_id)
    return [_answer(tokenizer, tokens, stops) for tokens in output]


def refills(model: Any, settings: AnswerSettings, *, synced: bool) -> bool:
    """Whether prompts take the places of answers that have ended, and may therefore be given in more than a batch.

    Not where ranks must take equally many steps, where beams need each other, nor with Unsloth's own `generate`.
    """
    return not synced and settings.num_beams == 1 and "generate" not in vars(model)


def _generate_together(
    model: Any,
    prompts: Sequence[Sequence[int]],
    generation: GenerationConfig,
    *,
    device: Any,
    synced: bool,
    enough: Enough | None,
) -> list[list[int]]:
    longest = max(map(len, prompts))
    input_ids = torch.full((len(prompts), longest), generation.pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for index, prompt in enumerate(prompts):
        input_ids[index, longest - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.long)
        attention_mask[index, longest - len(prompt) :] = 1
    output = model.generate(
        input_ids=input_ids.to(device),
        attention_mask=attention_mask.to(device),
        generation_config=generation,
        synced_gpus=synced,
        stopping_criteria=cut_when(enough),
    )
    tokens: list[list[int]] = output[:, longest:].tolist()
    return tokens


def _answer(tokenizer: Any, tokens: Sequence[int], stops: set[int]) -> Answer:
    end = next((place for place, token in enumerate(tokens) if token in stops), None)
    kept = tokens if end is None else tokens[:end]
    return Answer(text=tokenizer.decode(kept, skip_special_tokens=True).strip(), tokens=len(kept), stopped=end is not None)
