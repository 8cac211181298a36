"""Micro-batch, accumulation and global batch: contract B1 and B2."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.schema import TrainConfig
from sft_play.errors import UserError
from sft_play.plan.batch import Cost, Slots, choose_batch, equal_shares, share_out, spans, step_seconds


def test_one_explicit_value_is_used_and_the_other_computed() -> None:
    for world in (1, 2, 3, 8):
        explicit = choose_batch(TrainConfig(batch_size=4), (100,) * world, 64)
        assert set(explicit.micro_batches) == {4} and explicit.global_batch == 32
        other = choose_batch(TrainConfig(grad_accum=2), (100,) * world, 4)
        assert other.accumulation == 2 and other.global_batch == 32
        assert sum(other.micro_batches) * 2 >= 32  # beyond what gains speed, since it was asked for


def test_a_batch_above_the_default_raises_the_global_batch_with_a_notice() -> None:
    batch = choose_batch(TrainConfig(batch_size=32), (64,) * 4, 64)
    assert (batch.micro_batches, batch.accumulation, batch.global_batch) == ((32,) * 4, 1, 128)
    assert (
        batch.reasons["global batch"]
        == "global batch 128 = 32 per device x 4 devices: more at once than the default of 32"
    )
    with pytest.raises(UserError) as error:
        choose_batch(TrainConfig(batch_size=32, global_batch_size=64), (64,) * 4, 64)
    assert (
        "32 per device x 4 devices = 128 rows at once, but `train.global_batch_size` is 64: 64" in error.value.message
    )
    assert error.value.hint == "TRAIN_BATCH_SIZE=16 at most, or TRAIN_GLOBAL_BATCH_SIZE=128"
    uneven = choose_batch(
        TrainConfig(batch_size=3, global_batch_size=8), (64,) * 3, 64
    )  # no smaller one makes the same step
    assert uneven.reasons["accumulation"].endswith("1 of the 9 slots stay empty")


def test_contradictions_show_the_arithmetic() -> None:
    with pytest.raises(UserError) as error:
        choose_batch(TrainConfig(batch_size=4, grad_accum=4, global_batch_size=24), (8, 8), 64)
    assert (
        error.value.message
        == "4 per device x 4 accumulation x 2 devices = 32 rows per optimizer step, but `train.global_batch_size` is 24"
    )
    with pytest.raises(UserError) as error:
        choose_batch(TrainConfig(grad_accum=2), (3, 3), 64)
    assert "needs 8 rows per device = 32 global / (2 x 2 devices), but only 3 fit" in error.value.message
    assert error.value.hint == "set TRAIN_GRAD_ACCUM to 6 or more, or leave it to `auto`"


sizes = st.lists(st.integers(1, 200), min_size=1, max_size=16).map(tuple)


@given(fitting=sizes, global_batch_size=st.integers(1, 2048), most=st.integers(1, 64))
def test_the_global_batch_is_reached_on_any_world_size(
    fitting: tuple[int, ...], global_batch_size: int, most: int
) -> None:
    batch = choose_batch(TrainConfig(global_batch_size=global_batch_size), fitting, most)
    slots = sum(batch.micro_batches) * batch.accumulation
    assert batch.global_batch == global_batch_size <= slots
    assert len(batch.micro_batches) == len(fitting)
    assert all(1 <= micro <= min(room, most) for micro, room in zip(batch.micro_batches, fitting, strict=True))
    # No micro-step more than the room needs.
    assert (
        batch.accumulation <= -(-global_batch_size // sum(min(most, room) for room in fitting)) or len(set(fitting)) > 1
    )
    # Every rank's share fits its own slots, however the sampler rounds.
    total = sum(batch.micro_batches)
    assert all(-(-global_batch_size * micro // (total * batch.accumulation)) <= micro for micro in batch.micro_batches)


costs = st.builds(
    Cost,
    row_seconds=st.floats(0.01, 2.0),
    most_rows=st.integers(1, 9),
)


def within(shares: tuple[Slots, ...], ranks: list[Cost], rows: int) -> None:
    assert sum(micro * steps for micro, steps in shares) >= rows == sum(spans(rows, shares))
    for (micro, steps), cost, mine in zip(shares, ranks, spans(rows, shares), strict=True):
        assert 0 <= micro <= cost.most_rows and steps >= 1 and mine <= micro * steps


@settings(max_examples=150)
@given(rows=st.integers(1, 200), ranks=st.lists(costs, min_size=1, max_size=6), same=st.booleans())
def test_shares_fit_memory_and_are_never_slower_than_equal_ones(rows: int, ranks: list[Cost], same: bool) -> None:
    shares, equal = share_out(rows, ranks, same_steps=same), equal_shares(rows, ranks, same_steps=same)
    within(shares, ranks, rows)
    within(equal, ranks, rows)
    assert step_seconds(rows, shares, ranks) <= step_seconds(rows, equal, ranks)
    if same:
        assert len({steps for _, steps in shares}) == 1
