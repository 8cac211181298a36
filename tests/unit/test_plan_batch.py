"""Micro-batch, accumulation and global batch: contract B1 and B2."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft_play.config.schema import TrainConfig
from sft_play.errors import UserError
from sft_play.plan.batch import Cost, Slots, choose_batch, equal_shares, share_out, spans, step_seconds
from sft_play.plan.request import global_rows


def chosen(train: TrainConfig, fitting: tuple[int, ...], most: int) -> tuple[tuple[int, ...], int, dict[str, str]]:
    """Return micro-batches, accumulation and reasons of the batch for ranks that hold `fitting` rows each."""
    reasons = dict[str, str]()
    slots = choose_batch(train, fitting, most, reasons)
    (accumulation,) = {steps for _, steps in slots}
    return tuple(micro for micro, _ in slots), accumulation, reasons


def test_one_explicit_value_is_used_and_the_other_computed() -> None:
    for world in (1, 2, 3, 8):
        micros, accumulation, _ = chosen(TrainConfig(batch_size=4), (100,) * world, 64)
        assert set(micros) == {4} and accumulation == 8 // world + (8 % world > 0)
        micros, accumulation, _ = chosen(TrainConfig(grad_accum=2), (100,) * world, 4)
        assert accumulation == 2 and sum(micros) * 2 >= 32  # beyond what gains speed, since it was asked for


def test_a_batch_above_the_default_raises_the_global_batch_with_a_notice() -> None:
    train = TrainConfig(batch_size=32)
    micros, accumulation, reasons = chosen(train, (64,) * 4, 64)
    assert (micros, accumulation, global_rows(train, 4)) == ((32,) * 4, 1, 128)
    assert (
        reasons["global batch"] == "global batch 128 = 32 per device x 4 devices: more at once than the default of 32"
    )
    with pytest.raises(UserError) as error:
        chosen(TrainConfig(batch_size=32, global_batch_size=64), (64,) * 4, 64)
    assert (
        "32 per device x 4 devices = 128 rows at once, but `train.global_batch_size` is 64: 64" in error.value.message
    )
    assert error.value.hint == "TRAIN_BATCH_SIZE=16 at most, or TRAIN_GLOBAL_BATCH_SIZE=128"
    # No smaller one makes the same step.
    _, _, reasons = chosen(TrainConfig(batch_size=3, global_batch_size=8), (64,) * 3, 64)
    assert reasons["accumulation"].endswith("1 of the 9 slots stay empty")


def test_contradictions_show_the_arithmetic() -> None:
    with pytest.raises(UserError) as error:
        chosen(TrainConfig(batch_size=4, grad_accum=4, global_batch_size=24), (8, 8), 64)
    assert (
        error.value.message
        == "4 per device x 4 accumulation x 2 devices = 32 rows per optimizer step, but `train.global_batch_size` is 24"
    )
    with pytest.raises(UserError) as error:
        chosen(TrainConfig(grad_accum=2), (3, 3), 64)
    assert "needs 8 rows per device = 32 global / (2 x 2 devices), but only 3 fit" in error.value.message
    assert error.value.hint == "set TRAIN_GRAD_ACCUM to 6 or more, or leave it to `auto`"


sizes = st.lists(st.integers(1, 200), min_size=1, max_size=16).map(tuple)


@given(fitting=sizes, global_batch_size=st.integers(1, 2048), most=st.integers(1, 64))
def test_the_global_batch_is_reached_on_any_world_size(
    fitting: tuple[int, ...], global_batch_size: int, most: int
) -> None:
    micros, accumulation, _ = chosen(TrainConfig(global_batch_size=global_batch_size), fitting, most)
    assert global_batch_size <= sum(micros) * accumulation and len(micros) == len(fitting)
    assert all(1 <= micro <= min(room, most) for micro, room in zip(micros, fitting, strict=True))
    # No micro-step more than the room needs.
    assert accumulation <= -(-global_batch_size // sum(min(most, room) for room in fitting)) or len(set(fitting)) > 1
    # Every rank's share fits its own slots, however the sampler rounds.
    assert all(-(-global_batch_size * micro // (sum(micros) * accumulation)) <= micro for micro in micros)


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
