"""Unequal ranks: each rank times its own work alone, and shares change for good reasons only."""

from __future__ import annotations

import random

from sft_play.data.batches import Shares
from sft_play.plan.batch import spans
from sft_play.training.balance import LOOKS, ShareChooser, describe
from tests.documents import on_page
from tests.plans import rank_plan, simple_plan

EQUAL: Shares = ((4, 4), (4, 4))


def test_similar_ranks_keep_equal_shares_despite_noise() -> None:
    ranks = tuple(rank_plan(rank, device_name="cpu", micro_batch=4, accumulation=4) for rank in (0, 1))
    plan = simple_plan(strategy="ddp", world_size=2, backend="gloo", ranks=ranks, global_batch_size=32)
    chance, chooser = random.Random(0), ShareChooser(plan, 8)

    def look(*paces: float) -> Shares | None:
        """Judge 10 steps of 32 rows by ranks of these seconds per row."""
        return chooser.look([[pace * 160, 160, 16_000, 40] for pace in paces], EQUAL)

    for _ in range(500):
        assert look(*(0.05 * chance.uniform(0.94, 1.06) for _ in range(2))) is None
    for _ in range(LOOKS - 1):  # something else ran on one rank's cores for a while
        assert look(0.05, 0.1) is None
    assert look(0.05, 0.05) is None
    assert look(0.05, 0.1) is None


def test_a_rank_that_recovers_gets_its_rows_again() -> None:
    ranks = tuple(rank_plan(rank, device_name=f"CPU {rank}", micro_batch=4, accumulation=4) for rank in (0, 1))
    chooser = ShareChooser(
        simple_plan(strategy="ddp", world_size=2, backend="gloo", ranks=ranks, global_batch_size=32), 8
    )

    def shares_after(paces: tuple[float, float], shares: Shares) -> Shares:
        """Judge 10 looks at ranks of these seconds per row, each at 10 steps with the shares of that time."""
        for _ in range(10):
            counts = [10 * rows for rows in spans(32, shares)]
            work = zip(paces, counts, shares, strict=True)
            measured = [[pace * rows, rows, 100 * rows, 10 * steps] for pace, rows, (_, steps) in work]
            shares = chooser.look(measured, shares) or shares
        return shares

    slowed = shares_after((0.05, 0.15), EQUAL)
    assert spans(32, slowed)[1] < 16
    assert spans(32, shares_after((0.05, 0.05), slowed)) == (16, 16)


def test_a_change_of_shares_is_explained() -> None:
    description = describe([0.1, 0.19], (21, 11), (16, 16), "rows")
    assert description == "rank 1 is 1.9 times slower than rank 0: rows per step 21 + 11 instead of 16 + 16"
    assert on_page("one-gpu-slower-than-the-others", description)
