"""Which rows a step takes, on any number of ranks, and what the collator makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sft_play.data import IGNORED
from sft_play.data.batches import Collator, GlobalBatchSampler
from sft_play.data.formats import Example
from sft_play.data.prepare import is_held_out
from sft_play.plan.batch import Slots
from sft_play.plan.epoch import RowOrder

PAD = 3


worlds = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=5)
"""Slots of each rank, whose micro-steps may differ in number."""


def samplers(rows: int, batch: int, slots: Sequence[Slots]) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(RowOrder(rows=rows, seed=0), batch, slots, rank) for rank in range(len(slots))]


def steps(sampler: GlobalBatchSampler) -> list[list[list[int]]]:
    """Return the micro-batches of each optimizer step."""
    micro, count = list(sampler), sampler.turns
    return [micro[start : start + count] for start in range(0, len(micro), count)]


def global_batches(rows: int, batch: int, slots: Sequence[Slots]) -> list[list[int]]:
    """Return the sorted rows of each optimizer step over all ranks."""
    shares = [steps(sampler) for sampler in samplers(rows, batch, slots)]
    return [sorted(row for part in step for micro in part for row in micro) for step in zip(*shares, strict=True)]


@given(st.integers(1, 300), st.integers(1, 64), worlds, worlds)
def test_a_step_takes_the_same_rows_on_every_world_size(
    rows: int, batch: int, slots: list[Slots], other: list[Slots]
) -> None:
    batch = min(batch, *(sum(size * count for size, count in world) for world in (slots, other)))
    assert global_batches(rows, batch, slots) == global_batches(rows, batch, other)
    for sampler, (size, count) in zip(samplers(rows, batch, slots), slots, strict=True):
        assert len(list(sampler)) == sampler.steps * max(steps for _, steps in slots)
        assert all(len(micro) <= size for micro in sampler)
        assert all(sum(map(bool, step)) <= count and bool(step[-1]) == any(step) for step in steps(sampler))
    assert sorted(row for step in global_batches(rows, batch, slots) for row in step) == list(range(rows))


def test_a_golden_order_holds_across_versions() -> None:
    """A resumed run relies on it: another order would train rows twice."""
    sampler = GlobalBatchSampler(RowOrder(rows=8, seed=42), 4, [(2, 2)], 0)
    assert list(sampler) == [[1, 2], [5, 7], [6, 0], [3, 4]]


# ---- Collator

Rows = list[dict[str, Any]]


@st.composite
def prepared(draw: st.DrawFn) -> Rows:
    rows = []
    for index in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(4, 90), min_size=1, max_size=12))
        trained = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        labels = [token if on else IGNORED for token, on in zip(ids, trained, strict=True)]
        rows.append({"input_ids": ids, "labels": labels, "row": index})
    return rows


def pairs_of_flattened(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return (row, position of the context, target) of every trained token."""
    positions = batch["position_ids"][0].tolist()
    row_of = torch.tensor([position == 0 for position in positions]).cumsum(0).tolist()
    learnt = zip(batch["logits_to_keep"].tolist(), batch["targets"].tolist(), strict=True)
    return [(row_of[at] - 1, positions[at], target) for at, target in learnt if target != IGNORED]


def pairs_of_padded(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    pairs = []
    for row, targets in enumerate(batch["targets"].tolist()):
        for at, target in zip(batch["logits_to_keep"].tolist(), targets, strict=True):
            if target != IGNORED:
                assert batch["attention_mask"][row, at] == 1
                pairs.append((row, int(batch["position_ids"][row, at]), target))
    return pairs


@given(prepared())
def test_both_layouts_train_the_same_tokens(rows: Rows) -> None:
    expected = Counter(
        (index, at - 1, row["labels"][at])
        for index, row in enumerate(rows)
        for at in range(1, len(row["labels"]))
        if row["labels"][at] != IGNORED
    )
    flattened, padded = Collator("flattened", PAD)(rows), Collator("padded", PAD)(rows)
    assert Counter(pairs_of_flattened(flattened)) == expected
    assert Counter(pairs_of_padded(padded)) == expected
    assert flattened["rows"] == padded["rows"] == [row["row"] for row in rows]


def test_published_hashes_of_validation_rows_never_change() -> None:
    """Golden: another hash would move rows of existing validation data into training."""
    rows = [Example(place="a:1", form="text", text=f"row {i}").key for i in range(12)]
    assert [i for i, key in enumerate(rows) if is_held_out(key, None, 0.4)] == [1, 2, 4, 5, 7, 8, 11]
    assert [i for i in range(12) if is_held_out(rows[0], f"group {i}", 0.4)] == [1, 4, 7]
