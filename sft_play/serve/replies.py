"""Read requests of OpenAI's API, and write their answers as it does: at once, or piece by piece."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sft_play.data import OPEN
from sft_play.data.answers import AnswerParts, marks_of, parts_of
from sft_play.data.tools import tools_of
from sft_play.data.turns import chat_turns
from sft_play.data.written_tools import HINT
from sft_play.errors import DataError
from sft_play.evaluation.generation import prompt_ids
from sft_play.model.tokenizer import write_chat
from sft_play.serve.engine import Answering, Engine, Sampling
from sft_play.serve.parameters import Refused, read_parameters, require

DEFAULT_TOKENS = 1024
"""Maximum tokens of an answer whose request sets none."""
Event = Mapping[str, Any]


@dataclass(kw_only=True)
class Completion:
    """A request: its answers, and how they are written."""

    id: str
    created: int
    model: str
    """As the request names it."""
    path: str
    stream: bool
    usage: bool
    """Whether a stream ends with the numbers of tokens."""
    called: bool
    """Whether calls are calls of functions that the request offers."""
    tokenizer: Any
    prompts: list[list[int]]
    answerings: list[Answering] = field(default_factory=list)

    def parse(self, tokens: Sequence[int]) -> AnswerParts:
        """Return the parts of an answer's tokens."""
        if self.path == "/v1/completions":
            return AnswerParts(self.tokenizer.decode(tokens, skip_special_tokens=True))
        parts = parts_of(self.tokenizer, tokens)
        return marks_of(self.tokenizer).called(parts) if self.called else parts


def read_completion(engine: Engine, path: str, body: Any, name: str, notify: Callable[[], None]) -> Completion:
    """Return what a request asks for, and raise `Refused` for what cannot be answered."""
    asked = read_parameters(path, body)
    model = require(asked, "model")
    if model != name:
        raise Refused(
            f"there is one model here: `{name}`, not `{model}`", param="model", status=404, code="model_not_found"
        )
    prompts = _plain_prompts(engine, asked) if path == "/v1/completions" else [_chat_prompt(engine, path, asked)]
    for prompt in prompts:
        if len(prompt) >= engine.positions:
            raise Refused(
                f"the prompt has {len(prompt)} tokens, and the model takes at most {engine.positions - 1}",
                param="prompt" if path == "/v1/completions" else "input" if "input" in asked else "messages",
                code="context_length_exceeded",
            )
    completion = Completion(
        id=uuid.uuid4().hex,
        created=int(time.time()),
        model=model,
        path=path,
        stream=asked.get("stream", False),
        usage=asked.get("stream_options", False),
        called=bool(asked.get("tools")) and asked.get("tool_choice") != "none",
        tokenizer=engine.tokenizer,
        prompts=prompts,
    )
    for prompt in prompts:
        for number in range(asked.get("n", 1)):
            sampling = _sampling(engine, asked, len(prompt), number)
            completion.answerings.append(Answering(prompt, sampling, parse=completion.parse, notify=notify))
    return completion


def _sampling(engine: Engine, asked: Mapping[str, Any], prompt: int, number: int) -> Sampling:
    most = next(
        (asked[key] for key in ("max_completion_tokens", "max_output_tokens", "max_tokens") if key in asked),
        DEFAULT_TOKENS,
    )
    varied = asked.keys() & {"top_p", "top_k", "seed"} or asked.get("n", 1) > 1
    schema = asked.get("response_format") or asked.get("text")
    logprobs = asked.get("logprobs")
    if logprobs is True:
        logprobs = asked.get("top_logprobs", 0)
    elif asked.get("top_logprobs") and not logprobs:
        raise Refused("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    try:
        return Sampling(
            max_tokens=min(most, engine.positions - prompt),
            temperature=asked.get("temperature", 1.0 if varied else 0.0),
            top_p=asked.get("top_p", 1.0),
            top_k=asked.get("top_k", 0),
            seed=asked["seed"] + number if "seed" in asked else None,
            presence_penalty=asked.get("presence_penalty", 0.0),
            frequency_penalty=asked.get("frequency_penalty", 0.0),
            bias=asked.get("logit_bias", {}),
            stops=asked.get("stop", ()),
            logprobs=None if logprobs is False else logprobs,
            grammar=None if schema is None else engine.grammar_of(schema),
        )
    except ValueError as error:
        raise Refused(f"the JSON schema cannot be followed: {error}", param="response_format") from None


def _plain_prompts(engine: Engine, asked: Mapping[str, Any]) -> list[list[int]]:
    value = require(asked, "prompt")
    several = [value] if isinstance(value, str) or _are_tokens(value) else value
    vocabulary = len(engine.tokenizer)
    prompts = [
        engine.tokenizer(prompt, verbose=False)["input_ids"] if isinstance(prompt, str) else prompt
        for prompt in (several if isinstance(several, list) else [])
        if isinstance(prompt, str) or (_are_tokens(prompt) and max(prompt) < vocabulary)
    ]
    if not prompts or len(prompts) != len(several) or not all(prompts):
        raise Refused("`prompt` is not a text, tokens of the model, or a list of them", param="prompt")
    return prompts


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def _chat_prompt(engine: Engine, path: str, asked: Mapping[str, Any]) -> list[int]:
    column = "input" if path == "/v1/responses" else "messages"
    messages, tools = require(asked, column), asked.get("tools")
    if column == "input":
        messages = _messages_of(messages, asked.get("instructions"))
        # A chat has functions one level deeper.
        bare = [{key: value for key, value in tool.items() if key != "type"} for tool in tools or ()]
        tools = [{"type": "function", "function": function} for function in bare]
    variables = dict(asked.get("chat_template_kwargs", {}))
    if effort := asked.get("reasoning_effort", asked.get("reasoning")):
        if "reasoning_effort" not in str(engine.tokenizer.chat_template):
            raise Refused("this model's chat template does not read `reasoning_effort`", param="reasoning_effort")
        variables["reasoning_effort"] = effort
    if not messages:
        raise Refused(f"`{column}` is empty", param=column)
    if asked.get("tool_choice") == "none":
        tools = None
    try:
        turns = chat_turns(messages, column)
        if turns[-1]["role"] == "assistant":
            raise Refused("the last message is the assistant's; answers are not continued here", param=column)
        described = tools_of({"tools": tools}) if tools else None
        prompt = prompt_ids(engine.tokenizer, turns, described, **variables)
    except DataError as error:
        advice = f"; {error.hint}" if error.hint == HINT else ""  # others are about rows
        raise Refused(error.message + advice, param=column) from None
    if asked.get("response_format") or asked.get("text"):
        if tools:
            raise Refused("`response_format` and `tools` exclude each other here", param="response_format")
        text = write_chat(engine.tokenizer, turns, add_generation_prompt=True, **variables)
        if text.rstrip().endswith(OPEN):
            raise Refused(
                "this model thinks before it answers, and JSON cannot begin with a thought;"
                ' `chat_template_kwargs: {"enable_thinking": false}` may turn it off',
                param="response_format",
            )
    return prompt


def _messages_of(value: Any, instructions: str | None) -> Any:
    """Return the messages of `input`: a text, or a list of messages, calls and their results."""
    first = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*first, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise Refused("`input` is not a text or a list of messages", param="input")
    messages: list[Any] = []
    for item in value:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages.append({"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "message":
            messages.append({key: item[key] for key in ("role", "content") if key in item})
        elif kind != "reasoning":
            raise Refused(f"`input` contains an item of type `{kind}`, which is not read here", param="input")
    return [*first, *messages]


# Writing answers.


def _parts_of_answer(completion: Completion, answering: Answering) -> tuple[AnswerParts, list[dict[str, Any]]]:
    """Return an answer without the text that stopped it, and its calls; calls that cannot be read are text."""
    parts = completion.parse(answering.tokens)
    cut = min((at for stop in answering.sampling.stops if (at := parts.text.find(stop)) >= 0), default=None)
    parts = parts if cut is None else parts._replace(text=parts.text[:cut])
    calls = []
    for index, text in enumerate(parts.calls if completion.called else ()):
        try:
            call = json.loads(text)
            calls.append({"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)})
        except (ValueError, TypeError, KeyError):
            return AnswerParts(parts.shown, parts.thought), []
        calls[-1]["id"] = f"call_{completion.id[:16]}{index}"
    return (parts._replace(calls=()) if calls else AnswerParts(parts.shown, parts.thought)), calls


def _usage(completion: Completion) -> dict[str, int]:
    prompt = sum(map(len, completion.prompts))
    answers = sum(len(answering.tokens) for answering in completion.answerings)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def _tool_calls(calls: Sequence[Mapping[str, Any]], *, numbered: bool = False) -> list[dict[str, Any]]:
    return [
        {
            **({"index": index} if numbered else {}),
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for index, call in enumerate(calls)
    ]


def _logprobs(completion: Completion, answering: Answering, start: int = 0) -> dict[str, Any] | None:
    """Return the log-probabilities of an answer's tokens from `start` on, in the form of the request's path."""
    if answering.sampling.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = completion.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    tokens = answering.chosen[start:]
    if completion.path == "/v1/completions":
        texts = [completion.tokenizer.decode([chosen.token]) for chosen in tokens]
        before = len(completion.tokenizer.decode(answering.tokens[:start]))
        return {
            "tokens": texts,
            "token_logprobs": [chosen.logprob for chosen in tokens],
            "top_logprobs": [{completion.tokenizer.decode([t]): p for t, p in chosen.likeliest} for chosen in tokens],
            "text_offset": [before + sum(map(len, texts[:index])) for index in range(len(texts))],
        }
    return {
        "content": [
            entry(chosen.token, chosen.logprob) | {"top_logprobs": [entry(*likely) for likely in chosen.likeliest]}
            for chosen in tokens
        ],
        "refusal": None,
    }


def reply(completion: Completion) -> dict[str, Any]:
    """Return the reply to a request whose answers are complete."""
    if completion.path == "/v1/responses":
        return _response(
            completion, "completed", _items(completion, *_parts_of_answer(completion, completion.answerings[0]))
        )
    choices = []
    for index, answering in enumerate(completion.answerings):
        parts, calls = _parts_of_answer(completion, answering)
        choice = {
            "index": index,
            "finish_reason": "tool_calls" if calls else answering.finish,
            "logprobs": _logprobs(completion, answering),
        }
        if completion.path == "/v1/completions":
            choices.append(choice | {"text": parts.text})
            continue
        message: dict[str, Any] = {"role": "assistant", "content": parts.text if parts.text or not calls else None}
        message |= {"tool_calls": _tool_calls(calls)} if calls else {}
        message |= {"reasoning_content": parts.thought} if parts.thought else {}
        choices.append(choice | {"message": message})
    return _head(completion, chunk=False) | {"choices": choices, "usage": _usage(completion)}


def _head(completion: Completion, *, chunk: bool) -> dict[str, Any]:
    chat = completion.path == "/v1/chat/completions"
    kind = "text_completion" if not chat else "chat.completion.chunk" if chunk else "chat.completion"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{completion.id}",
        "object": kind,
        "created": completion.created,
        "model": completion.model,
    }


def _response(completion: Completion, status: str, output: Sequence[Event]) -> dict[str, Any]:
    answering = completion.answerings[0]
    cut = status == "completed" and answering.finish == "length"
    usage = _usage(completion)
    return {
        "id": f"resp_{completion.id}",
        "object": "response",
        "created_at": completion.created,
        "status": "incomplete" if cut else status,
        "model": completion.model,
        "output": list(output),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": answering.sampling.temperature,
        "top_p": answering.sampling.top_p,
        "store": False,
        "usage": None
        if status != "completed"
        else {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _items(completion: Completion, parts: AnswerParts, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of `output`: a thought, the message, calls."""
    items: list[dict[str, Any]] = []
    if parts.thought:
        content = [{"type": "reasoning_text", "text": parts.thought}]
        items.append({"id": f"rs_{completion.id}", "type": "reasoning", "summary": [], "content": content})
    if parts.text or not calls:
        items.append(_message(completion, "completed", [_part(parts.text)]))
    for call in calls:
        items.append(
            {
                "id": f"fc_{call['id']}",
                "type": "function_call",
                "call_id": call["id"],
                "name": call["name"],
                "arguments": call["arguments"],
                "status": "completed",
            }
        )
    return items


def _message(completion: Completion, status: str, content: list[Any]) -> dict[str, Any]:
    return {"id": f"msg_{completion.id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class Pieces:
    """The parts of a growing answer that can be sent: text that cannot become a mark or a stop any more."""

    def __init__(self, completion: Completion, answering: Answering) -> None:
        self.completion, self.answering = completion, answering
        self.text = self.thought = ""
        """Sent so far."""
        self._seen = self._sent = 0

    def next(self) -> tuple[str, str, int]:
        """Return the new text, the new thought, and the first token whose log-probabilities were not sent yet."""
        answering, completion, start = self.answering, self.completion, self._sent
        if not answering.done and len(answering.tokens) == self._seen:
            return "", "", start
        tokens = list(answering.tokens)
        self._seen = len(tokens)
        if answering.done:
            parts = _parts_of_answer(completion, answering)[0]
        elif self._holds(tokens):
            return "", "", start
        else:
            parts = completion.parse(tokens)
            parts = parts._replace(text=_certain(parts.text, (*answering.sampling.stops, *self._opening())))
        text, self.text = _rest(parts.text, self.text)
        thought, self.thought = _rest(parts.thought.removesuffix("\ufffd"), self.thought)
        if text or answering.done:
            self._sent = len(answering.chosen)
        return text, thought, start

    def _holds(self, tokens: Sequence[int]) -> bool:
        """Return whether nothing can be sent: a mark is incomplete, or only its end distinguishes a call from text."""
        if self.completion.path == "/v1/completions":
            return False
        marks = marks_of(self.completion.tokenizer)
        return marks.awaits(self.completion.tokenizer.decode(tokens)) or bool(
            self.completion.called and marks.form and not marks.form.opening
        )

    def _opening(self) -> tuple[str, ...]:
        form = marks_of(self.completion.tokenizer).form if self.completion.called else None
        return (form.opening,) if form and form.opening else ()


def _certain(text: str, stops: Sequence[str]) -> str:
    """Return a text without the possible beginning of a stop or of a character whose other bytes follow."""
    text = text.removesuffix("\ufffd")
    begun = max(
        (n for stop in stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])),
        default=0,
    )
    complete = min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
    return text[: min(complete, len(text) - begun)]


def _rest(text: str, sent: str) -> tuple[str, str]:
    return (text[len(sent) :], text) if text.startswith(sent) else ("", sent)


class CompletionEvents:
    """The chunks of streamed completions."""

    def __init__(self, completion: Completion) -> None:
        self.completion, self.chat = completion, completion.path == "/v1/chat/completions"
        self._pieces = [Pieces(completion, answering) for answering in completion.answerings]

    def _chunk(self, index: int, content: dict[str, Any], **others: Any) -> Event:
        choice = {"index": index, "finish_reason": None, "logprobs": None, **others}
        choice |= {"delta": content} if self.chat else content
        return _head(self.completion, chunk=True) | {"choices": [choice]}

    def begin(self) -> Iterator[Event]:
        for index in range(len(self._pieces) if self.chat else 0):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def grown(self) -> Iterator[Event]:
        """Yield the text that can be sent now."""
        for index, piece in enumerate(self._pieces):
            text, thought, start = piece.next()
            if thought and self.chat:
                yield self._chunk(index, {"reasoning_content": thought})
            if text:
                logprobs = _logprobs(self.completion, piece.answering, start)
                yield self._chunk(index, {"content" if self.chat else "text": text}, logprobs=logprobs)

    def end(self, index: int) -> Iterator[Event]:
        """Yield the end of an answer."""
        answering = self.completion.answerings[index]
        _, calls = _parts_of_answer(self.completion, answering)
        if calls and self.chat:
            yield self._chunk(index, {"tool_calls": _tool_calls(calls, numbered=True)})
        reason = "tool_calls" if calls else answering.finish
        yield self._chunk(index, {} if self.chat else {"text": ""}, finish_reason=reason)

    def usage(self) -> Event:
        return _head(self.completion, chunk=True) | {"choices": [], "usage": _usage(self.completion)}


class ResponseEvents:
    """The numbered events of a streamed response."""

    def __init__(self, completion: Completion) -> None:
        self.completion, self.piece = completion, Pieces(completion, completion.answerings[0])
        self._number, self._opened = -1, False

    def _event(self, kind: str, **parts: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **parts}

    def begin(self) -> Iterator[Event]:
        started = _response(self.completion, "in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def grown(self) -> Iterator[Event]:
        """Yield the text that can be sent now."""
        text, _, _ = self.piece.next()
        if not text:
            return
        place = {"item_id": f"msg_{self.completion.id}", "output_index": 0, "content_index": 0}
        if not self._opened:
            self._opened = True
            opened = _message(self.completion, "in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=opened)
            yield self._event("response.content_part.added", part=_part(""), **place)
        yield self._event("response.output_text.delta", delta=text, logprobs=[], **place)

    def end(self, _: int) -> Iterator[Event]:
        """Yield the final items, the message first, since it was streamed."""
        items = _items(self.completion, *_parts_of_answer(self.completion, self.completion.answerings[0]))
        items.sort(key=lambda item: item["type"] != "message")
        for index, item in enumerate(items):
            if item["type"] == "message" and self._opened:
                place = {"item_id": item["id"], "output_index": index, "content_index": 0}
                [part] = item["content"]
                yield self._event("response.output_text.done", text=part["text"], logprobs=[], **place)
                yield self._event("response.content_part.done", part=part, **place)
            else:
                yield self._event("response.output_item.added", output_index=index, item=item)
            if item["type"] == "function_call":
                yield self._event(
                    "response.function_call_arguments.done",
                    item_id=item["id"],
                    output_index=index,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            yield self._event("response.output_item.done", output_index=index, item=item)
        cut = self.completion.answerings[0].finish == "length"
        kind = "response.incomplete" if cut else "response.completed"
        yield self._event(kind, response=_response(self.completion, "completed", items))
