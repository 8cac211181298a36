"""From documents and plain text to training rows: every token is learnt, documents end with the end-of-sequence token.

A document longer than a row is cut into chunks that share one token: the last of a chunk is the first of the next, where it is
only read. So every token but a document's first is a target exactly once, and no chunk boundary costs a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sft_play.data.template import IGNORED, Encoded
from sft_play.errors import DataError

TOO_LONG = "longer than model.max_seq_len"
EMPTY = "empty text"
MARGIN = 2
"""The shortest document that trains something: a token and the one after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRows:
    """What became of one text."""

    rows: list[Encoded]
    """In order; several where a long text was cut into chunks."""
    dropped: str | None = None
    """Why there is no row."""
    cut: bool = False
    """Whether tokens were left out (`overlong: truncate`)."""
    overlong: int = 0
    """Tokens of a text that is left out or cut because it is longer than a row; 0 where it fits or is made into chunks."""


def encode_text(text: str, tokenizer: Any, *, limit: int, overlong: str = "split") -> list[Encoded]:
    """Returns the rows of one text, none where it is empty or left out. See `encode_texts`."""
    return encode_texts([text], tokenizer, limit=limit, overlong=overlong)[0].rows


def encode_texts(texts: Sequence[str], tokenizer: Any, *, limit: int, overlong: str = "split") -> list[TextRows]:
    """Tokenises texts together and returns what became of each, in order.

    `limit`: tokens of the longest row, at least 2. `overlong`: what happens to longer texts, a value of `data.overlong`; `error`,
    the default of the key, is for conversations, and cuts a text into chunks as `split` does. BOS comes first where the tokenizer
    adds one, EOS last; neither is added where the text has it already. Special tokens that are written out in a text are taken as
    such, so that texts which some other program has put into a template stay what they are. Raises `DataError` for a tokenizer
    without an end-of-sequence token.
    """
    assert limit >= MARGIN, "a row of one token trains nothing"
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end-of-sequence token, so documents could not be separated",
            hint="set `eos_token` in its config",
        )
    if not texts:
        return []
    first = beginning(tokenizer)
    # A long text is no mistake here, and the tokenizer would warn about each one.
    found = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [_rows(ids, first, tokenizer.eos_token_id, limit, overlong) for ids in found]


def beginning(tokenizer: Any) -> list[int]:
    """Returns the beginning-of-sequence token where the tokenizer puts one before a text, else nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def _rows(tokens: list[int], first: list[int], eos: int, limit: int, overlong: str) -> TextRows:
    """Returns the rows of one tokenised text."""
    if not tokens:
        return TextRows(rows=[], dropped=EMPTY)
    ids = tokens if tokens[:1] == first else [*first, *tokens]
    if ids[-1] != eos:
        ids = [*ids, eos]
    if len(ids) < MARGIN:
        return TextRows(rows=[], dropped=EMPTY)
    if len(ids) <= limit:
        return TextRows(rows=[_row(ids)])
    if overlong == "drop":
        return TextRows(rows=[], dropped=TOO_LONG, overlong=len(ids))
    if overlong.startswith("truncate"):
        return TextRows(rows=[_row(ids[:limit])], cut=True, overlong=len(ids))
    return TextRows(rows=[_row(ids[start : start + limit]) for start in range(0, len(ids) - 1, limit - 1)])


def _row(ids: list[int]) -> Encoded:
    """Returns a row of which every token is learnt but the first, which follows nothing and is never a target."""
    return Encoded(ids, [IGNORED, *ids[1:]], [], "")
