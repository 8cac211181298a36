"""From a conversation to the texts of its training rows: the chat template is rendered, and what is trained is
marked.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from sft_play.data import CLOSE, OPEN, Message
from sft_play.data.written_tools import Render, check_answer, check_written, has_tools
from sft_play.errors import DataError
from sft_play.files import text_sha256
from sft_play.model.tokenizer import MARKER, NotAcceptedError, write_chat

KNOWN_TAILS = 8
_ENDED_THOUGHT = re.compile(r"\s*(<think>)?.*</think>\s*", re.DOTALL)
_NOT_EXACT = "so the mask cannot be exact"
_BY_ANSWER = "split the conversation into rows that end at each answer, or use another template: `data.chat_template`"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row in tokens."""

    input_ids: list[int]
    labels: list[int]
    """The token where it is trained, else -100; same length as `input_ids`."""
    prompt_ids: list[int]
    """What the model is given when it writes the last answer; `input_ids` begins with it."""
    reference: str
    """The last answer."""
    weights: list[float] | None = None
    """How much each learnt token counts; `None`: all 1."""

    def part(self, start: int, end: int) -> Encoded:
        """Return some of the tokens; the prompt stays as it is."""
        weights = self.weights and self.weights[start:end]
        return replace(self, input_ids=self.input_ids[start:end], labels=self.labels[start:end], weights=weights)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a row's text."""

    start: int
    """Character."""
    end: int
    """The character after its last."""
    reference: str
    """The answer that it is; empty for other turns."""
    weight: float = 1.0
    """How much its tokens count; 0: they are not learnt."""


@dataclass(frozen=True, slots=True)
class RowText:
    """The text of one row, and what is learnt of it."""

    prompt: str
    answer: str
    """With the token that ends the turn."""
    reference: str
    """The answer's own words."""
    earlier: tuple[Span, ...] = ()
    """Answers within the prompt that are learnt too."""
    weight: float = 1.0
    """How much the answer's tokens count."""
    everything: bool = False
    """Every token is learnt (`train.loss_on: all`), those of `weighted` by their weights."""
    weighted: tuple[Span, ...] = ()


STOPS = re.compile(
    r"(</s>|<\|(?:endoftext|im_end|eot_id|end|end_of_text)\|>|<end_of_turn>"
    r"|<\uff5cend\u2581of\u2581sentence\uff5c>)\s*\Z"
)
"""Marks with which the templates of model families end turns, at the end of an answer."""


class Renderer:
    """Renders conversations with one tokenizer's template."""

    def __init__(self, tokenizer: Any, stops: Sequence[int]) -> None:
        """`stops`: the tokens that end a turn (`model.tokenizer.end_of_turn_ids`)."""
        self.tokenizer = tokenizer
        self.stops = [str(token) for token in tokenizer.convert_ids_to_tokens(list(stops))]
        self._roles: RoleMarks | None = None
        self._prompts = False
        """Whether the template was seen to write a generation prompt where it needs one."""
        self._tails: list[tuple[str, int]] = []
        """What the template writes after an answer's words, and where in it the end of the turn ends: the same for most
        answers.
        """

    def rows(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, loss_on: str = "assistant"
    ) -> list[RowText]:
        """Return the rows of a conversation that ends with an answer. Raise `DataError` if a mask cannot be
        exact.
        """
        self._roles = self._roles or role_marks(self.tokenizer, self.stops, self.render)
        self._roles.check(messages)
        if has_tools(messages, tools):
            last = max((index for index, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)
            check_written(messages[: last + 1], tools, self.render)
        rows = [self._everything(messages, tools)] if loss_on == "all" else self._answers(messages, tools, loss_on)
        if not self._prompts:
            check_generation_prompt(self.render)
            self._prompts = True
        return rows

    def _answers(self, messages: Sequence[Message], tools: Sequence[Any] | None, loss_on: str) -> list[RowText]:
        learnt = answers_to_learn(messages, loss_on)
        prompt, answer = self.answer(messages, learnt[-1], tools)
        self._check_prompt(messages[: learnt[-1]], tools, prompt)
        earlier, alone = [], []
        for index in learnt[:-1]:
            before, answer_before = self.answer(messages, index, tools)
            words, weight = messages[index]["content"], turn_weight(messages[index])
            if prompt.startswith(before + answer_before):
                earlier.append(Span(len(before), len(before) + len(answer_before), words, weight))
            else:  # a row of its own, as inference sees and writes it then
                alone.append(RowText(before, answer_before, words, weight=weight))
        final = messages[learnt[-1]]
        return [*alone, RowText(prompt, answer, final["content"], tuple(earlier), turn_weight(final))]

    def _check_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: str) -> None:
        """Raise `DataError` for a turn of the system or the user that the prompt of `messages` lacks."""
        for index, turn in enumerate(messages):
            if turn["role"] in ("system", "user") and turn["content"].strip() not in prompt:
                marked = [*messages[:index], {**turn, "content": MARKER}, *messages[index + 1 :]]
                if MARKER not in self.render(marked, tools, prompt=True):
                    raise DataError(
                        f"the chat template does not write turn {index + 1} ({turn['role']})",
                        hint="remove it, or use another template: `data.chat_template`",
                    )

    def answer(self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None = None) -> tuple[str, str]:
        """Return the prompt of message `index` and what the model writes then, with the end of its turn. Raise
        `DataError`.
        """
        prompt, answer = self._answer(messages, index, tools)
        words = messages[index]["content"]
        other = STOPS.search(words)
        if other and other[1] not in self.stops and not (other[1] == "</s>" and "<s>" in words):  # but for HTML's
            raise DataError(
                f"the answer of turn {index + 1} ends with `{other[1]}`, which another template ends turns with",
                hint="remove it from the text: this template writes its own, and the mark would be learnt as words",
            )
        for stop in self.stops:
            if 0 <= answer.find(stop) < len(answer) - len(stop):
                raise DataError(
                    f"the answer of turn {index + 1} contains `{stop}`, which ends a turn: inference would stop there",
                    hint=(
                        "remove it from the text (the template writes it), or skip such rows with the source's `filter`"
                    ),
                )
        return prompt, answer

    def _answer(self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None) -> tuple[str, str]:
        message = messages[index]
        prompt = self.render(messages[:index], tools, prompt=True)
        full = self.render(messages[: index + 1], tools)
        if "tool_calls" not in message and full.startswith(prompt):
            rest, words = full[len(prompt) :], message["content"]
            for tail, end in self._tails:
                if rest.endswith(tail):
                    body = rest[: len(rest) - len(tail)]
                    if body in (words, words.strip()):  # proven on the row itself: prompt, words, end of turn
                        return prompt, body + tail[:end]
        if not full.startswith(prompt):
            # Harmony omits the thoughts of calls once the final answer is there: what it writes of that is seen
            # without them.
            bare = [without_thought(turn) for turn in messages[:index]]
            bare_prompt, bare_full = self.render(bare, tools, prompt=True), self.render([*bare, message], tools)
            if bare_full.startswith(bare_prompt):
                return prompt, self._located([*bare, message], index, tools, bare_prompt, bare_full)[1]
        return self._located(messages, index, tools, prompt, full)

    def _located(
        self, messages: Sequence[Message], index: int, tools: Sequence[Any] | None, prompt: str, full: str
    ) -> tuple[str, str]:
        """Return what `answer` does, finding the place of the answer with a marker."""
        message, number = messages[index], index + 1
        if message.get("tool_calls"):
            if not full.startswith(prompt):
                raise DataError(
                    f"the chat template does not write turn {number} after its prompt, {_NOT_EXACT}", hint=_BY_ANSWER
                )
            answer = full[len(prompt) : len(prompt) + self._end(full[len(prompt) :], blank=False)]
            check_answer(messages, index, prompt, answer, tools, self.render, lambda text: self._end(text, blank=False))
            return prompt, answer
        marked = self.render([*messages[:index], {**message, "content": MARKER}], tools)
        head, marker, tail = marked.partition(MARKER)
        if not marker:
            raise DataError(
                f"the chat template does not write the answer of turn {number}",
                hint="it must write `content` of each of `messages`; or name another template: `data.chat_template`",
            )
        if MARKER in tail or not full.endswith(tail):
            raise DataError(
                f"the chat template does not write the answer of turn {number} in one place, {_NOT_EXACT}",
                hint=_BY_ANSWER,
            )
        end = self._end(tail, blank=True)
        start = len(prompt) if full.startswith(prompt) else _after_prompt(prompt, head, full, number)
        body = full[start : len(full) - len(tail)]
        if not _holds(body, message["content"], head[len(prompt) :] if head.startswith(prompt) else ""):
            raise DataError(
                f"the chat template changes the answer of turn {number}, or writes what depends on it, {_NOT_EXACT}",
                hint=_BY_ANSWER,
            )
        if (tail, end) not in self._tails and len(self._tails) < KNOWN_TAILS:
            self._tails.append((tail, end))
        return prompt, body + tail[:end]

    def _end(self, text: str, *, blank: bool) -> int:
        """Return where in `text` the first end of a turn ends; `blank`: only white space may precede it."""
        places = [(text.find(stop), stop) for stop in self.stops if stop in text]
        first, stop = min(places, default=(-1, ""))
        if first < 0 or (blank and text[:first].strip()):
            raise DataError(
                "the chat template writes no end-of-turn token after an answer, so the model would never learn to stop",
                hint=(
                    "use a template that ends each answer with the tokenizer's eos token, or name one:"
                    " `data.chat_template`"
                ),
            )
        return first + len(stop)

    def _everything(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> RowText:
        """Return the row of `train.loss_on: all`: every token, with the weight of its turn."""
        if all(message.get("train") is False for message in messages):
            raise DataError("every turn has `train: false` or weight 0, so there is nothing to learn")
        last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
        prompt, answer = self.answer(messages, last, tools)
        self._check_prompt(messages[:last], tools, prompt)
        weighted = []
        for index, message in enumerate(messages[: last + 1]):
            if (weight := turn_weight(message)) == 1:
                continue
            if message["role"] == "assistant":
                before, answer_text = self.answer(messages, index, tools)
                start, end = len(before), len(before) + len(answer_text)
            else:
                start, end = self._words(messages, index, last, tools, prompt)
                before, answer_text = prompt[:start], prompt[start:end]
            if not (prompt + answer).startswith(before + answer_text):
                raise DataError(
                    f"the chat template changes earlier turns when later ones are added, {_NOT_EXACT}", hint=_BY_ANSWER
                )
            weighted.append(Span(start, end, "", weight))
        return RowText(prompt, answer, messages[last]["content"], everything=True, weighted=tuple(weighted))

    def _words(
        self, messages: Sequence[Message], index: int, last: int, tools: Sequence[Any] | None, prompt: str
    ) -> tuple[int, int]:
        """Return where the prompt of message `last` contains the text of another message."""
        marked = [
            {**message, "content": MARKER} if at == index else message for at, message in enumerate(messages[:last])
        ]
        head, marker, tail = self.render(marked, tools, prompt=True).partition(MARKER)
        if not marker or MARKER in tail or not (prompt.startswith(head) and prompt.endswith(tail)):
            raise DataError(f"the chat template does not write turn {index + 1} in one place, {_NOT_EXACT}")
        return len(head), len(prompt) - len(tail)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False) -> str:
        """Return the text of a conversation, with the generation prompt if `prompt`. Raise `DataError`."""
        turns = [{key: value for key, value in message.items() if key != "train"} for message in messages]
        options: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            return write_chat(self.tokenizer, turns, add_generation_prompt=prompt, **options)
        except NotAcceptedError as error:
            if not messages:
                raise DataError(
                    "the conversation begins with an answer, and the chat template writes no prompt for it",
                    hint="set `train: false` on that turn to exclude it, or put a question before it",
                ) from error
            error.hint = "`data.chat_template` chooses another template"
            raise


def turn_weight(turn: Message) -> float:
    """Return how much the tokens of a turn count where they are learnt; 0: they are not."""
    return float(turn.get("train", True))


def answers_to_learn(messages: Sequence[Message], loss_on: str) -> list[int]:
    """Return the indices of the answers that are learnt (`train.loss_on: assistant` or `last`). Raise `DataError` for
    none.
    """
    for index, message in enumerate(messages):
        if (train := message.get("train")) and message["role"] != "assistant":
            mark = "train: true" if train is True else f"weight: {train}"
            raise DataError(
                f"turn {index + 1} ({message['role']}) has `{mark}`, but only answers are learnt",
                hint="`train.loss_on: all` learns every turn but those with `train: false`",
            )
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    chosen = [
        index for index in (answers[-1:] if loss_on == "last" else answers) if messages[index].get("train") is not False
    ]
    if not chosen:
        which = "the last answer has" if loss_on == "last" and answers else "every answer has"
        raise DataError(
            f"{which} `train: false` or weight 0, so there is nothing to learn"
            if answers
            else "there is no answer to learn"
        )
    return chosen


def without_thought(turn: Message) -> Message:
    """Return a turn without its thought, which some templates also take from the text before calls."""
    bare = {key: value for key, value in turn.items() if key != "reasoning_content"}
    return {**bare, "content": ""} if turn.get("tool_calls") else bare


def _after_prompt(prompt: str, head: str, full: str, number: int) -> int:
    """Return where the answer begins in `full`, where the template writes something else there than the generation
    prompt.

    A generation prompt may say more than the finished turn (a closed, empty thought): then the words follow the prompt.
    """
    generation_prompt = prompt[len(head) :]
    if not (prompt.startswith(head) and full.startswith(head)) or generation_prompt.count(
        OPEN
    ) > generation_prompt.count(CLOSE):
        r1 = "`data.chat_template: deepseek_r1`" if "<\uff5cAssistant\uff5c>" in prompt else "`data.chat_template`"
        raise DataError(
            f"the chat template does not begin turn {number} with its own generation prompt, {_NOT_EXACT}",
            hint=f"the model would be trained on other text than it sees at inference; use another template: {r1}",
        )
    return len(head)


def _holds(body: str, words: str, lead: str) -> bool:
    """Return whether `body` is an answer's text after what the template writes before answers, or after a thought."""
    own = words.rpartition(CLOSE)[2]
    for text in (words, words.strip(), words.lstrip(), words.rstrip(), own, own.strip(), own.lstrip(), own.rstrip()):
        if text and body.endswith(text):
            before = body[: len(body) - len(text)]
            if before == lead or _ENDED_THOUGHT.fullmatch(before):
                return True
    return False


# Rows that a template has rendered already: it would put them into itself again.


@dataclass(frozen=True, slots=True)
class RoleMarks:
    """What a template writes before a user's words and before an answer."""

    marks: tuple[str, ...] = ()
    special: bool = False
    """Whether they hold special tokens. Plain words (`USER:`) may stand in any text, so all of them must be there."""
    bos: str = ""
    """What stands before a conversation."""

    def check(self, messages: Sequence[Message]) -> None:
        """Raise `DataError` for a turn that contains them."""
        for index, turn in enumerate(messages):
            written = [mark for mark in self.marks if mark in turn["content"]]
            if self.bos and turn["content"].lstrip().startswith(self.bos):
                written = [self.bos]
            if written and (self.special or written == [self.bos] or len(written) == len(self.marks)):
                raise DataError(
                    f"turn {index + 1} ({turn['role']}) contains `{written[0]}`, which the chat template writes itself:"
                    " the row was rendered already, and would be rendered twice",
                    hint=(
                        "give the turns without the template's marks (`messages`: a role and its words); or put prompt"
                        " and answer into one column, `columns: {text: NAME}`, and read it with `format: text`, which"
                        " learns every token, the questions too"
                    ),
                )


def check_generation_prompt(render: Render) -> None:
    """Raise `DataError` for a template that writes a head before answers and none for generation: the head would be
    learnt, and other programs would show it.
    """
    asked = [{"role": "user", "content": "qFirstz"}]
    try:
        prompt, bare = (render(asked, None, with_prompt) for with_prompt in (True, False))
        answered = render([*asked, {"role": "assistant", "content": MARKER}], None, False)
    except DataError:  # a template that refuses plain conversations
        return
    head = answered.removeprefix(prompt).partition(MARKER)[0] if answered.startswith(prompt) else ""
    if prompt == bare and head.strip():
        raise DataError(
            f"the chat template writes no generation prompt, so {json.dumps(head)} before answers would be learnt",
            hint=(
                f"end it with `{{% if add_generation_prompt %}}{{{{ {json.dumps(head)} }}}}{{% endif %}}`, or name"
                " another template: `data.chat_template`"
            ),
        )


def role_marks(tokenizer: Any, stops: Sequence[str], render: Render) -> RoleMarks:
    """Return the marks of a tokenizer's template; none if it does not write a plain conversation."""
    bos = tokenizer.bos_token or ""
    asked = [{"role": "user", "content": "qFirstz"}]
    conversation = [*asked, {"role": "assistant", "content": MARKER}, {"role": "user", "content": "qSecondz"}]
    try:
        before_answer = render(asked, None, True).partition("qFirstz")[2]
        before_user = render(conversation, None, False).partition(MARKER)[2].partition("qSecondz")[0]
    except DataError:
        return RoleMarks(bos=bos)
    special_tokens = {
        *tokenizer.all_special_tokens,
        *(token.content for token in tokenizer.added_tokens_decoder.values()),
    }
    tokens = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)")
    marks = tuple(dict.fromkeys(_role_mark(text, stops, tokens) for text in (before_user, before_answer)))
    if not all(marks):
        return RoleMarks(bos=bos)
    special = all(tokens.search(mark) for mark in marks)
    with contextlib.suppress(DataError):  # a template without system turns
        system = _role_mark(
            render([{"role": "system", "content": MARKER}, *asked], None, True).partition(MARKER)[0], stops, tokens
        )
        word = tokens.search(system) and not tokens.fullmatch(system)  # a beginning of the text alone is no role
        if special and word and system not in "".join(marks):
            marks = (*marks, system)
    return RoleMarks(marks, special, bos)


def _role_mark(between: str, stops: Sequence[str], tokens: re.Pattern[str]) -> str:
    """Return the mark of a role in the text between two turns: a special token, with the word and the token after it
    if any.
    """
    text = between.strip()
    for stop in stops:
        text = text.removeprefix(stop).strip()
    matches = list(tokens.finditer(text))
    for index, token in enumerate(matches):
        after = matches[index + 1] if index + 1 < len(matches) else None
        word = text[token.end() : after.start() if after else len(text)].split("\n")[0]
        if word.strip():
            whole = after is not None and token.end() + len(word) == after.start()
            return text[token.start() : after.end() if after and whole else token.end() + len(word)].strip()
    return matches[0].group() if matches else text


# What a chat template really writes, as one checksum: files may stay the same while the library that renders them
# changes.


CONVERSATION = [
    {"role": "system", "content": "Answer \u00abbriefly\u00bb."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": " And\n3 + 3? "},
    {"role": "assistant", "content": "6"},
]
DAY = date(2026, 1, 1)


def template_sha256(tokenizer: Any) -> str | None:
    """Return a sha256 over a sample conversation as the tokenizer's template writes it, with and without the prompt for
    an answer.

    Templates that write today's date get a fixed one. Return `None` where there is no template, or one that cannot
    write the sample even without its system turn.
    """
    if not tokenizer.chat_template:
        return None
    for turns in (CONVERSATION, CONVERSATION[1:]):
        try:
            written = [
                write_chat(tokenizer, turns[:length], add_generation_prompt=prompt, day=DAY)
                for length, prompt in ((len(turns), False), (len(turns) - 1, True))
            ]
        except NotAcceptedError:
            continue
        return text_sha256(json.dumps(written))
    return None


# Thoughts of a reasoning model in its turns, and which of them a chat template leaves out of what is learnt.


def lost_thoughts(messages: Sequence[Message], rows: Sequence[RowText], loss_on: str) -> bool:
    """Return whether a thought of a trained turn is in no trained part of the conversation's rows.

    Thoughts are in `reasoning_content`, or before `</think>`. Qwen3 omits them from earlier turns: such turns get a
    separate row with the thought, so none is lost, except with `train.loss_on: all`, which makes a single row. A
    template without thoughts (ChatML) loses all in `reasoning_content`.
    """
    learnt = "\0".join(
        part
        for row in rows
        for part in (
            row.prompt if row.everything else "",
            *(row.prompt[s.start : s.end] for s in row.earlier),
            row.answer,
        )
    )
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is not False]
    for index in turns if loss_on == "all" else answers_to_learn(messages, loss_on):
        before, closed, _ = messages[index]["content"].partition(CLOSE)
        within = before.rpartition(OPEN)[2] if closed else ""
        if (messages[index].get("reasoning_content") or within).strip() not in learnt:
            return True
    return False
