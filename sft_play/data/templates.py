"""Which chat template is used, what `data.system` and `data.style` add to it, and proof that it writes tools and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sft_play.config.schema import DataConfig
from sft_play.data.example import Message
from sft_play.errors import DataError
from sft_play.files import text_sha256
from sft_play.runs.prepared import ChatFormat, ResolvedModel

FOLDER = Path(__file__).parent / "chat_templates"
EOS = "eos"
"""In a template's first comment: the end-of-sequence token of the tokenizer."""
SUFFIXES = (".jinja", ".jinja2", ".j2")


def template_names() -> list[str]:
    """Return the names that `data.chat_template` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def chat_format(data: DataConfig) -> ChatFormat | None:
    """Return what the configuration says about writing conversations; `None` where it leaves it to the tokenizer.

    Raise `DataError` for an unknown name, a file that is missing or no text, and a template with a syntax error.
    """
    style = {key: value for key, value in asdict(data.style).items() if value}
    if data.chat_template is None and data.system is None and not style:
        return None
    if data.system is not None and not data.system.strip():
        raise DataError("`data.system` is empty", hint="leave it out for no system turn")
    name, text = _chosen(data.chat_template) if data.chat_template is not None else (None, None)
    return ChatFormat(name=name, template=text, system=data.system, style=style)


def _chosen(value: str) -> tuple[str | None, str]:
    """Return the name (`None` for a file) and the text of `data.chat_template`."""
    if value in template_names():
        return value, _named_text(value)
    path = Path(value).expanduser()
    if not path.is_file() and not value.endswith(SUFFIXES) and "/" not in value:
        close = get_close_matches(value.lower(), template_names(), n=1, cutoff=0.5)
        known = f"names are {', '.join(template_names())}; anything else is the path of a Jinja file"
        raise DataError(
            f"`data.chat_template` is `{value}`, which is no template's name and no file",
            hint=f"did you mean `{close[0]}`? {known}" if close else known,
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template is not UTF-8 text (byte {error.start + 1})", place=str(path)) from None
    except OSError as error:
        hint = f"paths count from the folder in which you typed make; names are {', '.join(template_names())}"
        raise DataError(f"the chat template cannot be read: {error.strerror}", place=str(path), hint=hint) from None
    if not text.strip():
        raise DataError("the chat template is empty", place=str(path))
    check_syntax(text, str(path))
    return None, text


def check_syntax(text: str, place: str) -> None:
    """Raise `DataError` with the line of a template that is not Jinja."""
    import jinja2
    import jinja2.ext

    # The tag that transformers adds marks what the assistant writes. Importing transformers would take seconds.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", text)
    try:
        jinja2.Environment(extensions=[jinja2.ext.loopcontrols]).parse(plain)
    except RecursionError:
        raise DataError("the chat template nests without end", place=place) from None
    except jinja2.TemplateSyntaxError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip() if 0 < error.lineno <= len(lines) else ""
        raise DataError(
            f"the chat template has a syntax error: {error.message}: `{line}`",
            place=f"{place}:{error.lineno}",
            hint="`{% for %}` and `{% if %}` need their `{% endfor %}` and `{% endif %}`; `{{ }}` writes a value",
        ) from None


def fit_template(text: str, name: str, tokenizer: Any) -> str:
    """Return a named template for a tokenizer: with its end-of-turn token, and BOS where the tokenizer puts one before a text.

    Raise `DataError` where the vocabulary lacks what the template needs.
    """
    if lacking := _lacking(text, tokenizer):
        fitting = [other for other in template_names() if not _lacking(_named_text(other), tokenizer)]
        raise DataError(
            f"the chat template `{name}` needs tokens that the tokenizer lacks: {', '.join(f'`{token}`' for token in lacking)}",
            hint=f"leave `data.chat_template` out for the model's own template, or take one of {', '.join(fitting) or 'none'}",
        )
    _, end, _ = _header(text)
    if end not in (EOS, *tokenizer.get_vocab()):
        text = text.replace(f"set end = '{end}'", f"set end = {jinja_literal(tokenizer.eos_token)}")
    if "bos_token" not in text and adds_bos(tokenizer):
        text = "{{- bos_token -}}" + text
    return text


def end_note(name: str, tokenizer: Any) -> str | None:
    """Return what to tell a user whose named template ends turns with another token than usual; else `None`."""
    _, end, _ = _header(_named_text(name))
    if end in (EOS, *tokenizer.get_vocab()):
        return None
    return f"chat template `{name}`: the vocabulary has no `{end}`, so turns end with `{tokenizer.eos_token}`"


def adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts the beginning-of-sequence token before a text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]


def _named_text(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def _lacking(text: str, tokenizer: Any) -> list[str]:
    """Return the tokens that a named template needs and the tokenizer lacks."""
    needs, end, or_eos = _header(text)
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in needs if token not in vocabulary]
    if end not in vocabulary and (tokenizer.eos_token is None or not or_eos):
        missing.append(end)
    return missing


def _header(text: str) -> tuple[list[str], str, bool]:
    """Return what the first comment of a named template says: the tokens it needs, the one that ends a turn, and whether eos can."""
    needs = re.search(r"^ *needs: (.+)$", text, re.MULTILINE)
    end = re.search(r"^ *end: (\S+)( or eos)?$", text, re.MULTILINE)
    token = end.group(1) if end else EOS
    return needs.group(1).split() if needs else [], token, token == EOS or bool(end and end.group(2))


def add_style(template: str, chat: ChatFormat) -> str:
    """Return a template that first gives every conversation `data.system` and `data.style`."""
    if chat.system is None and not chat.style:
        return template
    lines = ["{%- set styled = namespace(turns=[]) -%}"]
    if chat.system is not None:
        lines.append(
            "{%- if not messages or messages[0]['role'] not in ['system', 'developer'] -%}"
            f"{{%- set messages = [{{'role': 'system', 'content': {jinja_literal(chat.system)}}}] + messages -%}}"
            "{%- endif -%}"
        )
    lines.append("{%- for message in messages -%}")
    for role in ("system", "user"):
        before, after = (jinja_literal(chat.style.get(f"{role}_{place}", "")) for place in ("prefix", "suffix"))
        lines.append(
            f"{{%- if message['role'] == '{role}' and message['content'] is string -%}}"
            f"{{%- set message = dict(message, content={before} + message['content'] + {after}) -%}}"
            "{%- endif -%}"
        )
    lines.append("{%- set styled.turns = styled.turns + [message] -%}{%- endfor -%}{%- set messages = styled.turns -%}")
    return "".join(lines) + template


def jinja_literal(text: str) -> str:
    """Return `text` as a literal of Jinja, which reads Python's escapes."""
    escaped = text.encode("unicode_escape").decode("ascii").replace("'", "\\'").replace("{", "\\x7b").replace("}", "\\x7d")
    return f"'{escaped.replace('%', chr(92) + 'x25').replace('#', chr(92) + 'x23')}'"


def with_chat(model: ResolvedModel, chat: ChatFormat | None) -> ResolvedModel:
    """Return a model that writes conversations as `chat` says; its tokenizer's fingerprint tells."""
    if chat is None:
        return model
    said = json.dumps(asdict(chat), sort_keys=True)
    return replace(model, chat=chat, tokenizer_fingerprint=text_sha256(f"{model.tokenizer_fingerprint}\n{said}"))


# Proof that a chat template writes a conversation's tools, calls and results, which many templates leave out without a word.
#
# Names, arguments and results are replaced by marks that occur nowhere else, and the marks are looked for in the rendered text: a
# short value (`1`) would be found anywhere.


WRITING_CALLS = ("qwen3",)
"""The named templates that write tools and calls."""
HINT = (
    f"take a template that writes calls: `data.chat_template: {', '.join(WRITING_CALLS)}`, or leave the key out where the model's own "
    "does (models that were trained to call tools)"
)
_NUMBER = 790_531_000
"""The mark of the first number: a number stays one, since a template may write text otherwise."""

Render = Callable[[Sequence[Message], Sequence[Any] | None, bool], str]
"""Gives the text of messages and tools, with the generation prompt or without."""


@dataclass(slots=True)
class _Marks:
    """Marks that stand for values, and what each stands for."""

    meaning: dict[str, str] = field(default_factory=dict)

    def text(self, meaning: str) -> str:
        mark = f"qMark{len(self.meaning)}z"
        self.meaning[mark] = meaning
        return mark

    def value(self, value: Any, turn: str) -> Any:
        """Return an argument with a mark for each text and number in it."""
        if isinstance(value, Mapping):
            return {key: self.value(inner, turn) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(inner, turn) for inner in value]
        meaning = f"{turn}: the argument `{_short(value)}`"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            number = _NUMBER + len(self.meaning)
            self.meaning[str(number)] = meaning
            return number
        return self.text(meaning)

    def missing(self, text: str) -> str | None:
        """Return what the first mark that `text` lacks stands for."""
        return next((meaning for mark, meaning in self.meaning.items() if mark not in text), None)


def has_tools(messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
    """Whether there is anything to prove."""
    return bool(tools) or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in messages)


def check_written(messages: Sequence[Message], tools: Sequence[Any] | None, render: Render) -> None:
    """Raise `DataError` where the text of a conversation that ends with an answer lacks its tools, or a call, or a result."""
    marks = _Marks()
    turns = [_marked_turn(turn, index + 1, marks) for index, turn in enumerate(messages)]
    described = _marked_tools(tools or [], marks)
    missing = marks.missing(render(turns, described or None, False))
    if missing is None and tools and not any(_name(tool) for tool in tools):  # nothing to mark
        last = messages[:-1]
        missing = "the row's `tools`" if render(last, tools, True) == render(last, None, True) else None
    if missing is not None:
        raise DataError(f"the chat template does not write {missing}", hint=HINT)


def check_answer(
    messages: Sequence[Message],
    index: int,
    prompt: str,
    said: str,
    tools: Sequence[Any] | None,
    render: Render,
    end: Callable[[str], int],
) -> None:
    """Raise `DataError` unless `said`, what is learnt of message `index`, holds its calls and its words. `end`: of a turn in a text."""
    message, number = messages[index], index + 1
    marks = _Marks()
    text = render([*messages[:index], _marked_turn({**message, "content": ""}, number, marks)], tools, False)
    rest = text.removeprefix(prompt)
    if (missing := marks.missing(rest)) is not None:
        raise DataError(f"the chat template does not write {missing}", hint=HINT)
    if marks.missing(rest[: end(rest)]) is not None:
        raise DataError(f"the chat template does not write the calls of turn {number} before the end of the turn", hint=HINT)
    words = message["content"].rpartition("</think>")[2].strip()
    if words not in said:
        raise DataError(
            f"the chat template does not write the words of turn {number} next to its calls",
            hint="leave the words out of that turn, or take another template: `data.chat_template`",
        )


def _marked_turn(turn: Message, number: int, marks: _Marks) -> Message:
    """Return a turn with marks for the names and arguments of its calls, or for the result that it is."""
    if turn["role"] == "tool" and turn["content"].strip():
        return {**turn, "content": marks.text(f"the result of turn {number}")}
    if not turn.get("tool_calls"):
        return turn
    calls, of = [], f"the calls of turn {number}"
    for call in turn["tool_calls"]:
        function = call["function"]
        name = marks.text(f"{of}: the name `{function['name']}`")
        calls.append({**call, "function": {**function, "name": name, "arguments": marks.value(function["arguments"], of)}})
    return {**turn, "tool_calls": calls}


def _marked_tools(tools: Sequence[Any], marks: _Marks) -> list[Any]:
    marked = []
    for tool in tools:
        name = _name(tool)
        mark = marks.text(f"the row's `tools`: the function `{name}`") if name else name
        if isinstance(tool.get("function"), Mapping):
            marked.append({**tool, "function": {**tool["function"], "name": mark}} if name else tool)
        else:
            marked.append({**tool, "name": mark} if name else tool)
    return marked


def _name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    return name if isinstance(name, str) and name else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
