"""Rows that are tokens already: their labels, masks and weights, without padding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sft_play.config.reader import kind_of
from sft_play.config.yaml_files import scalar_text
from sft_play.data import IGNORED
from sft_play.data.readers import LEAVE_OUT
from sft_play.data.turns import WEIGHT, marks_what_is_not_learnt, weight_of
from sft_play.data.values import is_blank, is_list, list_of, not_read
from sft_play.errors import DataError

Row = Mapping[str, Any]

MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask", "loss_mask")
"""Columns that are 1 where a token is learnt, next to `input_ids`."""
OF_TOKENS = ("input_ids", "labels", "attention_mask", "special_tokens_mask", "token_type_ids", WEIGHT, *MASKS)
"""Columns of token rows that are read, and those that a tokenizer adds to every row."""
LIKE_A_MASK = re.compile("mask|label|target|loss|weight")
LIKE_A_PART = re.compile(
    "(?:prompt|source|context|completion|answer|response|target)(?:.*(?:len|start|end|offset|num|tokens|ids))"
)
LIKE_PACKED = re.compile("position_ids|seq_?len|segment|document_ids|sequence_ids")


def tokens_of(row: Row) -> dict[str, Any]:
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
        alike = is_list(value) and len(value) == len(ids)
        if LIKE_A_PART.search(name.lower()) and not (mask and alike):
            way = "write `labels`, -100 for what is not learnt"
            raise not_read(name, "seems to mark where the learnt part begins, and is not read", way)
        if packed and is_list(value) and list(value) != list(range(len(ids))) and len(set(map(str, value))) > 1:
            raise not_read(name, "marks a row that packs several rows, which is not supported", "unpack the rows")
        if mask and alike:
            weights = all(isinstance(part, (bool, int, float)) and 0 <= part <= 1 for part in value)
            other = "loss_mask" if all(part in (0, 1) for part in value) else WEIGHT if weights else "labels"
            way = f"`columns: {scalar_text({other: name})}` if it does"
            if name not in MASKS and other == "loss_mask" and marks_what_is_not_learnt(name.removesuffix("_mask")):
                way = "where it is 1 for what is not learnt, write `labels`, -100 there"
            raise not_read(name, "seems to mark which tokens are learnt, and is not read", way)


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
