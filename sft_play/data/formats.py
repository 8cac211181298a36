"""How a row of a file becomes a training example. Pure functions; the error names what was found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.config.reader import kind_of, names_of
from sft_play.config.yaml_files import scalar_text
from sft_play.data import IGNORED
from sft_play.data.readers import LEAVE_OUT, Placed, show_row
from sft_play.data.turns import (
    REASONING,
    ROLE_NAMES,
    TOOL_NAMES,
    WEIGHT,
    Message,
    calls_undescribed,
    chat_turns,
    describes_tools,
    end_at_answer,
    is_filled,
    looks_like_a_mask,
    marks_what_is_not_learnt,
    other_names,
    refuse_media,
    refuse_unwritten,
    tools_of,
    weight_of,
)
from sft_play.data.values import is_blank, is_list, list_of, text_of
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
    source: int
    """Index into the split's sources."""
    messages: list[Message] | None = None
    """A conversation that ends with an answer."""
    tools: list[Any] | None = None
    """Descriptions of the functions that the conversation may call, for the chat template."""
    undescribed: bool = False
    """Whether it calls functions that neither `tools` nor a text describes."""
    filled: bool = False
    """Whether structs of Arrow's in its arguments or tools lost nulls that its row may have had."""
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
    group: str | None = None
    """The value of `data.group_by`."""
    answer_column: str | None = None
    """Column that may be the answer to a text."""

    @property
    def key(self) -> str:
        """A hash of the content, without weights: a row keeps its side of a split when they change."""
        content = [self.messages, self.tools, self.text, self.input_ids, self.labels]
        return text_sha256(json.dumps(content, ensure_ascii=False, sort_keys=True))


def answer_of(value: Any, name: str) -> str:
    """Return `value`, which must be text and not blank. Raise `DataError`."""
    text = text_of(value, name)
    if not text or text.isspace():
        raise DataError(f"`{name}` is empty, so there is nothing to learn", hint=LEAVE_OUT)
    return text


SYSTEM = ("system", "system_prompt", "system_message")
"""Columns that hold a system turn."""


def system_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the system turn of a row's `system` column (or of `system_prompt`, `system_message`), or nothing. Raise
    `DataError`.
    """
    columns = ((name, row[name]) for name in SYSTEM if row.get(name) is not None)
    turns = {name: value for name, value in columns if not (isinstance(value, str) and not value.strip())}
    texts = {text_of(value, name): name for name, value in turns.items()}
    if len(texts) > 1:
        raise DataError(f"the row has system turns that differ: {names_of(turns)}", hint="keep one of them")
    return [{"role": "system", "content": text} for text in texts]


LAST_ANSWERS = ("response", "output", "answer", "completion", "target", "reply")


def _chat(column: str) -> Callable[[Row], Parts]:
    def parts(row: Row) -> Parts:
        turns = chat_turns(row[column], column)
        waits = turns and turns[-1]["role"] != "assistant"
        if waits and (after := next((name for name in LAST_ANSWERS if not is_blank(row.get(name))), None)):
            raise DataError(
                f"`{after}` seems to be the answer to the last of `{column}`, and is not read",
                hint=(
                    f"`columns: {{prompt: {column}, completion: {after}}}` learns it alone;"
                    f" `columns: {{note: {after}}}` gives it a name that is not read"
                ),
            )
        if waits and not is_blank(row.get("chosen")):
            raise DataError(
                f"`chosen` contains the answer to the last of `{column}`: preferences are not trained here",
                hint=(
                    f"add the chosen answer to `{column}`; `columns: {{note: chosen}}` gives it a name that is not read"
                ),
            )
        return {"messages": end_at_answer([*system_of(row), *turns])}

    return parts


TURNS = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
"""How a text begins that is a list of turns."""


def _prompt(row: Row) -> Parts:
    """Return text, or lists of messages as TRL writes them, whose prompt may contain answers that are not trained."""
    prompt, completion = row["prompt"], row["completion"]
    if all(isinstance(value, str) and TURNS.match(value) for value in (prompt, completion)):  # of a CSV file
        prompt, completion = list_of(prompt, "prompt"), list_of(completion, "completion")
    if not is_list(prompt) and not is_list(completion):
        return _turns(row, text_of(prompt, "prompt"), "completion")
    asked = prompt if is_list(prompt) else [{"role": "user", "content": text_of(prompt, "prompt")}]
    context = chat_turns(asked, "prompt")
    for turn in context:
        if turn["role"] == "assistant":
            turn.setdefault("train", False)
    words = (
        completion if is_list(completion) else [{"role": "assistant", "content": answer_of(completion, "completion")}]
    )
    answer = chat_turns(words, "completion")
    if not any(turn["role"] == "assistant" for turn in answer):
        raise DataError("`completion` has no assistant message, so there is nothing to learn")
    return {"messages": end_at_answer([*system_of(row), *context, *answer])}


def _instruction(row: Row) -> Parts:
    """Return an Alpaca row's turns: the input is added to the instruction and never replaces it."""
    instruction = text_of(row["instruction"], "instruction")
    context = "" if row.get("input") is None else text_of(row["input"], "input")
    if context.strip().lower() in ("<noinput>", "nan"):
        raise DataError(f"`input` is `{context}`, which stands for none", hint="leave it empty")
    parts = [part for part in (instruction, context) if part.strip()]
    return _turns(row, "\n\n".join(parts) if parts else instruction, "output")


def _turns(row: Row, question: str, answer: str) -> Parts:
    if not question.strip():
        raise DataError("the question is empty", hint=LEAVE_OUT)
    last = [{"role": "user", "content": question}, {"role": "assistant", "content": answer_of(row[answer], answer)}]
    return {"messages": [*system_of(row), *_history(row.get("history")), *last]}


def _history(pairs: Any) -> list[Message]:
    """Return the earlier turns of an Alpaca row: a list of question and answer pairs."""
    turns: list[Message] = []
    for index, pair in enumerate(() if is_blank(pairs) else list_of(pairs, "history", "pairs: question and answer")):
        if not is_list(pair) or len(pair) != 2:
            raise DataError(f"`history[{index}]` is not a pair of question and answer")
        turns.append({"role": "user", "content": text_of(pair[0], f"history[{index}][0]")})
        turns.append({"role": "assistant", "content": answer_of(pair[1], f"history[{index}][1]")})
    return turns


def _text(row: Row) -> Parts:
    text = text_of(row["text"], "text")
    if not text or text.isspace():
        raise DataError("`text` is empty", hint="`filter: not blank(text)` skips such rows")
    return {"text": text}


MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask", "loss_mask")
"""Columns that are 1 where a token is learnt, next to `input_ids`."""
OF_TOKENS = ("input_ids", "labels", "attention_mask", "special_tokens_mask", "token_type_ids", WEIGHT, *MASKS)
"""Columns of token rows that are read, and those that a tokenizer adds to every row."""
LIKE_A_MASK = re.compile("mask|label|target|loss|weight")
LIKE_A_PART = re.compile(
    "(?:prompt|source|context|completion|answer|response|target)(?:.*(?:len|start|end|offset|num|tokens|ids))"
)
LIKE_PACKED = re.compile("position_ids|seq_?len|segment|document_ids|sequence_ids")


def _tokens(row: Row) -> Parts:
    ids = _integers(row["input_ids"], "input_ids", minimum=0)
    labels = None if row.get("labels") is None else _integers(row["labels"], "labels", minimum=-100)
    masks = {name: _flags(row[name], name) for name in ("attention_mask", *MASKS) if row.get(name) is not None}
    weights: list[float] | None = None
    if is_list(row.get(WEIGHT)):
        weights = [weight_of(value, f"{WEIGHT}[{at}]") for at, value in enumerate(row[WEIGHT])]
    for name, other in (("labels", labels), (WEIGHT, weights), *masks.items()):
        if other is not None and len(other) != len(ids):
            raise DataError(f"`{name}` has {len(other)} entries and `input_ids` {len(ids)}")
    if weights is not None and not any(weights):
        raise DataError("`weight` is 0 everywhere, so there is nothing to learn", hint=LEAVE_OUT)
    _refuse_unread(row, ids)
    flags: list[Sequence[float] | None] = [*(masks.get(name) for name in MASKS), weights]
    for mask in filter(None, flags):
        labels = [label if learnt else IGNORED for label, learnt in zip(labels or ids, mask, strict=True)]
    if 0 in masks.get("attention_mask", ()):
        start, end = _unpadded(masks["attention_mask"])
        ids, labels, weights = ids[start:end], labels and labels[start:end], weights and weights[start:end]
    if not ids:
        raise DataError("`input_ids` is empty, so there is nothing to learn")
    if labels is not None:
        _check_labels(labels, ids)
    return {"input_ids": ids, "labels": labels, "weights": weights}


def _check_labels(labels: Sequence[int], ids: Sequence[int]) -> None:
    if any(label < 0 and label != IGNORED for label in labels):
        raise DataError("`labels` contains a negative number other than -100, which excludes a token from training")
    if all(label == IGNORED for label in labels[1:]):  # the first token follows nothing, so it is never a target
        raise DataError("`labels` is -100 everywhere, so there is nothing to learn", hint=LEAVE_OUT)
    other = next((at for at, label in enumerate(labels) if label not in (IGNORED, ids[at])), None)
    if other is not None:
        raise DataError(
            f"`labels[{other}]` is {labels[other]} and `input_ids[{other}]` is {ids[other]}",
            hint="a label is the token at the same position, or -100; training shifts labels itself",
        )


def _refuse_unread(row: Row, ids: Sequence[int]) -> None:
    """Raise `DataError` for a column that says which tokens are learnt, or that several rows are packed into one."""
    for name, value in row.items():
        if name in OF_TOKENS or is_blank(value) or isinstance(value, (str, Mapping)):
            continue
        packed, mask = LIKE_PACKED.search(name.lower()), LIKE_A_MASK.search(name.lower())
        unread = f"`columns: {{note: {name}}}` gives it a name that is not read"
        if LIKE_A_PART.search(name.lower()) and not (mask and is_list(value) and len(value) == len(ids)):
            raise DataError(
                f"`{name}` seems to mark where the learnt part begins, and is not read",
                hint=f"write `labels`, -100 for what is not learnt; {unread}",
            )
        if not (packed or mask) or not is_list(value):
            continue
        if packed and list(value) != list(range(len(ids))) and len(set(map(str, value))) > 1:
            raise DataError(
                f"`{name}` marks a row that packs several rows, which is not supported",
                hint=f"unpack the rows; {unread}",
            )
        if mask and len(value) == len(ids):
            weights = all(isinstance(part, (bool, int, float)) and 0 <= part <= 1 for part in value)
            other = "loss_mask" if all(part in (0, 1) for part in value) else WEIGHT if weights else "labels"
            read = f"`columns: {{{other}: {name}}}` if it does"
            if name not in MASKS and other == "loss_mask" and marks_what_is_not_learnt(name.removesuffix("_mask")):
                read = "where it is 1 for what is not learnt, write `labels`, -100 there"
            raise DataError(
                f"`{name}` seems to mark which tokens are learnt, and is not read", hint=f"{read}; {unread}"
            )


def _flags(column: Any, name: str) -> list[int]:
    """Return a mask: 0 and 1, or false and true. Raise `DataError`."""
    flags = list_of(column, name, "0 and 1")
    others = [flag for flag in flags if type(flag) not in (bool, int) or flag not in (0, 1)]
    if others:
        raise DataError(f"`{name}` contains {others[0]}; expected 0 and 1")
    return list(map(int, flags))


def _integers(column: Any, name: str, minimum: int) -> list[int]:
    values = list(list_of(column, name, "integers"))
    if set(map(type, values)) - {int}:
        index = next(i for i, value in enumerate(values) if type(value) is not int)
        raise DataError(f"`{name}[{index}]` is {kind_of(values[index])}; expected an integer")
    if (least := min(values, default=minimum)) < minimum:
        raise DataError(f"`{name}` contains {least}; the least is {minimum}")
    return values


def _unpadded(mask: list[int]) -> tuple[int, int]:
    """Return where the row begins and ends without its padding: `attention_mask` is 1 in between. Raise `DataError`."""
    if 1 not in mask:
        return 0, 0
    start, end = mask.index(1), len(mask) - mask[::-1].index(1)
    if 0 in mask[start:end]:
        raise DataError("`attention_mask` is 0 between tokens; only padding at the ends can be left out")
    return start, end


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Row], Parts]]] = {
    "messages": (("messages",), _chat("messages")),
    "sharegpt": (("conversations",), _chat("conversations")),
    "prompt_completion": (("prompt", "completion"), _prompt),
    "question_answer": (
        ("question", "answer"),
        lambda row: _turns(row, text_of(row["question"], "question"), "answer"),
    ),
    "instruction": (("instruction", "output"), _instruction),
    "text": (("text",), _text),
    "tokens": (("input_ids",), _tokens),
}
"""Each format: the columns it needs, of a conversation the one that asks first, and the conversion."""


ANSWERS = (
    *(
        "response",
        "output",
        "answer",
        "completion",
        "target",
        "targets",
        "targets_pretokenized",
        "reply",
        "summary",
        "highlights",
        "translation",
    ),
    *("label", "labels", "category", "class", "sentiment", "intent", "topic", "emotion", "tag"),
)
ASKS = (
    *("prompt", "query", "input", "instruction", "question", "text", "review", "comment", "comment_text", "tweet"),
    *(
        "inputs",
        "inputs_pretokenized",
        "message",
        "sentence",
        "utterance",
        "ticket",
        "email",
        "article",
        "document",
        "body",
        "description",
        "source",
    ),
    *("content", "headline", "title"),
)
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
    if turns:
        hint = f"a conversation may have other names: {other_names(turns, row[turns], 'messages')}"
        hint += f"; a turn in `{turns}` has {names_of(row[turns][0])}"
    else:
        formats = "; ".join(f"{form}: {', '.join(columns)}" for form, (columns, _) in FORMATS.items())
        alike = max(FORMATS, key=lambda form: sum(new == old.lower() or 0.5 for new, old in _alike(row, form).items()))
        hint = (
            f"{_suggest_columns(row, alike)}; a dot leads into a column: `meta.text`; formats and their columns are"
            f" {formats}"
        )
    raise DataError(f"no format fits the columns {names_of(row)}", hint=f"{hint}; the row is {show_row(row)}")


def _chosen(row: Row) -> str:
    """Return the `columns` that turn a preference row into a row with its chosen answer."""
    chosen = row["chosen"]
    asks = next((name for name in ("prompt", "question", "instruction") if row.get(name) is not None), None)
    if _is_turns(chosen):
        answers = ROLE_NAMES.get(str(chosen[0].get("role", chosen[0].get("from"))).lower()) == "assistant"
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


def understand(placed: Placed, source: int, form: str | None, *, group_by: str | None = None) -> Example:
    """Return the example of a row; `form` is `None` if the columns of the row decide.

    `source` is the index of the row's source in its split, `group_by` is `data.group_by`. Raise `DataError` with the
    row's place.
    """
    place, row = placed
    try:
        if isinstance(row, DataError):
            raise row
        group = group_of(row, group_by) if group_by is not None else None
        form = form or recognise(row)
        _require(row, form)
        refuse_media(row)
        parts = FORMATS[form][1](row)
        if form == "text":
            parts["answer_column"] = next((name for alias in ANSWERS for name in row if name.lower() == alias), None)
        if not is_blank(row.get(WEIGHT)) and not parts.get("weights"):
            parts["weight"] = weight_of(row[WEIGHT], WEIGHT)
        if "messages" in parts:
            _refuse_mask(row)
            _take_thought(row, form, parts["messages"])
            if any(turn.get("reasoning_content") and "</think>" in turn["content"] for turn in parts["messages"]):
                raise DataError("an answer has its thoughts twice: in its text, too", hint="keep one of them")
            refuse_unwritten(row, FORMATS[form][0], parts["messages"])
            parts |= _tools(row, parts["messages"])
        return Example(place=place, form=form, source=source, group=group, **parts)
    except DataError as error:
        error.place = error.place or place
        raise
    except RecursionError:
        raise DataError("the row is nested too deeply", place=place) from None


def _take_thought(row: Row, form: str, messages: list[Message]) -> None:
    """Move the thought in a column of a single-answer row into that answer."""
    if form in ("messages", "sharegpt") or messages[-1].get("reasoning_content"):
        return
    if name := next((name for name in REASONING if isinstance(row.get(name), str) and row[name].strip()), None):
        if row[name].strip().lower() in ("on", "off", "yes", "no", "true", "false"):
            raise DataError(
                f"`{name}` is `{row[name]}`, which is no thought",
                hint=f"`columns: {{note: {name}}}` gives it a name that is not read",
            )
        messages[-1]["reasoning_content"] = text_of(row[name], name)


def _refuse_mask(row: Row) -> None:
    """Raise `DataError` for a column that seems to mark which turns are learnt."""
    for name, value in row.items():
        if is_list(value) and len(value) > 0 and looks_like_a_mask(name) and all(flag in (0, 1) for flag in value):
            raise DataError(
                f"`{name}` seems to mark which turns are learnt, and is not read",
                hint=(
                    f"write `train: false` into the turns that are not; `columns: {{note: {name}}}` gives it a name"
                    " that is not read"
                ),
            )


def _tools(row: Row, messages: list[Message]) -> Parts:
    """Return the tools that a row or its system turn describes, and whether calls are learnt that nothing describes.

    Raise `DataError` if a column describes them that is not read.
    """
    tools = tools_of(row)
    for turn in messages:
        described = turn.pop("tools", None)
        if described and tools not in (None, described):
            raise DataError("the tools of the row and of its system turn differ")
        tools = tools or described
    called = any(turn.get("tool_calls") for turn in messages)
    filled = (called or tools) and any(is_filled(value, name in TOOL_NAMES) for name, value in row.items())
    if tools or not called:
        return {"tools": tools, "filled": bool(filled)}
    if column := next((name for name, value in row.items() if describes_tools(value)), None):
        raise DataError(
            f"`{column}` describes tools, and is not read: calls would be learnt without them",
            hint=f"`columns: {{tools: {column}}}` reads it",
        )
    return {"undescribed": calls_undescribed(messages), "filled": bool(filled)}


def group_of(row: Row, column: str) -> str:
    """Return the value of `data.group_by`. Raise `DataError` if a row has none."""
    value = row.get(column)
    if value is None:
        problem = "is empty" if column in row else "is missing"
        raise DataError(
            f"`data.group_by` names the column `{column}`, which {problem}; the columns are {names_of(row)}",
            hint="every row needs a group, so that a group is wholly training or wholly validation",
        )
    if isinstance(value, (str, int, float)):
        return text_of(str(value), column)
    raise DataError(f"`{column}`, which `data.group_by` names, is {kind_of(value)}; expected text or a number")


def _require(row: Row, form: str) -> None:
    """Raise `DataError` with the columns of the format that `row` lacks, or has as null."""
    missing = sorted(column for column in FORMATS[form][0] if row.get(column) is None)
    if not missing:
        return
    if missing[0] in row:
        raise DataError(
            f"`{missing[0]}` is empty",
            hint=f"`filter: has({missing[0]})` leaves out such rows; {LEAVE_OUT}",
        )
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
    """Return the columns of a format -> what `row` calls them: in another letter case, or by another common
    name.
    """
    renamed: dict[str, str] = {}
    for new in (*sorted(FORMATS[form][0]), *(["input"] if form == "instruction" else [])):
        names = (name for alias in (new, *ALSO_CALLED.get(new, ())) for name in row if name.strip().lower() == alias)
        if old := next((name for name in names if name not in renamed.values()), None):
            renamed[new] = old
    return renamed


def _suggest_columns(row: Row, form: str) -> str:
    """Return the `columns` that would complete `row` for a format; unknown names are left open."""
    alike, texts = _alike(row, form), [name for name, value in row.items() if isinstance(value, str)]
    if not alike and len(row) == len(texts) == 2:  # of a text and its label the text is longer
        texts.sort(key=lambda name: -len(row[name]))
        form, alike = "prompt_completion", dict(zip(("prompt", "completion"), texts, strict=True))
    columns = dict.fromkeys(sorted(FORMATS[form][0]), "NAME") | alike
    listed = ", ".join(f"{new}: {scalar_text(old)}" for new, old in columns.items() if new != old)
    return f"`sources: [{{path: FILE, columns: {{{listed}}}}}]` instead of `train_path`"
