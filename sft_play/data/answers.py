"""An answer in its parts, cut by the marks of the family's own chat template: what was thought, what is said, which
functions are called.

The marks are found by rendering answers whose parts are known. So a model that writes what its training rows hold has
the same parts.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from sft_play.data import CLOSE, OPEN
from sft_play.errors import DataError
from sft_play.model.tokenizer import end_of_turn_ids, write_chat

WORDS, THOUGHT = "qWordsz", "qThoughtz"
NAMES = ("qFirstz", "qSecondz")
"""Of two functions; none of these texts occurs in a template."""
ARGUMENTS = {"qKeyaz": "qValueaz", "qKeybz": "qValuebz"}
QUESTION = {"role": "user", "content": "question"}
_NAME = re.compile(r"\s*([\w.:-]+)")


class AnswerParts(NamedTuple):
    """The parts of an answer."""

    text: str
    thought: str = ""
    calls: tuple[str, ...] = ()
    """Each call as JSON of its `name` and `arguments`, in the model's order; as written where it cannot be read."""

    @property
    def shown(self) -> str:
        """Text, and a line for each call."""
        return "\n".join(part for part in (self.text, *self.calls) if part)

    @property
    def compared(self) -> AnswerParts:
        """The same for the same answer: arguments in alphabetical order, whole numbers as 2 and not 2.0."""
        return self._replace(calls=tuple(map(_settled, self.calls)))


Read = Callable[[str], "list[tuple[str, Any]] | None"]
"""Gives name and arguments of the calls in a text, or `None` if it is not written as the template writes calls."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template writes calls."""

    opening: str
    """What stands before the first; empty if nothing marks it."""
    read: Read
    led: bool
    """Whether calls may follow what stands before a text without a thought; where not, that is the head of another
    message.
    """


@dataclass(frozen=True, slots=True)
class Marks:
    """How one tokenizer's template writes the parts of an answer; texts without the white space around them."""

    begun: bool
    """Whether the generation prompt has opened a thought."""
    opening: str
    """What stands before a thought."""
    closing: str
    """What stands between a thought and the text."""
    lead: str
    """What stands before a text without a thought."""
    trail: str
    """What stands between a text and the end of the turn."""
    form: CallForm | None
    special: re.Pattern[str] | None
    """The tokenizer's special tokens."""

    def cut(self, raw: str, plain: str | None = None, *, generated: bool = True) -> AnswerParts:
        """Return the parts of an answer without its end of turn. `plain`: without special tokens, for an answer that
        has no marks.

        `generated`: it follows the generation prompt; words of a data set do not.
        """
        thought, closed, rest = "", "", raw.strip()
        for mark in dict.fromkeys((self.closing, CLOSE)):
            if mark and mark in rest:
                thought, closed, rest = rest.rpartition(mark)
                break
        text = rest.strip().removeprefix(self.lead) if self.lead else rest
        final = bool(self.lead) and (text != rest.strip() or closed.endswith(self.lead))
        calls: tuple[str, ...] = ()
        if self.form and self.form.opening and (self.form.led or not final):
            at = text.find(
                self.form.opening, len(self.opening) if self.opening and text.startswith(self.opening) else 0
            )
            if at >= 0:
                calls, text = _read(self.form, text[at:]), text[:at]
        if not closed and not final and self._unclosed(text, generated):
            thought, text = text, ""
        text = text.strip().removesuffix(self.trail).strip() if self.trail else text.strip()
        if text == raw.strip():
            return AnswerParts((raw if plain is None else plain).strip())
        return AnswerParts(self._clean(text), self._clean(self._inner(thought)), calls)

    def awaits(self, raw: str) -> bool:
        """Return whether a partial answer ends within a mark."""
        begun = (self.lead, self.opening, self.form.opening if self.form else "")
        return any(mark.startswith(raw.strip()) for mark in begun)

    def called(self, answer: AnswerParts) -> AnswerParts:
        """Return an answer that consists of calls, which only their form reveals."""
        if answer.calls or self.form is None or self.form.opening:
            return answer
        calls = self.form.read(answer.text)
        return answer._replace(text="", calls=tuple(call_text(*call) for call in calls)) if calls else answer

    def _unclosed(self, text: str, generated: bool) -> bool:
        begins = any(text.lstrip().startswith(mark) for mark in (self.opening, OPEN) if mark)
        return begins or (self.begun and generated)

    def _inner(self, thought: str) -> str:
        """Return a thought without its marks."""
        inner = thought.strip()
        for mark in (self.lead, self.opening, OPEN):
            inner = inner.removeprefix(mark).strip() if mark else inner
        # Between a thought and calls stands what stands between it and a text, but for the text's own lead.
        bridge = self.closing.removesuffix(self.lead).strip() if self.lead else ""
        return inner.removesuffix(bridge) if bridge else inner

    def _clean(self, text: str) -> str:
        return (self.special.sub("", text) if self.special else text).strip()


def _read(form: CallForm, text: str) -> tuple[str, ...]:
    calls = form.read(text)
    return (" ".join(text.split()),) if calls is None else tuple(call_text(*call) for call in calls)


def call_text(name: str, arguments: Any) -> str:
    """Return a call as text."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _settled(call: str) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in sorted(value.items())}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(value), ensure_ascii=False) if isinstance(value := _decoded(call), dict) else call


@lru_cache(maxsize=4)
def marks_of(tokenizer: Any) -> Marks:
    """Return the marks of a tokenizer's template, which must not change afterwards."""
    stops = [str(token) for token in tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer))]
    prompt, plain = _written(tokenizer, {"content": WORDS}, stops)
    lead, separator, trail = plain.partition(WORDS)
    if not separator:
        lead = trail = ""
    _, thinking = _written(tokenizer, {"content": WORDS, "reasoning_content": THOUGHT}, stops)
    opening, _, after = thinking.partition(THOUGHT)
    closing = after.partition(WORDS)[0] if THOUGHT in thinking and WORDS in after else ""
    begun = prompt.rstrip().endswith(OPEN) or bool(closing.strip() and lead.strip().startswith(closing.strip()))
    special = sorted({*tokenizer.all_special_tokens, *stops}, key=len, reverse=True)
    return Marks(
        begun=begun,
        opening=opening.strip() if closing else "",
        closing=closing.strip(),
        lead=lead.strip(),
        trail=trail.strip(),
        form=_call_form(tokenizer, stops, lead),
        special=re.compile("|".join(map(re.escape, special))) if special else None,
    )


def parts_of(tokenizer: Any, tokens: Sequence[int]) -> AnswerParts:
    """Return the parts of an answer in tokens, without the one that ends the turn."""
    raw, plain = (tokenizer.decode(tokens, skip_special_tokens=skip) for skip in (False, True))
    return marks_of(tokenizer).cut(raw, plain)


def compare_parts(tokenizer: Any, row: Mapping[str, Any], answer: AnswerParts) -> tuple[AnswerParts, AnswerParts]:
    """Return the parts of a prepared row's own answer and of the one that was made, cut by the same marks.

    The row's tokens tell its calls; its words are those of the data.
    """
    marks, words = marks_of(tokenizer), row["reference"]
    reference = marks.cut(words, generated=False)
    if not reference.calls and "input_ids" in row:
        written = [int(token) for token in row["input_ids"][len(row["prompt_ids"]) :]]
        own = parts_of(tokenizer, written[:-1] if written and written[-1] in end_of_turn_ids(tokenizer) else written)
        reference = reference._replace(calls=(own if words.strip() else marks.called(own)).calls)
    return reference, marks.called(answer) if reference.calls else answer


def _written(
    tokenizer: Any, turn: Mapping[str, Any], stops: Sequence[str], tools: Sequence[Any] | None = None
) -> tuple[str, str]:
    """Return the generation prompt and what the template writes of an answer after it, up to the end of the turn; empty
    for none.
    """
    options: dict[str, Any] = {"tools": list(tools)} if tools else {}
    try:
        prompt = write_chat(tokenizer, [QUESTION], add_generation_prompt=True, **options)
        full = write_chat(tokenizer, [QUESTION, {"role": "assistant", **turn}], **options)
    except DataError:
        return "", ""
    answer = full[len(_common_start(prompt, full)) :]
    starts = [answer.rfind(mark) + len(mark) for mark in (WORDS, *ARGUMENTS.values()) if mark in answer]
    ends = [end for stop in stops if (end := answer.find(stop, max(starts, default=0))) >= 0]
    return prompt, answer[: min(ends, default=len(answer))]


# How calls are written: one and two of them are rendered, and what stands around their names and arguments is read off.


def _call_form(tokenizer: Any, stops: Sequence[str], lead: str) -> CallForm | None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Call.",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": "string", "description": "Text."} for key in ARGUMENTS},
                },
            },
        }
        for name in NAMES
    ]
    calls = [
        {"type": "function", "id": f"qCallId{index}z", "function": {"name": name, "arguments": ARGUMENTS}}
        for index, name in enumerate(NAMES)
    ]
    single, double = (
        _written(tokenizer, {"content": "", "tool_calls": calls[:count]}, stops, tools)[1] for count in (1, 2)
    )
    led, single = single.startswith(lead), single.removeprefix(lead)
    name, (first, second) = NAMES[0], ARGUMENTS
    if not all(mark in single for mark in (name, *ARGUMENTS, *ARGUMENTS.values())):
        return None
    if enclosing := next((located for located in _objects(single) if first in json.dumps(located[0])), None):
        written, start, _ = enclosing
        if name in json.dumps(written):
            opening = single[:start].strip().rstrip("[").strip()
            return CallForm(opening, _object_reader(written), led)
        return CallForm(single[: single.index(name)].strip(), _named_reader(_before(single, double)), led)
    key_at, value_at = single.index(first), single.index(ARGUMENTS[first])
    between = single[key_at + len(first) : value_at]
    separator = single[value_at + len(ARGUMENTS[first]) : single.index(second)]
    before_key = _common_end(single[single.index(name) + len(name) : key_at], separator)
    after_value = separator.removesuffix(before_key)
    read: Read = _read_python
    if before_key.strip() and between.strip() and after_value.strip():
        read = _pairs_reader(_before(single, double), before_key.strip(), between.strip(), after_value.strip())
    return CallForm(single[: single.index(name)].strip(), read, led)


def _before(single: str, double: str) -> str:
    """Return the text before the name of every call."""
    opening = single[: single.index(NAMES[0])]
    if NAMES[1] in double:
        between = double[double.rindex(ARGUMENTS["qKeybz"], 0, double.index(NAMES[1])) : double.index(NAMES[1])]
        opening = _common_end(opening, between) or opening
    return opening.strip()


def _common_start(first: str, second: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(letter for letter, _ in pairs)


def _common_end(first: str, second: str) -> str:
    return _common_start(first[::-1], second[::-1])[::-1]


def _objects(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the outermost JSON objects in a text, with start and end."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        end = at + 1
        try:
            value, end = decoder.raw_decode(text, at)
            yield value, at, end
        except (json.JSONDecodeError, RecursionError):
            pass
        at = text.find("{", end)


def _object_reader(written: dict[str, Any]) -> Read:
    """Read calls that are JSON objects with a name and arguments, or contain such an object."""
    outer = next(
        (key for key, value in written.items() if isinstance(value, dict) and NAMES[0] in value.values()), None
    )
    inner = written[outer] if outer else written
    name = next((key for key, value in inner.items() if value == NAMES[0]), None)
    arguments_key = next(
        (key for key, value in inner.items() if value == ARGUMENTS or _decoded(value) == ARGUMENTS), ""
    )

    def read(text: str) -> list[tuple[str, Any]] | None:
        calls = []
        for parsed, _, _ in _objects(text):
            call = parsed.get(outer) if outer else parsed
            if (
                not isinstance(call, dict)
                or arguments_key not in call
                or not isinstance(called := call.get(str(name)), str)
            ):
                return None
            calls.append((called, _decoded(call[arguments_key])))
        return calls or None

    return read


def _named_reader(before: str) -> Read:
    """Read calls whose name precedes the JSON object of their arguments."""

    def read(text: str) -> list[tuple[str, Any]] | None:
        calls, at = [], text.find(before)
        while at >= 0:
            name = _NAME.match(text, at + len(before))
            arguments = next(_objects(text[name.end() :]), None) if name else None
            if name is None or arguments is None:
                return None
            calls.append((name.group(1), arguments[0]))
            at = text.find(before, name.end() + arguments[2])
        return calls or None

    return read


def _pairs_reader(before: str, before_key: str, between: str, after_value: str) -> Read:
    """Read calls whose arguments are pairs of texts within marks."""
    parts = (re.escape(before_key), r"\s*(.+?)\s*", re.escape(between), r"\s*(.*?)\s*", re.escape(after_value))
    pair = re.compile("".join(parts), re.DOTALL)

    def read(text: str) -> list[tuple[str, Any]] | None:
        calls = []
        for part in text.split(before)[1:]:
            if (name := _NAME.match(part)) is None:
                return None
            calls.append((name.group(1), {key: _decoded(value) for key, value in pair.findall(part, name.end())}))
        return calls or None

    return read


def _read_python(text: str) -> list[tuple[str, Any]] | None:
    """Read a list of calls as Python writes them: `[add(a=2), stop()]`."""
    try:
        expression = ast.parse(text[text.index("[") : text.rindex("]") + 1], mode="eval").body
        calls = [call for call in getattr(expression, "elts", ()) if isinstance(call, ast.Call)]
        keywords = [{str(part.arg): ast.literal_eval(part.value) for part in call.keywords} for call in calls]
        return [(ast.unparse(call.func), arguments) for call, arguments in zip(calls, keywords, strict=True)] or None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _decoded(value: Any) -> Any:
    """Return a text parsed as JSON, or unchanged if it is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value
