"""What happens to conversations and token rows that are longer than `model.max_seq_len` (`data.overlong`).

`truncate` keeps the last answer: the oldest exchanges go first, then the beginning of the longest turn that is read and not learnt,
then the system turn. Only an answer that would not fit behind half a row of prompt loses its end, and then the token that ends a
turn is not learnt from it. `split` puts the exchanges of a conversation into as few rows as hold them, in order, each with the system
turn; an exchange that alone is too long is cut as by `truncate`. So each answer is learnt exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sft_play.data.example import Message
from sft_play.data.template import IGNORED, Encoded
from sft_play.errors import DataError

Encode = Callable[[Sequence[Message]], list[Encoded]]
"""Gives the rows of a conversation."""
Count = Callable[[str], int]
"""Gives the tokens of a text."""
SHORTEN_TRIES = 12


def truncated(messages: Sequence[Message], limit: int, encode: Encode, count: Count) -> tuple[list[Encoded], int]:
    """Returns the rows of the longest end of a conversation that fits, and how many answers lost their end. Raises `DataError` as `encode` does."""
    system, exchanges = exchanges_of(messages)
    rows: list[Encoded] = []
    for first in range(len(exchanges)):
        kept = [*system, *(turn for exchange in exchanges[first:] for turn in exchange)]
        if not _learns(kept):
            break
        rows = encode(kept)
        if _fits(rows, limit):
            return rows, 0
    return _shortened([*system, *_last_learnt(exchanges)], limit, encode, count)


def split(messages: Sequence[Message], limit: int, encode: Encode, count: Count) -> tuple[list[Encoded], bool, int]:
    """Returns rows that hold all exchanges, whether one of them had to be cut, and how many answers lost their end."""
    system, exchanges = exchanges_of(messages)
    rows: list[Encoded] = []
    held: list[Message] = []
    fitting: list[Encoded] = []
    cut, ends = False, 0
    for exchange in exchanges:
        more = _encoded_if_learnt([*system, *held, *exchange], encode)
        if _fits(more, limit):
            held, fitting = [*held, *exchange], more
            continue
        rows += fitting
        held, fitting = [*exchange], _encoded_if_learnt([*system, *exchange], encode)
        if not _fits(fitting, limit):
            shortened, lost = _shortened([*system, *exchange], limit, encode, count)
            rows, ends = rows + shortened, ends + lost
            held, fitting, cut = [], [], True
    return [*rows, *fitting], cut, ends


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


def _shortened(messages: Sequence[Message], limit: int, encode: Encode, count: Count) -> tuple[list[Encoded], int]:
    """Returns the rows of one exchange whose longest read turn lost its beginning, and how many answers lost their end.

    `messages` end with an answer.
    """
    turns = list(messages)
    rows = encode(turns)
    for _ in range(SHORTEN_TRIES):
        longest = max(rows, key=lambda row: len(row.input_ids))
        # Half a row of prompt is left to an answer that does not fit anyway.
        excess = min(len(longest.input_ids) - limit, len(longest.prompt_ids) - limit // 2)
        if excess <= 0:
            break
        read = [index for index, turn in enumerate(turns) if turn["role"] not in ("assistant", "system") and turn["content"]]
        if not read:
            if turns[0]["role"] != "system":
                break
            turns = turns[1:]
        else:
            index = max(read, key=lambda at: len(turns[at]["content"]))
            turns[index] = {
                **turns[index],
                "content": _without_beginning(turns[index]["content"], excess, count(turns[index]["content"])),
            }
        try:
            rows = encode(turns)
        except DataError:  # a template may refuse an empty question, or a conversation without its system turn
            break
    long = [len(row.input_ids) > limit for row in rows]
    cut = [cut_tokens(row, limit) if too_long else row for row, too_long in zip(rows, long, strict=True)]
    return cut, sum(too_long and loses_end(row, limit) for row, too_long in zip(rows, long, strict=True))


def _without_beginning(text: str, excess: int, tokens: int) -> str:
    """Returns `text`, which has so many `tokens`, without about `excess` tokens' worth of its first characters."""
    left = len(text) - 1 - -(-len(text) * excess // tokens)
    return text[-left:] if left > 0 else ""


def _last_learnt(exchanges: Sequence[list[Message]]) -> list[Message]:
    return next((exchange for exchange in reversed(exchanges) if _learns(exchange)), exchanges[-1])


def _learns(messages: Sequence[Message]) -> bool:
    return any(turn["role"] == "assistant" and turn.get("train") is not False for turn in messages)


def _encoded_if_learnt(messages: Sequence[Message], encode: Encode) -> list[Encoded]:
    return encode(messages) if _learns(messages) else []


def _fits(rows: Sequence[Encoded], limit: int) -> bool:
    return all(len(row.input_ids) <= limit for row in rows)
