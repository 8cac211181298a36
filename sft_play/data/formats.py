"""How a row of a file becomes a training example. Pure functions; the error names what was found."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sft_play.config.data_rules import NO_CHAT
from sft_play.config.reader import names_of
from sft_play.config.yaml_files import scalar_text
from sft_play.data import CLOSE, Message
from sft_play.data.judged import doubts_in, shapes_in
from sft_play.data.readers import LEAVE_OUT, Placed, parse_json, show_row
from sft_play.data.token_rows import OF_TOKENS, tokens_of
from sft_play.data.tools import TOOL_NAMES, take_tools
from sft_play.data.turns import MASKS as TURN_MASKS
from sft_play.data.turns import (
    READ,
    REASONING,
    WEIGHT,
    branches,
    chat_turns,
    content_of,
    end_at_answer,
    looks_like_a_mask,
    other_names,
    out_of_order,
    refuse_unwritten,
    role_of,
    turns_by_key,
    way_to_turns,
    weight_of,
)
from sft_play.data.values import (
    ANSWERS,
    ASKS,
    SPEAKERS,
    STANDS_FOR_NONE,
    group_of,
    in_snake_case,
    is_blank,
    is_list,
    lacks,
    leaves,
    list_of,
    not_read,
    refuse_media,
    refuse_none,
    text_of,
    with_inner_texts,
)
from sft_play.errors import DataError
from sft_play.files import text_sha256

Row = Mapping[str, Any]
Parts = dict[str, Any]
"""Fields of an `Example`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Exactly one of `messages`, `text` and `input_ids` is given."""

    place: str
    """`file:line`, or `file, row n`."""
    form: str
    """The format that it was read as: a key of `data.formats.FORMATS`."""
    messages: list[Message] | None = None
    """A conversation that ends with an answer."""
    tools: list[Any] | None = None
    """Descriptions of the functions that the conversation may call, for the chat template."""
    doubts: tuple[str, ...] = ()
    """What its author may not know of it, in words that are counted."""
    text: str | None = None
    """A document, or a piece of plain text."""
    input_ids: list[int] | None = None
    """Already tokenised."""
    labels: list[int] | None = None
    """With `input_ids`: -100 where not trained; `None` trains all."""
    weights: list[float] | None = None
    """With `input_ids`: how much each token counts."""
    weight: float = 1.0
    """How much each learnt token of the row counts, times its own weight."""
    unread: tuple[tuple[str, str], ...] = ()
    """What contains something and is not read, columns and keys of turns, at any depth (`review.status`), each with its
    value: nothing where that is no word or number.
    """
    marks: frozenset[str] = frozenset()
    """What looks like a mark in its questions and answers, or its text (`judged.shapes_in`)."""
    group: str | None = None
    """The value of `data.group_by`."""
    answer_column: str | None = None
    """Column that may be the answer to a text."""

    @property
    def key(self) -> str:
        """A hash of the content, without weights: a row keeps its side of a split when they change.

        Also without ids of calls, which a log draws anew for the same conversation.
        """
        messages = None if self.messages is None else list(map(_without_ids, self.messages))
        content = [messages, self.tools, self.text, self.input_ids, self.labels]
        return text_sha256(json.dumps(content, ensure_ascii=False, sort_keys=True))


def _without_ids(turn: Message) -> Message:
    calls = [{key: part for key, part in call.items() if key != "id"} for call in turn.get("tool_calls", ())]
    return {key: calls if key == "tool_calls" else part for key, part in turn.items() if key != "tool_call_id"}


AFTER = "turns after the last answer of their conversation, left out"
UNORDERED = "conversations whose turns are not in the order of their times, numbers or parents"
NO_PART = re.compile(rf"{STANDS_FOR_NONE.pattern}|<?no ?input>?|null|(?-i:None)|n/a", re.IGNORECASE)
"""What stands for none where a part of the prompt may be missing."""


def answer_of(value: Any, name: str) -> str:
    """Return `value`, which must be text and not blank. Raise `DataError`."""
    text = _words(value, name)
    if not text or text.isspace():
        raise DataError(f"`{name}` is empty, so there is nothing to learn", hint=LEAVE_OUT)
    return text


def _words(value: Any, name: str, none: re.Pattern[str] = STANDS_FOR_NONE) -> str:
    """Return `value`, which must be text: no word for a missing value, and no turns as JSON. Raise `DataError`."""
    text = text_of(value, name)
    refuse_none(text, name, none, "leave it empty" if none is NO_PART else LEAVE_OUT)
    if _turns_in(text, name) is not None:
        raise DataError(
            f"`{name}` contains turns as JSON, which would be learnt as text",
            hint="`columns: {messages: NAME}` reads a whole conversation, `columns: {prompt: NAME, completion: NAME}`"
            " one whose answer has its own column",
        )
    return text


SYSTEM = ("system", "system_prompt", "system_message")
"""Columns that hold a system turn."""


def system_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the system turn of a row's `system` column (or of `system_prompt`, `system_message`), or nothing. Raise
    `DataError`.
    """
    turns = {name: row[name] for name in SYSTEM if not is_blank(row.get(name))}
    texts = {_words(content_of(value, name), name, NO_PART) for name, value in turns.items()}
    if len(texts) > 1:
        raise DataError(f"the row has system turns that differ: {names_of(turns)}", hint="keep one of them")
    return [{"role": "system", "content": text} for text in texts]


LAST_ANSWER = re.compile(
    r"(?:\w+_)?(?:response|output|answer|completion|target|reply|ideal|generation|ground_?truth|reference|assistant)"
    "|gold|content|message|chosen"
)
"""Columns that may be the answer to a conversation that waits for it."""


def _chat(column: str) -> Callable[[Row], Parts]:
    def parts(row: Row) -> Parts:
        turns = chat_turns(row[column], column)
        waits = turns and turns[-1]["role"] != "assistant"
        filled = (name for name, value in row.items() if not is_blank(value))
        answers = (name for name in filled if LAST_ANSWER.fullmatch(in_snake_case(name)))
        if waits and (after := next(answers, None)):
            way = f"`columns: {scalar_text({'prompt': column, 'completion': after})}` learns it alone"
            raise not_read(after, f"seems to be the answer to the last of `{column}`, and is not read", way)
        messages = [*(turn for turn in system_of(row) if turn not in turns[:1]), *turns]
        learnt = end_at_answer(list(messages))
        listed = list_of(row[column], column)
        unordered = (UNORDERED,) if out_of_order(listed) or branches(listed) else ()
        return {"messages": learnt, "doubts": ((AFTER,) if len(learnt) < len(messages) else ()) + unordered}

    return parts


TURNS = re.compile(r"""\s*\[?\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
"""How a text begins that is a turn, or a list of them."""
PYTHON_TURNS = re.compile(r"\s*\[?\s*\{\s*'(?:role|from)'\s*:\s*'")
"""The same in Python's own notation, which is not JSON."""


def _turns_in(value: Any, name: str) -> Sequence[Any] | None:
    """Return turns: a list of them, a single one, or either as JSON in a text; `None` for other text. Raise
    `DataError`.
    """
    if isinstance(value, str) and TURNS.match(value):
        try:
            value = parse_json(value, name)
        except DataError:
            if PYTHON_TURNS.match(value):
                raise
            return None
        turns = value if is_list(value) else [value]
        return turns if turns and all(map(_is_turn, turns)) else None
    return [value] if _is_turn(value) else value if _is_turns(value) else None


def _is_turn(value: Any) -> bool:
    named = isinstance(value, Mapping) and role_of(value.get("role", value.get("from")))
    return bool(named) and ("content" in value or "value" in value)


def _prompt(row: Row) -> Parts:
    """Return text, or lists of messages as TRL writes them, whose prompt may contain answers that are not trained."""
    asked, words = (_turns_in(row[name], name) for name in ("prompt", "completion"))
    if asked is None and words is None:
        return _turns(row, _words(row["prompt"], "prompt"), "completion")
    asked = asked if asked is not None else [{"role": "user", "content": _words(row["prompt"], "prompt")}]
    context = chat_turns(asked, "prompt")
    for turn in context:
        if turn["role"] == "assistant":
            turn.setdefault("train", False)
    if words is None:
        words = [{"role": "assistant", "content": answer_of(row["completion"], "completion")}]
    answer = chat_turns(words, "completion")
    if not any(turn["role"] == "assistant" for turn in answer):
        raise DataError("`completion` has no assistant message, so there is nothing to learn")
    return {"messages": end_at_answer([*system_of(row), *context, *answer])}


def _instruction(row: Row) -> Parts:
    """Return an Alpaca row's turns: the input is added to the instruction and never replaces it."""
    instruction = _words(row["instruction"], "instruction")
    context = "" if row.get("input") is None else _words(row["input"], "input", NO_PART)
    parts = [part for part in (instruction, context) if part.strip()]
    return _turns(row, "\n\n".join(parts), "output")


def _turns(row: Row, question: str, answer: str) -> Parts:
    if not question.strip():
        raise DataError("the question is empty", hint=LEAVE_OUT)
    answered = {"role": "assistant", "content": answer_of(row[answer], answer)}
    return {
        "messages": [*system_of(row), *_history(row.get("history")), {"role": "user", "content": question}, answered]
    }


def _history(pairs: Any) -> list[Message]:
    """Return the earlier turns of an Alpaca row: a list of question and answer pairs."""
    turns: list[Message] = []
    listed = [] if is_blank(pairs) else list_of(pairs, "history", "pairs: question and answer")
    if _is_turns(listed):
        return chat_turns(listed, "history")
    for index, pair in enumerate(listed):
        if not is_list(pair) or len(pair) != 2:
            raise DataError(f"`history[{index}]` is not a pair of question and answer")
        turns.append({"role": "user", "content": text_of(pair[0], f"history[{index}][0]")})
        turns.append({"role": "assistant", "content": answer_of(pair[1], f"history[{index}][1]")})
    return turns


def _text(row: Row) -> Parts:
    text = _words(row["text"], "text")
    speakers = (name for name in row if in_snake_case(name) in SPEAKERS)
    if speaker := next((name for name in speakers if role_of(row[name])), None):
        raise DataError(
            f"`{speaker}` is `{row[speaker]}`: the row seems to be a turn of a conversation",
            hint=f"make one row of each conversation, `messages`; `columns: {scalar_text({'note': speaker})}`"
            " learns turns alone",
        )
    if not text or text.isspace():
        raise DataError("`text` is empty", hint="`filter: not blank(text)` skips such rows")
    return {"text": text}


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Row], Parts]]] = {
    "messages": (("messages",), _chat("messages")),
    "sharegpt": (("conversations",), _chat("conversations")),
    "prompt_completion": (("prompt", "completion"), _prompt),
    "question_answer": (
        ("question", "answer"),
        lambda row: _turns(row, _words(row["question"], "question"), "answer"),
    ),
    "instruction": (("instruction", "output"), _instruction),
    "text": (("text",), _text),
    "tokens": (("input_ids",), tokens_of),
}
"""Each format: the columns it needs, of a conversation the one that asks first, and the conversion."""


ALSO_CALLED: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("output", "answer", "completion"), ANSWERS),
    **dict.fromkeys(("prompt", "question", "instruction"), ASKS),
    "input": ("context",),
}
"""Column of a format -> what data sets call it, for hints."""


def recognise(row: Row) -> str:
    """Return the format whose columns `row` has. Raise `DataError` if none or more than one fits."""
    fitting = _fitting(row)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError(
            f"the columns fit more than one format: {', '.join(fitting)} (columns: {names_of(row)})",
            hint=(
                f"set {' or '.join(f'`format: {form}`' for form in fitting)} of the source; the row is {show_row(row)}"
            ),
        )
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise DataError(
            "the row has `chosen` and `rejected`: preferences are not trained here",
            hint=f"to train on the chosen answers, give the source `columns: {{{_chosen(row)}}}`",
        )
    begun = [form for form, (columns, _) in FORMATS.items() if any(row.get(column) is not None for column in columns)]
    complete = [form for form, (columns, _) in FORMATS.items() if set(columns) <= row.keys()]
    begun = [form for form in begun if form in complete] or begun or complete
    if len(begun) == 1:
        _require(row, begun[0])
    turns = next((name for name, value in row.items() if _is_turns(value)), None)
    largest = max(row, key=lambda name: len(str(row[name])), default="")
    if is_list(row.get(largest)) and (way := way_to_turns(row[largest], largest)):
        hint = way
    elif turns:
        hint = f"a conversation may have other names: {other_names(turns, row[turns], 'messages')}"
        hint += f"; a turn in `{turns}` has {names_of(row[turns][0])}"
    else:
        formats = "; ".join(f"{form}: {', '.join(columns)}" for form, (columns, _) in FORMATS.items())
        flat = with_inner_texts(row)
        alike = max(FORMATS, key=lambda form: sum(new == old.lower() or 0.5 for new, old in _alike(flat, form).items()))
        hint = (
            f"{_suggest_columns(flat, alike)}; a dot leads into a column: `meta.text`; formats and their columns are"
            f" {formats}"
        )
    raise DataError(f"no format fits the columns {names_of(row)}", hint=f"{hint}; the row is {show_row(row)}")


def _chosen(row: Row) -> str:
    """Return the `columns` that turn a preference row into a row with its chosen answer."""
    chosen = row["chosen"]
    asks = next((name for name in ("prompt", "question", "instruction") if row.get(name) is not None), None)
    if _is_turns(chosen):
        answers = role_of(chosen[0].get("role", chosen[0].get("from"))) == "assistant"
        return (
            f"{'' if asks in ('prompt', None) else f'prompt: {asks}, '}completion: chosen"
            if asks and answers
            else "messages: chosen"
        )
    answer = {"question": "answer", "instruction": "output"}.get(asks or "", "completion")
    return f"{answer}: chosen" if asks else "text: chosen"


def _is_turns(value: Any) -> bool:
    return is_list(value) and len(value) > 0 and isinstance(value[0], Mapping)


def _fitting(row: Row) -> list[str]:
    return [form for form, (columns, _) in FORMATS.items() if all(row.get(column) is not None for column in columns)]


def understand(placed: Placed, form: str | None, *, group_by: str | None = None) -> Example:
    """Return the example of a row; `form` is `None` if the columns of the row decide.

    `group_by` is `data.group_by`. Raise `DataError` with the row's place.
    """
    place, row = placed
    try:
        if isinstance(row, DataError):
            raise row
        group = group_of(row, group_by) if group_by is not None else None
        row = {name: turns_by_key(value) for name, value in row.items()}
        form = form or recognise(row)
        _require(row, form)
        refuse_media(row)
        parts = FORMATS[form][1](row)
        answers = (name for alias in ANSWERS for name in row if name.lower() == alias and row[name] != "accept")
        parts["answer_column"] = next(answers, None) if form == "text" else None
        if not is_blank(row.get(WEIGHT)) and not parts.get("weights"):
            parts["weight"] = weight_of(row[WEIGHT], WEIGHT)
        if "messages" in parts:
            _refuse_mask(row)
            _take_thought(row, form, parts["messages"])
            if any(turn.get("reasoning_content") and CLOSE in turn["content"] for turn in parts["messages"]):
                raise DataError("an answer has its thoughts twice: in its text, too", hint="keep one of them")
            refuse_unwritten(row, FORMATS[form][0], parts["messages"])
            _refuse_rendered(parts["messages"])
            parts["tools"], of_tools = take_tools(row, parts["messages"])
            right = (name for name in row if name not in FORMATS[form][0] and EXPECTED.fullmatch(in_snake_case(name)))
            other = [name for name in right if lacks(row[name], [parts["messages"][-1]["content"]])]
            parts["doubts"] = (*parts.get("doubts", ()), *of_tools, *map(OTHER_ANSWER.format, other))
        unread = () if row.get("path") == place else _unread(row, form, group_by)  # a document tells its path and title
        content = parts.get("messages") or parts.get("text") or ""
        parts["doubts"] = (*parts.get("doubts", ()), *doubts_in(content))
        return Example(place=place, form=form, group=group, unread=unread, marks=shapes_in(content), **parts)
    except DataError as error:
        error.place = error.place or place
        raise
    except RecursionError:
        raise DataError("the row is nested too deeply", place=place) from None


READ_BESIDES = frozenset({*SYSTEM, *REASONING, *TOOL_NAMES, WEIGHT, "history", "note"})
"""Columns that formats read besides their own, and the name for what is not read on purpose."""
READ_OF_TURNS = frozenset({*READ, *TURN_MASKS, *TOOL_NAMES, "note"})


@functools.cache
def _read_by(form: str, group_by: str | None) -> frozenset[str | None]:
    """Return the columns that a format reads."""
    others = {"tokens": OF_TOKENS, "instruction": ("input",)}
    besides = (WEIGHT, "note") if form in NO_CHAT else READ_BESIDES
    return frozenset({*besides, *FORMATS[form][0], *others.get(form, ()), group_by})


MOST_LEAVES, MOST_SHORT = 20, 24
"""Values within one that are looked at, and letters of a word."""


def _unread(row: Row, form: str, group_by: str | None) -> tuple[tuple[str, str], ...]:
    """Return what contains something and is not read, see `Example.unread`."""
    read = _read_by(form, group_by)
    values = [(name, value) for name, value in row.items() if name not in read]
    for column in FORMATS[form][0] if form != "tokens" else ():
        turns = (turn for turn in (row[column] if is_list(row[column]) else ()) if isinstance(turn, Mapping))
        items = (item for turn in turns for item in turn.items())
        values += [(f"{column}.{key}", value) for key, value in items if key not in READ_OF_TURNS]
    words: dict[str, set[str]] = {}
    for name, value in values:
        for leaf, inner in islice(leaves(value, name), MOST_LEAVES):
            if not is_blank(inner):
                words.setdefault(leaf, set()).add(" ".join(str(inner)[: MOST_SHORT + 1].split()))
    joined = {name: ", ".join(sorted(several)) for name, several in words.items()}
    return tuple(
        (name, text if len(text) <= MOST_SHORT and text.isprintable() else "") for name, text in joined.items()
    )


RENDERED = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>)?\s*(?:\[INST\].*\[/INST\]|<\|im_start\|>.*<\|im_start\|>assistant"
    r"|<\|start_header_id\|>.*assistant<\|end_header_id\|>|<start_of_turn>.*<start_of_turn>model"
    r"|<\|(?:user|system)\|>.*<\|assistant\|>)\s*",
    re.DOTALL,
)
"""A prompt as the templates of model families write it, up to where the answer begins."""


def _refuse_rendered(messages: Sequence[Message]) -> None:
    """Raise `DataError` for a turn that some template has rendered."""
    if any(turn["role"] == "user" and RENDERED.fullmatch(turn["content"]) for turn in messages):
        raise DataError(
            "a question has the marks of a chat template already, and would get them twice",
            hint="write the words alone, or the turns separately; the template is applied when the data are prepared",
        )


EXPECTED = re.compile(
    "(?:ground_?truth|expected|ideal|gold(?:en)?)(?:_?(?:answer|output|response|completion|label|text))?"
    "|(?:correct|right|reference|true)_?(?:answer|output|response|completion|label|text)"
)
OTHER_ANSWER = "answers without the text of `{}`, which seems to be the right answer"


def _take_thought(row: Row, form: str, messages: list[Message]) -> None:
    """Move the thought in a column of a single-answer row into that answer."""
    if form in ("messages", "sharegpt") or messages[-1].get("reasoning_content"):
        return
    if name := next((name for name in REASONING if isinstance(row.get(name), str) and row[name].strip()), None):
        if (thought := row[name].strip()).isascii() and thought.isalpha():  # `on`, or how much is to be thought
            raise not_read(name, f"is `{row[name]}`, which is no thought")
        messages[-1]["reasoning_content"] = text_of(row[name], name)


def _refuse_mask(row: Row) -> None:
    """Raise `DataError` for a column that seems to mark which turns are learnt."""
    for name, value in row.items():
        if is_list(value) and len(value) > 0 and looks_like_a_mask(name) and all(flag in (0, 1) for flag in value):
            way = "write `train: false` into the turns that are not"
            raise not_read(name, "seems to mark which turns are learnt, and is not read", way)


def _require(row: Row, form: str) -> None:
    """Raise `DataError` with the columns of the format that `row` lacks, or has as null."""
    missing = sorted(column for column in FORMATS[form][0] if row.get(column) is None)
    if not missing:
        return
    if missing[0] in row:
        raise DataError(f"`{missing[0]}` is empty", hint=f"`filter: has({missing[0]})` leaves it out; {LEAVE_OUT}")
    others = " or ".join(_fitting(row))
    raise DataError(
        f"format `{form}` needs {', '.join(f'`{m}`' for m in missing)}; the columns are {names_of(row)}",
        hint=(
            f"this row looks like {others}, but a source has one format: give each format its own source"
            if others
            else _suggest_columns(row, form)
        ),
    )


def _alike(row: Row, form: str) -> dict[str, str]:
    """Return the columns of a format -> what `row` calls them: in another letter case, or by another common name."""
    renamed: dict[str, str] = {}
    for new in (*sorted(FORMATS[form][0]), *(["input"] if form == "instruction" else [])):
        names = (name for alias in (new, *ALSO_CALLED.get(new, ())) for name in row if name.strip().lower() == alias)
        if old := next((name for name in names if name not in renamed.values()), None):
            renamed[new] = old
    return renamed


def _suggest_columns(row: Row, form: str) -> str:
    """Return the `columns` that would complete `row` for a format; unknown names are left open."""
    alike, texts = (
        _alike(row, form),
        [n for n, value in row.items() if isinstance(value, str) and n not in READ_BESIDES],
    )
    if any(_is_turns(row[old]) for old in alike.values()):  # as the Responses API has them
        form, alike = "prompt_completion", _alike(row, "prompt_completion")
    if not alike and len(texts) > 1:
        form = "prompt_completion"
    if not alike and len(texts) == 2:
        if len(row[texts[0]].split()) < 3 <= len(row[texts[1]].split()):  # a label before its text
            texts.reverse()
        alike = dict(zip(("prompt", "completion"), texts, strict=True))
    columns = {new: old for new, old in (dict.fromkeys(FORMATS[form][0], "NAME") | alike).items() if new != old}
    return f"`data.sources: {scalar_text([{'path': 'FILE', 'columns': columns}])}`"
