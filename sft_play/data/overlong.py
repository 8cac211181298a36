"""What happens to conversations and token rows that are longer than `model.max_seq_len` (`data.overlong`).

`truncate` keeps the last answer: the oldest exchanges go first, then the beginning of the longest turn that is read and not learnt,
then the system turn. `split` puts the exchanges of a conversation into as few rows as hold them, in order, each with the system
turn; an exchange that alone is too long is cut as by `truncate`. So each answer is learnt at most once, and always to its end: an exchange
stays together (a call, its result, the answer), and one whose answers do not fit is left out. Only `truncate_answers` cuts answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sft_play.data.example import Message
from sft_play.data.template import IGNORED, Encoded
from sft_play.errors import DataError

Encode = Callable[[Sequence[Message]], list[Encoded]]
"""Gives the rows of a conversation."""
Count = Callable[[str], int]
"""Gives the tokens of a text."""
SHORTEN_TRIES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What is left of a conversation."""

    rows: list[Encoded]
    turns: list[Message]
    """The turns that stand in the rows; one that was shortened is another object than it was."""
    answers_cut: int = 0
    """Answers that lost their end."""

    def lost(self, messages: Sequence[Message]) -> frozenset[str]:
        """Returns what the conversation lost, in words: kinds of turns, and the beginning or end of one."""
        before, after = {id(turn) for turn in messages}, {id(turn) for turn in self.turns}
        shortened = Counter(str(turn["role"]) for turn in self.turns if id(turn) not in before)
        gone = Counter(str(turn["role"]) for turn in messages if id(turn) not in after) - shortened
        ends = ["the end of an answer"] if self.answers_cut else []
        return frozenset([*(f"{role} turns" for role in gone), *(f"the beginning of a {role} turn" for role in shortened), *ends])


def truncated(messages: Sequence[Message], limit: int, encode: Encode, count: Count, *, answers: bool = False) -> Cut | None:
    """Returns the longest end of a conversation that fits; `None` where its last answer does not, unless `answers` may be cut.

    Raises `DataError` as `encode` does.
    """
    system, exchanges = exchanges_of(messages)
    for first in range(len(exchanges)):
        kept = [*system, *(turn for exchange in exchanges[first:] for turn in exchange)]
        if not _learns(kept):
            break
        rows = encode(kept)
        if _fits(rows, limit):
            return Cut(rows=rows, turns=kept)
    return _shortened([*system, *_last_learnt(exchanges)], limit, encode, count, answers=answers)


def split(messages: Sequence[Message], limit: int, encode: Encode, count: Count) -> Cut:
    """Returns rows that hold all exchanges but those whose answers do not fit."""
    system, exchanges = exchanges_of(messages)
    rows: list[Encoded] = []
    turns: list[Message] = []
    held: list[Message] = []
    fitting: list[Encoded] = []
    for exchange in exchanges:
        more = _encoded_if_learnt([*system, *held, *exchange], encode)
        if not _fits(more, limit):
            rows, turns = rows + fitting, turns + held
            held, more = [], _encoded_if_learnt([*system, *exchange], encode)
        if _fits(more, limit):
            held, fitting = [*held, *exchange], more
            continue
        fitting = []
        if shortened := _shortened([*system, *exchange], limit, encode, count):
            rows, turns = rows + shortened.rows, turns + shortened.turns
    rows, turns = rows + fitting, turns + held
    return Cut(rows=rows, turns=[*system, *(turn for turn in turns if turn["role"] != "system")])


def exchanges_of(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Returns the system turns at the beginning, and the exchanges: each a question with all that follows until the next one."""
    start = next((index for index, turn in enumerate(messages) if turn["role"] != "system"), len(messages))
    exchanges: list[list[Message]] = []
    for turn in messages[start:]:
        if turn["role"] == "user" or not exchanges:
            exchanges.append([])
        exchanges[-1].append(turn)
    return list(messages[:start]), exchanges


def cut_tokens(row: Encoded, limit: int) -> Encoded:
    """Returns a row of at most `limit` tokens that keeps its last answer, or what is learnt of tokens that have none.

    The beginning goes first; the end only where half a row of what is read before would not be left.
    """
    start = _kept_from(row, limit)
    ids, labels = row.input_ids[start : start + limit], row.labels[start : start + limit]
    return Encoded(ids, labels, row.prompt_ids[start:] if row.prompt_ids else [], row.reference)


def loses_end(row: Encoded, limit: int) -> bool:
    """Whether `cut_tokens` leaves out learnt tokens at the end: those of the last answer, and the one that ends its turn."""
    end = _kept_from(row, limit) + limit
    return any(label != IGNORED for label in row.labels[end:])


def _kept_from(row: Encoded, limit: int) -> int:
    """Returns the first token that `cut_tokens` keeps."""
    first = len(row.prompt_ids) or next((index for index, label in enumerate(row.labels) if label != IGNORED), 0)
    return first - max(min(first, limit // 2), min(first, limit - (len(row.labels) - first)))


def chunks(row: Encoded, limit: int) -> list[Encoded]:
    """Returns a long row in pieces that share one token, so that each label is learnt once; pieces without any are left out."""
    found = []
    for start in range(0, len(row.input_ids) - 1, limit - 1):
        ids, labels = row.input_ids[start : start + limit], row.labels[start : start + limit]
        if any(label != IGNORED for label in labels[1:]):
            found.append(Encoded(ids, [IGNORED, *labels[1:]], [], ""))
    return found


def _shortened(messages: Sequence[Message], limit: int, encode: Encode, count: Count, *, answers: bool = False) -> Cut | None:
    """Returns one exchange whose longest read turns lost their beginning, but never all of it; `None` where it does not fit even so.

    `messages` end with an answer. `answers` lets an answer that is longer than half a row lose its end: half a row of prompt stays.
    """
    turns = list(messages)
    rows = encode(turns)
    for _ in range(SHORTEN_TRIES):
        longest = max(rows, key=lambda row: len(row.input_ids))
        excess = len(longest.input_ids) - limit
        if answers:
            excess = min(excess, len(longest.prompt_ids) - limit // 2)
        elif len(longest.input_ids) - len(longest.prompt_ids) >= limit:
            return None
        if excess <= 0:
            break
        read = [index for index, turn in enumerate(turns) if turn["role"] not in ("assistant", "system") and turn["content"]]
        index = max(read, key=lambda at: len(turns[at]["content"]), default=0)
        tokens = count(turns[index]["content"]) if read else 0
        if tokens < 2:
            if messages[0]["role"] != "system":
                break
            return _shortened(messages[1:], limit, encode, count, answers=answers)
        content = _without_beginning(turns[index]["content"], min(excess, tokens // 2), tokens)
        try:
            fewer = [*turns[:index], {**turns[index], "content": content}, *turns[index + 1 :]]
            rows, turns = encode(fewer), fewer
        except DataError:  # a template may refuse what is left, or a conversation without its system turn
            break
    long = [len(row.input_ids) > limit for row in rows]
    if any(long) and not answers:
        return None
    cut = [cut_tokens(row, limit) if too_long else row for row, too_long in zip(rows, long, strict=True)]
    lost = sum(too_long and loses_end(row, limit) for row, too_long in zip(rows, long, strict=True))
    return Cut(rows=cut, turns=turns, answers_cut=lost)


def _without_beginning(text: str, excess: int, tokens: int) -> str:
    """Returns `text`, which has so many `tokens`, without about `excess` tokens' worth of its first characters."""
    left = max(1, len(text) - 1 - -(-len(text) * excess // tokens))
    return text[-left:]


def _last_learnt(exchanges: Sequence[list[Message]]) -> list[Message]:
    return next((exchange for exchange in reversed(exchanges) if _learns(exchange)), exchanges[-1])


def _learns(messages: Sequence[Message]) -> bool:
    return any(turn["role"] == "assistant" and turn.get("train") is not False for turn in messages)


def _encoded_if_learnt(messages: Sequence[Message], encode: Encode) -> list[Encoded]:
    return encode(messages) if _learns(messages) else []


def _fits(rows: Sequence[Encoded], limit: int) -> bool:
    return all(len(row.input_ids) <= limit for row in rows)
